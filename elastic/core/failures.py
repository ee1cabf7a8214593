# SPDX-License-Identifier: Apache-2.0
"""What follows when members say that they cannot finish the round: one more try, or the others go on without some.

Whose fault it is follows from which links are broken (`Rounds.blamed`). Below half of the last commit's members nobody
is dropped by accusations alone. Holds which newcomers could not be reached before, and for how long the members plan
without a survey of links when they differ about the plan again.
"""

from collections import deque
from collections.abc import Collection, Sequence

from isthmus.collective.core.types import OuterStep, PeerId, PeerRef
from isthmus.elastic.core.edges import Edges
from isthmus.elastic.core.farewell import UNREACHABLE_EXIT_CODE
from isthmus.elastic.core.messages import Refused
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session

MAX_CAUSES = 400
"""Characters of the members' reports that a reason quotes."""
_UNSURVEYED = 64
"""Outer steps without a survey of links after the first failure for other plans. A plan from no survey is right
anyway; over unequal links it is slower."""


class Failures:
    """Judges reports of failure, once those that follow the first one had time to come."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._unreached: deque[PeerRef] = deque(maxlen=roster.config.max_peers)
        """Peers that the members dropped before any commit held work of theirs."""
        self._unsurveyed = _UNSURVEYED

    def settle(self) -> None:
        """The members that wait on a failed round get another view: without the silent, or one more try."""
        roster, rounds, view = self._roster, self._roster.rounds, self._roster.state.view
        if rounds.judge_at is None or roster.now < rounds.judge_at:
            return
        accused = rounds.accused(view)
        heard_before = roster.now - roster.config.suspect_silence_s
        silent = [
            session.ref
            for session in roster.members()
            if accused[session.ref.peer_id] and session.last_heard <= heard_before
        ]
        if silent:
            roster.drop(dict.fromkeys(silent, "silent, and a member waits for it"))
            return
        if self._plans_without_a_survey():
            return
        newcomers = rounds.known(view) - roster.state.reached.keys()
        blamed = rounds.blamed(view, newcomers)
        are_alone = all(member.peer_id in newcomers for member in view.members)
        gone = self._gone_without(blamed)
        is_about_newcomers = newcomers.issuperset(gone) and not are_alone
        rounds.remember(view)
        if not blamed or (not is_about_newcomers and (rounds.retries == 0 or not self._leaves_half(gone))):
            rounds.retries += 1
            roster.change_view(out={}, cause=f"round failed, one more try: {self._causes()}")
        else:
            self._drop_blamed([roster.sessions[peer_id] for peer_id in blamed])

    def _plans_without_a_survey(self) -> bool:
        """The members differ about the plan, which follows from what each told the others of its links.

        Who told one of them this and the other that is not known: nobody is blamed, and for a while, twice as long
        each time, all plan without. If they differ then, too, the one with another plan does not follow the rules.
        """
        roster, step = self._roster, self._roster.state.outer_step
        if step < roster.survey_from or not any(report.differs for report in roster.rounds.reports.values()):
            return False
        roster.survey_from = OuterStep(step + self._unsurveyed)
        roster.counters["planned_differently"] += 1
        cause = f"the members plan differently, one more try, without a survey until outer step {roster.survey_from}"
        self._unsurveyed *= 2
        roster.change_view(out={}, cause=f"{cause}: {self._causes()}")
        return True

    def _drop_blamed(self, blamed: Sequence[Session]) -> None:
        """The others go on without these. A newcomer that failed before is told why and sent home."""
        roster = self._roster
        last_words: dict[PeerRef, Refused] = {}
        for session in blamed:
            if session.ref.peer_id in roster.state.reached:
                continue  # it was reached once: its line is broken, its address is not wrong
            if session.ref in self._unreached:
                reason = (
                    f"the members cannot exchange with {session.ref.peer_id} at {session.address or 'no address'} "
                    f"({self._causes()}): give it an address that all of them reach (--advertise) and open its port"
                )
                last_words[session.ref] = Refused(code=UNREACHABLE_EXIT_CODE, reason=reason)
            self._unreached.append(session.ref)
        roster.counters["blamed"] += len(blamed)
        reasons = {session.ref: "members could not finish the round with it" for session in blamed}
        roster.drop(reasons, last_words)

    def _gone_without(self, blamed: Collection[PeerId]) -> set[PeerId]:
        """These, and the members that have links with the rest through them alone."""
        roster = self._roster
        stay = [session for session in roster.members() if session.ref.peer_id not in blamed]
        together = Edges(roster.state.view).with_a_hub(stay, roster.state.reached)
        return {*blamed, *(session.ref.peer_id for session in stay if session not in together)}

    def _leaves_half(self, gone: Collection[PeerId]) -> bool:
        """Whether half of the members of the last commit would stay. Fewer are not left over by accusations alone."""
        certificate = self._roster.state.certificate
        if certificate is None:
            return True
        present = [member.ref for member in self._roster.state.view.members if member.peer_id not in gone]
        stay = [item for item in certificate.contributors if item.ref in present]
        return 2 * len(stay) >= len(certificate.contributors)

    def _causes(self) -> str:
        reports = self._roster.rounds.reports.values()
        return "; ".join(dict.fromkeys(report.cause for report in reports))[:MAX_CAUSES]
