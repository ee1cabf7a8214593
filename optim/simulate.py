# SPDX-License-Identifier: Apache-2.0
"""N workers in one process, without a network: the smallest engine that keeps every promise of the protocol.

It serves tests and convergence tables, and is the shortest reading of what an engine owes an `Outer`. Everything
happens in a fixed order after global inner step t (t = 0: before the first):

    backward pass of every worker -> rounds of `plan(t)`, if one is of gradients -> inner optimizers ->
    emit the rounds of `plan(t)`, if none is -> workers of `leaves[t]` vanish, payloads and all ->
    rounds due at t are stepped and settled, or given up -> workers of `joins[t]` arrive with a donor's shared state.

Rounds in flight are reduced over those who survive until they are due; a worker that joined meanwhile settles the
result without a contribution. States are double-buffered through `out`, as in a real engine. What is trained, and what
an exchange loses and costs, are the caller's (workload.py).

It must not know devices, codecs or clocks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from isthmus.optim.flat import blend
from isthmus.optim.outer import (
    ANCHOR,
    GRAD,
    PARAM,
    Contribution,
    Outcome,
    Result,
    Round,
    Tensors,
    Weigh,
    Work,
    digest_of,
    empty_like,
)
from isthmus.optim.workload import ExactWire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentKey, FragmentTable
    from isthmus.optim.outer import Emitted, Outer, Settled
    from isthmus.optim.workload import Delivery, Wire, Workload

    States: TypeAlias = dict["FragmentKey", "State"]


class State(NamedTuple):
    """What one worker holds of a fragment."""

    shared: Tensors
    private: Tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Committed:
    """One round that had a result."""

    round_: Round
    members: tuple[str, ...]
    digests: Mapping[str, str]
    """Digest of the fragment's shared state on every worker afterwards; all alike, or the method is broken."""
    shared: Mapping[str, Tensor]
    """A copy of the first worker's shared state afterwards."""


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """What a simulation did."""

    committed: list[Committed] = field(default_factory=list)
    """Empty if nothing is recorded."""
    dropped: list[Round] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    """The workers' parameters at the end, [table.numel] each."""
    states: dict[str, States] = field(default_factory=dict)
    """The workers' states at the end."""
    num_rounds: int = 0
    """Those that had a result."""
    payload_nbytes: float = 0.0
    """Of all rounds: the payloads of one worker in their wire form, the mean over contributors."""
    sent_nbytes: float = 0.0
    """Of all rounds: what one worker sent, likewise. More than its payloads where these go to everybody."""


@dataclass(slots=True, kw_only=True, eq=False)
class _InFlight:
    round_: Round
    emitted: dict[str, Emitted]
    weights: dict[str, float]
    """For the work that the payloads hold, whatever is done until the round is due."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    row: int
    inner_steps: int = 0
    moved_at: dict[FragmentKey, int] = field(default_factory=dict)
    """Its own inner steps when a round of the fragment last moved its values."""
    recycled: States = field(default_factory=dict)


def one_each(_worker: str, _work: Work) -> float:
    """All workers count alike in a mean."""
    return 1.0


def by_samples(_worker: str, work: Work) -> float:
    """A worker counts by what it has trained on."""
    return work.samples


def simulate(
    outer: Outer,
    *,
    table: FragmentTable,
    initial: Tensor,
    workers: Sequence[str],
    workload: Workload,
    num_inner_steps: int,
    weigh: Callable[[str, Work], float] = one_each,
    batch_size: float | Mapping[str, float] = 1.0,
    speeds: Mapping[str, float] | None = None,
    leaves_out: Callable[[str, int], bool] = lambda _worker, _step: False,
    aborted: Callable[[Round], bool] = lambda _round: False,
    joins: Mapping[int, Sequence[str]] | None = None,
    leaves: Mapping[int, Sequence[str]] | None = None,
    wire: Wire | None = None,
    records: bool = True,
    on_step: Callable[[int, Trajectory], None] = lambda _step, _trajectory: None,
) -> Trajectory:
    """Train `workers` for `num_inner_steps` with an outer optimizer.

    Args:
        outer: the method.
        table: layout of the parameters, and of all that has their shape.
        initial: [table.numel] fp32, every worker's start; not written.
        workers: names, in the order of the view.
        workload: trains them; has a row for each that is there at once.
        num_inner_steps: global inner steps.
        weigh: a worker's weight in a round, before the factor that the method itself puts on it.
        batch_size: samples in one inner step of a worker; a number for each, where they differ.
        speeds: own inner steps in a global one, in (0, 1]; 1 where not given.
        leaves_out: whether a worker leaves a global inner step out, besides.
        aborted: rounds that fail everywhere.
        joins: who arrives after which inner step, with the parameters and shared state of the first member.
        leaves: who vanishes after which inner step, with what it had emitted.
        wire: what an exchange loses and costs; None: nothing is lost.
        records: whether every round's digests and shared state are kept. They cost time and memory.
        on_step: called after every global inner step, and once at 0. The trajectory is live: read only.

    Returns:
        What happened. Its last tensors are the simulation's own and no longer change.

    Raises:
        ValueError: if the fragments do not hold every tensor exactly once, or are of a kind that the workload lacks; if
            somebody joins when all have left.
    """
    outer = outer.fitted(table)
    run = _Run(
        outer,
        table,
        workload,
        weigh=weigh,
        batch_size=batch_size,
        speeds=speeds or {},
        leaves_out=leaves_out,
        aborted=aborted,
        wire=wire or ExactWire(),
        records=records,
    )
    for worker in workers:
        run.add(worker, initial, shared=None)
    for step in range(num_inner_steps + 1):
        rounds = outer.plan(step)
        is_of_gradient = any(round_.fragment.kind == GRAD for round_ in rounds)
        run.train(step, rounds if is_of_gradient else ())
        run.emit(() if is_of_gradient else rounds)
        for worker in (leaves or {}).get(step, ()):
            run.remove(worker)
        run.settle(step)
        for worker in (joins or {}).get(step, ()):
            run.join(worker)
        on_step(step, run.trajectory)
    return run.trajectory


def shared_parameters(trajectory: Trajectory, fragments: Sequence[Fragment], *, out: Tensor) -> Tensor:
    """The parameters that a run stands for: its anchor, or the workers' mean where a method has none.

    Also where gradients are exchanged: the workers are alike, and the anchor is old between two means of them.

    Args:
        trajectory: at any moment.
        fragments: those of the method.
        out: [table.numel], overwritten and returned.
    """
    out.copy_(torch.stack(list(trajectory.values.values())).mean(0))
    states = next(iter(trajectory.states.values()))
    if any(fragment.kind == GRAD for fragment in fragments):
        return out
    for fragment in fragments:
        shared = states[fragment.key].shared
        if fragment.kind == PARAM and ANCHOR in shared:
            fragment.scatter(shared[ANCHOR], out=out)
    return out


class _Run:
    def __init__(
        self,
        outer: Outer,
        table: FragmentTable,
        workload: Workload,
        *,
        weigh: Callable[[str, Work], float],
        batch_size: float | Mapping[str, float],
        speeds: Mapping[str, float],
        leaves_out: Callable[[str, int], bool],
        aborted: Callable[[Round], bool],
        wire: Wire,
        records: bool,
    ) -> None:
        self.outer, self.workload, self.wire, self.records = outer, workload, wire, records
        self.weigh, self.batch_size, self.aborted = weigh, batch_size, aborted
        self.speeds, self.leaves_out = speeds, leaves_out
        self.fragments = {fragment.key: fragment for fragment in outer.fragments(table)}
        table.check_partition(self.fragments.values())
        lacking = {key.kind for key in self.fragments} - set(workload.tensors)
        if lacking:
            raise ValueError(f"this workload has no {', '.join(sorted(lacking))}")
        self.trajectory = Trajectory()
        self.workers: dict[str, _Worker] = {}
        self.free_rows = list(reversed(range(len(workload.tensors[PARAM]))))
        self.in_flight: list[_InFlight] = []

    # -------------------------------------------------------------------------------- who is there

    def add(self, name: str, value: Tensor, shared: Mapping[FragmentKey, Mapping[str, Tensor]] | None) -> None:
        worker = self.workers[name] = _Worker(row=self.free_rows.pop())
        self.workload.begin(worker.row, name)
        self.trajectory.values[name] = self.workload.tensors[PARAM][worker.row].copy_(value)
        states = self.trajectory.states[name] = {}
        for key, fragment in self.fragments.items():
            local = self._local(fragment, name)
            if shared is None:
                held = self.outer.init(fragment, local)
            else:
                held = {n: t.clone() for n, t in shared[key].items()}
            states[key] = State(shared=held, private=self.outer.init_private(fragment, held, local))
        worker.recycled = {key: State(*map(empty_like, state)) for key, state in states.items()}

    def join(self, name: str) -> None:
        donor = next(iter(self.workers), None)
        if donor is None:
            raise ValueError(f"{name} joins when nobody is there to start from")
        states = self.trajectory.states[donor]
        value = self.trajectory.values[donor].clone()
        for key, fragment in self.fragments.items():
            if key.kind == PARAM and ANCHOR in states[key].shared:
                fragment.scatter(states[key].shared[ANCHOR], out=value)
        self.add(name, value, {key: state.shared for key, state in states.items()})

    def remove(self, name: str) -> None:
        self.free_rows.append(self.workers[name].row)
        # The row is another worker's from now on; what it held last stays readable.
        for held in (self.workers, self.trajectory.values, self.trajectory.states):
            del held[name]
        for flight in self.in_flight:
            flight.emitted.pop(name, None)

    # -------------------------------------------------------------------------------- one global inner step

    def train(self, step: int, rounds: Sequence[Round]) -> None:
        """Everybody's inner step, with the rounds of its gradient in the middle."""
        if step == 0:
            return
        active = {name: worker for name, worker in self.workers.items() if self._is_its_turn(name, step)}
        for worker in active.values():
            worker.inner_steps += 1
        rows = [worker.row for worker in active.values()]
        inner_steps = [worker.inner_steps for worker in active.values()]
        self.workload.backward(rows, inner_steps)
        for round_ in rounds:
            flight = self._emit(round_, active)
            if flight.emitted:
                self._settle(flight)
        self.workload.update(rows, inner_steps)

    def emit(self, rounds: Sequence[Round]) -> None:
        self.in_flight.extend(self._emit(round_, self.workers) for round_ in rounds)

    def settle(self, step: int) -> None:
        due = [flight for flight in self.in_flight if flight.round_.due_step <= step]
        for flight in due:
            self.in_flight.remove(flight)
            self._settle(flight)

    def _is_its_turn(self, name: str, step: int) -> bool:
        speed = self.speeds.get(name, 1.0)
        return int(step * speed) > int((step - 1) * speed) and not self.leaves_out(name, step)

    def _emit(self, round_: Round, workers: Mapping[str, _Worker]) -> _InFlight:
        fragment = self.fragments[round_.fragment]
        emitted: dict[str, Emitted] = {}
        weights: dict[str, float] = {}
        for name in workers:
            value = self._local(fragment, name)
            # The value's own buffer receives the payload if it can, as in an engine that is short of memory.
            out = value if round_.numel is None else torch.empty(round_.numel)
            state, work = self.trajectory.states[name][round_.fragment], self._work(name, round_)
            emitted[name] = self.outer.emit(round_, value, state.shared, state.private, work, out=out)
            if emitted[name].weight != 1.0 and not round_.is_told:
                raise ValueError(f"{round_}: a payload of weight {emitted[name].weight} in a round that is not told")
            base = self.weigh(name, work) if round_.weigh is Weigh.SAMPLES else 1.0
            weights[name] = emitted[name].weight * base
        return _InFlight(round_=round_, emitted=emitted, weights=weights)

    def _settle(self, flight: _InFlight) -> None:
        round_ = flight.round_
        delivery = None if self.aborted(round_) else self._exchange(flight)
        results = {} if delivery is None else self._results(flight, delivery)
        for name in self.workers:
            self._apply(name, flight, results.get(name), self._contribution(name, flight, delivery))
        if not results:
            self.trajectory.dropped.append(round_)
            return
        self.trajectory.num_rounds += 1
        if self.records:
            states = {name: held[round_.fragment] for name, held in self.trajectory.states.items()}
            self.trajectory.committed.append(
                Committed(
                    round_=round_,
                    members=next(iter(results.values())).members,
                    digests={name: digest_of(state.shared) for name, state in states.items()},
                    shared={n: t.clone() for n, t in next(iter(states.values())).shared.items()},
                )
            )

    # -------------------------------------------------------------------------------- one round

    def _exchange(self, flight: _InFlight) -> Delivery | None:
        """What the wire made of it; None if nobody is left who contributed."""
        weights = flight.weights
        members = tuple(name for name in flight.emitted if weights[name] > 0.0)
        if not members:
            return None
        delivery = self.wire.exchange(
            flight.round_,
            self.fragments[flight.round_.fragment],
            {name: flight.emitted[name].payload for name in members},
            {name: weights[name] for name in members},
        )
        self.trajectory.payload_nbytes += delivery.payload_nbytes
        self.trajectory.sent_nbytes += delivery.sent_nbytes
        return delivery

    def _results(self, flight: _InFlight, delivery: Delivery) -> dict[str, Result]:
        """Every worker's; a worker that met nobody has none."""
        weights = flight.weights
        members = tuple(name for name in flight.emitted if weights[name] > 0.0)
        results = {}
        for name in self.workers:
            partner = delivery.partners.get(name)
            group = members if not delivery.partners else () if partner is None else (name, partner)
            if group:
                results[name] = Result(
                    # A result of its own for everybody: a method may be told to write into it.
                    value=delivery.values.get(name, delivery.values[group[0]]).clone(),
                    members=group,
                    weight_sum=sum(weights[member] for member in group),
                    weights=tuple(weights[member] for member in group),
                    notes=tuple(flight.emitted[member].notes for member in group) if flight.round_.num_notes else (),
                )
        return results

    def _contribution(self, name: str, flight: _InFlight, delivery: Delivery | None) -> Contribution | None:
        mine = flight.emitted.get(name)
        if mine is None:
            return None
        newer = [
            later.emitted[name].payload
            for later in self.in_flight
            if later.round_.fragment == flight.round_.fragment and name in later.emitted
        ]
        delivered = mine.payload if delivery is None else delivery.delivered.get(name, mine.payload)
        return Contribution(
            payload=mine.payload,
            weight=flight.weights[name],
            read_delivered=lambda out: out.copy_(delivered),
            notes=mine.notes,
            kept=mine.kept,
            newer_payload=newer[-1] if newer else None,
        )

    def _apply(self, name: str, flight: _InFlight, result: Result | None, mine: Contribution | None) -> None:
        round_ = flight.round_
        key = round_.fragment
        worker, state = self.workers[name], self.trajectory.states[name][key]
        out = worker.recycled[key]
        shared = state.shared if result is None else self.outer.step(round_, result, state.shared, out=out.shared)
        if result is not None and not round_.keeps_value:
            result = dataclasses.replace(result, value=torch.empty(0))
        outcome = Outcome(
            round_=round_, result=result, contribution=mine, before=state.shared, after=shared, private=state.private
        )
        settled = self.outer.settle(outcome, out=out.private)
        self._move(name, self.fragments[key], settled)
        self.trajectory.states[name][key] = State(shared, settled.private)
        worker.recycled[key] = State(
            state.shared if shared is out.shared else out.shared,
            state.private if settled.private is out.private else out.private,
        )

    def _move(self, name: str, fragment: Fragment, settled: Settled) -> None:
        if settled.target is None:
            return  # there is nothing to follow: what is given up here has moved nobody's anchor
        value = self._local(fragment, name)
        blend(value, settled.target, settled.keep)
        fragment.scatter(value, out=self._values(fragment, name))
        self.workers[name].moved_at[fragment.key] = self.workers[name].inner_steps

    def _work(self, name: str, round_: Round) -> Work:
        worker = self.workers[name]
        inner_steps = worker.inner_steps - worker.moved_at.get(round_.fragment, 0)
        batch_size = self.batch_size if isinstance(self.batch_size, int | float) else self.batch_size[name]
        return Work(inner_steps=inner_steps, samples=inner_steps * batch_size)

    def _values(self, fragment: Fragment, name: str) -> Tensor:
        return self.workload.tensors[fragment.kind][self.workers[name].row]

    def _local(self, fragment: Fragment, name: str) -> Tensor:
        return fragment.gather(self._values(fragment, name), out=torch.empty(fragment.numel))
