# SPDX-License-Identifier: Apache-2.0
"""What an outer optimizer is: named state, exchanged on a schedule, then absorbed.

Every low-communication method answers the same questions. Which tensors are exchanged together (`fragments`),
when (`plan`), what is sent (`emit`), what becomes of the answer (`absorb`), and what if there is none
(`dropped`). The engine that asks them owns time, network, workers and buffers; a method owns arithmetic only.

What the engine does after each inner step t, and once at t = 0 before the first:

    1. for every round of `plan(t)`: `emit`, then start its exchange;
    2. for every round with `due_step` <= t: wait, then `absorb` its result or, if it was aborted, call `dropped`;
    3. move the workers' values: value <- keep * value + (1 - keep) * target.

Emit comes before absorb: methods that overlap a whole outer round must take their difference before the anchor moves.
A fragment's kind says what its values are: the parameters (`PARAM`), a state of the inner optimizer by its own name
("exp_avg"), or the gradient (`GRAD`). Rounds of gradients run between the backward pass and the inner optimizer.

Rules for every method:
    * A method has no memory but `State`. `plan` depends on the global inner step alone.
    * `emit`, `absorb` and `dropped` never write to the state they are given: an outer step can be computed, held
      back until the commit, and thrown away.
    * What they put into `State.shared` is computed from shared state and from what is equal for all members in the
      `Result`, in operations that round alike on every CPU (see optim/nesterov.py).
    * All tensors are flat, contiguous, fp32 and on the CPU: values and payloads [fragment.numel] unless the round says
      otherwise, those of a state of any length.

It must not know processes, sockets, clocks, codecs or commit rounds.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import torch

from isthmus.optim.flat import overlap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentKey, FragmentTable

PARAM: Final = "param"
"""Kind of the fragments of the parameters."""
GRAD: Final = "grad"
"""Kind of the fragments of the gradient; their rounds have no delay."""

ANCHOR: Final = "anchor"
"""Name, in `State.shared`, of the parameters that all members agree on. Joiners start from it, evaluation reads it."""


class Op(enum.Enum):
    """How the payloads of a round's members become one result."""

    MEAN = "mean"
    """Everybody gets the weighted mean."""
    GATHER = "gather"
    """Everybody gets every payload."""
    PAIR = "pair"
    """Members are paired; each gets its peer's payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One exchange of one fragment, as planned."""

    fragment: FragmentKey
    op: Op
    inner_step: int
    """The global inner step after which its payload is emitted."""
    delay: int = 0
    """Inner steps the workers go on meanwhile; 0: they wait."""
    codec: str | None = None
    """How its payloads travel, as collective names it ("int8", "topk:64"); None: as the run is configured."""
    numel: int | None = None
    """Elements of its payload and result; None: of the fragment."""
    num_notes: int = 0
    """How many numbers go with the payload, see `Emitted.notes`."""

    def __post_init__(self) -> None:
        if self.inner_step < 0 or self.delay < 0:
            raise ValueError(f"a round needs inner_step >= 0 and delay >= 0, got {self}")
        if self.fragment.kind == GRAD and self.delay:
            raise ValueError("the inner optimizer waits for its gradient: a round of it has no delay")

    @property
    def due_step(self) -> int:
        """The global inner step after which its result is absorbed."""
        return self.inner_step + self.delay


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker has done since a round of this fragment last moved its values."""

    inner_steps: int
    samples: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Emitted:
    """What a worker gives to a round."""

    payload: Tensor
    """[numel]: the `out` that was given to `emit`."""
    weight: float = 1.0
    """Factor on the weight the engine gives this worker, for methods that judge their own payload. >= 0; with 0 it is
    no member of the result."""
    notes: tuple[float, ...] = ()
    """`round.num_notes` numbers that all members see exactly, whatever the codec."""
    kept: Tensor | None = None
    """Not sent: what the method wants to see again in its `Contribution`, of any length. Nobody writes to it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """What this worker itself gave to a round. Private: never a source of shared state."""

    payload: Tensor
    """[numel]: as `emit` wrote it."""
    weight: float
    """Its weight in the round, the emitted factor included."""
    read_delivered: Callable[[Tensor], object]
    """Writes into the given buffer, [numel], what the others decoded from `payload`; error feedback keeps the rest."""
    notes: tuple[float, ...] = ()
    """As emitted."""
    kept: Tensor | None = None
    """As emitted."""
    newer_payload: Tensor | None = None
    """[numel]: the latest payload emitted for the same fragment while this round was under way, if any."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What a committed round returned. All but `contribution` is equal on all members, save for `Op.PAIR`."""

    value: Tensor
    """MEAN: sum(w * payload) / sum(w), [numel]. GATHER: [len(members), numel], rows as in `members`. PAIR: the
    peer's payload, [numel]."""
    members: tuple[str, ...]
    """Whose payloads it holds, in the order of the view."""
    weight_sum: float
    weights: tuple[float, ...] = ()
    """One a member, in their order: the emitted factor included."""
    notes: tuple[tuple[float, ...], ...] = ()
    """One tuple a member, in their order, if the round has notes."""
    contribution: Contribution | None = None
    """None if this worker gave nothing to the round, as a learner that replays it."""

    def __post_init__(self) -> None:
        if not self.members or not self.weight_sum > 0.0:
            raise ValueError("a round to which nobody contributed has no result: it was dropped")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """A method's memory for one fragment, by name. Treat the tensors as read-only too."""

    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """Bit-identical on all members; digested, stored and sent to joiners."""
    private: Mapping[str, Tensor] = field(default_factory=dict)
    """This worker's own, as an error-feedback residual. A joiner begins with what `Outer.init` gives."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", MappingProxyType(dict(self.shared)))
        object.__setattr__(self, "private", MappingProxyType(dict(self.private)))

    def empty_like(self) -> State:
        """A state of the same names and sizes with unset values, to be recycled as `out` (double buffering)."""
        return State(
            shared={name: torch.empty_like(tensor) for name, tensor in self.shared.items()},
            private={name: torch.empty_like(tensor) for name, tensor in self.private.items()},
        )

    def successor(self, out: State | None) -> State:
        """`out`, or if it is None a new state like this one: where a method writes what comes after this.

        Raises:
            ValueError: if `out` shares memory with this state, to which no method ever writes.
        """
        if out is None:
            return self.empty_like()
        held = (*self.shared.values(), *self.private.values())
        if any(overlap(new, old) for new in (*out.shared.values(), *out.private.values()) for old in held):
            raise ValueError("a method never writes to the state it is given: out must be other memory")
        return out

    def shared_digest(self) -> str:
        """BLAKE2b over names, sizes and bytes of the shared tensors, in the order of their names."""
        digest = hashlib.blake2b(digest_size=32)
        for name, tensor in sorted(self.shared.items()):
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Absorbed:
    """The outcome of a round: the next state, and what the workers do with their local values."""

    state: State
    target: Tensor | None
    """[numel], read-only, often a tensor of `state` itself. None if and only if `keep` is 1."""
    keep: float
    """value <- keep * value + (1 - keep) * target, done where the value lives. 0: replaced; 1: untouched."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.keep <= 1.0 or (self.target is None) != (self.keep == 1.0):
            raise ValueError(f"keep must be in [0, 1], and 1 goes with no target; got keep={self.keep}")

    @classmethod
    def unchanged(cls, state: State) -> Absorbed:
        """Nothing moves: the same state, and the workers keep their values."""
        return cls(state=state, target=None, keep=1.0)


class Outer(Protocol):
    """An outer optimizer. One paper, one file, one frozen dataclass of its settings.

    Arguments before the slash are positional, so that a method may name those it does not read with an underscore.
    """

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """Split the model into the fragments that this method exchanges.

        Raises:
            ValueError: if the model cannot be split as the settings ask.
        """
        ...

    def init(self, fragment: Fragment, value: Tensor, /) -> State:
        """The state before the first round, in memory of its own.

        Args:
            fragment: whose state.
            value: [fragment.numel], the initial parameters (for a joiner: the anchor); copied.
        """
        ...

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """The rounds whose payloads are emitted after global inner step `inner_step`.

        Pure, and equal on every member. It does not see `outer_step`: while rounds are in flight one member has seen a
        commit that another has not, so a plan that followed from it would differ between them.

        Args:
            inner_step: inner steps since the run began; 0 is asked too, before the first.
        """
        ...

    def emit(self, round_: Round, value: Tensor, state: State, work: Work, /, *, out: Tensor) -> Emitted:
        """Write what this worker contributes.

        Args:
            round_: a round of `plan`.
            value: [fragment.numel], the local value of the round's fragment.
            state: the fragment's state; not written.
            work: what this worker has done for it.
            out: [numel], receives the payload. It may be `value` itself, which is then lost.
        """
        ...

    def absorb(self, round_: Round, result: Result, state: State, /, *, out: State | None = None) -> Absorbed:
        """Turn a committed round into the next state.

        Args:
            round_: the round.
            result: what it returned; not written, except as `out` allows.
            state: the fragment's state; not written.
            out: a recycled state whose tensors receive the new values; None allocates. Its tensors must not overlap
                those of `state`. They may be `result.value` (the whole tensor): that saves a copy of the parameters.

        Returns:
            The next state; with `out` given, its tensors are those of `out`.
        """
        ...

    def dropped(
        self, round_: Round, contribution: Contribution | None, state: State, /, *, out: State | None = None
    ) -> Absorbed:
        """Deal with a round that was aborted and will not run again.

        Where the delay is shorter than the outer round, the right answer is `Absorbed.unchanged(state)`: the workers
        go on training, and the next difference carries the missed work by itself. A method whose delay is a whole
        outer round holds the only copy of that work in its payload: it must carry the payload in its private state
        into the next emit *and* still send the workers to the anchor. Never apply a contribution that was not reduced.
        """
        ...


@runtime_checkable
class FitsModel(Protocol):
    """A method some of whose settings follow from the model unless they are given, as a number of fragments."""

    def fitted(self, table: FragmentTable, /) -> Outer:
        """The same method with all settings known: `plan` sees no model."""
        ...


def fit(outer: Outer, table: FragmentTable) -> Outer:
    """What an engine uses: the method with all settings known.

    Raises:
        ValueError: if the model cannot be split as the settings ask.
    """
    return outer.fitted(table) if isinstance(outer, FitsModel) else outer
