# SPDX-License-Identifier: Apache-2.0
"""What peers are told of the run: its view, its newest commit, where a learner stands, how it went back.

Repeats are answers: nothing is told here that nobody asked for, but for what was decided just now.
"""

from isthmus.collective.core.types import OuterStep, PeerRef
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.exit_codes import INTEGRITY, REFUSED
from isthmus.elastic.core.holders import Holders
from isthmus.elastic.core.messages import Commit, Evicted, NewView, Rebuilt, Refused, Welcome
from isthmus.elastic.core.notary import Sealer
from isthmus.elastic.core.open_round import OpenRound
from isthmus.elastic.core.records import RollbackRecord
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.work import MAX_STRIKES

WRONG = "had another result than the others, or said what is not true"
"""What is said of a peer that was wrong too often, where the last time is not known."""


class News:
    """Tells. It remembers which certificate it has sealed, and whom it has asked for the first state."""

    def __init__(self, sealer: Sealer, turn: Turn, holders: Holders, open_round: OpenRound) -> None:
        self._sealer, self._state, self._turn = sealer, turn.state, turn
        self._holders, self._round = holders, open_round
        self._sealed: Certificate | None = None  # the newest one that was told
        self.founder: PeerRef | None = None
        """Who was asked last to make the run's first state."""

    # -------------------------------------------------------------------------------- members, and the excused

    def expect(self, session: Session) -> None:
        """It is being told something now; from now on it should show that it has heard."""
        session.told_at = self._turn.now
        if session.behind_since is None:
            session.behind_since = self._turn.now

    def tell(self, session: Session) -> None:
        """Say again what a member must know: the newest commit (it may have it staged) and the view."""
        session.told_at = self._turn.now
        self.tell_commit(session.ref)
        if not self._state.final:
            self.tell_view(session.ref)

    def tell_view(self, to: PeerRef) -> None:
        """The newest view, with what this peer alone has to know of it."""
        state = self._state
        view = NewView(
            view=state.view,
            excused=tuple(state.excused),
            contributed=state.contributed.get(to),
            weights=self._round.weights,
            survey_from=self._round.survey_from,
        )
        self._turn.send(to, view)

    def tell_commit(self, to: PeerRef) -> None:
        """The newest commit, for who may have it staged, and for who keeps its certificate."""
        certificate = self._state.certificate
        if certificate is None:
            return
        if self._sealed is None or self._sealed.order != certificate.order:
            self._sealed = self.sealed(certificate)
        self._turn.send(to, Commit(certificate=self._sealed))

    def sealed(self, certificate: Certificate) -> Certificate:
        """Under the seal that it has, whose authority the peers know, or else under ours."""
        return certificate if certificate.seal else certificate.sealed(self._sealer)

    # -------------------------------------------------------------------------------- who is no member

    def welcome(self, session: Session) -> None:
        """Tell a learner what to catch up with and from whom, or that it is to found the run."""
        committed = self._state.committed
        welcome = Welcome(
            epoch=self._state.epoch,
            target=committed,
            donors=() if session.synced == committed else self._holders.donors(),
            found=committed is None and session.ref == self.founder,
        )
        self._turn.send(session.ref, welcome)
        self.tell_commit(session.ref)

    def ask_to_found(self, session: Session) -> None:
        """The run has no state: this peer is to make it."""
        self.founder = session.ref
        session.progressed_at = self._turn.now
        self.welcome(session)

    def remind(self, to: PeerRef) -> None:
        """Say the newest commit to who voted for it, before it hears that it is out and forgets what it has staged.

        That may be the only copy of the committed state: when a commit was written and the line to everybody went,
        all came back as strangers, threw their copies away, and the run was lost with nobody dead
        (scenarios/commit_that_nobody_heard_of.toml).
        """
        certificate = self._state.certificate
        if certificate is not None and any(item.peer_id == to.peer_id for item in certificate.contributors):
            self.tell_commit(to)

    def turn_away(self, to: PeerRef, reason: str) -> None:
        """Tell it that it is no member, and first of the commit that it may not have heard of."""
        self.remind(to)
        self._turn.send(to, Evicted(epoch=self._state.epoch, reason=reason))

    def sends_home(self, ref: PeerRef, reason: str) -> Refused:
        """What a peer hears that was wrong too often."""
        self._turn.counters["sent_home"] += 1
        said = (
            f"{ref.peer_id} {reason}, {MAX_STRIKES} times in a row: it is put out; look for what is wrong with this "
            "machine, then start it again, and it fetches the state"
        )
        return Refused(code=INTEGRITY, reason=said)

    def tell_replaced(self, to: PeerRef) -> None:
        """A newer start of the same peer is known. An older one that still speaks lives on a copy of its folder."""
        reason = (
            f"a newer start of {to.peer_id} has taken this one's place: if both run, one of their folders is a copy "
            "of the other; join from an empty folder (--dir)"
        )
        self._turn.send(to, Refused(code=REFUSED, reason=reason))

    def tell_rebuilt(self, to: PeerRef) -> None:
        """The run went back: what it goes on from."""
        record = self._state.rebuilt
        assert record is not None, "only a run that went back says so"
        certificate = record.certificate
        rebuilt = Rebuilt(
            epoch=record.epoch,
            certificate=None if certificate is None else self.sealed(certificate),
            committed=self._state.committed,
            given_up=record.given_up if isinstance(record, RollbackRecord) else OuterStep(0),
        )
        self._turn.send(to, rebuilt)
