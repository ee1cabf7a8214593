# SPDX-License-Identifier: Apache-2.0
"""The wires of the round simulator: streams of TCP's kind, and a control line between each peer and the view server.

A link is one stream between two starts of peers. Each way keeps its order; two streams overtake each other. What one
way carries is acknowledged when it is read, unless the way back is cut; so many frames and no more may be unread. A
broken link takes what is on it, each end learns of it by itself. A cut way only delays, until it is mended or either
end's keepalive runs out.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.network import pair_of
from tests.simulation.rounds.options import DIAL_TIMEOUT_S, KEEPALIVE_S, RoundOptions
from tests.simulation.rounds.values import Frame, damaged
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.rounds.bundle import Bundle
    from tests.simulation.rounds.peer import Peer

SERVER = "server"


@dataclass(eq=False, slots=True)
class End:
    """One end of a link, and what was sent from here and is not read yet."""

    site: str
    bundle: "Bundle"
    is_up: bool = False
    flying: deque[tuple[float, Frame]] = field(default_factory=deque)
    num_unread: int = 0
    unheard_acks: list[Frame] = field(default_factory=list)
    last_at: float = 0.0
    said_farewell: bool = False


@dataclass(eq=False, slots=True)
class Link:
    """One stream between two starts of peers."""

    stream: int
    ends: tuple[End, End]

    def end_at(self, site: str) -> End:
        return self.ends[0] if self.ends[0].site == site else self.ends[1]

    def opposite(self, end: End) -> End:
        return self.ends[1] if self.ends[0] is end else self.ends[0]


class Network:
    """Who reaches whom, and what is under way."""

    def __init__(self, world: World, options: RoundOptions) -> None:
        self.world = world
        self.options = options
        self.peers: dict[str, Peer] = {}
        self.healed = False
        self.fault_at: dict[tuple[str, str], float] = {}
        """When something was last wrong between two sites; for the checker."""
        self.cut_since: dict[tuple[str, str], float] = {}
        self._base: dict[tuple[str, str], float] = {}
        self._links: dict[tuple[str, str], list[Link]] = {}
        self._letters: dict[tuple[str, str], deque[tuple[float, Callable[..., None], tuple[Any, ...]]]] = {}

    # ------------------------------------------------------------------------ ways

    def latency_s(self, source: str, target: str) -> float:
        """One way, this time."""
        pair = (source, target)
        if pair not in self._base:
            self._base[pair] = self.world.rng.uniform(*self.options.latency_s)
        jitter_s = self.options.jitter_s
        return self._base[pair] + (self.world.rng.uniform(0.0, jitter_s) if jitter_s else 0.0)

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cut_since

    def is_broken(self, one: str, other: str) -> bool:
        """Whether either way is cut."""
        return self.broken_since(one, other) is not None

    def broken_since(self, one: str, other: str) -> float | None:
        """Since when either way is cut; None if neither is."""
        ways = (one, other), (other, one)
        return min((self.cut_since[way] for way in ways if way in self.cut_since), default=None)

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from source to target any more."""
        if (source, target) in self.cut_since:
            return
        self.world.say("cut", source[-2:], "->", target[-2:])
        self.cut_since[source, target] = since = self.world.now
        for site in (source, target):
            self.world.after(
                self.world.rng.uniform(*KEEPALIVE_S), "keepalive", self._keepalive, source, target, since, site
            )

    def mend(self, source: str, target: str) -> None:
        """It does again, and what has waited goes on."""
        if self.cut_since.pop((source, target), None) is None:
            return
        self.world.say("mend", source[-2:], "->", target[-2:])
        self.fault_at[pair_of(source, target)] = self.world.now
        self._carry_letters(source, target)
        for link in tuple(self._links.get(pair_of(source, target), ())):
            end = link.end_at(source)
            back = link.opposite(end)
            acks, back.unheard_acks = back.unheard_acks, []
            for frame in acks:
                self._hear_ack(back, frame)
            self._arrive(link, end)
            if end.said_farewell:
                self._tell_lost(link, end)

    def heal(self) -> None:
        """End of all faults."""
        self.healed = True
        for source, target in list(self.cut_since):
            self.mend(source, target)

    def chance(self, probability: float) -> bool:
        """Whether a fault of the wire strikes now."""
        return not self.healed and probability > 0 and self.world.rng.random() < probability

    def _keepalive(self, source: str, target: str, since: float, site: str) -> None:
        if self.cut_since.get((source, target)) == since:
            for link in tuple(self._links.get(pair_of(source, target), ())):
                self.lose(link, link.end_at(site))

    # ------------------------------------------------------------------------ frames

    def send(self, link: Link, end: End, frame: Frame) -> None:
        """The kernel takes it."""
        if self.chance(self.options.corrupt):
            frame = damaged(frame)
        target = link.opposite(end).site
        end.num_unread += 1
        end.last_at = max(end.last_at, self.world.now + self.latency_s(end.site, target)) + self.options.frame_s
        end.flying.append((end.last_at, frame))
        self.world.at(end.last_at, frame.kind, self._arrive, link, end)

    def look_again(self, site: str) -> None:
        """This site runs again: it reads what lies in its kernel."""
        for pair, links in self._links.items():
            if site in pair:
                for link in tuple(links):
                    self._arrive(link, link.opposite(link.end_at(site)))

    def _arrive(self, link: Link, end: End) -> None:
        reader = link.opposite(end)
        peer = self.peers[reader.site]
        if end.flying and reader.is_up and not peer.is_paused and not self.is_cut(end.site, reader.site):
            peer.run(reader.bundle.start, self._read, link, end, reader)

    def _read(self, link: Link, end: End, reader: End) -> None:
        while end.flying and end.flying[0][0] <= self.world.now and reader.is_up:
            _, frame = end.flying.popleft()
            if self.is_cut(reader.site, end.site):
                end.unheard_acks.append(frame)
            else:
                self._hear_ack(end, frame)
            reader.bundle.on_frame(link, frame)

    def _hear_ack(self, end: End, frame: Frame) -> None:
        end.num_unread -= 1
        if end.is_up:
            end.bundle.on_ack(frame)

    # ------------------------------------------------------------------------ links come and go

    def dial(self, bundle: "Bundle", stream: int, attempt: int) -> None:
        """Towards `bundle.on_dialled(stream, attempt, outcome)`, which is called at least once."""
        source, target = bundle.peer.peer_id, bundle.ref.peer_id
        self.world.after(self.latency_s(source, target), "dial", self._dial_arrives, bundle, stream, attempt)
        self._dialled(DIAL_TIMEOUT_S, bundle, stream, attempt, "timeout")

    def _dialled(self, delay_s: float, bundle: "Bundle", stream: int, attempt: int, outcome: str) -> None:
        peer = bundle.peer
        self.world.after(delay_s, outcome, peer.run, bundle.start, bundle.on_dialled, stream, attempt, outcome)

    def _dial_arrives(self, bundle: "Bundle", stream: int, attempt: int) -> None:
        source, host = bundle.peer.peer_id, self.peers[bundle.ref.peer_id]
        if self.is_broken(source, host.peer_id) or bundle.peer.is_hidden_from(host):
            return
        if host.alive:
            host.run(host.start_number, self._accept, bundle, stream, attempt)
        elif not host.died_silently:
            self._dialled(self.latency_s(host.peer_id, source), bundle, stream, attempt, "refused")

    def _accept(self, bundle: "Bundle", stream: int, attempt: int) -> None:
        source, host = bundle.peer.peer_id, self.peers[bundle.ref.peer_id]
        latency_s = self.latency_s(host.peer_id, source)
        other = host.bundle_for_dial_from(bundle.peer_ref) if host.ref == bundle.ref else None
        if other is None:
            self._dialled(latency_s, bundle, stream, attempt, "turned away")
        elif stream < 0:  # it only looks whether anybody is there
            self._dialled(latency_s, bundle, stream, attempt, "answered")
        else:
            link = Link(stream, (End(source, bundle), End(host.peer_id, other)))
            link.ends[1].last_at = self.world.now + latency_s
            self._links.setdefault(pair_of(source, host.peer_id), []).append(link)
            self.world.after(latency_s, "reply", self._reply, link, attempt)
            other.attach(link)

    def _reply(self, link: Link, attempt: int) -> None:
        end = link.ends[0]
        peer = self.peers[end.site]
        is_gone = peer.start_number != end.bundle.start
        if is_gone or self.is_cut(link.ends[1].site, end.site) or not link.ends[1].is_up:
            self.world.after(self.world.rng.uniform(*KEEPALIVE_S), "half open", self.lose, link, link.ends[1])
        elif not end.bundle.is_awaiting(link.stream, attempt):  # the kernel says so, whatever the process does
            latency_s = self.latency_s(end.site, link.ends[1].site)
            self.world.after(latency_s, "given up", self.lose, link, link.ends[1])
        else:
            peer.run(end.bundle.start, self._attach_dialled, link, attempt)

    def _attach_dialled(self, link: Link, attempt: int) -> None:
        end, other = link.ends
        if not other.is_up or not end.bundle.is_awaiting(link.stream, attempt):
            self._after_close(link, end, loses_flight=True)
            return
        end.bundle.attach(link)
        end.bundle.on_dialled(link.stream, attempt, "attached")
        self._arrive(link, other)

    def close(self, link: Link, end: End) -> None:
        """This end closes the link by its own decision. What it has sent may still arrive, or not."""
        if end.is_up:
            end.is_up = False
            self._after_close(link, end, loses_flight=self.world.rng.random() < 0.5)

    def reject(self, link: Link, end: End) -> None:
        """This end closes the link because of what came over it."""
        self.fault_at[pair_of(link.ends[0].site, link.ends[1].site)] = self.world.now
        self.close(link, end)

    def process_gone(self, site: str, *, silently: bool) -> None:
        """All ends at this site are gone; without a word, the others find out by their keepalive."""
        for pair, links in self._links.items():
            for link in tuple(links) if site in pair else ():
                end = link.end_at(site)
                if end.is_up and silently:
                    end.is_up = False
                    end.flying.clear()
                    keepalive_s = self.world.rng.uniform(*KEEPALIVE_S)
                    self.world.after(keepalive_s, "keepalive", self.lose, link, link.opposite(end))
                else:
                    self.close(link, end)

    def lose(self, link: Link, end: End) -> None:
        """This end finds out that the link is gone."""
        peer = self.peers[end.site]
        if end.is_up and peer.start_number == end.bundle.start:
            self.fault_at[pair_of(link.ends[0].site, link.ends[1].site)] = self.world.now
            peer.run(end.bundle.start, self._lose, link, end)

    def _lose(self, link: Link, end: End) -> None:
        if end.is_up:
            end.is_up = False
            self._after_close(link, end, loses_flight=True)
            end.bundle.on_lost(link, is_their_fault=False)

    def break_link(self, one: str, other: str, link: Link | None = None) -> None:
        """One of their links breaks, this one or any, with all that is on it."""
        links = [link for link in self._links.get(pair_of(one, other), ()) if link.ends[0].is_up and link.ends[1].is_up]
        if not links:
            return
        link = link if link is not None else self.world.rng.choice(links)
        self.world.say("link breaks:", one[-2:], other[-2:], "stream", link.stream)
        for end in link.ends:
            end.flying.clear()
            self.world.after(self.world.rng.choice((0.0, 0.01, 0.3)), "break", self.lose, link, end)

    def _after_close(self, link: Link, end: End, *, loses_flight: bool) -> None:
        other = link.opposite(end)
        other.flying.clear()
        if loses_flight:
            end.flying.clear()
        links = self._links[pair_of(end.site, other.site)]
        if not other.is_up and link in links:
            links.remove(link)
        end.said_farewell = True
        farewell_at = max(end.last_at, self.world.now + self.latency_s(end.site, other.site))
        self.world.at(farewell_at, "farewell", self._tell_lost, link, end)

    def _tell_lost(self, link: Link, end: End) -> None:
        other = link.opposite(end)
        if not self.is_cut(end.site, other.site):
            self.lose(link, other)

    # ------------------------------------------------------------------------ control line

    def write(self, source: str, target: str, action: Callable[..., None], *args: Any) -> None:
        """A control message: in order, late while the way is cut, never lost while both sides live."""
        letters = self._letters.setdefault((source, target), deque())
        due = self.world.now + self.latency_s(source, target)
        if letters:
            due = max(due, letters[-1][0])
        letters.append((due, action, args))
        self.world.at(due, "control", self._carry_letters, source, target)

    def _carry_letters(self, source: str, target: str) -> None:
        letters = self._letters.get((source, target))
        while letters and letters[0][0] <= self.world.now and not self.is_cut(source, target):
            _, action, args = letters.popleft()
            action(*args)
