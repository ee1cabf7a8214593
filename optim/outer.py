# SPDX-License-Identifier: Apache-2.0
"""What an outer optimizer is: named state, exchanged on a schedule, then stepped.

Every low-communication method answers the same questions. Which tensors are exchanged together (`fragments`), when
(`plan`), what is sent (`emit`), what the members' answer makes of the state that all share (`step`), and what becomes
of a worker's own state and values (`settle`). The engine that asks them owns time, network, workers and buffers; a
method owns arithmetic only.

A plan that is not empty is one *outer step*: its rounds are exchanged, voted and committed together. What the engine
does after each inner step t, and once at t = 0 before the first:

    1. for every round of `plan(t)`: `emit`, then start its exchange;
    2. when a round has its result: `step`, before the vote; what follows is the shared state once the vote is won;
    3. for every round with `due_step` <= t: wait for the commit, then `settle`, and move the workers' values:
       value <- keep * value + (1 - keep) * target.

Emit comes before settle: methods that overlap a whole outer round must take their difference before the anchor moves.
A fragment's kind says what its values are: the parameters (`PARAM`), a state of the inner optimizer by its own name
("exp_avg"), or the gradient (`GRAD`). A plan with a round of a gradient runs between the backward pass and the inner
optimizer, all its rounds.

Rules for every method:
    * A method has no memory but its state. `plan` depends on the global inner step alone.
    * `emit`, `step` and `settle` never write to the state they are given: an outer step can be computed, held back
      until the commit, and thrown away.
    * `step` sees shared state and the `Result`, which are equal for all members, and computes in operations that round
      alike on every CPU (see optim/nesterov.py). Learners and audits call it too, long after the workers are gone.
    * All tensors are flat, contiguous, fp32 and on the CPU: values and payloads [fragment.numel] unless the round says
      otherwise, those of a state of any length.

It must not know processes, sockets, clocks, codecs or commit rounds.
"""

from __future__ import annotations

import enum
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from isthmus.optim.flat import overlap

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus.optim.fragments import Fragment, FragmentKey, FragmentTable
    from isthmus.optim.run_facts import RunFacts

StepT = TypeVar("StepT", bound="Callable[..., Any]")

Tensors: TypeAlias = Mapping[str, Tensor]
"""A state: flat fp32 tensors by name. Nobody writes to one that was handed out, but for an `out`."""

PARAM: Final = "param"
"""Kind of the fragments of the parameters."""
GRAD: Final = "grad"
"""Kind of the fragments of the gradient; their rounds have no delay."""

ANCHOR: Final = "anchor"
"""Name, in shared state, of the parameters that all members agree on. Joiners start from it, evaluation reads it."""


class Op(enum.Enum):
    """How the payloads of a round's members become one result."""

    MEAN = "mean"
    """Everybody gets the weighted mean."""
    GATHER = "gather"
    """Everybody gets every payload."""
    PAIR = "pair"
    """Members are paired; each gets its peer's payload."""


class Weigh(enum.Enum):
    """What a member of a round weighs, before the factor that the method itself puts on it (`Emitted.weight`)."""

    SAMPLES = "samples"
    """What it has trained on since a round of the fragment last moved its values."""
    ALIKE = "alike"
    """All who have trained weigh 1."""


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
    weigh: Weigh = Weigh.SAMPLES
    """How its members are weighed."""
    keeps_value: bool = False
    """Whether `settle` reads `Result.value`. It costs the engine the memory of a payload until the due step."""

    def __post_init__(self) -> None:
        if self.inner_step < 0 or self.delay < 0:
            raise ValueError(f"a round needs inner_step >= 0 and delay >= 0, got {self}")
        if self.fragment.kind == GRAD and self.delay:
            raise ValueError("the inner optimizer waits for its gradient: a round of it has no delay")

    @property
    def due_step(self) -> int:
        """The global inner step after which its result reaches the workers."""
        return self.inner_step + self.delay

    @property
    def is_told(self) -> bool:
        """Whether members tell each other weights and notes before the payloads: only then may a method weigh its own.

        A plain mean by samples needs no such word, which costs a round trip.
        """
        return self.op is not Op.MEAN or self.num_notes > 0 or self.weigh is not Weigh.SAMPLES


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
    no member of the result. Other than 1 only in a round that `is_told`."""
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
    """What a round returned. All of it is equal on all members, save for the value of `Op.PAIR`."""

    value: Tensor
    """MEAN: sum(w * payload) / sum(w), [numel]. GATHER: [len(members), numel], rows as in `members`. PAIR: the
    peer's payload, [numel]. In `settle`: empty unless the round `keeps_value`."""
    members: tuple[str, ...]
    """Whose payloads it holds, in the order of the view."""
    weight_sum: float
    weights: tuple[float, ...] = ()
    """One a member, in their order: the emitted factor included."""
    notes: tuple[tuple[float, ...], ...] = ()
    """One tuple a member, in their order, if the round has notes."""

    def __post_init__(self) -> None:
        if not self.members or not self.weight_sum > 0.0:
            raise ValueError("a round to which nobody contributed has no result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What became of a round, as one worker sees it at the due step."""

    round_: Round
    result: Result | None
    """What it returned. None if it has none, or if what this worker gave was not counted: it came too late, or the
    round was given up. A contribution that was not reduced is never applied."""
    contribution: Contribution | None
    """What this worker gave; None if it gave nothing, as one that came while the round was out."""
    before: Tensors
    """The fragment's shared state that the round started from."""
    after: Tensors
    """The one that it led to; the same if it had no result for anybody."""
    private: Tensors
    """The worker's own state; not written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settled:
    """What a worker does at a round's due step: its next private state, and how its local values move.

    value <- keep * value + (1 - keep) * target, done where the value lives. 0: replaced; 1: untouched.
    """

    private: Tensors
    target: Tensor | None
    """[numel], read-only, often a tensor of the shared state itself. None if and only if `keep` is 1."""
    keep: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.keep <= 1.0 or (self.target is None) != (self.keep == 1.0):
            raise ValueError(f"keep must be in [0, 1], and 1 goes with no target; got keep={self.keep}")

    @classmethod
    def replaced(cls, private: Tensors, target: Tensor) -> Settled:
        """The worker goes to the target."""
        return cls(private=private, target=target, keep=0.0)

    @classmethod
    def untouched(cls, private: Tensors) -> Settled:
        """The worker keeps its value."""
        return cls(private=private, target=None, keep=1.0)


def elementwise(step: StepT) -> StepT:
    """Says of a method's `step` that it treats every element by itself, whatever stands beside it.

    An engine may then call it for parts of a fragment, side by side: `result.value`, `shared` and `out` are slices at
    the same place, each of them [n].
    """
    step.is_elementwise = True  # type: ignore[attr-defined]
    return step


def is_elementwise(outer: Outer) -> bool:
    """Whether the method's `step` says so of itself; one that a subclass puts in its place says it again."""
    return getattr(type(outer).step, "is_elementwise", False)


class Outer(ABC):
    """An outer optimizer. One paper, one file, one frozen dataclass of its settings.

    Arguments before the slash are positional, so that a method may name those it does not read with an underscore.
    """

    __slots__ = ()

    @property
    def counts_from_anchor(self) -> bool:
        """Whether a worker's next payload counts from the shared anchor.

        If so, a worker whose work was not counted moves along with the anchor, value <- value + new anchor - old
        anchor, so that what it has done stays what it is.
        """
        return True

    @property
    def steps_may_differ(self) -> bool:
        """Whether a worker may leave inner steps out before a round, because it is slower than others.

        What it gives then is the outcome of fewer steps, and weighs less. Where every inner step exchanges its own
        gradient there is none to leave out.
        """
        return True

    @property
    def reads_payloads(self) -> bool:
        """Whether `step` reads every member's payload in some rounds, which are gathers, and not their mean alone."""
        return False

    def fitted(self, _table: FragmentTable, _run: RunFacts | None = None, /) -> Outer:
        """What an engine uses: the same method with all settings known that follow from the model or from the run.

        Args:
            table: layout of the parameters.
            run: how long the run is and how it trains; None: not known, and settings that follow from it must be given.

        Raises:
            ValueError: if the model cannot be split as the settings ask, or a setting that follows from the run is
                missing.
        """
        return self

    @abstractmethod
    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """Split the model into the fragments that this method exchanges.

        Raises:
            ValueError: if the model cannot be split as the settings ask.
        """

    @abstractmethod
    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """The shared state before the first round, in memory of its own. Bit-identical on all members from then on.

        Args:
            fragment: whose state.
            value: [fragment.numel], the initial parameters; copied. On the meta device: only the sizes are asked for.
        """

    def init_private(self, _fragment: Fragment, _shared: Tensors, _value: Tensor, /) -> Tensors:
        """What a worker remembers for itself when it begins from this shared state, as a residual; never sent.

        It begins so at the start, after it has joined, and where what it remembered is lost.

        Args:
            fragment: whose state.
            shared: of the fragment.
            value: [fragment.numel], the values the worker begins with; copied.
        """
        return {}

    @abstractmethod
    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """The rounds whose payloads are emitted after global inner step `inner_step`: together they are an outer step.

        Pure, and equal on every member. It does not see the outer step: while rounds are in flight one member has seen
        a commit that another has not, so a plan that followed from it would differ between them. Rounds of one plan
        are of different fragments, and have one delay. It is at most the time to the fragment's next turn. Where it is
        as long, so that a fragment is given anew before its outcome lands, all plans are of the same fragments.

        Args:
            inner_step: inner steps since the run began; 0 is asked too, before the first.
        """

    @abstractmethod
    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, work: Work, /, *, out: Tensor
    ) -> Emitted:
        """Write what this worker contributes.

        Args:
            round_: a round of `plan`.
            value: [fragment.numel], the local value of the round's fragment.
            shared: the fragment's state from which this worker trains; not written.
            private: the worker's own; not written.
            work: what this worker has done for it.
            out: [numel], receives the payload. It may be `value` itself, which is then lost.
        """

    @abstractmethod
    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """The next shared state. Pure, with the same bits on every member and machine.

        Args:
            round_: the round.
            result: what it returned; not written, except as `out` allows.
            shared: the fragment's state; not written.
            out: recycled tensors that receive the new values and are returned; None allocates. They must not overlap
                those of `shared`. One of them may be `result.value` (the whole tensor): that saves a copy of the
                parameters.

        Returns:
            The next state: `out` if it was given, or `shared` itself if nothing moves.
        """

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:  # noqa: ARG002
        """What becomes of a worker's private state and of its local values, at the due step of a round.

        Without a method's own answer: the worker goes to the new anchor, or keeps its work if that was not counted, so
        that the next difference from the anchor holds it.

        Args:
            outcome: what became of the round.
            out: recycled tensors for the next private state; None allocates. They must not overlap `outcome.private`.
        """
        if outcome.result is None:
            return Settled.untouched(outcome.private)
        return Settled.replaced(outcome.private, outcome.after[ANCHOR])


def empty_like(state: Tensors) -> dict[str, Tensor]:
    """A state of the same names and sizes with unset values, to be recycled as `out` (double buffering)."""
    return {name: torch.empty_like(tensor) for name, tensor in state.items()}


def successor(state: Tensors, out: Tensors | None) -> Tensors:
    """`out`, or if it is None a new state like this one: where a method writes what comes after this.

    Raises:
        ValueError: if `out` shares memory with this state, to which no method ever writes.
    """
    if out is None:
        return empty_like(state)
    if any(overlap(new, old) for new in out.values() for old in state.values()):
        raise ValueError("a method never writes to the state it is given: out must be other memory")
    return out


def digest_of(state: Tensors) -> str:
    """BLAKE2b over names, sizes and bytes of the tensors, in the order of their names."""
    digest = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(state.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
