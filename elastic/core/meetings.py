# SPDX-License-Identifier: Apache-2.0
"""Links before membership: a learner becomes a member after both ends say that they are connected.

A member that the others cannot exchange with costs all of them a round. So whoever may become a member with whom is
told so (`Meet`), makes the links beside whatever else it does, and says what became of it (`Met`). Rules:

* Members that exchange with each other have met; what is asked for is links between a learner and everybody else.
* Two that have both tried in vain are apart: they can be members of one view while another one has met all (edges.py).
  They are asked again now and then; a view that comes later joins them.
* A learner that has met no such member within `meet_timeout_s` is told who tried which address with which error, and is
  sent home. The members never notice.
* A peer whose work a commit has held is never sent home for that: its line is broken, its address is not wrong.
* If it comes back and waits as long for links with members that came after it, these make way for it: all who have no
  commit yet, or a single one that has. More of them reach more of the run than it does, and it waits.

Nothing is repeated but in answer to a heartbeat.
"""

from collections.abc import Iterable, Sequence

from isthmus.collective.core.types import Instant, PeerRef
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.edges import Edges, are_parted, have_met
from isthmus.elastic.core.exit_codes import UNREACHABLE
from isthmus.elastic.core.messages import Meet, Met, Refused
from isthmus.elastic.core.pauses import Pauses
from isthmus.elastic.core.roster import Roster
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views

MAX_LEARNERS = 64
"""Learners that are asked to meet each other; all of them meet the members."""

AGAIN_S = 60.0
"""So often two members without a link try to make one: what a dial costs is little, and a network may change."""

_NEVER = float("inf")

_MOST_TOLD = 340
"""Characters about failed attempts that a reason holds: it is a `Reason` with the rest of the sentence."""


class Meetings:
    """Asks for links, and decides who has enough of them. What was said is in the sessions."""

    def __init__(self, config: CoordinatorConfig, turn: Turn, roster: Roster, views: Views, pauses: Pauses) -> None:
        self._config, self._state, self._turn, self._roster = config, turn.state, turn, roster
        self._views, self._pauses = views, pauses

    def heard(self, session: Session, said: Met) -> None:
        """A peer tells with whom it has a link, and with whom it has none."""
        known = {other.ref for other in self._roster.sessions.values()}
        session.met |= known.intersection(said.peers)
        session.met.intersection_update(known)
        session.unmet |= {item.ref: item.cause for item in said.unmet if item.ref in known}
        session.unmet = {ref: cause for ref, cause in session.unmet.items() if ref in known - session.met}

    def ask(self, session: Session) -> None:
        """Name those that it has not met, or that have not met it, unless it was asked a moment ago.

        A link that one side has made may have ended since with the other's view: whoever dials must dial again.
        """
        roster, now = self._roster, self._turn.now
        session.rejoin(now)
        if now < session.asked_at + self._config.meet_interval_s:
            return
        missing = [other for other in self._wanted(session) if not have_met(session, other)]
        if roster.is_member(session) and now >= session.asked_again_at + AGAIN_S:
            session.asked_again_at = now
            edges, others = Edges(self._state.view), (item for item in roster.members() if item is not session)
            missing += [other for other in others if not edges.between(session, other)]
        missing = [other for other in missing if not are_parted(session, other)]
        if not missing:
            return
        session.asked_at = now
        for other in missing:
            session.asked.setdefault(other.ref, now)
        peers = tuple(other.member for other in missing)
        self._turn.send(session.ref, Meet(peers=peers))

    def ask_all(self) -> None:
        """Somebody came: everybody hears of it at once."""
        for session in self._roster.sessions.values():
            session.asked_at = -_NEVER
            self.ask(session)

    def have_met(self, candidates: Iterable[Session], stays: Sequence[Session]) -> list[Session]:
        """Those of the candidates that make a view with all who stay, and each other; the first ones first."""
        chosen: list[Session] = []
        hubs = Edges(self._state.view).hubs_among(stays)
        for session in candidates:
            unlinked = [other for other in (*stays, *chosen) if not have_met(session, other)]
            left = [hub for hub in hubs if hub not in unlinked] + ([] if unlinked else [session])
            if left and all(self._is_apart(session, other) for other in unlinked):
                chosen.append(session)
                hubs = left
        return chosen

    def _is_apart(self, one: Session, other: Session) -> bool:
        """Whether nobody expects any more that the two get a link."""
        both_tried = other.ref in one.unmet and one.ref in other.unmet
        if both_tried or are_parted(one, other):
            return True
        return _asked_at(one, other) + self._config.meet_timeout_s <= self._turn.now

    def send_home(self) -> None:
        """Learners whose time is over hear why. Who is excused goes at a boundary: see `unreached`."""
        for session in self._roster.learners():
            if not self._roster.is_excused(session) and self._due_at(session) <= self._turn.now:
                self._turn.send(session.ref, self._unreached(session))
                self._roster.close(session)

    def unreached(self) -> dict[PeerRef, Refused]:
        """The excused whose time is over, and what they hear. To change the view in mid-round would void an exchange.

        One that no commit had held was closed as a learner, and stayed in the view's list (seed 3786).
        """
        late = filter(self._roster.is_excused, self._roster.learners())
        return {session.ref: self._unreached(session) for session in late if self._due_at(session) <= self._turn.now}

    def _unreached(self, session: Session) -> Refused:
        self._turn.counters["unreached"] += 1
        return Refused(code=UNREACHABLE, reason=self._reason(session, self._lacking(session)))

    def make_way(self) -> None:
        """Members go that keep out somebody whose work was committed before theirs.

        Without this an excused peer and a newcomer that had become a member meanwhile, neither of which could dial the
        other, were never in one view: neither was a newcomer any more (seed 556).
        """
        for session in self._roster.learners():
            keeps_out = self._keep_out(session)
            if not keeps_out:
                continue
            last_words = {
                other.ref: Refused(code=UNREACHABLE, reason=self._reason(other, [session]))
                for other in keeps_out
                if other.ref.peer_id not in self._state.reached
            }
            reason = f"has no link with {session.ref.peer_id}, whose work was committed before"
            self._turn.counters["made_way"] += len(keeps_out)
            self._views.drop({other.ref: reason for other in keeps_out}, last_words, counted_as="has no link")
            return  # the others look again at the members that are left

    def _keep_out(self, session: Session) -> list[Session]:
        """The members that are to make way for this learner now."""
        state, now = self._state, self._turn.now
        since = state.reached.get(session.ref.peer_id)
        is_fit = session.synced in (state.committed, state.previous) and session.synced is not None
        if since is None or not is_fit or not self._pauses.is_over(session.ref, state.outer_step, now):
            return []
        lacking = self._lacking(session)
        if not lacking or any(_asked_at(session, other) + self._config.meet_timeout_s > now for other in lacking):
            return []
        known = [state.reached[other.ref.peer_id] for other in lacking if other.ref.peer_id in state.reached]
        if len(known) > 1 or any(first <= since for first in known):
            return []
        stay = [other for other in self._roster.members() if other not in lacking]
        is_held = session.synced == state.committed or any(other.holds_state for other in stay)
        return lacking if is_held else []

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        roster, learners = self._roster, self._roster.learners()
        instants = [self._due_at(session) for session in learners if not roster.is_excused(session)]
        for session in learners:
            if session.ref.peer_id in self._state.reached:
                due = (_asked_at(session, other) + self._config.meet_timeout_s for other in self._lacking(session))
                instants += [instant for instant in due if instant > self._turn.now]
        return [instant for instant in instants if instant != _NEVER]

    def forgive(self, now: Instant) -> None:
        """The coordinator itself did not run: nobody could answer."""
        for session in self._roster.sessions.values():
            session.asked = dict.fromkeys(session.asked, now)

    def _wanted(self, session: Session) -> list[Session]:
        """Whom it should meet: who is a learner meets everybody, a member meets the learners."""
        roster = self._roster
        learners = [item for item in roster.learners() if item is not session]
        if roster.is_member(session):
            return learners
        return [*roster.members(), *learners[:MAX_LEARNERS]]

    def _lacking(self, session: Session) -> list[Session]:
        """Members that answer us, and that this learner and they have not met, if none of all has met everybody."""
        members = self._roster.members()
        if any(have_met(session, hub) for hub in Edges(self._state.view).hubs_among(members)):
            return []
        heard_since = self._turn.now - self._config.suspect_silence_s
        here = [item for item in members if not item.disconnected and item.last_heard >= heard_since]
        return [item for item in here if not have_met(session, item)]

    def _due_at(self, session: Session) -> Instant:
        if session.ref.peer_id in self._state.reached or session.disconnected:
            return _NEVER
        lacking = [other for other in self._lacking(session) if not are_parted(session, other)]  # for those it waits
        asked_at = min((_asked_at(session, other) for other in lacking), default=_NEVER)
        return asked_at + self._config.meet_timeout_s

    def _reason(self, session: Session, lacking: Sequence[Session]) -> str:
        attempts: list[str] = []
        for other in lacking:
            if session.ref not in other.met:
                cause = other.unmet.get(session.ref, "no connection")
                attempts.append(f"{other.ref.peer_id} with {session.address or 'no address'}: {cause}")
            if other.ref not in session.met:
                cause = session.unmet.get(other.ref, "no connection")
                attempts.append(f"you with {other.ref.peer_id} at {other.address or 'no address'}: {cause}")
        told = "; ".join(attempts)
        if len(told) > _MOST_TOLD:
            told = f"{told[:_MOST_TOLD]}..."
        return (
            f"{len(lacking)} of the {len(self._roster.members())} members have no link with you ({told}): give this "
            "peer an address that all of them reach (--advertise) and open its port"
        )


def _asked_at(one: Session, other: Session) -> Instant:
    """Since when both know that they should meet."""
    return max(one.asked.get(other.ref, _NEVER), other.asked.get(one.ref, _NEVER))
