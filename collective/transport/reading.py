# SPDX-License-Identifier: Apache-2.0
"""How much of one peer's words is read: never so much that others have to wait.

asyncio's reads return at once while there is data, so a loop that reads and handles gives nobody else a turn as long
as the other side sends faster. Found before: one learner sent heartbeats at 2.8 MB/s for ten seconds. Meanwhile the
coordinator heard nobody else, and dropped two honest members as silent.

Rules: whoever reads in a loop gives the others a turn every millisecond. What a peer says on connections that it has
dialled is bounded beside that, for all of them of one purpose together. Nothing is thrown away: who says more is read
later, so the kernel's buffers fill and TCP holds it back.
"""

import asyncio
import math
from dataclasses import dataclass

from isthmus.collective.core.bucket import TokenBucket
from isthmus.collective.core.types import PeerId
from isthmus.collective.transport.hello import Hello, Purpose

_TURN_S = 1e-3
_NAP_S = 0.02
"""Who has said too much is read again after so long at least, rather than word by word."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Frames and bytes a second in the long run, and at once."""

    frames_per_s: float
    frames_at_once: float
    bytes_per_s: float
    bytes_at_once: float


BOUNDS = {
    # The fastest runs commit some 300 times a second, with three words of a member each. A vote of one of 1024 members
    # has 40 KB, and what one says when it comes in 200 KB.
    Purpose.CONTROL: Bounds(2000, 4000, 2 << 20, 4 << 20),
    # Questions to a donor: a GB of chunks a second, each with one frame.
    Purpose.STATE: Bounds(1000, 2000, 1 << 20, 2 << 20),
}


class Turns:
    """Lets others have theirs, in a loop that may never have to wait."""

    def __init__(self) -> None:
        self._last = -math.inf

    async def give(self) -> None:
        """Let everything else that is ready run, if this has not been done for a while."""
        clock = asyncio.get_running_loop().time
        if clock() - self._last >= _TURN_S:
            await asyncio.sleep(0)
            self._last = clock()


class Allowance:
    """What may still be read of one peer."""

    def __init__(self, bounds: Bounds) -> None:
        self._frames = TokenBucket(bounds.frames_per_s, bounds.frames_at_once)
        self._bytes = TokenBucket(bounds.bytes_per_s, bounds.bytes_at_once)

    async def wait(self) -> None:
        """Until there is some of it."""
        while delay_s := self._debt_s():  # noqa: ASYNC110 - only time pays it
            await asyncio.sleep(max(delay_s, _NAP_S))

    def spend(self, nbytes: int) -> None:
        """One frame of so many bytes was read."""
        now = asyncio.get_running_loop().time()
        self._frames.take(now, 1)
        self._bytes.take(now, nbytes)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is spent: a new one is as good."""
        now = asyncio.get_running_loop().time()
        return not any(bucket.delay_s(now, bucket.burst) for bucket in (self._frames, self._bytes))

    def _debt_s(self) -> float:
        now = asyncio.get_running_loop().time()
        return max(self._frames.delay_s(now), self._bytes.delay_s(now))


class Allowances:
    """One for each peer and purpose, however often it dials."""

    def __init__(self) -> None:
        self._spent: dict[tuple[PeerId, Purpose], Allowance] = {}

    def of(self, hello: Hello) -> Allowance | None:
        """That of this peer; None where it is not bounded."""
        bounds = BOUNDS.get(hello.purpose)
        if bounds is None:
            return None
        key = hello.peer_id, hello.purpose
        if key not in self._spent:
            self._spent = {other: allowance for other, allowance in self._spent.items() if not allowance.is_whole}
            self._spent[key] = Allowance(bounds)
        return self._spent[key]
