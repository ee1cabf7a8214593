# SPDX-License-Identifier: Apache-2.0
"""The workers' values, this peer's own state beside them, and the version of the shared state they are trained from.

    start_from      all parameters become the anchor; private state begins, or goes on from the disk, as moments do
    emit            the payloads of an outer step, made of the fragments as they are now
    land            the step is committed: private state goes on, the workers come to its outcome, or part of the way
    follow          the run went on without this peer: the workers move along with the anchor

Rules: the base is pinned, because the state may move on and write over whatever is recycled. The mailbox is free for
the next question whenever no question is under way; payloads have memory of their own until they land. Where the
workers stand still until the outcome is known and nothing else reads the payload, the mailbox itself is the payload.

It must not know steps' order, samples or the membership.
"""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from isthmus.collective.codec.base import first_non_finite
from isthmus.elastic.core.messages import Held
from isthmus.optim.outer import (
    ANCHOR,
    PARAM,
    Contribution,
    Outcome,
    Outer,
    Round,
    Settled,
    Tensors,
    Work,
    empty_like,
)
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.moments import Moments
from isthmus.trainer.engine.outer_state import OuterState, RoundOutcome
from isthmus.trainer.engine.own_state import InnerState, OwnState, copy_inner_state, is_of_size
from isthmus.trainer.engine.round_exchange import Payload
from isthmus.trainer.engine.state_version import Version, gather_anchor
from isthmus.trainer.errors import WorkerDiverged
from isthmus.trainer.threads import in_thread
from isthmus.trainer.workers.ipc import BackwardDone, Evaluated, Kept, StepDone
from isthmus.trainer.workers.pool import WorkerPool
from isthmus.trainer.workers.shared_buffer import MAILBOX

log = logging.getLogger(__name__)

OWN_PARAMETERS: Final = -1
"""No place of a fragment has this number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """What this peer has given to a committed outer step."""

    payloads: Sequence[Payload]
    weights: Sequence[float]
    """By round: what each payload weighed."""


class WorkerValues:
    """See the module.

    Args:
        pool: the workers.
        mailbox: the flat vector, fp32, shared with the workers.
        anchors: memory that they share too, [numel] each, in the order of `SharedBuffer.anchors`.
        outer: the method, fitted.
        plan: its outer steps.
        state: the shared state.
        read_delivered: writes what the others decoded from a payload of ours, see RoundExchange.
        moments: what the workers have, between peers.
        first_parameters: makes those of a new run, [numel], where the method shares no parameters. Else None.
        inner_kinds: what the inner optimizer keeps and this peer's disk is to have; None: it is a loop's own affair.
        recall: what this peer's disk knows of its own state when it held this shared one, or one a little earlier.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        mailbox: Tensor,
        anchors: Sequence[Tensor] = (),
        outer: Outer,
        plan: OuterPlan,
        state: OuterState,
        read_delivered: Callable[[Round, Tensor, Tensor], object],
        moments: Moments,
        first_parameters: Callable[[], Awaitable[Tensor]] | None = None,
        inner_kinds: Sequence[str] | None = None,
        recall: Callable[[Held], Awaitable[OwnState | None]] | None = None,
    ) -> None:
        self._pool = pool
        self._mailbox = mailbox
        self._anchors = anchors
        self._outer = outer
        self._state = state
        self._fragments = state.fragments
        self._read_delivered = read_delivered
        self._moments = moments
        self._first_parameters = first_parameters
        self._inner_kinds = inner_kinds
        self._recall = recall
        self._are_workers_new = True
        self._own_parameters: Tensor | None = None  # after the last landing, where nobody shares them
        self._is_mailbox_payload = _can_lend_mailbox(outer, plan, state)
        self._spare_payloads: dict[int, list[Tensor]] = defaultdict(list)
        self._base: Version | None = None
        self._private: dict[int, Tensors] = {}  # by place
        self._recycled: dict[int, Tensors] = {}
        self._is_anchor = False

    @property
    def base(self) -> Version:
        """What the workers train from."""
        assert self._base is not None, "the workers have not been loaded"
        return self._base

    @property
    def has_base(self) -> bool:
        """Whether the workers were loaded."""
        return self._base is not None

    @property
    def private(self) -> Mapping[int, Tensors]:
        """This peer's own state, by place of the fragment. Its tensors are written over by later landings.

        Where the parameters are this peer's own too, they are at `OWN_PARAMETERS`, as they were after the last landing.
        """
        own = self._own_parameters
        return self._private if own is None else {**self._private, OWN_PARAMETERS: {PARAM: own}}

    def workers_replaced(self) -> None:
        """These workers know nothing: the next start gives them moments from the disk, if it has any."""
        self._are_workers_new = True

    async def inner_state(self) -> InnerState | None:
        """A copy of what the inner optimizer keeps now; None if that is not this peer's to keep.

        Only while nothing else is asked of the workers, as right after a landing: that waits for the inner steps which
        are with them (`TrainingLoop`). And only while the mailbox is free.
        """
        if self._inner_kinds is None:
            return None
        return await copy_inner_state(self._pool, self._mailbox, self._inner_kinds)

    async def start_from(self, version: Version) -> None:
        """The workers begin anew from this version, which is pinned."""
        own = await self._recalled(version)
        private = own.private if own is not None and self._base is None else {}
        if self._first_parameters is None:
            await in_thread(partial(gather_anchor, version.tensors, self._fragments, out=self._mailbox))
        else:
            await in_thread(self._mailbox.copy_, await self._own_start(private))
        self._rebase(version)
        self._is_anchor = self._first_parameters is None
        await in_thread(self._begin_private, version, private if own is not None and own.is_exact else {})
        await self._pool.load(keep=0.0)
        await self._moments.begin(self._pool, own)
        self._are_workers_new = False

    async def _recalled(self, version: Version) -> OwnState | None:
        """What the disk knows, where the workers know nothing."""
        if self._recall is None or not self._are_workers_new:
            return None
        own = await self._recall(version.held)
        if own is None or own.inner is None:
            return own
        if self._inner_kinds is None or not is_of_size(own.inner, self._inner_kinds, self._mailbox.numel()):
            log.warning("moments_unusable outer_step=%d; they are of another optimizer or model", own.outer_step)
            return replace(own, inner=None)
        return own

    async def _own_start(self, private: Mapping[int, Tensors]) -> Tensor:
        """The parameters to begin with where there is no anchor: what is at hand. `private`: what the disk knows."""
        own = self._own_parameters
        if own is None:
            own = private.get(OWN_PARAMETERS, {}).get(PARAM)
        if own is None:
            own = self._moments.take_parameters()
        if own is None:
            assert self._first_parameters is not None, "there is an anchor"
            own = await self._first_parameters()
        return own

    def _begin_private(self, version: Version, remembered: Mapping[int, Tensors]) -> None:
        self._private = {}
        for place, fragment in enumerate(self._fragments):
            value = torch.zeros(fragment.numel)
            if fragment.kind == PARAM:
                fragment.gather(self._mailbox, out=value)
            begun = self._outer.init_private(fragment, version.shared(place), value)
            if begun:
                self._private[place] = begun
        kept = {place: state for place, state in remembered.items() if place != OWN_PARAMETERS}
        sizes = {place: _sizes(state) for place, state in self._private.items()}
        if sizes == {place: _sizes(state) for place, state in kept.items()}:
            self._private = kept
        self._recycled = {place: empty_like(state) for place, state in self._private.items()}

    async def step(self, indices: Sequence[int], *, inner_step: int, position: float) -> StepDone:
        """One inner step. Two may be under way; `rest` when one is done.

        `position`: where the run is by what it has committed; likewise below.
        """
        self._is_anchor = False
        return await self._pool.step(indices, inner_step=inner_step, position=position)

    async def rest(self) -> None:
        """Whoever waits for what the workers have gets a copy of it. Nobody asks for a step meanwhile."""
        await self._moments.after_step(self._pool)

    async def backward(self, indices: Sequence[int], *, inner_step: int, position: float) -> BackwardDone:
        """The first half of an inner step, whose gradient is exchanged."""
        return await self._pool.backward(indices, inner_step=inner_step, position=position)

    async def update(self, *, inner_step: int, position: float) -> StepDone:
        """The second half, with the gradient that is there then."""
        self._is_anchor = False
        done = await self._pool.update(inner_step=inner_step, position=position)
        await self.rest()
        return done

    # -------------------------------------------------------------------------------- an outer step of this peer

    async def emit(self, rounds: Sequence[Round], works: Sequence[Work]) -> list[Payload]:
        """The payloads of these rounds, from the fragments as they are now.

        Args:
            rounds: of one outer step.
            works: what this peer has done for each.

        Raises:
            WorkerDiverged: a payload that weighs something is not finite.
        """
        payloads: dict[int, Payload] = {}
        for kind in dict.fromkeys(round_.fragment.kind for round_ in rounds):
            numbers = [number for number, round_ in enumerate(rounds) if round_.fragment.kind == kind]
            places = [self._state.places[rounds[number].fragment] for number in numbers]
            ranges = [part for place in places for part in self._fragments[place].ranges]
            await self._pool.store(ranges, kind=kind)
            for number, place in zip(numbers, places, strict=True):
                payloads[number] = await in_thread(self._emit, rounds[number], place, works[number])
        return [payloads[number] for number in range(len(rounds))]

    def _emit(self, round_: Round, place: int, work: Work) -> Payload:
        fragment = self._fragments[place]
        value = self._mailbox
        if not self._is_mailbox_payload:
            value = fragment.gather(self._mailbox, out=self._payload_of(fragment.numel))
        out = value if round_.numel is None else self._payload_of(round_.numel)
        private = self._private.get(place, {})
        emitted = self._outer.emit(round_, value, self.base.shared(place), private, work, out=out)
        if emitted.weight != 1.0 and not round_.is_told:
            raise ValueError(f"{round_}: a payload of weight {emitted.weight} in a round that is not told")
        if emitted.weight > 0.0 and first_non_finite(emitted.payload) is not None:
            raise WorkerDiverged(self.base.manifest.outer_step + 1, f"{fragment.kind}/{fragment.index}")
        if out is not value:
            self._spare_payloads[fragment.numel].append(value)
        return Payload(round_=round_, emitted=emitted)

    def _payload_of(self, numel: int) -> Tensor:
        spare = self._spare_payloads[numel]
        return spare.pop() if spare else torch.empty(numel)

    async def land(
        self, version: Version, outcomes: Sequence[RoundOutcome], given: Given | None, newer: Sequence[Payload] = ()
    ) -> list[int]:
        """Bring the workers to the outcome of an outer step. The payloads that were given are not needed any more.

        Args:
            version: pinned, what the workers train from then; released if this raises.
            outcomes: by round.
            given: by this peer; None: nothing.
            newer: payloads that were emitted since, the newest last.

        Returns:
            The places of the fragments whose values moved.
        """
        try:
            settled = await in_thread(self._settle, outcomes, given, newer)
            await self._move(outcomes, settled)
            if self._first_parameters is not None:
                await self._pool.store()
                if first_non_finite(self._mailbox) is None:
                    self._own_parameters = await in_thread(self._mailbox.clone)
        except BaseException:
            version.release()  # found before: each worker that died here left a state in memory for ever
            raise
        self._rebase(version)
        if given is not None and not self._is_mailbox_payload:
            for payload in given.payloads:
                self._spare_payloads[payload.emitted.payload.numel()].append(payload.emitted.payload)
        return [outcome.place for outcome, made in zip(outcomes, settled, strict=True) if made.target is not None]

    def _settle(self, outcomes: Sequence[RoundOutcome], given: Given | None, newer: Sequence[Payload]) -> list[Settled]:
        settled = []
        for number, outcome in enumerate(outcomes):
            place, round_ = outcome.place, outcome.round_
            contribution = None
            if given is not None:
                later = [item.emitted.payload for item in newer if item.round_.fragment == round_.fragment]
                emitted = given.payloads[number].emitted
                contribution = Contribution(
                    payload=emitted.payload,
                    weight=given.weights[number],
                    read_delivered=partial(self._read_delivered, round_, emitted.payload),
                    notes=emitted.notes,
                    kept=emitted.kept,
                    newer_payload=later[-1] if later else None,
                )
            private = self._private.get(place, {})
            known = Outcome(
                round_=round_,
                result=outcome.result,
                contribution=contribution,
                before=outcome.before,
                after=outcome.after,
                private=private,
            )
            made = self._outer.settle(known, out=self._recycled.get(place))
            if made.private is not private:
                self._private[place], self._recycled[place] = made.private, private
            settled.append(made)
        return settled

    async def _move(self, outcomes: Sequence[RoundOutcome], settled: Sequence[Settled]) -> None:
        """The workers' values go where each round says; those of one kind and one `keep` together."""
        moves: dict[tuple[str, float], list[tuple[int, Tensor]]] = defaultdict(list)
        for outcome, made in zip(outcomes, settled, strict=True):
            if made.target is not None:
                moves[outcome.round_.fragment.kind, made.keep].append((outcome.place, made.target))
        for (kind, keep), targets in moves.items():
            source = await self._bring(targets)
            ranges = [part for place, _ in targets for part in self._fragments[place].ranges]
            num_mended = await self._pool.load(ranges, kind=kind, place=source, keep=keep)
            if num_mended:
                log.warning("values_mended kind=%s elements=%d; they were not finite", kind, num_mended)
        numel = sum(
            self._fragments[outcome.place].numel
            for outcome, made in zip(outcomes, settled, strict=True)
            if made.keep == 0.0 and made.target is outcome.after.get(ANCHOR)
        )
        if moves or not self._is_anchor:
            self._is_anchor = numel == self._mailbox.numel()

    async def _bring(self, targets: Sequence[tuple[int, Tensor]]) -> int:
        """Put the fragments' values where the workers find them; returns that place of the shared buffer."""
        for number, anchor in enumerate(self._anchors):
            if any(target is anchor for _, target in targets):
                return MAILBOX + 1 + number  # the whole model, and there already
        for place, target in targets:
            await in_thread(self._fragments[place].scatter, target, out=self._mailbox)
        return MAILBOX

    # -------------------------------------------------------------------------------- the run went on

    async def follow(self, version: Version, require: Callable[[], None]) -> None:
        """Move the workers along with the anchor: what they have done since their base stays what it is.

        `local + (new anchor - old anchor)`, fragment by fragment: the next difference from the new anchor is then the
        late work and whatever is added to it, and nobody else's step is undone.

        Args:
            version: pinned.
            require: raises if what the workers have done does not count any more.
        """
        old = self.base
        moved = version.moved_from(old) if self._outer.counts_from_anchor else ()
        ranges = tuple(part for place in moved for part in self._fragments[place].ranges)
        if moved:
            try:
                await self._pool.store(ranges)
                require()
            except BaseException:
                version.release()
                raise
            await in_thread(self._shift, moved, version, old)
        self._rebase(version)
        if moved:
            self._is_anchor = False
            await self._pool.load(ranges, keep=0.0)

    def _shift(self, moved: Sequence[int], new: Version, old: Version) -> None:
        for place in moved:
            fragment = self._fragments[place]
            pairs = zip(
                fragment.pairs(new.states[place][ANCHOR]), fragment.pairs(old.states[place][ANCHOR]), strict=True
            )
            for (after, part), (before, _) in pairs:
                self._mailbox[part].add_(after).sub_(before)

    # -------------------------------------------------------------------------------- the shared parameters

    async def keep_anchor(self) -> Kept:
        """Make the workers keep a copy of the shared parameters of the base, if they have room for it.

        Only while nothing else is asked of them.
        """
        return await self._pool.keep(place=None if self._has_anchor else await self._bring_anchor())

    async def judge_anchor(self) -> Evaluated:
        """Judge the shared parameters of the base without a copy at the workers, which get their own back then.

        Only while nothing else is asked of them. Costs a copy in this process, unless they hold the anchor anyway.
        """
        if self._has_anchor:
            return await self._pool.evaluate()
        await self._pool.store()
        own = await in_thread(self._mailbox.clone)
        await self._pool.load(place=await self._bring_anchor(), keep=0.0)
        judged = await self._pool.evaluate()
        await in_thread(self._mailbox.copy_, own)
        await self._pool.load(keep=0.0)
        return judged

    async def _bring_anchor(self) -> int:
        states = enumerate(self.base.states)
        return await self._bring([(at, state[ANCHOR]) for at, state in states if self._fragments[at].kind == PARAM])

    @property
    def _has_anchor(self) -> bool:
        """Whether the workers hold what is to be judged: where nobody shares parameters those are their own."""
        return self._is_anchor or self._first_parameters is not None

    def _rebase(self, version: Version) -> None:
        """The workers train from this version now."""
        old, self._base = self._base, version
        if old is not None:
            old.release()


def _can_lend_mailbox(outer: Outer, plan: OuterPlan, state: OuterState) -> bool:
    """Whether nobody writes to the mailbox until a payload has landed, nor reads the payload then."""
    if len(state.fragments) > 1 or state.fragments[0].kind != PARAM or type(outer).settle is not Outer.settle:
        return False
    (first,) = plan.rounds(1)
    return first.delay == 0 and first.numel is None


def _sizes(state: Tensors) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in sorted(state.items())}
