# SPDX-License-Identifier: Apache-2.0
"""How the membership changes: the next view is journalled, and then whoever is in it or out of it hears so.

A view names the committed state, and always has a member that holds it, or no member at all. When it is to change is
decided elsewhere.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from isthmus.collective.core.types import Epoch, PeerRef, View
from isthmus.elastic.core.edges import Edges
from isthmus.elastic.core.messages import CoordinatorMessage, Evicted, Refused
from isthmus.elastic.core.news import WRONG, News
from isthmus.elastic.core.open_round import OpenRound
from isthmus.elastic.core.records import ReleaseRecord, ViewRecord
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.work import MAX_STRIKES

_ANY: Final = Epoch(0)

Departures = Mapping[PeerRef, CoordinatorMessage | None]
"""Members that the next view does without, each with what it is told (None: it is dead, nobody listens)."""


class Views:
    """Makes views, by whichever reason a peer is no longer in one."""

    def __init__(self, turn: Turn, roster: Roster, news: News, open_round: OpenRound) -> None:
        self._state, self._turn, self._roster, self._news, self._round = turn.state, turn, roster, news, open_round

    # -------------------------------------------------------------------------------- the next view

    def change(
        self,
        *,
        out: Departures,
        into: Sequence[Session] = (),
        excuse: Sequence[Session] = (),
        cause: str,
        struck: tuple[PeerRef, ...] = (),
        weights: tuple[float, ...] = (),
        above: Epoch = _ANY,
    ) -> None:
        """Journal and announce the next view: without `out`, with `into` at the end. Who is to `excuse` keeps its work.

        Whoever is excused already stays so, unless it is in `out` or `into`. `struck`: see `ViewRecord`; `weights`: see
        `NewView`, for the same members as before. Its epoch is `above` this one, and the next as a rule.
        """
        committed, epoch = self._state.committed, Epoch(max(self._state.epoch, above) + 1)
        assert committed is not None, "a view needs a state"
        out, present = dict(out), self._roster.members()
        # What happens after all have handed in does not touch how long that took. Who comes in begins later.
        is_cut_short = not excuse and (bool(into) or any(session.ready_at is None for session in present))
        stays = [session for session in present if session.ref not in out and session not in excuse]
        edges = Edges(self._state.view)
        together = edges.with_a_hub([*stays, *into], self._state.reached)
        unlinked = [session for session in stays if session not in together]
        self._leave_out(unlinked, out, "has no link with the members that go on")
        self._turn.counters.update("dropped: has no link" for _ in unlinked)
        stays = [session for session in stays if session in together]
        into = [session for session in into if session in together]
        for session in into:
            session.admit(holds_state=session.synced == committed, now=self._turn.now)
        for session in excuse:
            session.excuse(epoch, committed)
            _part(session, stays, edges)
        absent = [item for item in self._roster.excused() if item.ref not in out and item not in into]
        absent += excuse
        if all(session.holds_state is False for session in (*stays, *into)):
            # Everybody is one commit behind and whoever could serve it is gone. As members they would wait for a
            # donor for ever; as learners they wait for any peer that brings the state back.
            self._leave_out(stays, out, "nobody holds the state")
            stays, into = [], []
        members = [session.member for session in (*stays, *into)]
        apart = edges.pairs_apart([*stays, *into])
        view = View(epoch, committed.outer_step, committed.digest, tuple(members), apart)
        excused = tuple(session.ref for session in absent)
        self._turn.persist(ViewRecord(view=view, cause=cause[:500], excused=excused, struck=struck))
        self.release_leases_of_strangers()
        weights = weights if len(weights) == self._state.view.world_size else ()
        grew_at = {session.ref: session.grew_at for session in present}
        self._round.begin(self._turn.now, weights, grew_at=grew_at, is_cut_short=is_cut_short)
        for ref, message in out.items():
            gone = self._roster.sessions.get(ref.peer_id)
            if gone is not None and gone.ref == ref:
                self._roster.close(gone)
            if message is not None:
                self._turn.send(ref, message)
        for session in (*stays, *into, *absent):
            self._news.expect(session)
            self._news.tell_view(session.ref)

    def _leave_out(
        self, sessions: Sequence[Session], out: dict[PeerRef, CoordinatorMessage | None], reason: str
    ) -> None:
        for session in sessions:
            self._news.remind(session.ref)
            out[session.ref] = Evicted(epoch=Epoch(self._state.epoch + 1), reason=reason)

    def release_leases_of_strangers(self) -> None:
        """Free what former members own. Also repairs a journal that was cut between a view and its releases."""
        leases = self._state.leases
        for ref in leases.owners():
            if self._state.standing_since(ref) is None:
                record = ReleaseRecord(ref=ref, epoch=self._state.epoch, ranges=leases.owned_by(ref))
                self._turn.persist(record)

    # -------------------------------------------------------------------------------- who goes

    def drop(
        self,
        lost: Mapping[PeerRef, str],
        last_words: Mapping[PeerRef, Refused] | None = None,
        *,
        struck: Collection[PeerRef] = (),
        counted_as: str = "",
    ) -> None:
        """Give these sessions up, each for its reason; members among them leave the view.

        Whoever has `last_words` hears them instead of `Evicted`, and does not come back. Who is `struck` said what is
        not true. Reasons that say more than a few words could are `counted_as` something shorter.
        """
        out: dict[PeerRef, CoordinatorMessage | None] = {}
        for ref, reason in lost.items():
            session = self._roster.sessions[ref.peer_id]
            self._turn.counters[f"dropped: {counted_as or reason}"] += 1
            if self._is_missed(ref):
                self._leave_out([session], out, reason)
                out[ref] = (last_words or {}).get(ref, out[ref])
            else:
                self._roster.close(session)
                self._turn.send(ref, Evicted(epoch=self._state.epoch, reason=reason))
        if out:
            cause = "; ".join(f"{ref.peer_id} dropped: {lost[ref]}" for ref in out)
            self.change(out=out, cause=cause, struck=tuple(ref for ref in out if ref in struck))

    def strike(self, liars: Mapping[PeerRef, str]) -> None:
        """Go on without these members, whose words or work were false. Whoever has had its strikes is sent home."""
        out = {ref for ref in liars if self._state.strikes.of(ref.peer_id) + 1 >= MAX_STRIKES}
        last_words = {ref: self._news.sends_home(ref, liars[ref]) for ref in out}
        self.drop(liars, last_words, struck=tuple(liars), counted_as="said what is not true")

    def let_go_of_the_struck(self) -> None:
        """Send home who has had its strikes: a coordinator died between the last of them and the next view."""
        out = [session.ref for session in self._roster.sessions.values() if self._state.strikes.is_out(session.ref)]
        if out and not self._roster.over:
            last_words = {ref: self._news.sends_home(ref, WRONG) for ref in out}
            self.drop(dict.fromkeys(out, WRONG), last_words, counted_as=WRONG)

    def put_out(self, session: Session, word: Refused, *, cause: str) -> None:
        """The operator wants it gone: it hears this, and the others go on without it."""
        self._turn.counters["put_out"] += 1
        if self._is_missed(session.ref):
            self.change(out={session.ref: word}, cause=cause)
        else:
            self._roster.close(session)
            self._turn.send(session.ref, word)

    def _is_missed(self, ref: PeerRef) -> bool:
        """Whether the others need another view if it goes."""
        return self._state.standing_since(ref) is not None and not self._roster.over


def _part(late: Session, stays: Sequence[Session], edges: Edges) -> None:
    """They were members together, and need not meet again."""
    for other in stays:
        if edges.between(late, other):
            late.met.add(other.ref)
            other.met.add(late.ref)
        else:
            late.unmet[other.ref] = other.unmet[late.ref] = "no link before"
