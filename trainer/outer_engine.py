# SPDX-License-Identifier: Apache-2.0
"""The engine that asks an outer optimizer its questions: what optim/outer.py says an engine does, on one real peer.

After global inner step t: emit what the plan of t names and start its exchange, then absorb (or drop) what is due, and
move the local values. Rounds of gradients go the same way before the inner optimizer's step t.

A round that breaks because the view changed is started again in the new one; in an unchanged view it is dropped.

When a member has missed a round that others absorbed, the next votes show it: histories differ. Then the one that has
absorbed most gives its shared state to all, and whoever differed goes on as a joiner does: private state as `init`
makes it, parameters at the anchor, nothing of its own in the rounds under way. Gradients that were used without being
exchanged tear the peers' parameters apart too; a method with rounds of gradients gets parameters and the inner
optimizer's tensors along with the shared state.

Rules: all members ask the method the same questions in the same order. States are double-buffered through `out`.
It must not know hooks, or how a round travels.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from isthmus.collective.core.types import Epoch
from isthmus.collective.errors import CollectiveError, OperationAborted
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import (
    ANCHOR,
    GRAD,
    PARAM,
    Contribution,
    Emitted,
    Outcome,
    Outer,
    Round,
    Tensors,
    Weigh,
    Work,
    digest_of,
    empty_like,
)
from isthmus.trainer.outer_exchange import Exchange, Exchanger
from isthmus.trainer.outer_values import LocalValues, bytes_of, take_bytes
from isthmus.trainer.outer_votes import History, Settled

log = logging.getLogger(__name__)

_MAX_RUNNING: Final = 80
"""Rounds that travel at once, of gradients and of others each; the communicator bears 256 operations."""
_HISTORY_NBYTES: Final = 16
_NUM_REFUSED: Final = 32
"""Rounds last settled here that others may start again in a new view. As many as may be due within one's lead."""


class State(NamedTuple):
    """What this peer holds of a fragment."""

    shared: Tensors
    private: Tensors


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """A round that was emitted and is not absorbed yet."""

    round_: Round
    place: int
    emitted: Emitted
    weight: float
    exchange: Exchange | None = None
    """None between two exchangers."""
    is_ours: bool = True
    """Whether what we emitted still fits our state."""


class OuterEngine:
    """See the module.

    Args:
        method: the outer optimizer.
        values: of this peer.
        batch_size: samples in one inner step.
        weigh: this peer's weight in a round, from its id and what it has done.
        on_abort: told of a round that broke in the view that is installed.

    Raises:
        ValueError: the method cannot split this model.
    """

    def __init__(
        self,
        method: Outer,
        values: LocalValues,
        *,
        batch_size: float,
        weigh: Callable[[str, Work], float],
        on_abort: Callable[[OperationAborted], None] | None,
    ) -> None:
        self.method = method.fitted(values.table)
        """With all settings known."""
        self.fragments = {fragment.key: fragment for fragment in self.method.fragments(values.table)}
        values.table.check_partition(self.fragments.values())
        self.states: dict[FragmentKey, State] = {}
        """Empty before `begin`."""
        self.history = History()
        self.num_dropped = 0
        self._values = values
        self._batch_size, self._weigh, self._on_abort = batch_size, weigh, on_abort
        self._exchanger: Exchanger | None = None
        self._recycled: dict[FragmentKey, State] = {}
        self._moved_at: dict[FragmentKey, int] = {}
        self._in_flight: list[_Flight] = []
        self._epoch: Epoch | None = None
        self._last_settled: deque[tuple[int, int]] = deque(maxlen=_NUM_REFUSED)
        self._refusals: list[Future[Any]] = []

    # -------------------------------------------------------------------------------- begin and end

    def begin(self, exchanger: Exchanger) -> None:
        """Exchange through this from now on. Makes the states if there are none; starts again what is under way."""
        self._exchanger, self._epoch = exchanger, exchanger.view.epoch
        if self.states:
            for number, flight in enumerate(self._in_flight):
                self._start(flight, self._in_flight[:number])
            return
        for key, fragment in self.fragments.items():
            value = self._values.gather(fragment)
            shared = self.method.init(fragment, value)
            self.states[key] = State(shared, self.method.init_private(fragment, shared, value))
        self._recycled = {key: State(*map(empty_like, state)) for key, state in self.states.items()}
        self.run(0, of_gradient=False)

    def end(self) -> None:
        """Leave alone what is under way; its payloads are kept."""
        self._exchanger = None
        for flight in self._in_flight:
            if flight.exchange is not None:
                flight.exchange.leave()
                flight.exchange = None
        for refusal in self._refusals:
            refusal.cancel()

    def shared_digest(self) -> str:
        """BLAKE2b of the shared state of all fragments."""
        digest = hashlib.blake2b(digest_size=32)
        for key, state in sorted(self.states.items()):
            digest.update(f"{_name(key)}:{digest_of(state.shared)};".encode())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered; copies."""
        return {
            "history": [self.history.num_rounds, self.history.digest],
            "moved_at": {_name(key): step for key, step in self._moved_at.items()},
            "shared": {_name(key): _copies(state.shared) for key, state in self.states.items()},
            "private": {_name(key): _copies(state.private) for key, state in self.states.items()},
            "in_flight": [
                {
                    "inner_step": flight.round_.inner_step,
                    "place": flight.place,
                    "payload": flight.emitted.payload.clone(),
                    "weight": flight.weight,
                    "notes": list(flight.emitted.notes),
                    "kept": None if flight.emitted.kept is None else flight.emitted.kept.clone(),
                    "is_ours": flight.is_ours,
                }
                for flight in self._in_flight
            ],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go back to `state_dict`; before `begin`.

        Raises:
            ValueError: it is of another model or method.
        """
        states = {}
        for key, fragment in self.fragments.items():
            zeros = torch.zeros(fragment.numel)
            shared = self.method.init(fragment, zeros)
            states[key] = State(shared, self.method.init_private(fragment, shared, zeros))
        for part in ("shared", "private"):
            ours = {_name(key): _sizes(getattr(state, part)) for key, state in states.items()}
            theirs = {name: _sizes(tensors) for name, tensors in saved[part].items()}
            if ours != theirs:
                raise ValueError(f"the checkpoint's {part} state is {theirs}; this model and method need {ours}")
        for key in states:
            shared, private = saved["shared"][_name(key)], saved["private"][_name(key)]
            states[key] = State(shared=_copies(shared), private=_copies(private))
        self.states = states
        self._recycled = {key: State(*map(empty_like, state)) for key, state in states.items()}
        self.history = History(num_rounds=saved["history"][0], digest=saved["history"][1])
        named = {_name(key): key for key in states}
        self._moved_at = {named[name]: step for name, step in saved["moved_at"].items()}
        self._in_flight = [
            _Flight(
                round_=self.method.plan(flight["inner_step"])[flight["place"]],
                place=flight["place"],
                emitted=Emitted(payload=flight["payload"].clone(), notes=tuple(flight["notes"]), kept=flight["kept"]),
                weight=flight["weight"],
                is_ours=flight["is_ours"],
            )
            for flight in saved["in_flight"]
        ]

    # -------------------------------------------------------------------------------- one inner step

    def run(self, step: int, *, of_gradient: bool) -> None:
        """Emit what is planned, then absorb what is due: rounds of gradients, or all others.

        Raises:
            ValueError: the method asks for what cannot be, as a state that the inner optimizer does not keep.
        """
        self._look_at_view()
        flights = [] if of_gradient else self._in_flight
        rounds = self.method.plan(step)
        is_of_gradient = any(round_.fragment.kind == GRAD for round_ in rounds)
        for place, round_ in enumerate(rounds):
            if is_of_gradient == of_gradient:
                flight = self._emit(round_, place, step)
                self._start(flight, flights)
                flights.append(flight)
        for flight in [flight for flight in flights if flight.round_.due_step <= step]:
            flights.remove(flight)
            self._settle(flight, step)

    def _emit(self, round_: Round, place: int, step: int) -> _Flight:
        value = self._values.gather(self.fragments[round_.fragment])
        out = value if round_.numel is None else torch.empty(round_.numel)
        inner_steps = step - self._moved_at.get(round_.fragment, 0)
        work = Work(inner_steps=inner_steps, samples=inner_steps * self._batch_size)
        state = self.states[round_.fragment]
        emitted = self.method.emit(round_, value, state.shared, state.private, work, out=out)
        base = self._weigh(self._open.me, work) if round_.weigh is Weigh.SAMPLES else 1.0
        weight = emitted.weight * base
        return _Flight(round_=round_, place=place, emitted=emitted, weight=weight)

    def _start(self, flight: _Flight, others: list[_Flight]) -> None:
        if len(others) >= _MAX_RUNNING:
            earlier = others[-_MAX_RUNNING].exchange
            assert earlier is not None
            earlier.settle()  # waits; its own turn comes later
        flight.exchange = self._open.start(flight.round_, flight.place, flight.emitted, flight.weight, self.history)
        self._look_at_view()  # the view may have come since we looked, and this round must not wait in it unsaid

    def _settle(self, flight: _Flight, step: int) -> None:
        """Absorb or drop a round that is due, and move the values."""
        round_ = flight.round_
        exchange, settled = self._finish(flight)
        if settled.needs_repair:
            settled = self._repair(flight, exchange, settled)
        contribution = self._contribution(flight, exchange)
        result = None
        if settled.counts:
            self.history = self.history.after(round_, flight.place, settled.votes)
            result = exchange.result(settled.votes)
        state, out = self.states[round_.fragment], self._recycled[round_.fragment]
        shared = state.shared if result is None else self.method.step(round_, result, state.shared, out=out.shared)
        absorbed = self.method.settle(
            Outcome(
                round_=round_,
                result=result,
                contribution=contribution,
                before=state.shared,
                after=shared,
                private=state.private,
            ),
            out=out.private,
        )
        self.states[round_.fragment] = State(shared, absorbed.private)
        self._recycled[round_.fragment] = State(
            state.shared if shared is out.shared else out.shared,
            state.private if absorbed.private is out.private else out.private,
        )
        if absorbed.target is not None:
            self._values.move(self.fragments[round_.fragment], absorbed.target, absorbed.keep)
            self._moved_at[round_.fragment] = step
        if not settled.counts:
            self.num_dropped += 1
            cause = settled.error or "a member has no result, or none has a weight"
            log.warning("round_dropped inner_step=%d fragment=%s: %s", round_.inner_step, _name(round_.fragment), cause)
            if round_.fragment.kind == GRAD and absorbed.target is None:  # everybody's own gradient is used
                self.history = self.history.torn()
        self._last_settled.append((round_.inner_step, flight.place))
        if not exchange.is_current:  # whoever lacks its votes makes it again in a view that we may have looked at
            self._refusals += self._open.refuse(round_.inner_step, flight.place)

    def _finish(self, flight: _Flight) -> tuple[Exchange, Settled]:
        """See a round through, in the next view if this one has broken."""
        while True:
            exchange = flight.exchange
            assert exchange is not None, "rounds are settled between begin and end"
            settled = exchange.settle()
            if isinstance(settled.error, OperationAborted) and self._on_abort is not None and exchange.is_current:
                self._on_abort(settled.error)
            if settled.votes or exchange.is_current:
                return exchange, settled
            self._start(flight, [])

    def _look_at_view(self) -> None:
        """In a new view, refuse what is settled here, so that nobody waits for us there."""
        for refusal in self._refusals:
            refusal.cancel()
        self._refusals.clear()
        if self._open.view.epoch != self._epoch:
            self._epoch = self._open.view.epoch
            for step, place in self._last_settled:
                self._refusals += self._open.refuse(step, place)

    def _contribution(self, flight: _Flight, exchange: Exchange) -> Contribution | None:
        if not flight.is_ours:
            return None
        newer = [later.emitted.payload for later in self._in_flight if later.round_.fragment == flight.round_.fragment]
        return exchange.contribution(newer[-1] if newer else None)

    # -------------------------------------------------------------------------------- those who missed a round

    def _repair(self, flight: _Flight, exchange: Exchange, settled: Settled) -> Settled:
        """Take the leader's state if ours is another. All who have the votes of this round come here together."""
        tensors = [tensor for _, state in sorted(self.states.items()) for _, tensor in sorted(state.shared.items())]
        if any(key.kind == GRAD for key in self.fragments):
            tensors += self._values.everything()
        ours = torch.tensor([self.history.num_rounds, self.history.digest], dtype=torch.int64)
        packed = torch.cat([bytes_of(tensor) for tensor in (ours, *tensors)])
        try:
            exchange.repair(settled.leader, packed)
        except CollectiveError as error:
            return Settled(error=error)
        num_rounds, digest = packed[:_HISTORY_NBYTES].clone().view(torch.int64).tolist()
        theirs = History(num_rounds=num_rounds, digest=digest)
        is_leader = exchange.members[settled.leader] == self._open.me
        if not is_leader and (theirs != self.history or theirs != theirs.mended()):
            log.warning("repaired inner_step=%d rounds=%d", flight.round_.inner_step, num_rounds)
            take_bytes(tensors, packed[_HISTORY_NBYTES:])
            self._rejoin()
            for other in (flight, *self._in_flight):
                other.is_ours = False
        self.history = theirs.mended()
        return settled

    def _rejoin(self) -> None:
        """Go on from the shared state as a joiner does."""
        for key, fragment in self.fragments.items():
            shared = self.states[key].shared
            if not shared:
                continue
            value = shared[ANCHOR] if ANCHOR in shared else self._values.gather(fragment)
            self.states[key] = State(shared, self.method.init_private(fragment, shared, value))
            # Methods of gradients got the parameters themselves: their anchor is an old mean.
            if fragment.kind == PARAM and ANCHOR in shared and not any(key.kind == GRAD for key in self.fragments):
                self._values.move(fragment, shared[ANCHOR], 0.0)

    @property
    def _open(self) -> Exchanger:
        assert self._exchanger is not None, "between begin and end"
        return self._exchanger


def by_work(_peer: str, work: Work) -> float:
    """A peer's weight is the number of samples behind its payload; 1 for all before the first step."""
    return work.samples or 1.0


def _name(key: FragmentKey) -> str:
    return f"{key.kind}/{key.index}"


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in sorted(tensors.items())}
