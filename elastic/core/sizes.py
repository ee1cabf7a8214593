# SPDX-License-Identifier: Apache-2.0
"""How large parts of committed rounds were: what is usual, and what each member has sent itself.

The guard (witnesses.py) measures by it. It follows from the commits in the journal, so a coordinator that starts again
measures as before. While a coordinator forgot it, the first member that warmed up after a power cut was the measure of
all others, and honest members that did not warm up were put out.

Rules: values only. What went through while nothing was usual yet had a wider limit. It counts as its sender's own for
fewer rounds: by then members that warm up send more.
"""

from collections import deque
from collections.abc import Mapping

import msgspec

from isthmus.collective.core.types import PeerId
from isthmus.elastic.core.values import Size

_ROUNDS_KNOWN = 5
"""So many rounds say what is usual."""
_OWN_ROUNDS = 64
"""So many commits long a member's own earlier numbers count."""
_FIRST_ROUNDS = 20
"""So many after those that went through while nothing was usual. Newcomers warm up over 100 inner steps by default."""


class KnownSizes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`Sizes` as a value: oldest first."""

    usual: tuple[Size, ...] = ()
    own: tuple[tuple[tuple[PeerId, Size], ...], ...] = ()
    first: tuple[tuple[PeerId, Size], ...] = ()


class Sizes:
    """See the module."""

    def __init__(self, known: KnownSizes = KnownSizes()) -> None:  # noqa: B008 - frozen
        self.usual = deque(known.usual, maxlen=_ROUNDS_KNOWN)
        """Of the last rounds in which parts could be compared."""
        self._own = deque(map(dict, known.own), maxlen=_OWN_ROUNDS)
        self._first = dict(known.first)  # what went through while nothing was usual

    def known(self) -> KnownSizes:
        """All of it."""
        own = tuple(tuple(sizes.items()) for sizes in self._own)
        return KnownSizes(tuple(self.usual), own, tuple(self._first.items()))

    def own(self, peer_id: PeerId) -> float:
        """The largest that this member has sent and that was in range; 0 if nothing is known of it."""
        kept = self._own if len(self._own) >= _FIRST_ROUNDS else (*self._own, self._first)
        return max((sizes.get(peer_id, 0.0) for sizes in kept), default=0.0)

    def committed(self, in_range: Mapping[PeerId, Size], usual: Size) -> None:
        """A commit held parts of these sizes, 0 is not known; `usual` was the middle, 0 if nobody could compare."""
        known = {peer: size for peer, size in in_range.items() if size > 0.0}
        if self.usual:
            self._own.append(known)
        else:
            self._first |= {peer: max(size, self._first.get(peer, 0.0)) for peer, size in known.items()}
        if usual > 0.0:
            self.usual.append(usual)
