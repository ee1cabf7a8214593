# SPDX-License-Identifier: Apache-2.0
"""Finding the coordinator: a list of addresses, patience, and no stampede.

Rules: all addresses are tried in turn, the one that answered last comes first. An address that takes long has the next
one dialled beside it: a coordinator that is frozen takes connections and says nothing, while another one serves by now.
Pauses grow and are random, so that the peers of a restarted coordinator do not come at the same instant. One address
that refuses is no refusal while another may still answer. Nothing here knows what is said on the connection.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from isthmus.collective.core.types import Instant
from isthmus.collective.errors import CollectiveError, HandshakeRefused
from isthmus.collective.transport import Channel, Purpose
from isthmus.collective.transport.racing import race

Dial = Callable[[str, Purpose], Awaitable[Channel]]
"""Opens a connection to an address for a purpose, within its own deadline. Raises CollectiveError."""

LATER_CODE = 4
"""Of a refusal that only holds for now: nobody reachable."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
"""A coordinator that is back is found within this; it waits longer than that for its members."""
_HEAD_START_S = 0.5
"""Of each address over the next. Over the longest path a handshake with TLS takes about as long."""


class NobodyAnswers(Exception):
    """No coordinator was found in time. `causes` has what happened at every address."""

    def __init__(self, waited_s: float, causes: dict[str, str]) -> None:
        super().__init__(f"nobody answers: {causes}")
        self.waited_s = waited_s
        self.causes = causes


class Dialler:
    """Opens control connections, again and again.

    Args:
        addresses: where a coordinator may be, `host:port`, best first.
        dial: opens one connection.
        clock: monotonic seconds.
        rng: for the pauses.
    """

    def __init__(
        self, addresses: Sequence[str], dial: Dial, *, clock: Callable[[], Instant], rng: random.Random
    ) -> None:
        if not addresses:
            raise ValueError("at least one address is needed")
        self._addresses = list(addresses)
        self._dial = dial
        self._clock = clock
        self._rng = rng
        self._pause_s = 0.0
        self._connected_at: Instant | None = None

    async def connect(self, *, timeout_s: float | None) -> tuple[str, Channel]:
        """The address that answered, and the connection. Without a timeout it goes on for ever.

        Raises:
            HandshakeRefused: everybody is there and refuses.
            NobodyAnswers: the time is over.
        """
        began = self._clock()
        # A connection that broke at once was none: without a pause two programs that disagree would spin.
        if self._connected_at is not None and began - self._connected_at > _LONGEST_PAUSE_S:
            self._pause_s = 0.0
        while True:
            await asyncio.sleep(self._pause_s * self._rng.uniform(0.5, 1.0))
            self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
            causes: dict[str, CollectiveError] = {}
            answer = await race(
                self._addresses,
                lambda address: self._dial(address, Purpose.CONTROL),
                head_start_s=_HEAD_START_S,  # every dial has a deadline of its own
                let_go=lambda channel: channel.close(),
                causes=causes,
            )
            if answer is not None:
                self._addresses.remove(answer[0])
                self._addresses.insert(0, answer[0])
                self._connected_at = self._clock()
                return answer
            refusals = [e for e in causes.values() if isinstance(e, HandshakeRefused) and e.code != LATER_CODE]
            if len(refusals) == len(self._addresses):
                raise refusals[0]
            waited_s = self._clock() - began
            if timeout_s is not None and waited_s >= timeout_s:
                raise NobodyAnswers(waited_s, {address: str(cause) for address, cause in causes.items()})
