# SPDX-License-Identifier: Apache-2.0
"""What this peer measures of its links: round trips, and how fast bytes get through while more are waiting.

The transfers themselves are the measurement; where there were none, `probe` sends padding for a fraction of a second.
The kernel counts what has arrived at both ends, so nothing is asked of the other side.

Where there is time, `look_ahead` sends it in turns. A line that is full one way holds up the acknowledgements of what
comes the other way, and bbr, which allows twice what is on the way without queues, then stays for seconds at half of
what the path carries: four peers with 25 MB/s each that padded at once saw 12 to 16, in turns 24.

Rules: `Communicator.survey` brings all members' observations together and decides; only paces that are all that holds
us back are raised from here. A window is longer than most bursts; the fastest of them is what a link can do.
"""

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.collective.core.held_rate import HeldRate
from isthmus.collective.core.survey import Observation
from isthmus.collective.core.types import Member, PeerId, PeerRef
from isthmus.collective.transport.bundle import Bundle
from isthmus.collective.transport.pacing import Brake
from isthmus.collective.transport.sockets import FAR_S

_WINDOW_S = 0.2
_LONGEST_WINDOW_S = 0.8
_WINDOWS_KEPT = 64
_TURNS = 4
"""Of members that are all new; with more of them, several share one."""
_TRIPS_TO_FULL_SPEED = 6
_LONGEST_TURN_S = 1.2
_LEAST_PADDED_NBYTES = 10 * 1448
"""What TCP sends before it has heard anything. A window of padding in which less arrives says nothing of the line: its
acknowledgements wait behind what goes the other way. Two peers with 8 Mbit/s and 60 ms met that when one of them had
just fetched the state. They took the line for one of 2 kB/s; the first exchange took 244 s instead of 0.6."""
_PART_OF_ALL = 0.1
"""A member that sends less than this part of an equal share does not send."""
_OWN_LIMIT = 0.35
"""Paths that are padded together take the line from each other, and some get half of an equal share; only what gets
less than this part of one is taken to be slow itself. Transfers have paces: what they show of a path is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """What is known of the way to one member. 0.0 is unknown."""

    peer_id: PeerId
    host: str
    """The other end of the path that was found; "" before that."""
    is_dialled: bool
    """Whether this side opened the connections."""
    num_streams: int
    round_trip_s: float
    bytes_per_s: float
    """Most that was reached while more was waiting."""
    bytes_sent: int
    bytes_received: int
    bytes_sent_again: int
    """Lost on the way, as the kernel counts it."""


@dataclass(slots=True)
class _Seen:
    sent: int = 0
    received: int = 0
    was_waiting: bool = False
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOWS_KEPT))
    is_only_padded: bool = True

    def shown(self, rate: float, *, is_padding: bool) -> None:
        """A window in which so much got through, bytes/s; nothing shows nothing."""
        if rate > 0.0:
            self.rates.append(rate)
            self.is_only_padded &= is_padding


class LinkMeter:
    """Watches all bundles of a mesh. Call `sample` often while rounds run.

    Args:
        bundles: those of the mesh, by peer.
    """

    def __init__(self, bundles: Mapping[PeerRef, Bundle]) -> None:
        self._bundles = bundles
        self._seen: dict[PeerRef, _Seen] = {}
        self._sampled_at = -math.inf
        self._sent, self._received = HeldRate(), HeldRate()
        self._brake = Brake()
        self.awaits_turn = False
        """Whether a look ahead has not begun to measure, since others do."""

    def _begin(self, now: float) -> None:
        """Nothing moved before this."""
        self._sampled_at = now
        for ref, bundle in self._bundles.items():
            seen = self._seen.setdefault(ref, _Seen())
            seen.sent, seen.received = bundle.bytes_delivered(), bundle.bytes_received
            seen.was_waiting = bundle.is_waiting

    def sample(self, now: float, *, is_padding: bool = False) -> None:
        """End a window, if it is long enough, and begin the next. One with a pause in it shows nothing."""
        seconds = now - self._sampled_at
        if seconds < _WINDOW_S:
            return
        if seconds > _LONGEST_WINDOW_S:
            self._brake.release()
            self._sent.pause()
            self._received.pause()
            self._begin(now)
            return
        sent, received = 0, []
        waited: dict[PeerRef, int] = {}  # who had more to send all the while, and what got through
        for ref, bundle in self._bundles.items():
            seen = self._seen.setdefault(ref, _Seen())
            moved = bundle.bytes_delivered() - seen.sent
            sent += max(0, moved)  # a stream that is new has not delivered what the old one had
            received.append(max(0, bundle.bytes_received - seen.received))
            if seen.was_waiting and bundle.is_waiting and moved >= 0:
                waited[ref] = moved
        self._ease(waited, seconds)
        least = _LEAST_PADDED_NBYTES if is_padding else 1
        if sum(waited.values()) >= least:
            self._sent.window(sent / seconds, is_padding=is_padding)
            for ref, moved in waited.items():
                self._seen[ref].shown(moved / seconds, is_padding=is_padding)
        if sum(received) >= least and min(received) > _PART_OF_ALL * sum(received) / len(received):
            # What only some of them send is no limit of ours.
            self._received.window(sum(received) / seconds, is_padding=is_padding)
        for ref in [ref for ref in self._seen if ref not in self._bundles]:
            del self._seen[ref]
        self._begin(now)

    def _ease(self, waited: Mapping[PeerRef, int], seconds: float) -> None:
        """Raise the paces if they are all that holds us back.

        Args:
            waited: who had more to send all the while, and how many bytes got through.
            seconds: how long the window was.
        """
        paced = {ref: pace for ref, bundle in self._bundles.items() if (pace := bundle.pace_now) is not None}
        if not paced or any(ref not in waited for ref in paced):
            self._brake.release()
        else:
            carried = {ref: float(waited[ref]) for ref in paced}
            allowed = {ref: seconds * pace for ref, pace in paced.items()}
            for ref in self._brake.window(carried, allowed):
                self._bundles[ref].raise_pace()

    def paced_anew(self) -> None:
        """The bundles have other paces than in the windows before."""
        self._brake.release()

    async def look_ahead(self, members: Sequence[Member], rank: int, turn_s: float | None, *, connect_s: float) -> None:
        """Probe the new ones among them, when it is our turn, all connected or `connect_s` are over.

        Whoever knows the way to some of them begins: their lines are known. Then come, by rank, those to whom all are
        new.

        Args:
            members: the others.
            rank: ours.
            turn_s: how long a turn is; None: as long as it takes to find the speed of the longest path.
            connect_s: how long missing connections are waited for.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + connect_s
        while not all(self._is_connected(member.ref) for member in members):
            if loop.time() >= give_up_at:
                break
            await asyncio.sleep(_WINDOW_S / 4)
        # A frame each way shows which paths are short: the first round trips on a busy machine take milliseconds.
        for bundle in self._unknown(members):
            bundle.pad_once()
        await asyncio.sleep(_WINDOW_S / 4)
        if not self._unknown(members):
            return
        if turn_s is None:
            longest_s = max((self._round_trip_s(member.ref) for member in members), default=0.0)
            turn_s = min(_LONGEST_TURN_S, _TRIPS_TO_FULL_SPEED * longest_s + 2 * _WINDOW_S)
        self.awaits_turn = True
        try:
            await asyncio.sleep(self._turn(rank) * (turn_s + _WINDOW_S))
        finally:
            self.awaits_turn = False
        await self.probe(members, turn_s)

    def _turn(self, rank: int) -> int:
        """0 is the first."""
        is_new = not any(seen.rates for seen in self._seen.values())
        return 1 + rank % _TURNS if is_new else 0

    async def probe(self, members: Sequence[Member], seconds: float) -> None:
        """Send padding to the members to which no transfer has shown a rate yet, all at once."""
        unknown = self._unknown(members)
        if not unknown or seconds <= 0.0:
            return
        loop = asyncio.get_running_loop()
        first_news_s = max(bundle.shortest_round_trip_s() for bundle in unknown)
        ends_at = loop.time() + first_news_s + seconds
        for bundle in unknown:
            bundle.pace(None)
            bundle.pad_until(ends_at)
        try:
            await asyncio.sleep(first_news_s)
            self._begin(loop.time())
            while loop.time() < ends_at and unknown:
                await asyncio.sleep(_WINDOW_S / 4)
                self.sample(loop.time(), is_padding=True)
                for bundle in [bundle for bundle in unknown if not self._is_far(bundle.peer)]:
                    bundle.end_padding(ends_at)  # it only seemed far, while nothing had been sent
                    unknown.remove(bundle)
        finally:
            for bundle in unknown:
                bundle.end_padding(ends_at)

    def _unknown(self, members: Sequence[Member]) -> list[Bundle]:
        """Long paths of which no transfer has shown a rate."""
        return [
            self._bundles[member.ref]
            for member in members
            if self._is_far(member.ref) and not self._seen.get(member.ref, _Seen()).rates
        ]

    def observation(self, members: Sequence[Member]) -> Observation:
        """What we saw of the way to these members, in their order."""
        sent = self._sent.most()
        share = sent / max(1, len(members) - 1)
        return Observation(
            sent=sent,
            received=self._received.most() if self._received.num_windows > 1 else 0.0,
            one_way_s=tuple(self._round_trip_s(member.ref) / 2 for member in members),
            sent_to=tuple(self._rate_to(member.ref, share) for member in members),
        )

    def _rate_to(self, ref: PeerRef, share: float) -> float:
        """Most bytes/s to this member; `share` is an equal part of what went to all. 0.0 is unknown."""
        seen = self._seen.get(ref, _Seen())
        most = max(seen.rates, default=0.0)
        return max(most, share) if seen.is_only_padded and most > _OWN_LIMIT * share else most

    def reports(self, members: Sequence[Member]) -> list[LinkReport]:
        """For people: what is known of the links to these members."""
        known = [
            (self._bundles[member.ref], self._seen.get(member.ref)) for member in members if member.ref in self._bundles
        ]
        return [
            LinkReport(
                peer_id=bundle.peer_id,
                host=bundle.host,
                is_dialled=bundle.is_dialler,
                num_streams=bundle.num_streams,
                round_trip_s=bundle.shortest_round_trip_s(),
                bytes_per_s=max(seen.rates, default=0.0) if seen else 0.0,
                bytes_sent=bundle.bytes_sent,
                bytes_received=bundle.bytes_received,
                bytes_sent_again=bundle.bytes_sent_again(),
            )
            for bundle, seen in known
        ]

    def _is_connected(self, ref: PeerRef) -> bool:
        bundle = self._bundles.get(ref)
        return bundle is not None and bundle.is_whole

    def _is_far(self, ref: PeerRef) -> bool:
        """Only long paths are probed: to a near peer the padding would measure our own processor."""
        return self._round_trip_s(ref) > FAR_S

    def _round_trip_s(self, ref: PeerRef) -> float:
        bundle = self._bundles.get(ref)
        return 0.0 if bundle is None else bundle.shortest_round_trip_s()
