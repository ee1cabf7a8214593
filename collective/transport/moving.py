# SPDX-License-Identifier: Apache-2.0
"""What moves between us and a peer that brings rounds further: bytes of chunks, and nothing else.

Found before: a member that sent none of its parts, and padding instead, counted as moving. Its round ended after half
an hour, and named everybody.

Rules: of what comes, chunks count that a round needs; one that is under way does as far as it has come, since on a slow
line it takes long. Chunks that nobody needs come from honest members too, repeats and those of rounds that have ended,
so some of them count. Of what is sent, chunks count as far as they are acknowledged, with all that went before them.
"""

_MAX_USELESS = 32
"""Chunks in a row that no round needs and that count all the same: what lies in buffers when a round ends."""


class Moving:
    """A number that grows while chunks move, over all links to one peer."""

    def __init__(self) -> None:
        self._whole = 0
        self._num_useless = 0
        self._last = 0
        self._lost = 0

    def came(self, nbytes: int, *, is_needed: bool) -> None:
        """A chunk is whole."""
        self._num_useless = 0 if is_needed else self._num_useless + 1
        if self._num_useless <= _MAX_USELESS:
            self._whole += nbytes

    def taken(self, nbytes: int) -> None:
        """A link that has ended had sent so many bytes of chunks."""
        self._whole += nbytes

    def total(self, on_links: int) -> int:
        """The number now. It never falls: what was under way on a link that broke has moved as well.

        Args:
            on_links: what is under way on links that live.
        """
        now = self._whole + on_links
        self._lost += max(0, self._last - now)
        self._last = now
        return now + self._lost
