# SPDX-License-Identifier: Apache-2.0
"""Where a peer stands in the run, and what follows from that at home.

Its phase and its view, the state it holds, the payload and its exchange, the leases: whatever its trainer is told. It
is told itself what was decided (member.py hears it, and knows whether to believe it) and what the trainer has done.

Rules: see member.py. It must not know messages, connections, or when something is said.
"""

import enum
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from isthmus.collective.core.types import Epoch, Instant, Member, OuterStep, PeerRef, View
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.events import (
    BecomeActive,
    BecomeExcused,
    BecomeLearner,
    CarryOver,
    CatchUpFailed,
    CaughtUp,
    InstallStaged,
    InstallView,
    MemberEffect,
    Progressed,
    RoundReady,
)
from isthmus.elastic.core.lease_desk import LeaseDesk
from isthmus.elastic.core.local_round import LocalRound
from isthmus.elastic.core.messages import Heartbeat, Held, NewView
from isthmus.elastic.core.pursuit import Pursuit


class Phase(enum.Enum):
    """Where a peer stands."""

    JOINING = "joining"  # has not been answered
    LEARNING = "learning"  # welcome, but no member: catches up
    SYNCING = "syncing"  # a member that does not hold the view's state yet
    ACTIVE = "active"  # a member that does
    EXCUSED = "excused"  # was active, is late, and will be a member again
    FINISHED = "finished"  # its part is over, for good


class Place:
    """See the module's docstring. What it orders is appended to `effects`, which its owner empties.

    Args:
        me: this start of this peer.
        held: the state it starts with.
        catch_up_retry_s: the pause after a catch-up that failed.
        counters: what came out of turn, by reason.
        sign: this peer's signature of these bytes.
    """

    def __init__(
        self,
        me: PeerRef,
        held: Held | None,
        catch_up_retry_s: float,
        counters: Counter[str],
        sign: Callable[[bytes], bytes],
    ) -> None:
        self.me = me
        self.effects: list[MemberEffect] = []
        self.phase = Phase.JOINING
        self.view: View | None = None
        """The one this peer is a member of, advanced by installed commits."""
        self.is_standing = False
        """Whether what this peer has done since the last commit counts: as an active member, or excused."""
        self.pursuit = Pursuit(me.peer_id, held, catch_up_retry_s)
        self.round = LocalRound(me, sign)
        self.leases = LeaseDesk()
        self._counters = counters
        self._progress = 0
        self._inner_steps = 0
        self._waits = False  # for others, as the trainer says
        self._weights: tuple[View, tuple[float, ...]] | None = None  # what the parts weigh in this view's first round

    @property
    def held(self) -> Held | None:
        """The committed state it holds."""
        return self.pursuit.held

    @property
    def view_state(self) -> Held | None:
        """The state that its view names."""
        return None if self.view is None else Held(self.view.outer_step, self.view.digest)

    def heartbeat(self, epoch: Epoch) -> Heartbeat:
        """How far it is."""
        held = self.held
        is_ready = self.round.payload is not None
        # Who catches up is never blocked: the others must not wait for it without end.
        at_rest = self.phase in (Phase.ACTIVE, Phase.EXCUSED) and self.pursuit.is_at_rest
        return Heartbeat(
            epoch=epoch,
            outer_step=held.outer_step if held is not None else OuterStep(0),
            progress=self._progress,
            blocked=at_rest and (is_ready or self._waits),
            ready=at_rest and is_ready,
            inner_steps=self._inner_steps,
        )

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        view, own, held = self.view, self.round, self.held
        assert (view is not None) == (self.phase in (Phase.SYNCING, Phase.ACTIVE)), "the phase contradicts the view"
        if view is not None:
            assert view.holds(self.me), "in a view without being its member"
        if self.phase is Phase.ACTIVE:
            assert held == self.view_state, "active from another state"
            assert not self.pursuit.busy, "active while it catches up"
        assert self.is_standing or self.phase not in (Phase.ACTIVE, Phase.EXCUSED), "active, and for nothing"
        if own.payload is not None:
            assert self.is_standing, "a payload outside of a membership"
            assert held is not None, "a payload from nowhere"
            assert own.payload.outer_step == held.outer_step, "a payload of another step"
        if own.key is not None:
            assert view is not None, "an exchange without a view"
            assert own.key.epoch == view.epoch, "an exchange of another view"
        if own.laid_aside is not None:
            assert view is None, "a member keeps what an older membership has staged"
            assert not self.pursuit.busy, "a state is fetched over what is staged"

    # -------------------------------------------------------------------------------- what was decided

    def enter(self, said: NewView) -> None:
        """It is a member of this view, which is newer than its own."""
        mine, view = self.view, said.view
        self._weights = (view, said.weights) if said.weights else None
        self._learn_from(view, said.contributed)
        if mine is None or view.epoch > mine.epoch:
            self.effects += [*self.round.abort(), *self.round.drop_aside()]
            self.effects.append(InstallView(view=view, survey_from=said.survey_from))
        self.view = view
        self._take_part()

    def excuse(self, view: View, contributed: Held | None) -> None:
        """The round goes on without this peer. Said again, it tells of the newest state."""
        self._learn_from(view, contributed)
        self.effects += self.round.abort()
        self.view = None
        if not self.is_standing:
            self.phase = Phase.LEARNING  # a coordinator that restarted knows no better: there is nothing to keep
        elif self.phase is not Phase.EXCUSED:
            self.phase = Phase.EXCUSED
            self.effects.append(BecomeExcused(view=view))
        # From a view that is empty nobody serves; a member of the one before may have stayed for that (seed 2525).
        self.aim(Held(view.outer_step, view.digest), view.members or None)

    def _learn_from(self, view: View, contributed: Held | None) -> None:
        """A view tells of commits that were not heard of: one holds this peer's work, and is staged here if it agreed.

        The view's own state may be several commits further (scenarios/excused_before_it_heard_its_commit.toml), and be
        staged here without holding this peer's work: who had no partner in a round of pairs, or weighed nothing, finds
        the others' result too (seeds 86615, 57440). Whoever did not agree is overruled, and has nothing to keep.
        """
        named = Held(view.outer_step, view.digest)
        if not self.is_standing or contributed == named:
            self.install_if_staged(named)
        if contributed is None:
            return
        self.install_if_staged(contributed)
        if self.is_standing and self.held is not None and contributed.outer_step > self.held.outer_step:
            self._overruled_at(contributed.outer_step)

    def _take_part(self) -> None:
        """In a view: active if its state is held, else on the way to it."""
        view = self.view
        assert view is not None, "only members take part"
        state = Held(view.outer_step, view.digest)
        if self.held == state and not self.pursuit.busy:
            self.pursuit.rest()
            if self.phase is not Phase.ACTIVE:
                self.phase = Phase.ACTIVE
                self.is_standing = True
                self.effects.append(BecomeActive(view=view))
            self.effects += self._start(view)
            return
        self.phase = Phase.SYNCING
        self.effects += self.pursuit.aim(state, view.members)

    def _start(self, view: View) -> Sequence[MemberEffect]:
        weights = self._weights[1] if self._weights is not None and self._weights[0] == view else ()
        return self.round.start(view, weights)

    def aim(self, target: Held, donors: Sequence[Member] | None = None) -> bool:
        """As no member, to this committed state. It may have been laid aside here, and perhaps nowhere else.

        Returns:
            Whether it was.
        """
        held = self.held
        is_here = self.install_if_staged(target)
        if not is_here and held is not None and target != held and target.outer_step >= held.outer_step:
            self.effects += self.round.drop_aside()
        self.effects += self.pursuit.aim(target, donors)
        return is_here

    def install_if_staged(self, made: Held, certificate: Certificate | None = None) -> bool:
        """If this very state is staged, it becomes the held one. Without a certificate it was learnt from a view."""
        final = certificate is not None and certificate.final
        position = certificate.position if certificate is not None else None
        key = self.round.take_staged(made)
        if key is None:
            return False
        self.effects.append(InstallStaged(key=key, held=made, final=final, position=position))
        self.pursuit.installed(made)
        self._advance(made)
        return True

    def _advance(self, made: Held) -> None:
        if self.view is not None:
            self.view = msgspec.structs.replace(self.view, outer_step=made.outer_step, digest=made.digest)

    def overrule(self, made: Held) -> None:
        """The others agreed on something else than what is staged here: fetch what they have.

        As a member, until an `Evicted` says otherwise. To leave the view by oneself would be a view of one's own: a
        coordinator that crashed between commit and eviction still counts on this member
        (scenarios/overruled_member_stays.toml).
        """
        if self.view is not None:
            self._overruled_at(made.outer_step)
            self._advance(made)
            self._take_part()

    # -------------------------------------------------------------------------------- what happens at home

    def take_payload(self, payload: RoundReady) -> bool:
        """The trainer hands in. False if that is of no use to anybody."""
        if not self.is_standing or self.held is None:
            self._counters["payload_of_no_member"] += 1
        elif payload.outer_step != self.held.outer_step or self.round.payload is not None:
            self._counters["payload_of_another_step"] += 1
        else:
            self.round.payload = payload
            if self.view is not None and self.phase is Phase.ACTIVE:
                self.effects += self._start(self.view)
            return True
        return False

    def progressed(self, event: Progressed) -> None:
        """The trainer got on."""
        self._progress = max(self._progress, event.progress)
        self._inner_steps = max(self._inner_steps, event.inner_steps)
        self._waits = event.blocked

    def has_leases(self) -> None:
        """What it waited for is here.

        It waits for others only until then. A trainer that hangs right then says no more, and would count as waiting
        for ever (scenarios/hangs_right_after_its_leases.toml).
        """
        self._waits = False

    def catch_up_ended(self, event: CaughtUp | CatchUpFailed, now: Instant) -> None:
        """What was ordered has ended. Who is no member goes on by `go_on`."""
        self.pursuit.ended(event, now)
        self._carry_over()
        if self.view is not None:
            self._take_part()

    def go_on(self) -> None:
        """To the newest state that is known."""
        if self.pursuit.target is not None:
            self.effects += self.pursuit.aim(self.pursuit.target)

    def _carry_over(self) -> None:
        """The state moved on without the payload."""
        payload, held = self.round.payload, self.held
        if payload is not None and held is not None and payload.outer_step != held.outer_step:
            self.effects += self.round.forget()
            self.effects.append(CarryOver(outer_step=payload.outer_step, held=held))

    # -------------------------------------------------------------------------------- membership ends

    def lose_membership(self, reason: str) -> None:
        """It is no member any more, and not excused either. What it has staged is laid aside."""
        if self.view is not None or self.is_standing:
            if self.phase is Phase.ACTIVE:
                self.round.lay_aside()
            self._stop_training(reason)
            self.view = None

    def drop_staged(self) -> None:
        """What is staged is no part of the run, and neither is the payload."""
        self.effects += [*self.round.forget(), *self.round.drop_aside()]

    def end(self) -> None:
        """Its part is over."""
        self.effects += [*self.round.abort(), *self.round.drop_aside()]
        self.phase = Phase.FINISHED

    def _overruled_at(self, step: OuterStep) -> None:
        self._stop_training(f"outer step {step} was committed with another result than this peer's")

    def _stop_training(self, reason: str) -> None:
        self.is_standing = False
        self.effects += self.round.forget()
        self.leases.forget()
        self._waits = False  # or it would count as waiting when it is back (scenarios/hangs_with_an_old_word.toml)
        self.effects.append(BecomeLearner(reason=reason))
