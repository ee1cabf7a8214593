# SPDX-License-Identifier: Apache-2.0
"""What follows when members say that they cannot finish the round: one more try, or the others go on without some.

Whose fault it is follows from which links are broken, not from who says it (`Blame`). Below half of the last commit's
members nobody is dropped by accusations alone. Holds how often the outer step was tried, and which newcomers could not
be reached before.
"""

from collections import deque
from collections.abc import Collection, Sequence

from isthmus.collective.core.types import PeerId, PeerRef, View
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.edges import Edges, part
from isthmus.elastic.core.exit_codes import UNREACHABLE
from isthmus.elastic.core.messages import Refused
from isthmus.elastic.core.open_round import OpenRound
from isthmus.elastic.core.pauses import Pauses
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views

_MAX_LINKS = 1024
MAX_CAUSES = 400
"""Characters of the members' reports that a reason quotes."""


class Failures:
    """Judges reports of failure, once those that follow the first one had time to come."""

    def __init__(
        self,
        config: CoordinatorConfig,
        turn: Turn,
        roster: Roster,
        views: Views,
        *,
        open_round: OpenRound,
        pauses: Pauses,
    ) -> None:
        self._config, self._state, self._turn, self._roster = config, turn.state, turn, roster
        self._views, self._round, self._pauses = views, open_round, pauses
        self._blame = Blame(open_round)
        self._retries = 0  # with unchanged members, since the last commit
        self._lost_s = 0.0  # how much longer the tries since then took than a round does
        self._unreached: deque[PeerRef] = deque(maxlen=config.max_peers)
        """Peers that the members dropped before any commit held work of theirs."""
        self._parted: set[PeerId] = set()  # newcomers that lost a link since the last commit

    def committed(self) -> None:
        """The outer step is made: the next one starts without a past."""
        self._retries, self._lost_s = 0, 0.0
        self._parted.clear()
        self._blame.committed()

    def settle(self) -> None:
        """The members that wait on a failed round get another view: without the silent, or one more try."""
        roster, open_round, view = self._roster, self._round, self._state.view
        if open_round.judge_at is None or self._turn.now < open_round.judge_at:
            return
        accused = open_round.accused(view, tales=self._blame.tales)
        heard_before = self._turn.now - self._config.suspect_silence_s
        silent = [
            session.ref
            for session in roster.members()
            if accused[session.ref.peer_id] and session.last_heard <= heard_before
        ]
        if silent:
            self._views.drop(dict.fromkeys(silent, "silent, and a member waits for it"))
            return
        if self._plans_without_a_survey():
            return
        self._lost_s += self._took_too_long_s()
        newcomers = self._blame.known(view) - self._state.reached.keys()
        blamed = self._blame.blamed(view, newcomers)
        are_alone = all(member.peer_id in newcomers for member in view.members)
        parted = () if are_alone and self._retries == 0 else self._part(blamed, newcomers)
        blamed = tuple(peer for peer in blamed if peer not in parted)
        gone = self._gone_without(blamed)
        is_about_newcomers = newcomers.issuperset(gone) and not are_alone
        if not blamed or (not is_about_newcomers and (self._retries == 0 or not self._leaves_half(gone))):
            self._retries += not parted
            self._blame.remember(view)
            self._views.change(out={}, cause=f"round failed, one more try: {self._causes()}")
        else:
            is_accused = self._accused_by_enough(blamed)
            self._blame.remember(view, gone=blamed)
            self._drop_blamed([roster.sessions[peer_id] for peer_id in blamed], is_accused)

    def _took_too_long_s(self) -> float:
        """How much longer the members have exchanged in this view than is usual."""
        ready_at = [session.ready_at for session in self._roster.members() if session.ready_at is not None]
        if len(ready_at) < self._state.view.world_size:
            return 0.0
        began_at = max(self._round.began_at, *ready_at)
        return max(0.0, self._turn.now - began_at - self._round.exchange_s)

    def _part(self, blamed: Collection[PeerId], newcomers: Collection[PeerId]) -> list[PeerId]:
        """Newcomers whose link with a single member is said to be broken keep their place, and lose that link.

        One voice alone kept every joiner out. Not of two members: all others have spoken then.
        """
        view, sessions, members = self._state.view, self._roster.sessions, self._roster.members()
        parted: list[PeerId] = []
        for peer in blamed:
            ends = self._blame.other_ends(view, peer)
            if peer not in newcomers or len(ends) != 1 or len(members) < 3:
                continue
            (other,) = ends
            if other in blamed or other not in sessions or not self._roster.is_member(sessions[other]):
                continue
            part(sessions[peer], sessions[other], self._turn.now)
            self._parted.add(peer)
            # Without a hub somebody would lose its place: then it is the newcomer.
            if len(Edges(view).with_a_hub(members, self._state.reached)) == len(members):
                parted.append(peer)
        if parted:
            self._turn.counters["parted"] += len(parted)
        return parted

    def _accused_by_enough(self, blamed: Collection[PeerId]) -> set[PeerId]:
        """Those whose links with two members, or with all others, are said to be broken."""
        view = self._state.view
        present = {member.peer_id for member in view.members}
        ends = {peer: self._blame.other_ends(view, peer) for peer in blamed}
        return {peer for peer in blamed if len(ends[peer]) > 1 or (ends[peer] and ends[peer] >= present - {peer})}

    def _plans_without_a_survey(self) -> bool:
        """The members differ about the plan, which follows from what each told the others of its links.

        Who told one of them this and the other that is not known: nobody is blamed, and for a while, twice as long
        each time, all plan without. If they differ then, too, the one with another plan does not follow the rules.
        """
        step, open_round = self._state.outer_step, self._round
        if step < open_round.survey_from or not any(report.differs for report in self._round.reports.values()):
            return False
        open_round.do_without_a_survey(step)
        self._turn.counters["planned_differently"] += 1
        cause = (
            f"the members plan differently, one more try, without a survey until outer step {open_round.survey_from}"
        )
        self._views.change(out={}, cause=f"{cause}: {self._causes()}")
        return True

    def _drop_blamed(self, blamed: Sequence[Session], is_accused: Collection[PeerId]) -> None:
        """The others go on without these. A newcomer that failed before is told why and sent home.

        Args:
            is_accused: whose own fault it is, as far as links can tell.
        """
        last_words: dict[PeerRef, Refused] = {}
        for session in blamed:
            if session.ref.peer_id in self._state.reached:
                continue  # it was reached once: its line is broken, its address is not wrong
            if session.ref.peer_id not in is_accused:
                continue
            if session.ref in self._unreached or session.ref.peer_id in self._parted:
                reason = (
                    f"the members cannot exchange with {session.ref.peer_id} at {session.address or 'no address'} "
                    f"({self._causes()}): give it an address that all of them reach (--advertise) and open its port"
                )
                last_words[session.ref] = Refused(code=UNREACHABLE, reason=reason)
            self._unreached.append(session.ref)
        for session in blamed:
            self._pauses.blamed(session.ref, self._state.outer_step, self._turn.now, waited_s=self._lost_s)
        self._turn.counters["blamed"] += len(blamed)
        reasons = {session.ref: "members could not finish the round with it" for session in blamed}
        self._views.drop(reasons, last_words)

    def _gone_without(self, blamed: Collection[PeerId]) -> set[PeerId]:
        """These, and the members that have links with the rest through them alone."""
        stay = [session for session in self._roster.members() if session.ref.peer_id not in blamed]
        together = Edges(self._state.view).with_a_hub(stay, self._state.reached)
        return {*blamed, *(session.ref.peer_id for session in stay if session not in together)}

    def _leaves_half(self, gone: Collection[PeerId]) -> bool:
        """Whether half of the members of the last commit would stay. Fewer are not left over by accusations alone."""
        certificate = self._state.certificate
        if certificate is None:
            return True
        present = [member.ref for member in self._state.view.members if member.peer_id not in gone]
        stay = [item for item in certificate.contributors if item.ref in present]
        return 2 * len(stay) >= len(certificate.contributors)

    def _causes(self) -> str:
        reports = self._round.reports.values()
        return "; ".join(dict.fromkeys(report.cause for report in reports))[:MAX_CAUSES]


class Blame:
    """What members say of their links, now and since the last commit."""

    def __init__(self, open_round: OpenRound) -> None:
        self._round = open_round
        self._past_links: set[tuple[PeerId, PeerId]] = set()  # that were said to be broken since the last commit
        self._went_last: dict[frozenset[PeerId], PeerId] = {}  # which end of a link, over all outer steps
        self.tales: set[PeerId] = set()
        """Both ends of all tales since the last commit whose teller was not heard. It may have been late, once."""

    def committed(self) -> None:
        """The outer step is made: the next one starts without a past, but for who went."""
        self._past_links.clear()
        self.tales.clear()

    def remember(self, view: View, gone: Collection[PeerId] = ()) -> None:
        """The view is about to change for what was reported: it counts on until something is committed.

        Args:
            gone: who goes for it.
        """
        for accuser, peers in self._round.voices(view, self.tales).items():
            for ends in (frozenset((accuser, peer)) for peer in peers):
                for out in ends.intersection(gone):
                    self._went_last.pop(ends, None)
                    self._went_last[ends] = out
        while len(self._went_last) > _MAX_LINKS:
            del self._went_last[next(iter(self._went_last))]
        self._past_links |= {(accuser, peer) for accuser, peers in self._round.voices(view).items() for peer in peers}
        self.tales.update(*self._round.unheard().items())

    def other_ends(self, view: View, peer: PeerId) -> set[PeerId]:
        """The other ends of its links that are said to be broken, now and since the last commit."""
        now = {(accuser, other) for accuser, others in self._round.voices(view, self.tales).items() for other in others}
        return {end for link in now | self._past_links if peer in link for end in link} - {peer}

    def known(self, view: View) -> set[PeerId]:
        """The members, and whoever was said to have a broken link since the last commit and is gone."""
        return {member.peer_id for member in view.members}.union(*self._past_links)

    def blamed(self, view: View, newcomers: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Whom to drop after a failure, so that those who stay reach each other.

        An accusation says that a link is broken, not whose fault it is: it counts against both of its ends. So a
        member that reaches nobody goes, however many it accuses, and not those who reach each other. What a newcomer
        says counts against itself alone: it has no commit yet, the others have. Between two ends with as many broken
        links the one goes that did not go the last time that theirs was broken, then the one that had the most broken
        links before, then the accused one, the newcomer, the newest member. What was said since the last commit counts
        on, also against members that are gone: nobody accuses one after the other out.

        Args:
            newcomers: whoever has no commit yet, of the `known` ones. One that was dropped is still a newcomer: without
                that its word, and the next newcomer's, sent a proven member out (seed 101577).
        """
        present = [member.peer_id for member in view.members]
        voices = self._round.voices(view, self.tales)
        now = {frozenset((accuser, peer)) for accuser, peers in voices.items() for peer in peers}
        links = now | {frozenset(link) for link in self._past_links}
        accused = self._round.accused(view, newcomers, self.tales)
        blamed: list[PeerId] = []
        while True:
            rest = [peer for peer in present if peer not in blamed]
            broken = [link for link in now if link.issubset(rest)]
            if not broken and (blamed or not any(accused.values())):
                return tuple(blamed)

            def weight(
                peer: PeerId, rest: list[PeerId] = rest, broken: list[frozenset[PeerId]] = broken
            ) -> tuple[int, bool, int, int, bool, int]:
                others = [other for link in links if peer in link for other in link if other not in (peer, *blamed)]
                if peer not in newcomers:
                    others = [other for other in others if other not in newcomers]
                went_last = any(self._went_last.get(link) == peer for link in broken)
                num_ever = len({other for link in {*links, *self._went_last} if peer in link for other in link})
                return len(others), not went_last, num_ever, accused[peer], peer in newcomers, rest.index(peer)

            ends = [peer for peer in rest if any(peer in link for link in broken)]
            blamed.append(max(ends or [peer for peer in rest if accused[peer]], key=weight))
