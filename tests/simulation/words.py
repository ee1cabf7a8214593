# SPDX-License-Identifier: Apache-2.0
"""I3, I5: what the coordinator says and whom it takes back, held against the words that its process has heard.

Donors hold what they are named for, as far as anybody has said. Who is put out hears first of the commit that it voted
for. Who was excused comes back only if it has got on since.
"""

from isthmus.collective.core.types import PeerRef, View
from isthmus.elastic.core.messages import (
    Commit,
    CoordinatorMessage,
    Evicted,
    Heartbeat,
    Join,
    Leave,
    PeerMessage,
    RoundFailed,
    Synced,
    Vote,
    Welcome,
)
from isthmus.elastic.core.records import CommitRecord, ViewRecord
from tests.simulation.history import History
from tests.simulation.world import demand

SILENCE_S = 4.0
"""Of the coordinator's time in which it did not wait for the store; less than its timeout."""

RECONNECT_S = 0.4
"""The same for who has lost its connection."""

TURNED_AWAY = ("no member and no learner", "dropped while it was away")


class Words:
    """Books of one coordinator's process after the other."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._epoch = 0
        self._members: set[PeerRef] = set()
        self._excused: set[PeerRef] = set()
        self._put_out: set[PeerRef] = set()  # by the newest view
        self._gone_since: dict[PeerRef, int] = {}  # in which epoch it was put out
        self._aware_of: dict[PeerRef, int] = {}  # the newest epoch that its Joins name
        self._leaves: set[PeerRef] = set()  # whoever has asked to go in order
        self._last_told: dict[PeerRef, CoordinatorMessage] = {}
        self._held: dict[PeerRef, int] = {}  # the newest outer step that each is known to hold
        self._steps: dict[PeerRef, int] = {}
        self._heard_at: dict[PeerRef, float] = {}
        self._lost_at: dict[PeerRef, float] = {}
        self._was_away: set[PeerRef] = set()
        self._excused_at: dict[PeerRef, int] = {}  # inner steps of those that have done none since

    def arrived(self, sender: PeerRef, now: float) -> None:
        """A word is here. Who was away for too long before that has not to thank for it."""
        since, self._heard_at[sender] = self._heard_at.get(sender), now
        lost_at = self._lost_at.pop(sender, None)
        was_silent = since is not None and now - since > SILENCE_S
        if was_silent or (lost_at is not None and now - lost_at > RECONNECT_S):
            self._was_away.add(sender)

    def went(self, sender: PeerRef, now: float) -> None:
        self._lost_at.setdefault(sender, now)

    def decided(self, record: ViewRecord, now: float) -> None:
        """Who is dropped for its silence has been silent, also while the store was at work."""
        silent, gone = (
            {part.split(" ")[0] for part in record.cause.split("; ") if part.endswith(f"dropped: {reason}")}
            for reason in ("silent", "did not come back")
        )
        for ref in (self._members | self._excused) & set(self._heard_at) - self._was_away:
            if ref.peer_id in silent:
                demand(
                    now - self._heard_at[ref] > SILENCE_S, "I4", "{} is dropped for its silence, and has spoken", ref
                )
            if ref.peer_id in gone:
                lost_at = self._lost_at.get(ref, now)
                demand(now - lost_at > RECONNECT_S, "I4", "{} is dropped for being away, and is here", ref)

    def coordinator_started(self) -> None:
        self._held, self._steps, self._last_told = {}, {}, {}
        self._heard_at, self._lost_at, self._was_away = {}, {}, set()
        self._excused_at = dict.fromkeys(self._excused, -1)
        if self._history.lineage.commits:
            self._agreed(self._history.lineage.commits[-1])

    def _agreed(self, record: CommitRecord) -> None:
        """Who was overruled still has what the round began with, until it says more."""
        self._held |= {item.ref: record.outer_step - (not item.agreed) for item in record.contributions}

    def committed(self, record: CommitRecord) -> None:
        self._agreed(record)

    def rebuilt(self) -> None:
        self._members, self._excused, self._excused_at, self._put_out = set(), set(), {}, set()
        self._gone_since.clear()
        self._held = {}

    def brought(self, sender: PeerRef, message: PeerMessage) -> None:
        """A word has arrived."""
        match message:
            case Heartbeat() if message.epoch >= self._epoch:
                self._holds(sender, message.outer_step)
                self._gets_on(sender, message)
            case Heartbeat():
                self._gets_on(sender, message)
            case Synced(held=held):
                self._holds(sender, held.outer_step)
            case Leave(now=False, held=held):
                self._leaves.add(sender)
                self._holds(sender, held.outer_step if held is not None else 0)
            case Join(epoch=epoch, held=held):
                self._aware_of[sender] = max(epoch, self._aware_of.get(sender, 0))
                self._holds(sender, held.outer_step if held is not None else 0)
            case Vote() | RoundFailed() if message.key.epoch == self._epoch:
                self._holds(sender, message.key.outer_step)
                self._excused_at.pop(sender, None)
            case _:
                pass

    def _holds(self, sender: PeerRef, outer_step: int) -> None:
        self._held[sender] = max(self._held.get(sender, 0), outer_step)

    def _gets_on(self, sender: PeerRef, beat: Heartbeat) -> None:
        self._steps[sender] = max(self._steps.get(sender, -1), beat.inner_steps)
        since = self._excused_at.get(sender)
        if since is None:
            return
        if beat.ready or (since >= 0 and beat.inner_steps > since):
            del self._excused_at[sender]
        elif since < 0:  # its first word to this coordinator: what counts is done from here on
            self._excused_at[sender] = beat.inner_steps

    def view_decided(self, record: ViewRecord) -> None:
        view: View = record.view
        members, excused = {member.ref for member in view.members}, set(record.excused)
        for ref in members & self._excused:
            demand(ref not in self._excused_at, "I4", "{} is a member again, and has not got on since it was late", ref)
        for ref in excused - self._excused:
            self._excused_at[ref] = self._steps.get(ref, -1)
        self._put_out = (self._members | self._excused) - members - excused
        self._gone_since |= dict.fromkeys(self._put_out, view.epoch)
        self._members, self._excused, self._epoch = members, excused, view.epoch

    def told(self, to: PeerRef, message: CoordinatorMessage) -> None:
        before, self._last_told[to] = self._last_told.get(to), message
        if isinstance(message, Welcome):
            # Whoever leaves is never a member again, and may stay to serve the state.
            is_aware = to in self._leaves or self._aware_of.get(to, 0) >= self._gone_since.get(to, 0)
            demand(is_aware, "I5", "{} is welcome before it has heard that it was put out", to)
            if to in self._leaves and to in self._put_out:
                self._demand_reminder(to, before)
        match message:
            case Welcome(target=target, donors=donors) if target is not None:
                for donor in donors:
                    said = self._held.get(donor.ref)
                    demand(said is None or said >= target.outer_step, "I5", "{} is no donor, as it said", donor.ref)
            case Evicted(reason=reason) if to in self._put_out or reason in TURNED_AWAY:
                self._demand_reminder(to, before)
            case _:
                pass

    def _demand_reminder(self, to: PeerRef, before: CoordinatorMessage | None) -> None:
        self._put_out.discard(to)
        commits = self._history.lineage.commits
        newest = commits[-1] if commits and self._history.newest is not None else None
        if newest is not None and any(item.ref.peer_id == to.peer_id for item in newest.contributions):
            is_reminded = isinstance(before, Commit) and before.certificate.key == newest.key
            demand(is_reminded, "I3", "{} is put out before it hears of the commit that it voted for", to)
