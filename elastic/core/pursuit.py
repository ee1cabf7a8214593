# SPDX-License-Identifier: Apache-2.0
"""Getting to the committed state: what a peer holds, what it aims at, who can help.

Rules: one catch-up at a time, and a running one is left alone, because restarted at every commit it would never
end. After a failure there is a pause, in which the coordinator names other donors. Nobody goes back: a target that is
older than what is held is stale, unless the peer was told that what it holds is no part of the run (`give_up`).
"""

from collections.abc import Sequence

from isthmus.collective.core.types import Instant, Member, OuterStep, PeerId
from isthmus.elastic.core.events import CatchUp, CatchUpFailed, CaughtUp, FoundState, MemberEffect
from isthmus.elastic.core.messages import Held

NOTHING: tuple[MemberEffect, ...] = ()


class Pursuit:
    """The state a peer holds and the one it is after."""

    def __init__(self, me: PeerId, held: Held | None, retry_s: float) -> None:
        self.held = held
        self.target: Held | None = None
        self.busy = False
        """A `CatchUp` or `FoundState` was ordered and has not ended."""
        self.retry_at: Instant | None = None
        self._me = me
        self._retry_s = retry_s
        self._goal: Held | None = None  # of the catch-up that runs
        self._donors: tuple[Member, ...] = ()
        self._void_after: OuterStep | None = None  # what runs may end in a state that was given up meanwhile
        self._but: Held | None = None  # and the one that was not

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing newer is known than what is held."""
        return not self.busy and (self.target is None or self.target == self.held)

    def found(self) -> Sequence[MemberEffect]:
        """The coordinator asks for the run's first state."""
        if self.busy or self.held is not None:
            return NOTHING
        self.busy = True
        return [FoundState()]

    def aim(self, target: Held, donors: Sequence[Member] | None = None) -> Sequence[MemberEffect]:
        """This state is committed (and these members can serve it)."""
        if self.held is not None and target.outer_step < self.held.outer_step:
            return NOTHING
        self.target = target
        if donors is not None:
            self._donors = tuple(member for member in donors if member.peer_id != self._me)
        return self._start()

    def ended(self, event: CaughtUp | CatchUpFailed, now: Instant) -> None:
        """What was ordered has ended; `aim` or `wake` goes on from there."""
        self.busy = False
        void_after, self._void_after = self._void_after, None
        if isinstance(event, CaughtUp) and (
            void_after is None or event.held.outer_step <= void_after or event.held == self._but
        ):
            self.held = event.held
            goal = self._goal  # the target may have moved on meanwhile; that is no failure
            arrived = goal is None or self.held == goal or self.held.outer_step > goal.outer_step
        else:
            arrived = False
        self.retry_at = None if arrived else now + self._retry_s

    def wake(self, now: Instant) -> Sequence[MemberEffect]:
        """The pause after a failure is over."""
        if self.retry_at is None or now < self.retry_at:
            return NOTHING
        self.retry_at = None
        return self._start()

    def installed(self, held: Held) -> None:
        """The peer made this state itself, by a round that was committed."""
        self.held = held

    def give_up(self, after: OuterStep, but: Held | None) -> None:
        """States newer than this step, but for one, are no part of the run: none is held, aimed at, or waited for."""
        if self.held is not None and self.held != but and self.held.outer_step > after:
            self.held = None
        self.target = self.retry_at = None
        self._void_after, self._but = (after if self.busy else None), but

    def rest(self) -> None:
        """What is held is what is wanted."""
        self.target = self.retry_at = None

    def _start(self) -> Sequence[MemberEffect]:
        if self.busy or self.target is None or self.target == self.held:
            return NOTHING
        if self.retry_at is not None or not self._donors:
            return NOTHING  # the timer wakes us; the next Welcome or view names donors
        self.busy = True
        self._goal = self.target
        return [CatchUp(target=self.target, donors=self._donors)]
