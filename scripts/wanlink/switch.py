# SPDX-License-Identifier: Apache-2.0
"""A packet's way from one peer's port to another's, and what arrives when.

    frame -> cut? -> uplink's queue -> losses -> delay, jitter -> downlink's queue -> frame

A super-packet is first cut into runs that take at most RUN_S at the slower of the two rates: queues then see small
units, as they would on a wire, and at high rates a run still spares most of the work per segment.

Rules: pure; time comes in, what leaves goes to a function of the caller. What is under way lies in one queue for each
path and each downlink, in order; only what others overtake lies in a heap. The hot path is `enter` and `deliver`: some
tens of thousands of calls a second.
"""

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeAlias

from scripts.wanlink import packets
from scripts.wanlink.links import Link, Port
from scripts.wanlink.scenario import Step, after, paths

RUN_S = 0.001
MTU_WIRE_NBYTES = 1514
QUEUE_SHARE = 4  # a run takes at most this part of a queue, so that a queue fills and drops by small units
HELD_MAX_NBYTES = 512 << 20  # under way at once, in all; beyond it, frames are dropped and counted
LATE_S = 0.001

Deliver: TypeAlias = Callable[[int, packets.Pieces], None]
Destination: TypeAlias = Callable[[bytes], int]
# (due, order, to, bytes on the wire, segments, pieces)
Run: TypeAlias = tuple[float, int, int, int, int, packets.Pieces]


class Switch:
    """The network between `peers` ports.

    Attributes:
        links, ports: [from][to] (a path to oneself is None), and [peer].
        strangers: frames for nobody here, such as IPv6's.
        overflowed: segments that found HELD_MAX_NBYTES under way.
        delivered, late, late_max_s: runs delivered; of them more than LATE_S after their time, and by how much at
            most. Many late ones mean that the machine is too slow for what is asked.
    """

    def __init__(self, peers: int, seed: int, destination: Destination = packets.destination) -> None:
        """Between so many peers; `destination` tells a frame's one, -1 if it is for nobody here."""
        self.links = [
            [None if i == j else Link(Random(f"{seed}: {i} > {j}")) for j in range(peers)] for i in range(peers)
        ]
        self.ports = [Port() for _ in range(peers)]
        self.strangers = self.overflowed = self.delivered = self.late = 0
        self.late_max_s = 0.0
        self._peers = peers
        self._destination = destination
        self._run_max = [[1 << 16] * peers for _ in range(peers)]
        self._paths: list[list[deque[Run]]] = [[deque() for _ in range(peers)] for _ in range(peers)]
        self._lines: list[deque[Run]] = [deque() for _ in range(peers)]  # through the downlink's queue
        self._queues = [*self._lines, *(path for row in self._paths for path in row)]
        self._overtaken: list[Run] = []  # a heap
        self._order = 0
        self._held_nbytes = 0

    # ------------------------------------------------------------------------------------- settings

    def apply(self, step: Step, now: float) -> None:
        """Bring the step into force, as a whole or not at all.

        Raises:
            ScenarioError: it does not fit this network.
        """
        links = {(i, j): self.link(i, j).settings for i, j in paths("*", self._peers)}
        ports = {i: port.settings for i, port in enumerate(self.ports)}
        new_links, new_ports = after(step, links, ports)
        for (i, j), link_settings in new_links.items():
            self.link(i, j).set(link_settings)
        for i, port_settings in new_ports.items():
            self.ports[i].set(port_settings, now)
        for names, is_cut in ((step.cut, True), (step.heal, False)):
            for name in names:
                for i, j in paths(name, self._peers):
                    self.link(i, j).is_cut = is_cut
        if new_ports:
            self._run_max = [[_run_max(one, other) for other in self.ports] for one in self.ports]

    def link(self, source: int, target: int) -> Link:
        """The path from one peer to another one."""
        link = self.links[source][target]
        assert link is not None, "no path leads from a peer to itself"
        return link

    # ------------------------------------------------------------------------------------- packets

    def enter(self, source: int, frame: bytes, now: float) -> None:
        """Take a frame that a peer sends. Not earlier than the one before of the same peer."""
        target = self._destination(frame)
        link = self.links[source][target] if 0 <= target < self._peers else None
        if link is None:
            self.strangers += 1
            return
        header, mss, segments = packets.measure(frame)
        if link.is_cut:
            link.refused += segments
            return
        if self._held_nbytes > HELD_MAX_NBYTES:
            self.overflowed += segments
            return
        path, run_max = self._paths[source][target], self._run_max[source][target]
        uplink = self.ports[source].up
        for first in range(0, segments, run_max):
            last = min(first + run_max, segments)
            count = last - first
            payload = min(count * mss, len(frame) - header - first * mss)
            nbytes = packets.wire_nbytes(payload, header, count)
            sent = uplink.departure(now, nbytes, count)
            if sent is None:
                continue
            if link.passes(count):
                pieces = (frame,) if count == segments else packets.cut_out(frame, header, mss, first, last)
                link.carried_nbytes += nbytes
                self._put(path.append, link.arrival(sent), target, nbytes, count, pieces)
                continue
            for start, stop in packets.runs(first, last, link.lose(count)):
                pieces = (frame,) if segments == 1 else packets.cut_out(frame, header, mss, start, stop)
                payload = min((stop - start) * mss, len(frame) - header - start * mss)
                nbytes = packets.wire_nbytes(payload, header, stop - start)
                link.carried_nbytes += nbytes
                self._risk(link, path, link.arrival(sent), target, nbytes, stop - start, header, pieces)

    def _risk(
        self,
        link: Link,
        path: deque[Run],
        due: float,
        target: int,
        nbytes: int,
        count: int,
        header: int,
        pieces: packets.Pieces,
    ) -> None:
        """Put a run on its path that was not lost, but may meet another accident."""
        if link.corrupt.hits(count):
            link.corrupted += 1
            pieces = packets.flip_bit(pieces, header, link.rng)
        is_twice = bool(link.duplicate.hits(count))
        link.duplicated += is_twice
        add: Callable[[Run], None] = path.append
        if held_back_s := link.holds_back(count):
            due += held_back_s
            add = partial(heapq.heappush, self._overtaken)
        for _ in range(1 + is_twice):
            self._put(add, due, target, nbytes, count, pieces)

    def _put(
        self, add: Callable[[Run], None], due: float, target: int, nbytes: int, count: int, pieces: packets.Pieces
    ) -> None:
        self._order += 1
        self._held_nbytes += nbytes
        add((due, self._order, target, nbytes, count, pieces))

    def next_due(self) -> float | None:
        """When `deliver` has something to do; None if nothing is under way."""
        firsts = [queue[0][0] for queue in self._queues if queue]
        if self._overtaken:
            firsts.append(self._overtaken[0][0])
        return min(firsts, default=None)

    def deliver(self, now: float, hand_over: Deliver) -> None:
        """Hand over all that has arrived by now, in order of arrival at each port."""
        for line in self._lines:
            while line and line[0][0] <= now:
                due, _, target, nbytes, _, pieces = line.popleft()
                self._hand_over(target, nbytes, pieces, now - due, hand_over)
        arrived: list[Run] = []
        for path in self._queues[self._peers :]:
            while path and path[0][0] <= now:
                arrived.append(path.popleft())
        while self._overtaken and self._overtaken[0][0] <= now:
            arrived.append(heapq.heappop(self._overtaken))
        for due, order, target, nbytes, count, pieces in sorted(arrived):
            received = self.ports[target].down.departure(due, nbytes, count)
            if received is None:
                self._held_nbytes -= nbytes
            elif received > now:
                self._lines[target].append((received, order, target, nbytes, count, pieces))
            else:
                self._hand_over(target, nbytes, pieces, now - received, hand_over)

    def _hand_over(self, target: int, nbytes: int, pieces: packets.Pieces, late_s: float, hand_over: Deliver) -> None:
        self._held_nbytes -= nbytes
        self.delivered += 1
        if late_s > LATE_S:
            self.late += 1
            self.late_max_s = max(self.late_max_s, late_s)
        hand_over(target, pieces)


def _run_max(source: Port, target: Port) -> int:
    """Segments a run may have between these two."""
    limits = [
        min(queue.bytes_per_s * RUN_S, queue.limit_nbytes / QUEUE_SHARE)
        for queue in (source.up, target.down)
        if queue.bytes_per_s
    ]
    return max(1, int(min(limits, default=1e9) / MTU_WIRE_NBYTES))
