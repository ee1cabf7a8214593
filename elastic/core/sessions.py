# SPDX-License-Identifier: Apache-2.0
"""What the coordinator knows of one start of one peer, and when it gives it up.

Liveness is progress, not heartbeats. A peer is given up when it is
* gone: its connection broke and it did not come back within its grace;
* silent: nothing was heard for `heartbeat_timeout_s`;
* deaf: it speaks, but for as long as that shows no sign of having heard the newest view or commit;
* stalled: it stands still although nobody keeps it waiting, and others wait for it.
All of this dies with the coordinator's process; what must not is in run_state.py.
"""

from dataclasses import dataclass, field

from isthmus.collective.core.types import Epoch, Instant, Member, OuterStep, PeerRef
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.messages import Heartbeat, Held

STANDS_STILL = "makes no progress"
"""Why a stalled peer is given up."""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One start of one peer, learner or member (the view says which)."""

    ref: PeerRef
    address: str
    last_heard: Instant
    progressed_at: Instant
    told_at: Instant
    synced: Held | None = None
    """Newest committed state that it said it holds."""
    holds_state: bool | None = None
    """Whether this member holds the view's state. No for who was admitted one commit behind and has not said yet
    that it caught up; unknown after a restart of the coordinator for who has not spoken yet."""
    admitted_at: Instant = float("-inf")
    """When it became a member, as far as this coordinator has seen it."""
    is_aware: bool = False
    """Whether this member has shown, to this coordinator, that it knows of its admission."""
    leaving: bool = False
    disconnected: bool = False
    """Its connection was seen to break and nothing was heard since."""
    awaited_until: Instant | None = None
    """By then it must have spoken again."""
    behind_since: Instant | None = None
    """Since then it should know something newer than what it shows."""
    progress: int = -1
    exchanged: int = -1
    """Its progress without its inner steps: bytes, and what was made of them."""
    grew_at: Instant = 0.0
    """When that was last seen to grow, blocked or not. A member that trains on beside an exchange may hang in it."""
    slowest_s: float | None = None
    """Its slowest recent interval between two signs of progress, as seen through heartbeats."""
    blocked: bool = False
    ready_at: Instant | None = None
    """When it was first heard to have handed in for the round in progress."""
    met: set[PeerRef] = field(default_factory=set)
    """With whom it says that it has a link; see meetings.py."""
    unmet: dict[PeerRef, str] = field(default_factory=dict)
    """With whom it tried in vain, and why."""
    parted: dict[PeerRef, Instant] = field(default_factory=dict)
    """From whom it was parted, and until when: whatever they say, they have no link."""
    parted_s: dict[PeerRef, float] = field(default_factory=dict)
    """For how long the last time."""
    asked_at: Instant = float("-inf")
    """When it was last asked to meet others."""
    asked_again_at: Instant = float("-inf")
    """When it was last asked to meet the members that it has no link with."""
    asked: dict[PeerRef, Instant] = field(default_factory=dict)
    """When it was first asked to meet each of them."""
    inner_steps: int = 0
    """As many as it was heard to have done."""
    excused_in: Epoch | None = None
    """The view that went on without it; None if it is not excused."""
    worked_from: int | None = None
    """Its inner steps when it was first heard to know that view: what counts was done since."""
    num_owned_before: int | None = None
    """Samples that it owned, and had not reported, when it first asked for more as a member, or as an excused one. A
    restarted coordinator does not know when that was, and begins anew."""
    has_worked: bool = False
    """Whether it has done a round's work since, or handed one in."""

    @property
    def member(self) -> Member:
        """This start of the peer, where others reach it now. A view has it where it was when that was made."""
        return Member(self.ref.peer_id, self.ref.incarnation, self.address)

    @property
    def comes_back(self) -> bool:
        """Whether it may be a member (again): an excused peer that stands still would only be late once more."""
        return self.excused_in is None or self.has_worked

    def part(self, other: PeerRef, now: Instant, first_s: float) -> None:
        """A round could not be finished over this link: each time it is out of use for twice as long."""
        self.parted_s[other] = seconds = 2.0 * self.parted_s.get(other, 0.5 * first_s)
        self.parted[other] = now + seconds

    def rejoin(self, now: Instant) -> None:
        """Links whose time is over may be used again."""
        self.parted = {other: until for other, until in self.parted.items() if until > now}

    def hands_in(self, now: Instant) -> None:
        """Its payload of the round in progress is ready."""
        self.has_worked = True
        if self.ready_at is None:
            self.ready_at = now

    def excuse(self, epoch: Epoch, held: Held) -> None:
        """The round goes on without it, in the view of this epoch. It holds the state that the round starts from.

        Bytes are no work: a peer whose worker hangs follows the commits as long as its daemon lives.
        """
        self.excused_in, self.worked_from, self.has_worked = epoch, None, False
        self.num_owned_before = None
        self.synced = held

    def works(self, beat: Heartbeat, round_inner_steps: int) -> None:
        """Count what it has done since it was excused; a round has so many inner steps."""
        self.inner_steps = max(self.inner_steps, beat.inner_steps)
        if self.excused_in is None or beat.epoch < self.excused_in:
            return  # an older word: the steps that it does not tell of were done before
        if self.worked_from is None:
            self.worked_from = self.inner_steps
        self.has_worked |= self.inner_steps >= self.worked_from + round_inner_steps

    def heard(self, now: Instant) -> None:
        """Anything arrived from it."""
        self.last_heard = now
        self.disconnected = False
        self.awaited_until = None

    def lost(self, now: Instant, grace_s: float) -> None:
        """Its connection broke."""
        self.disconnected = True
        self.awaited_until = now + grace_s

    def beat(self, beat: Heartbeat, now: Instant) -> None:
        """Measure its pace. Time in which it waits for others does not count."""
        if beat.progress > self.progress:
            if self.progress >= 0 and not self.blocked:
                self.slowest_s = max(now - self.progressed_at, 0.9 * (self.slowest_s or 0.0))
            self.progress = beat.progress
            self.progressed_at = now
        elif beat.blocked:
            self.progressed_at = now
        if beat.progress - beat.inner_steps > self.exchanged:
            self.exchanged = beat.progress - beat.inner_steps
            self.grew_at = now
        self.blocked = beat.blocked

    def admit(self, *, holds_state: bool, now: Instant) -> None:
        """It becomes a member. That it stood still as a learner, with nothing left to fetch, is not held against it.

        Without this it was dropped in the moment of its admission (test_scenarios.py: idle learner).
        """
        self.holds_state = holds_state
        self.admitted_at, self.is_aware = now, False
        self.progressed_at = now
        self.slowest_s = None
        self.excused_in = None
        self.num_owned_before = None

    def shows(self, held: OuterStep, needed: OuterStep, now: Instant) -> None:
        """It says which outer step it holds. Who once held the view's state does not lose it."""
        if held < needed:
            self.holds_state = self.holds_state or False
        elif not self.holds_state:
            self.holds_state = True
            # Bytes per second say nothing about inner steps: its pace is measured afresh.
            self.progressed_at = now
            self.slowest_s = None

    def forgive(self, now: Instant) -> None:
        """The coordinator itself did not run: its clock must not be held against the peer."""
        self.last_heard = now
        self.progressed_at = now
        if self.ready_at is not None:
            self.ready_at = now  # the others' words may lie in our own socket
        if self.behind_since is not None:
            self.behind_since = now
        if self.awaited_until is not None:
            self.awaited_until = max(self.awaited_until, now + 1.0)

    def stall_timeout_s(self, config: CoordinatorConfig) -> float:
        """How long it may stand still, by its own measured pace."""
        if self.holds_state is False:
            return config.stall_floor_s  # bytes arrive all the time, or its donors are gone
        if self.slowest_s is None:
            return config.stall_initial_s
        return max(config.stall_floor_s, config.stall_factor * self.slowest_s)

    def stalls_at(self, config: CoordinatorConfig) -> Instant:
        """When it counts as stalled if it shows no progress until then."""
        return self.progressed_at + self.stall_timeout_s(config)

    def deadlines(self, config: CoordinatorConfig, *, others_wait: bool) -> tuple[tuple[Instant, str], ...]:
        """When it will be given up and why, as things stand."""
        result = [(self.last_heard + config.heartbeat_timeout_s, "silent")]
        if self.awaited_until is not None:
            result.append((self.awaited_until, "did not come back"))
        if self.behind_since is not None:
            result.append((self.behind_since + config.heartbeat_timeout_s, "does not hear"))
        if others_wait and not self.blocked:
            result.append((self.stalls_at(config), STANDS_STILL))
        return tuple(result)
