# SPDX-License-Identifier: Apache-2.0
"""The test's own view server: it hears who failed and whom they suspect, and issues the next view.

No part of the product. It is never down, knows at once whom it cannot reach itself, and lets everybody back in who
asks. A step is committed when all members have all results of it in the same view.
"""

from typing import TYPE_CHECKING

from isthmus.collective.core.apart import Pair
from isthmus.collective.core.types import Epoch, Member, OuterStep, PeerRef, View
from tests.simulation.rounds.network import SERVER

if TYPE_CHECKING:
    from tests.simulation.rounds.peer import Peer
    from tests.simulation.rounds.simulator import RoundSimulator

BEAT_S = 0.5
PATIENCE_S = 1.5
GATHER_S = 0.2


class ViewServer:
    """See the module."""

    def __init__(self, sim: "RoundSimulator") -> None:
        self.sim = sim
        self.views: list[View] = []
        self.step = 0
        self.num_commits = 0
        self._joining: dict[PeerRef, Peer] = {}
        self._done: set[PeerRef] = set()
        self._suspects: set[str] = set()
        self._is_changing = False
        self._missing_since: dict[PeerRef, float] = {}

    @property
    def view(self) -> View:
        """The newest one."""
        return self.views[-1]

    def start(self) -> None:
        self.sim.world.after(GATHER_S, "first view", self._change)
        self.sim.world.after(BEAT_S, "beat", self._beat)

    def change_for_no_reason(self) -> None:
        """A view that nobody asked for."""
        self._change_soon()

    # ------------------------------------------------------------------------ what peers say

    def hear(self, peer: "Peer", what: str, *args: object) -> None:
        """A peer writes: "join", "done" (epoch, step), "failed" (epoch, suspects)."""
        self.sim.network.write(peer.peer_id, SERVER, self._on_word, peer, peer.ref, what, args)

    def _on_word(self, peer: "Peer", ref: PeerRef, what: str, args: tuple[object, ...]) -> None:
        if what == "join":
            self._joining[ref] = peer
        elif self.views and args[0] == self.view.epoch and self.view.holds(ref):
            if what == "done":
                self._on_done(ref, args[1])
            else:
                self._suspects.update(args[1])  # type: ignore[arg-type]
                self._change_soon()

    def _on_done(self, ref: PeerRef, step: object) -> None:
        if step != self.step or self._is_changing:
            return
        self._done.add(ref)
        if len(self._done) == self.view.world_size:
            self.sim.checker.committed(self.view, self.step)
            self.sim.world.say("---- commit of step", self.step, "in view", self.view.epoch)
            self._done = set()
            self.num_commits += 1
            for member in self.view.members:
                self._tell(member.ref, "on_commit", self.view.epoch, self.step)
            self.step += 1

    # ------------------------------------------------------------------------ views

    def _beat(self) -> None:
        """Look who is there, and who waits to be let in."""
        now = self.sim.world.now
        members = self.view.members if self.views else ()
        for member in members:
            if self._reaches(member.ref):
                self._missing_since.pop(member.ref, None)
            elif now - self._missing_since.setdefault(member.ref, now) > PATIENCE_S:
                self._suspects.add(member.peer_id)
                self._change_soon()
        if any(self._reaches(ref) for ref in self._joining):
            self._change_soon()
        self.sim.world.after(BEAT_S, "beat", self._beat)

    def _change_soon(self) -> None:
        if not self._is_changing:
            self._is_changing = True
            self.sim.world.after(GATHER_S, "change", self._change)

    def _change(self) -> None:
        self._is_changing = False
        rng = self.sim.world.rng
        members = {member.ref for member in self.view.members} if self.views else set()
        # Somebody who is not reached, or started again, goes; somebody who is merely suspected, perhaps.
        kept = {
            ref
            for ref in members
            if ref.peer_id not in self._suspects
            or (self._reaches(ref) and not self.sim.network.chance(self.sim.options.distrust))
        }
        kept |= {ref for ref in self._joining if self._reaches(ref)}
        newest = {ref.peer_id: max(item for item in kept if item.peer_id == ref.peer_id) for ref in kept}
        refs = list(newest.values())
        if not refs:
            self._change_soon()
            return
        refs.sort()
        if self.sim.options.shuffles:
            rng.shuffle(refs)
        refs = self._with_a_hub(refs)
        epoch = Epoch(self.view.epoch + 1 if self.views else 0)
        named = tuple(Member(r.peer_id, r.incarnation, "") for r in refs)
        view = View(epoch, OuterStep(self.step), b"", named, self._apart(refs))
        told = members | set(refs)
        self.views.append(view)
        self._joining = {ref: peer for ref, peer in self._joining.items() if ref not in refs and peer.ref == ref}
        self._done, self._suspects, self._missing_since = set(), set(), {}
        self.sim.world.say("---- view", epoch, [f"{ref.peer_id[-2:]}.{ref.incarnation}" for ref in refs])
        for ref in sorted(told):
            self._tell(ref, "on_view", view, self.step)

    def _with_a_hub(self, refs: list[PeerRef]) -> list[PeerRef]:
        """All of them, if one has links with all; else one alone."""
        return refs if any(not self.sim.peers[ref.peer_id].is_hidden for ref in refs) else refs[:1]

    def _apart(self, refs: list[PeerRef]) -> tuple[Pair, ...]:
        peers = [self.sim.peers[ref.peer_id] for ref in refs]
        return tuple((a, b) for b in range(len(peers)) for a in range(b) if peers[a].is_hidden_from(peers[b]))

    def _reaches(self, ref: PeerRef) -> bool:
        peer = self.sim.peers[ref.peer_id]
        return (
            peer.ref == ref
            and peer.alive
            and not peer.is_paused
            and not self.sim.network.is_broken(ref.peer_id, SERVER)
        )

    def _tell(self, ref: PeerRef, verb: str, *args: object) -> None:
        peer = self.sim.peers[ref.peer_id]
        if peer.ref == ref and peer.alive:
            start = peer.start_number
            self.sim.network.write(SERVER, ref.peer_id, peer.run, start, getattr(peer, verb), *args)
