# SPDX-License-Identifier: Apache-2.0
"""I4, I5: nobody is put out, left behind, kept out or taken in without a reason.

Books of what one coordinator's process has heard, by its own time, and of what it decides. Who is given up for what it
did not say has not said it. Who is excused had the grace, from the quorum on and since it came in. Who comes in is
here. Who was late comes back when its pause is over, and no later; who does nothing meanwhile is given up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from isthmus.collective.core.types import PeerRef, View
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.events import CoordinatorEffect, Persist, SendToPeer
from isthmus.elastic.core.messages import Heartbeat, Join, Leave, PeerMessage, Refused, RoundFailed, Synced, Vote
from isthmus.elastic.core.records import CommitRecord, RebuildRecord, RollbackRecord, ViewRecord
from tests.simulation.world import demand

_EPS_S = 1e-6
_WAITED = ", and a member waits for it"


@dataclass(slots=True)
class _Pace:
    """How a peer gets on, as its heartbeats tell."""

    progress: int = -1
    grew_at: float = -math.inf
    is_new: bool = False
    arrived_at: float = -math.inf
    longest_s: float = 0.0
    """Between two signs of progress."""
    longest_since_s: float = 0.0
    """The same since it said that it holds the state, if it came in without."""
    forgiven_at: float = -math.inf
    is_blocked: bool = False
    is_behind: bool = False
    """It came in without the view's state: how its bytes came says nothing of its steps."""

    def begins(self, now: float) -> None:
        """It is a member, and measured anew; perhaps in a new session, where its first word is progress."""
        self.is_new = True
        self.grew_at, self.longest_s, self.longest_since_s, self.is_behind = now, 0.0, 0.0, True

    def arrives(self, now: float) -> None:
        """It says that it holds the state. The coordinator may have known, and measured on, or begins now."""
        self.arrived_at, self.longest_since_s, self.is_behind = now, 0.0, False

    def beats(self, beat: Heartbeat, now: float) -> None:
        if beat.progress > self.progress:
            if self.progress >= 0 and not self.is_blocked:
                self.longest_s = max(self.longest_s, now - self.grew_at)
                self.longest_since_s = max(self.longest_since_s, now - max(self.grew_at, self.arrived_at))
            self.progress, self.grew_at = beat.progress, now
        elif beat.blocked:
            self.grew_at = now
        if self.is_new:
            self.arrived_at, self.is_new = now, False
        self.is_blocked = beat.blocked


@dataclass(slots=True)
class _Absence:
    """Of one excused peer."""

    since: int
    """After how many commits it was excused."""
    beside: set[PeerRef]
    """Members from then on, without a break: it has links with these. Empty if it may have none with some."""
    synced: int
    """The outer step that it says to hold."""
    has_worked: bool = False


@dataclass(slots=True)
class _Known:
    """What dies with the process."""

    members: set[PeerRef] = field(default_factory=set)
    excused: set[PeerRef] = field(default_factory=set)
    view: View | None = None
    step: int = 0
    admitted_at: dict[PeerRef, float] = field(default_factory=dict)
    ready_at: dict[PeerRef, float] = field(default_factory=dict)
    """Who has handed in for the next commit."""
    heard_at: dict[PeerRef, float] = field(default_factory=dict)
    gone: set[PeerRef] = field(default_factory=set)
    """Their connections were lost, and they have said nothing since."""
    aware_at: dict[PeerRef, float] = field(default_factory=dict)
    """When each has shown last that it had heard the newest view and commit, or was on its way to that."""
    spoke: set[PeerRef] = field(default_factory=set)
    """They are done with this attempt at the round."""
    paces: dict[PeerRef, _Pace] = field(default_factory=dict)
    absences: dict[PeerRef, _Absence] = field(default_factory=dict)
    waits: dict[PeerRef, int] = field(default_factory=dict)
    """How often in a row it was awaited in vain."""
    uncertain: set[PeerRef] = field(default_factory=set)
    """They were put out since a commit held their work: how often they were awaited is not known here."""
    num_commits: int = 0
    num_splits: int = 0
    """Votes without a majority since the last commit."""


class Reasons:
    """See the module.

    Args:
        config: of the coordinator.
        now: its process's time, in which it did not wait for the store.
    """

    def __init__(self, config: CoordinatorConfig, now: Callable[[], float]) -> None:
        self._config, self._now = config, now
        self._known = _Known()
        self._durable: tuple[View | None, set[PeerRef]] = (None, set())
        self._looked_at = 0.0

    # ------------------------------------------------------------------------ what is durable

    def coordinator_started(self, step: int) -> None:
        """The next process knows what is in the journal."""
        view, excused = self._durable
        members = {member.ref for member in view.members} if view is not None else set()
        self._known = _Known(members=members, excused=set(excused), view=view, step=step)
        self._known.uncertain = members | excused
        self._looked_at = self._now()

    def persisted(self, record: ViewRecord | RebuildRecord | RollbackRecord) -> None:
        self._durable = (record.view, set(record.excused)) if isinstance(record, ViewRecord) else (None, set())

    # ------------------------------------------------------------------------ what it hears

    def lost(self, sender: PeerRef) -> None:
        """A connection."""
        self._known.gone.add(sender)

    def brought(self, sender: PeerRef, message: PeerMessage) -> None:
        """A word."""
        known, now = self._known, self._now()
        known.heard_at[sender] = now
        known.gone.discard(sender)
        absence = known.absences.get(sender)
        match message:
            case Heartbeat():
                self._beats(sender, message, now)
                self._arrives(sender, message.outer_step, now)
            case Vote() | RoundFailed() if self._is_of_this_round(message) and sender in known.members:
                known.aware_at[sender] = now
                known.spoke.add(sender)
                known.ready_at.setdefault(sender, now)
            case Join(held=held) | Synced(held=held) | Leave(held=held) if held is not None:
                self._arrives(sender, held.outer_step, now)
                if absence is not None and not isinstance(message, Leave):
                    absence.synced = held.outer_step
            case _:
                pass

    def _arrives(self, sender: PeerRef, step: int, now: float) -> None:
        """It says which outer step it holds."""
        pace = self._known.paces.get(sender)
        if pace is not None and pace.is_behind and step >= self._known.step:
            pace.arrives(now)

    def _beats(self, sender: PeerRef, beat: Heartbeat, now: float) -> None:
        known = self._known
        known.paces.setdefault(sender, _Pace()).beats(beat, now)
        if known.view is None or beat.epoch < known.view.epoch or sender not in known.members | known.excused:
            return
        if beat.outer_step >= known.step or not beat.blocked:
            known.aware_at[sender] = now
        if beat.ready and beat.outer_step == known.step:
            known.ready_at.setdefault(sender, now)
            if sender in known.absences:
                known.absences[sender].has_worked = True

    def _is_of_this_round(self, message: Vote | RoundFailed) -> bool:
        view = self._known.view
        return view is not None and (message.key.epoch, message.key.outer_step) == (view.epoch, self._known.step)

    # ------------------------------------------------------------------------ what it decides

    def decided(self, effects: Sequence[CoordinatorEffect]) -> None:
        """All that comes of one event."""
        self._look()
        returning: set[PeerRef] = set()
        for effect in effects:
            match effect:
                case Persist(record=ViewRecord() as record):
                    self._judge(record)
                    self._changes(record)
                case Persist(record=CommitRecord() as record):
                    self._committed(record)
                    returning = set() if record.final else set(self._known.absences)
                case Persist(record=RebuildRecord() | RollbackRecord() as record):
                    certificate = record.certificate
                    step = 0 if certificate is None else certificate.made.outer_step
                    self._known = _Known(step=step, gone=self._known.gone, num_splits=self._known.num_splits)
                case SendToPeer(message=Refused(reason=reason)) if "results differ" in reason:
                    tried = self._known.num_splits + 1
                    is_hopeless = tried >= self._config.max_split_votes
                    demand(is_hopeless, "I4", "the run is halted after {} votes without a majority in a row", tried)
                case _:
                    pass
        for ref in returning & self._known.excused:
            self._demand_return(ref)

    def _look(self) -> None:
        """If it did not run for a while, nobody is blamed for that."""
        now, before = self._now(), self._looked_at
        self._looked_at = now
        if now > before + self._config.lateness_s:
            for pace in self._known.paces.values():
                pace.forgiven_at = now  # perhaps it only had nothing to do, and measures on (seed 24512)

    def _judge(self, record: ViewRecord) -> None:
        """Against what was known before."""
        known, now = self._known, self._now()
        members, excused = {member.ref for member in record.view.members}, set(record.excused)
        reasons = dict(part.split(" dropped: ", 1) for part in record.cause.split("; ") if " dropped: " in part)
        for ref in known.members | known.excused:
            self._demand_reason(ref, reasons.get(ref.peer_id, ""), now)
        late = excused - known.excused
        if late:
            self._demand_grace(late, now)
        for ref in members - known.members:
            demand(ref not in known.gone, "I5", "{} becomes a member, and its connection is lost", ref)

    def _demand_reason(self, ref: PeerRef, reason: str, now: float) -> None:
        known, config = self._known, self._config
        silent_s = now - known.heard_at.get(ref, -math.inf)
        aware_s = now - known.aware_at.get(ref, -math.inf)
        limits = {"silent": config.heartbeat_timeout_s, f"silent{_WAITED}": config.suspect_silence_s}
        is_silent = silent_s >= limits.get(reason, 0.0) - _EPS_S
        demand(is_silent, "I4", "{} is dropped as silent, and has spoken", ref)
        is_gone = reason != f"connection lost{_WAITED}" or ref in known.gone
        demand(is_gone, "I4", "{} is dropped for a lost connection, and is here", ref)
        is_deaf = reason != "does not hear" or aware_s >= config.heartbeat_timeout_s - _EPS_S
        demand(is_deaf, "I4", "{} is dropped as deaf, and was aware of all {:.1f} s ago", ref, aware_s)
        is_voteless = not reason.startswith("has not voted") or ref not in known.spoke
        demand(is_voteless, "I4", "{} is dropped without a vote, and is done with the round", ref)

    def _demand_grace(self, late: set[PeerRef], now: float) -> None:
        """The quorum is there, and has waited since for as long as the shortest grace, and for each as a member."""
        known, config = self._known, self._config
        num_standing = len(known.members) + len(known.excused)
        quorum = max(1, config.min_peers, math.ceil(config.round_quorum * num_standing))
        ready_at = sorted(known.ready_at[ref] for ref in known.members if ref in known.ready_at)
        demand(len(ready_at) >= quorum, "I4", "{} of {} are no quorum to go on", len(ready_at), num_standing)
        for ref in late:
            demand(ref not in known.ready_at, "I4", "{} is late, and has handed in", ref)
            since = max(ready_at[quorum - 1], known.admitted_at.get(ref, -math.inf))
            is_late = now >= since + config.grace_floor_s - _EPS_S
            demand(is_late, "I4", "{} is late after {:.2f} s", ref, now - since)

    def _demand_return(self, ref: PeerRef) -> None:
        """A commit was made, and this peer stays excused: its pause is not over, or it is not fit to come back."""
        known, absence = self._known, self._known.absences[ref]
        out, most = known.num_commits - absence.since, 2 ** (known.waits.get(ref, 1) - 1)
        # Between peers that were members together there are links; of others that is not known here.
        is_linked = known.view is not None and not known.view.apart and known.members <= absence.beside
        is_here = ref not in known.gone and ref not in known.uncertain and bool(known.members)
        is_fit = is_here and is_linked and absence.has_worked and absence.synced in (known.step - 1, known.step)
        demand(out < most or not is_fit, "I4", "{} was late {} times, and is still out", ref, known.waits.get(ref))
        pace = known.paces.get(ref)
        if pace is None:
            return
        config = self._config
        patience_s = max(config.stall_floor_s, config.stall_factor * pace.longest_s)
        is_measured = pace.longest_since_s > 0.0 and not pace.is_behind
        patience_s = patience_s if is_measured else max(patience_s, config.stall_initial_s)
        stands_s = self._now() - max(pace.grew_at, pace.arrived_at, pace.forgiven_at)
        demand(stands_s <= patience_s, "I4", "{} is excused, and stands still for {:.1f} s", ref, stands_s)

    # ------------------------------------------------------------------------ what follows

    def _changes(self, record: ViewRecord) -> None:
        known, now = self._known, self._now()
        members, excused = {member.ref for member in record.view.members}, set(record.excused)
        known.num_splits += record.cause.startswith("votes differ")
        known.admitted_at |= dict.fromkeys(members - known.members, now)
        for ref in members - known.members:
            known.paces.setdefault(ref, _Pace()).begins(now)
        out = (known.members | known.excused) - members - excused
        known.uncertain |= out
        books: tuple[dict[PeerRef, float] | dict[PeerRef, _Pace], ...]
        books = known.admitted_at, known.ready_at, known.paces
        for book in books:
            for ref in out & book.keys():
                del book[ref]
        for ref in excused - known.excused:
            known.waits[ref] = known.waits.get(ref, 0) + 1
            has_apart = known.view is None or bool(known.view.apart)
            known.absences[ref] = _Absence(known.num_commits, set() if has_apart else set(members), known.step)
        known.absences = {ref: absence for ref, absence in known.absences.items() if ref in excused}
        for absence in known.absences.values():
            absence.beside &= members
        known.spoke.clear()
        known.members, known.excused, known.view = members, excused, record.view

    def _committed(self, record: CommitRecord) -> None:
        known = self._known
        known.num_commits += 1
        known.num_splits = 0
        known.step = record.outer_step
        for book in (known.ready_at, known.spoke):
            book.clear()
        for pace in known.paces.values():
            pace.is_blocked = False  # it has what it waited for
        for item in record.contributions:
            known.waits.pop(item.ref, None)
            known.uncertain.discard(item.ref)
