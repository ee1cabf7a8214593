"""N workers in one process without a network: the same methods, the smallest honest engine.

It serves tests and convergence tables, and is the shortest reading of what an engine owes an `Outer`. Everything
happens in a fixed order after global inner step t (t = 0: before the first):

    inner step of every worker -> emit what `plan(t)` asks -> workers of `leaves[t]` vanish, payloads and all ->
    rounds due at t are absorbed, or dropped -> workers of `joins[t]` arrive with a donor's shared state.

Rounds in flight are reduced over those who survive until they are due; a worker that joined meanwhile absorbs the
result as a learner does, without a contribution. States are double-buffered through `out`, as in a real engine.
It must not know devices, codecs or clocks; its randomness (who is paired with whom) follows from the inner step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, assert_never

import torch

from optim.flat import blend
from optim.outer import ANCHOR, Contribution, Op, Result, Round, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from optim.fragments import Fragment, FragmentKey, FragmentTable
    from optim.outer import Absorbed, Emitted, Outer

    InnerStep: TypeAlias = Callable[[str, int, Tensor], None]
    """(worker, inner_step counted from 1, value [table.numel]): trains the value in place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Committed:
    """One round that was absorbed."""

    round_: Round
    members: tuple[str, ...]
    digests: Mapping[str, str]
    """Digest of the fragment's shared state on every worker afterwards; all alike, or the method is broken."""
    shared: Mapping[str, Tensor]
    """A copy of the first worker's shared state afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """What a simulation did."""

    committed: list[Committed] = field(default_factory=list)
    dropped: list[Round] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    """The workers' values at the end, [table.numel] each."""
    states: dict[str, dict[FragmentKey, State]] = field(default_factory=dict)
    """The workers' states at the end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _InFlight:
    round_: Round
    emitted: dict[str, Emitted]


def simulate(
    outer: Outer,
    *,
    table: FragmentTable,
    initial: Tensor,
    workers: Sequence[str],
    inner_step: InnerStep,
    num_inner_steps: int,
    weights: Mapping[str, float] | None = None,
    aborted: Callable[[Round], bool] = lambda _round: False,
    joins: Mapping[int, Sequence[str]] | None = None,
    leaves: Mapping[int, Sequence[str]] | None = None,
    deliver: Callable[[Tensor], Tensor] = lambda payload: payload,
) -> Trajectory:
    """Train `workers` for `num_inner_steps` with an outer optimizer.

    Args:
        outer: the method.
        table: layout of the parameters; only fragments of kind "param" are simulated.
        initial: [table.numel] fp32, every worker's start; not written.
        workers: names, in the order of the view.
        inner_step: trains one worker for one step.
        num_inner_steps: global inner steps.
        weights: of the workers in every mean; 1 where not given.
        aborted: rounds that fail everywhere.
        joins: who arrives after which inner step, with the parameters and shared state of the first member.
        leaves: who vanishes after which inner step, with what it had emitted.
        deliver: what the others decode from a payload, [numel] -> [numel]; stands in for a lossy codec.

    Returns:
        What happened. Its last tensors are the simulation's own and no longer change.

    Raises:
        ValueError: if a fragment is of another kind or the fragments do not hold every tensor exactly once.
    """
    run = _Run(outer=outer, table=table, weights=weights or {}, aborted=aborted, deliver=deliver)
    for worker in workers:
        run.add(worker, initial, shared=None)
    for step in range(num_inner_steps + 1):
        if step > 0:
            for worker, value in run.trajectory.values.items():
                inner_step(worker, step, value)
        run.emit(step)
        for worker in (leaves or {}).get(step, ()):
            run.remove(worker)
        run.settle(step)
        for worker in (joins or {}).get(step, ()):
            run.join(worker)
    return run.trajectory


class _Run:
    def __init__(
        self,
        *,
        outer: Outer,
        table: FragmentTable,
        weights: Mapping[str, float],
        aborted: Callable[[Round], bool],
        deliver: Callable[[Tensor], Tensor],
    ) -> None:
        self.outer, self.weights, self.aborted, self.deliver = outer, weights, aborted, deliver
        self.fragments = {fragment.key: fragment for fragment in outer.fragments(table)}
        table.check_partition(self.fragments.values())
        if any(key.kind != "param" for key in self.fragments):
            raise ValueError("only fragments of kind 'param' are simulated")
        self.trajectory = Trajectory()
        self.recycled: dict[str, dict[FragmentKey, State]] = {}
        self.in_flight: list[_InFlight] = []

    def add(self, worker: str, value: Tensor, shared: Mapping[FragmentKey, Mapping[str, Tensor]] | None) -> None:
        self.trajectory.values[worker] = value.clone()
        states = self.trajectory.states[worker] = {}
        for key, fragment in self.fragments.items():
            state = self.outer.init(fragment, self._local(fragment, worker))
            if shared is not None:
                state = State(shared={n: t.clone() for n, t in shared[key].items()}, private=state.private)
            states[key] = state
        self.recycled[worker] = {key: state.empty_like() for key, state in states.items()}

    def join(self, worker: str) -> None:
        donor = next(iter(self.trajectory.values))
        states = self.trajectory.states[donor]
        value = self.trajectory.values[donor].clone()
        for key, fragment in self.fragments.items():
            if ANCHOR in states[key].shared:
                fragment.scatter(states[key].shared[ANCHOR], out=value)
        self.add(worker, value, {key: state.shared for key, state in states.items()})

    def remove(self, worker: str) -> None:
        for held in (self.trajectory.values, self.trajectory.states, self.recycled):
            del held[worker]
        for flight in self.in_flight:
            flight.emitted.pop(worker, None)

    def emit(self, step: int) -> None:
        for round_ in self.outer.plan(step):
            emitted = {}
            for worker, states in self.trajectory.states.items():
                value = self._local(self.fragments[round_.fragment], worker)
                # The value's own buffer receives the payload, as in an engine that is short of memory.
                emitted[worker] = self.outer.emit(round_, value, states[round_.fragment], out=value)
            self.in_flight.append(_InFlight(round_=round_, emitted=emitted))

    def settle(self, step: int) -> None:
        due = [flight for flight in self.in_flight if flight.round_.due_step <= step]
        for flight in due:
            self.in_flight.remove(flight)
            results = {} if self.aborted(flight.round_) else self._reduce(flight)
            for worker in self.trajectory.states:
                self._apply(worker, flight, results.get(worker))
            if not results:
                self.trajectory.dropped.append(flight.round_)
                continue
            states = {worker: held[flight.round_.fragment] for worker, held in self.trajectory.states.items()}
            self.trajectory.committed.append(
                Committed(
                    round_=flight.round_,
                    members=next(iter(results.values())).members,
                    digests={worker: state.shared_digest() for worker, state in states.items()},
                    shared={n: t.clone() for n, t in next(iter(states.values())).shared.items()},
                )
            )

    def _reduce(self, flight: _InFlight) -> dict[str, Result]:
        """Every worker's result; empty if nobody is left who contributed."""
        contributions = {worker: self._contribution(worker, flight) for worker in flight.emitted}
        members = tuple(worker for worker, mine in contributions.items() if mine.weight > 0.0)
        if not members:
            return {}
        payloads = [self.deliver(contributions[worker].payload) for worker in members]
        member_weights = [contributions[worker].weight for worker in members]
        match flight.round_.op:
            case Op.MEAN:
                value = torch.zeros_like(payloads[0])
                for payload, weight in zip(payloads, member_weights, strict=True):
                    value += payload * weight
                value /= sum(member_weights)
            case Op.GATHER:
                value = torch.stack(payloads)
            case Op.PAIR:
                return self._pair(flight.round_, contributions, members)
            case _:
                assert_never(flight.round_.op)
        return {
            # A result of its own for everybody: a method may be told to write into it.
            worker: Result(
                value=value.clone(),
                members=members,
                weight_sum=sum(member_weights),
                weights=tuple(member_weights),
                contribution=contributions.get(worker),
            )
            for worker in self.trajectory.values
        }

    def _pair(
        self, round_: Round, contributions: Mapping[str, Contribution], members: tuple[str, ...]
    ) -> dict[str, Result]:
        """Disjoint pairs, drawn from the inner step; an odd one out has no result."""
        drawn = random.Random(round_.inner_step).sample(members, len(members))
        pairs = list(zip(drawn[::2], drawn[1::2], strict=False))
        return {
            worker: Result(
                value=self.deliver(contributions[peer].payload),
                members=(worker, peer),
                weight_sum=contributions[worker].weight + contributions[peer].weight,
                weights=(contributions[worker].weight, contributions[peer].weight),
                contribution=contributions[worker],
            )
            for pair in pairs
            for worker, peer in (pair, pair[::-1])
        }

    def _contribution(self, worker: str, flight: _InFlight) -> Contribution:
        mine = flight.emitted[worker]
        newer = [
            later.emitted[worker].payload
            for later in self.in_flight
            if later.round_.fragment == flight.round_.fragment and worker in later.emitted
        ]
        return Contribution(
            payload=mine.payload,
            weight=mine.weight * self.weights.get(worker, 1.0),
            read_delivered=lambda out: out.copy_(self.deliver(mine.payload)),
            newer_payload=newer[-1] if newer else None,
        )

    def _apply(self, worker: str, flight: _InFlight, result: Result | None) -> None:
        key = flight.round_.fragment
        state, out = self.trajectory.states[worker][key], self.recycled[worker][key]
        if result is not None:
            absorbed = self.outer.absorb(flight.round_, result, state, out=out)
        else:
            mine = self._contribution(worker, flight) if worker in flight.emitted else None
            absorbed = self.outer.dropped(flight.round_, mine, state, out=out)
        if absorbed.state is not state:
            self.trajectory.states[worker][key], self.recycled[worker][key] = absorbed.state, state
        self._move(worker, self.fragments[key], absorbed)

    def _move(self, worker: str, fragment: Fragment, absorbed: Absorbed) -> None:
        if absorbed.target is None:
            return
        value = self._local(fragment, worker)
        blend(value, absorbed.target, absorbed.keep)
        fragment.scatter(value, out=self.trajectory.values[worker])

    def _local(self, fragment: Fragment, worker: str) -> Tensor:
        return fragment.gather(self.trajectory.values[worker], out=torch.empty(fragment.numel))
