# SPDX-License-Identifier: Apache-2.0
"""DES-LOC: parameters and states of the inner optimizer are averaged, each with a period of its own.

    after inner step t:   x <- mean over workers of x   if K_x divides t     (the parameters)
                          u <- mean of u                if K_u divides t     ("exp_avg", the first moment)
                          v <- mean of v                if K_v divides t     ("exp_avg_sq", the second moment)

Slow states need few exchanges: recommended are K_u = 3 K_x and K_v = 6 K_x, half the bytes of Local Adam. A state that
is averaged less often than its half-life forgets the mean before the next one; its average is then little worth.

Shared state: the last mean of the parameters, the anchor; of the inner states, nothing. Private state: none.
    * The paper counts no copy at all, on the device; public code (torchft's DesLoc) keeps one of everything in host
      memory, for recovery. We keep that of the parameters, on the host, where all states live: joiners, checkpoints
      and evaluation start from it, digests are taken of it, and payloads are differences from it.
    * Copies of u and v would cost two more, doubled by `out`, only for joiners. A joiner begins with fresh moments
      instead, as in DiLoCo, and gets the mean at the next exchange of each. The engine should weigh it lightly until
      then, for its small moments pull the mean down. Its count of steps stays its own: under AdamW's bias correction
      averaged moments make its steps too short for a while; ADOPT has no such correction.

Source: DES-LOC (arXiv:2505.22549), algorithm 1. On purpose otherwise here:
    * The listing averages u and v before the gradient of step t is used, we after it, as the public code does: all
      exchanges of a boundary follow the same step.
    * Parameters travel as anchor - x, whose mean gives the same result. A lossy codec then loses a part of K_x steps
      and not a part of the model.
    * A mean of second moments is cut off at 0, below which a codec's error may push it, and travels exactly unless
      told otherwise: a codec with one scale a block rounds small ones to 0, and Adam divides by their root.
    * After an aborted round the public code returns to its backups. Here the workers go on training.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.flat import require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import ANCHOR, GRAD, PARAM, Emitted, Op, Outer, Round, Settled, successor
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outcome, Result, Tensors, Work

NON_NEGATIVE: Final = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
"""States of torch's optimizers that are means of squares."""

_HASH_NBYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAveraging(Outer):
    """What DES-LOC, Local Adam and MT-DAO share: everything but which states have which period.

    Raises:
        ValueError: if a setting is out of its range.
    """

    inner_steps: int = 256
    """K_x, inner steps between exchanges of the parameters, >= 1. The paper trains with 256 (1.7B parameters)."""
    second_moment_codec: str | None = "raw"
    """How second moments travel; None: as the run is configured. A floating-point codec is safe ("bf16")."""

    def __post_init__(self) -> None:
        if any(period < 1 for period in self.periods.values()):
            raise ValueError(f"inner_steps must be at least 1, got {self.inner_steps}")

    @property
    @abstractmethod
    def periods(self) -> Mapping[str, int]:
        """Inner steps between exchanges, by kind of fragment: the parameters, then states of the inner optimizer."""

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """One of each kind, all tensors."""
        return tuple(table.whole(kind) for kind in self.periods)

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """Anchor: a copy of the parameters. Other kinds: nothing."""
        require_flat(value, fragment.numel, "the initial value")
        return {ANCHOR: value.clone()} if fragment.kind == PARAM else {}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """Blocking means of the kinds whose turn it is."""
        return tuple(
            Round(
                fragment=FragmentKey(kind=kind, index=0),
                op=Op.MEAN,
                inner_step=inner_step,
                codec=self.second_moment_codec if kind in NON_NEGATIVE else None,
                keeps_value=kind != PARAM,
            )
            for kind, period in self.periods.items()
            if inner_step > 0 and self._is_due(kind, period, inner_step)
        )

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, _private: Tensors, _work: Work, /, *, out: Tensor
    ) -> Emitted:
        """Of the parameters anchor - value; of a state the state itself."""
        require_flat(value, value.numel(), "the local value")
        require_flat(out, value.numel(), "the payload buffer")
        if round_.fragment.kind != PARAM:
            return Emitted(payload=out.copy_(value))
        anchor = shared[ANCHOR]
        require_flat(value, anchor.numel(), "the local value")
        return Emitted(payload=torch.sub(anchor, value, out=out))

    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """The mean of the parameters; of other kinds nothing is shared. `out["anchor"]` may be `result.value`.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        if round_.fragment.kind != PARAM:
            return shared
        out = successor(shared, out)
        old, new = shared[ANCHOR], out[ANCHOR]
        require_flat(result.value, old.numel(), "the mean of the payloads")
        require_flat(new, old.numel(), "the next anchor")
        torch.sub(old, result.value, out=new)
        return out

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """The workers take the mean. What was not counted stays: the next exchange of this kind carries the steps."""
        kind, result = outcome.round_.fragment.kind, outcome.result
        if kind == PARAM:
            return Outer.settle(self, outcome, out=out)
        if result is None:
            return Settled.untouched(outcome.private)
        mean = result.value.clamp(min=0.0) if kind in NON_NEGATIVE else result.value
        return Settled.replaced(outcome.private, mean)

    def _is_due(self, _kind: str, period: int, inner_step: int) -> bool:
        return inner_step % period == 0


@register("desloc")
@dataclass(frozen=True, slots=True, kw_only=True)
class DesLoc(StateAveraging):
    """DES-LOC's settings; defaults are the paper's. Without `states` it is Local SGD whose workers keep their moments.

    Raises:
        ValueError: if a setting is out of its range.
    """

    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """States of the inner optimizer that are averaged, by their own names; those of AdamW and ADOPT."""
    state_multiples: tuple[int, ...] = (3, 6)
    """Period of each state in periods of the parameters, >= 1: K_u = 3 K_x, K_v = 6 K_x."""
    randomised: bool = False
    """Exchange each kind after any step with probability one over its period, as the paper's theory assumes; all
    members draw alike."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", checked_states(self.states))
        object.__setattr__(self, "state_multiples", checked_multiples(self.state_multiples, "state_multiples"))
        if len(self.state_multiples) != len(self.states):
            raise ValueError(f"{len(self.states)} states need as many state_multiples, got {self.state_multiples}")
        StateAveraging.__post_init__(self)

    @property
    def periods(self) -> Mapping[str, int]:
        """K_x of the parameters, then its multiples."""
        multiples = zip(self.states, self.state_multiples, strict=True)
        return {PARAM: self.inner_steps} | {state: multiple * self.inner_steps for state, multiple in multiples}

    def _is_due(self, kind: str, period: int, inner_step: int) -> bool:
        if not self.randomised:
            return inner_step % period == 0
        digest = hashlib.blake2b(f"{kind}:{inner_step}".encode(), digest_size=_HASH_NBYTES).digest()
        return int.from_bytes(digest, "big") * period < 1 << 8 * _HASH_NBYTES


def checked_states(states: Iterable[str]) -> tuple[str, ...]:
    """Names of inner states as a tuple, as a configuration may give a list.

    Raises:
        ValueError: if it is one text, or a name is repeated, empty or that of another kind.
    """
    names = () if isinstance(states, str) else tuple(states)
    if isinstance(states, str) or len(set(names)) < len(names) or any(n in ("", PARAM, GRAD) for n in names):
        raise ValueError(f"states must be different names of states of the inner optimizer, got {states!r}")
    return names


def checked_multiples(multiples: Iterable[int], what: str) -> tuple[int, ...]:
    """Whole multiples of a period as a tuple, as a configuration may give a list.

    Raises:
        ValueError: if one is no whole number >= 1.
    """
    checked = tuple(multiples)
    if any(isinstance(m, bool) or not isinstance(m, int) or m < 1 for m in checked):
        raise ValueError(f"{what} must be whole numbers of at least 1, got {multiples!r}")
    return checked
