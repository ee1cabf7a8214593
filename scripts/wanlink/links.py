# SPDX-License-Identifier: Apache-2.0
"""What one path, and one port, do to the segments that pass.

A path leads from one peer to another, one way: delay, jitter, losses, and rarer accidents. A port is a peer's access
to the network: its uplink and its downlink, each a transmitter of some rate behind a drop-tail queue; all paths of the
peer share it.

Rules: pure; time comes in as a number of seconds, randomness from a generator seeded by the caller. A rare event is
drawn as the number of segments until it happens next, so that the many segments it spares cost nothing.
"""

import math
from collections.abc import Sequence
from random import Random

from scripts.wanlink.scenario import LinkSettings, PortSettings

REORDER_MIN_S = 0.001
QUEUE_MIN_NBYTES = 4 * 1514  # a queue that holds less than a segment would pass nothing
NEVER = 1 << 62


def gap(probability: float, rng: Random) -> int:
    """Trials that fail before the next success: geometric, by inversion."""
    if probability <= 0.0:
        return NEVER
    if probability >= 1.0:
        return 0
    return min(NEVER, int(math.log(1.0 - rng.random()) / math.log1p(-probability)))


class Rare:
    """An event that hits each segment independently."""

    __slots__ = ("_gap", "_probability", "_rng")

    def __init__(self, probability: float, rng: Random) -> None:
        self._probability, self._rng = probability, rng
        self._gap = gap(probability, rng)

    def hits(self, count: int) -> Sequence[int]:
        """Which of the next `count` segments are hit, ascending."""
        if self._gap >= count:
            self._gap -= count
            return ()
        hit = []
        index = self._gap
        while index < count:
            hit.append(index)
            index += 1 + gap(self._probability, self._rng)
        self._gap = index - count
        return hit

    @property
    def quiet(self) -> int:
        """How many segments come before the next that is hit."""
        return self._gap

    def spare(self, count: int) -> None:
        """So many of those have come."""
        self._gap -= count


class Bursts:
    """Losses that come together: Gilbert's two states, with Elliott's loss within the bad one.

    E. N. Gilbert, Capacity of a burst-noise channel, Bell System Technical Journal 39 (1960); E. O. Elliott, ibid. 42
    (1963). Long-run loss = loss · enter / (enter + leave); mean length of a bad stretch = 1 / leave segments.
    """

    __slots__ = ("_enter", "_is_bad", "_leave", "_left", "_loss", "_rng")

    def __init__(self, enter: float, leave: float, loss: float, rng: Random) -> None:
        """Begin in the good state.

        Args:
            enter: probability, after each good segment, that the next is a bad one; 0 = never.
            leave: the same from bad to good.
            loss: probability that a bad segment is lost.
            rng: the generator.
        """
        self._enter, self._leave, self._loss, self._rng = enter, leave, loss, rng
        self._is_bad = False
        self._left = gap(enter, rng) + 1 if enter else NEVER

    def hits(self, count: int) -> Sequence[int]:
        """Which of the next `count` segments are lost, ascending."""
        if not self._is_bad and self._left > count:
            self._left -= count
            return ()
        hit: list[int] = []
        index = 0
        while index < count:
            stop = min(count, index + self._left)
            if self._is_bad:
                hit += (i for i in range(index, stop) if self._loss >= 1.0 or self._rng.random() < self._loss)
            self._left -= stop - index
            index = stop
            if self._left == 0:
                self._is_bad = not self._is_bad
                self._left = gap(self._leave if self._is_bad else self._enter, self._rng) + 1
        return hit

    @property
    def quiet(self) -> int:
        """How many segments come before the next that may be hit."""
        return 0 if self._is_bad else self._left - 1

    def spare(self, count: int) -> None:
        """So many of those have come."""
        self._left -= count


class Link:
    """A path from one peer to another.

    Attributes:
        is_cut: nothing new enters; what is under way still arrives.
        segments, lost, refused: segments that came, were lost by chance, came while cut.
        carried_nbytes: bytes that left the sender's uplink and were not lost.
        reordered, duplicated, corrupted: how often each happened.
    """

    __slots__ = (
        "_accidents",
        "_burst_losses",
        "_delay_s",
        "_foreseen",
        "_jitter_s",
        "_latest",
        "_losses",
        "_quiet",
        "_reorder",
        "carried_nbytes",
        "corrupt",
        "corrupted",
        "duplicate",
        "duplicated",
        "is_cut",
        "lost",
        "refused",
        "reordered",
        "rng",
        "segments",
        "settings",
    )

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.is_cut = False
        self.segments = self.lost = self.refused = self.carried_nbytes = 0
        self.reordered = self.duplicated = self.corrupted = 0
        self._latest = 0.0
        self._foreseen = self._quiet = 0
        self.set(LinkSettings())

    def set(self, settings: LinkSettings) -> None:
        """Be such a path from the next segment on; what is under way keeps its time of arrival."""
        self.settings = settings
        self._delay_s, self._jitter_s = settings.delay_ms / 1e3, settings.jitter_ms / 1e3
        # Generators of their own, so that the pattern of losses does not depend on what else is drawn.
        loss_rng, burst_rng = Random(self.rng.random()), Random(self.rng.random())
        self._losses = Rare(settings.loss_percent / 100, loss_rng)
        self._burst_losses = Bursts(
            settings.burst_enter_percent / 100,
            settings.burst_leave_percent / 100,
            settings.burst_loss_percent / 100,
            burst_rng,
        )
        self._reorder = Rare(settings.reorder_percent / 100, self.rng)
        self.duplicate = Rare(settings.duplicate_percent / 100, self.rng)
        self.corrupt = Rare(settings.corrupt_percent / 100, self.rng)
        self._accidents = (self._losses, self._burst_losses, self._reorder, self.duplicate, self.corrupt)
        self._foreseen = self._quiet = 0

    def passes(self, count: int) -> bool:
        """Whether none of the next `count` segments meets any accident; counts them if so.

        Most do not, so it is looked up once for how many that holds.
        """
        if count > self._quiet:
            self._catch_up()
            foreseen = min(accident.quiet for accident in self._accidents)
            if count > foreseen:
                return False
            self._foreseen = self._quiet = foreseen
        self._quiet -= count
        self.segments += count
        return True

    def _catch_up(self) -> None:
        """Let all accidents know what has passed."""
        passed = self._foreseen - self._quiet
        for accident in self._accidents:
            accident.spare(passed)
        self._foreseen = self._quiet = 0

    def lose(self, count: int) -> Sequence[int]:
        """Which of the next `count` segments are lost, ascending; counts them."""
        self._catch_up()
        self.segments += count
        lost, together = self._losses.hits(count), self._burst_losses.hits(count)
        if together:
            lost = sorted({*lost, *together})
        self.lost += len(lost)
        return lost

    def arrival(self, sent: float) -> float:
        """When a run that leaves at `sent` comes out at the other end; never before an earlier one."""
        due = sent + self._delay_s
        if self._jitter_s:
            due += self._jitter_s * (2.0 * self.rng.random() - 1.0)
        due = self._latest = max(due, self._latest)
        return due

    def holds_back(self, count: int) -> float:
        """By how many seconds a run of `count` segments comes later still, so that others pass it; mostly 0."""
        if not self._reorder.hits(count):
            return 0.0
        self.reordered += 1
        return max(REORDER_MIN_S, self._delay_s / 4)


class Queue:
    """A transmitter behind a drop-tail queue, kept as nothing but the time when it will have sent everything."""

    __slots__ = ("_free_at", "bytes_per_s", "dropped", "limit_nbytes")

    def __init__(self) -> None:
        self.bytes_per_s = 0.0  # 0: as fast as may be
        self.limit_nbytes = 0
        self.dropped = 0
        self._free_at = 0.0

    def set(self, mbit: float, queue_ms: float, now: float) -> None:
        """Send so much from now on; what waits is sent at the new rate."""
        waiting = max(0.0, self._free_at - now) * self.bytes_per_s
        self.bytes_per_s = mbit * 1e6 / 8
        self.limit_nbytes = max(QUEUE_MIN_NBYTES, int(self.bytes_per_s * queue_ms / 1e3))
        self._free_at = now + (waiting / self.bytes_per_s if self.bytes_per_s else 0.0)

    def departure(self, now: float, nbytes: int, segments: int) -> float | None:
        """When the last of these bytes will have been sent; None if the queue has no room and drops them."""
        if not self.bytes_per_s:
            return now
        start = max(now, self._free_at)
        if (start - now) * self.bytes_per_s + nbytes > self.limit_nbytes:
            self.dropped += segments
            return None
        self._free_at = start + nbytes / self.bytes_per_s
        return self._free_at


class Port:
    """One peer's access to the network."""

    __slots__ = ("down", "settings", "up")

    def __init__(self) -> None:
        self.up, self.down = Queue(), Queue()
        self.settings = PortSettings()

    def set(self, settings: PortSettings, now: float) -> None:
        """Have these rates from now on."""
        self.settings = settings
        self.up.set(settings.up_mbit, settings.queue_ms, now)
        self.down.set(settings.down_mbit, settings.queue_ms, now)
