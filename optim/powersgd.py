# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: DiLoCo whose pseudo-gradient travels as one thin factor a round.

A is a matrix of the pseudo-gradient plus what was left out so far, [n, m]. All members hold an orthonormal factor for
each of its sides. Rounds take turns, each with a single MEAN, for the factors are linear in A:

    odd:    P = mean(A · Q̂)      Â = P · Q̂ᵀ      P̂ <- orthonormalise(P)      n · r numbers travel
    even:   Q = mean(Aᵀ · P̂)     Â = P̂ · Qᵀ      Q̂ <- orthonormalise(Q)      m · r numbers travel

    anchor <- Nesterov(anchor, Â);   local <- anchor;   residual <- A - own part of Â, with what its codec lost

If all work lies in the same r columns and rows, every second round is exact and leaves nothing to send. Tensors that do
not get `min_compression` times smaller travel as they are. Shared state: anchor, momentum, and the factors of all
compressed matrices, end to end: "left" (the P̂) and "right" (the Q̂). Private state: the residual.

Source: PowerSGD (arXiv:1905.13727). One side a round, compression after some rounds and the rule which tensors to
compress are those of the authors' later code (github.com/epfml/powersgd); it does this to gradients, at every step.

On purpose unlike public code:
    * The residual is what this worker's own factor left out (the paper's algorithm 2), not A - Â (the code's): the mean
      over members is the same, so the anchor is too, but a worker that leaves takes less with it.
    * Factors are orthonormalised after the mean, by everybody with the same bits; a column that vanished begins anew,
      for it would stay zero for ever.
    * Whether a tensor is compressed is decided with >=, not >.
    * DiLoCo's outer momentum is left out unless it is asked for. What was left out comes rounds later, and a momentum
      pushes on meanwhile: the lower the rank, the further it runs away.

Held-out loss of the decoder of `scripts/bench convergence` (dimension 64), 4 workers, 40 rounds of H 30 from its first
weights; on Python's library, then on tiny Shakespeare. Rank 32 sends 41 % of the numbers, rank 8 11 %:

    lr, momentum                  1, 0             0.6, 0.5          0.6, 0.9
    rank 32                  2.013   2.226      2.020   2.273     2.162   2.513
    rank 8                   2.264   2.353      2.317   2.462     2.620   2.997
    mean of all parameters   1.995   2.132      one worker alone  2.154   2.268

That was with factors from the first round on. Rank 32 by `dense_steps`, against plain averaging (torch's C++ headers,
then Python's library; inner rate 2e-3; H x rounds):

    dense rounds          8 x 10           8 x 40           30 x 10           30 x 40
    none              +1.7   +1.5 %    +3.1   +5.3 %    +2.4   +4.0 %     +4.8   +4.4 %
    5                 +0.2   +0.1      +0.4   +1.2      +0.3   +0.5       +1.6   +0.7
    10                                                                    +1.1   +0.1
    20, the default   +0.1   -0.0      +0.1   +0.1      +0.0   -0.0       +0.3   -0.4
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.diloco import DiLoCo, anchor_and_momentum, step_anchor, warm_up_steps
from isthmus.optim.flat import require_flat
from isthmus.optim.lowrank import decompress, first_q, orthonormalise, project, project_back, warm_start
from isthmus.optim.outer import ANCHOR, Emitted, Settled, successor
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outcome, Result, Round, Tensors, Work
    from isthmus.optim.run_facts import RunFacts

LEFT: Final = "left"
"""Name of the orthonormal factors [rows, rank] in shared state, and of the rounds that renew them."""
RIGHT: Final = "right"
"""Likewise, [columns, rank]."""
RESIDUAL: Final = "residual"
"""Name, in private state, of what this worker has still to send."""

_OTHER: Final = {LEFT: RIGHT, RIGHT: LEFT}
_MAX_SEED: Final = 1 << 16


@register("powersgd")
@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(DiLoCo):
    """PowerSGD's settings, beside DiLoCo's.

    Raises:
        ValueError: if a setting is out of its range.
    """

    lr: float | None = 1.0
    """Outer learning rate, > 0. None: DiLoCo's default."""
    momentum: float = 0.0
    """Outer Nesterov momentum, in [0, 1). With error feedback it is best left out."""
    rank: int = 32
    """r, columns of a factor, >= 1; no more than a matrix has rows or columns. The paper's gradients need 1 to 4; no
    source says what a pseudo-gradient of many steps needs."""
    min_compression: float = 2.0
    """A matrix is compressed if its factors, on the mean of both sides, are at least this much smaller, > 0."""
    dense_steps: int | None = None
    """Inner steps at the beginning whose rounds send everything as it is, >= 0. None: as long as DiLoCo's defaults warm
    up, 20 rounds and at least 160. The authors' code: 100, of one step a round."""
    seed: int = 0
    """Of the first factors, in [0, 65536). The same on all members."""
    shapes: tuple[tuple[int, ...], ...] | None = dataclasses.field(default=None, metadata={"fitted": True})
    """Those of the model's tensors, in table order; None: not known yet, which `fitted` works out."""

    def __post_init__(self) -> None:
        DiLoCo.__post_init__(self)
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if not 0.0 < self.min_compression < float("inf"):
            raise ValueError(f"min_compression must be positive and finite, got {self.min_compression}")
        if self.dense_steps is not None and self.dense_steps < 0:
            raise ValueError(f"dense_steps must be at least 0, got {self.dense_steps}")
        if not 0 <= self.seed < _MAX_SEED:
            raise ValueError(f"seed must be in [0, {_MAX_SEED}), got {self.seed}")

    def fitted(self, table: FragmentTable, _run: RunFacts | None = None, /) -> PowerSGD:
        """The same settings with `shapes` known, which `plan` needs to say how long a payload is: it sees no model.

        Raises:
            ValueError: if the shapes are known already, and others.
        """
        shapes = tuple(spec.shape for spec in table.specs)
        if self.shapes not in (None, shapes):
            raise ValueError("these settings are fitted to a model of other shapes")
        return dataclasses.replace(self, shapes=shapes)

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """One fragment: the whole flat vector.

        Raises:
            ValueError: if the settings are fitted to other shapes.
        """
        return DiLoCo.fragments(self.fitted(table), table)

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """Anchor: a copy of the value. Momentum: zeros. Factors: random, orthonormal; no values on the meta device."""
        require_flat(value, fragment.numel, "the initial value")
        layout = self._layout()
        shared = anchor_and_momentum(value)
        if layout.matrices:
            for side in (LEFT, RIGHT):
                shared[side] = torch.empty(layout.thin_numel(side), device=value.device)
                for matrix in () if value.is_meta else layout.matrices:
                    random = first_q(*matrix.sizes[side], self._seed(matrix, side))
                    matrix.factor(side, shared[side]).copy_(orthonormalise(random))
        return shared

    def init_private(self, _fragment: Fragment, _shared: Tensors, value: Tensor, /) -> Tensors:
        """Residual: zeros."""
        return {RESIDUAL: torch.zeros_like(value)}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A blocking mean after every H-th inner step, of one side's factors.

        Raises:
            ValueError: if `shapes` is None.
        """
        return tuple(
            dataclasses.replace(round_, numel=self._layout().payload_numel(self._side(inner_step)))
            for round_ in DiLoCo.plan(self, inner_step)
        )

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, _work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The factors of anchor - value + residual for the round's side, then the other tensors as they are."""
        layout, side = self._layout(), self._side(round_.inner_step)
        require_flat(value, layout.numel, "the local value")
        require_flat(out, layout.payload_numel(side), "the payload buffer")
        owed = torch.sub(shared[ANCHOR], value).add_(private[RESIDUAL])
        if side is None:
            out.copy_(owed)
        else:
            for matrix in layout.matrices:
                basis = matrix.factor(_OTHER[side], shared[_OTHER[side]])
                product = project if side == LEFT else project_back
                product(matrix.view(owed), basis, matrix.factor(side, out))
            for place, sent in layout.as_they_are(side):
                out[sent] = owed[place]
        return Emitted(payload=out, kept=owed)

    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """One Nesterov step on the mean that the factors stand for, and this side's factors anew.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        layout, side = self._layout(), self._side(round_.inner_step)
        delta = layout.decompressed(result.value, side, shared, out=torch.empty(layout.numel))
        renewed = {} if side is None else {side: self._renewed(result.value, side, round_.inner_step)}
        # From here on result.value is not read again: it may be memory of `out`.
        stepped = step_anchor(shared, delta, lr=self.lr_of(result), momentum=self.momentum, out=out)
        for name in (LEFT, RIGHT) if layout.matrices else ():
            stepped[name].copy_(renewed.get(name, shared[name]))
        return stepped

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """The worker goes to the new anchor, and owes what its own factor, as it arrived, left out.

        What was not counted stays as it is, work and residual, so that the next A holds all that this one held.
        """
        mine = outcome.contribution
        if outcome.result is None or mine is None or mine.weight == 0.0:
            return DiLoCo.settle(self, outcome)
        assert mine.kept is not None, "emit keeps what it owes"
        out = successor(outcome.private, out)
        delivered, side = torch.empty_like(mine.payload), self._side(outcome.round_.inner_step)
        mine.read_delivered(delivered)
        self._layout().decompressed(delivered, side, outcome.before, out=out[RESIDUAL])
        torch.sub(mine.kept, out[RESIDUAL], out=out[RESIDUAL])
        return Settled.replaced(out, outcome.after[ANCHOR])

    def _side(self, inner_step: int) -> str | None:
        """Which side's factors a round sends; None: everything as it is."""
        dense_steps = warm_up_steps(self.inner_steps) if self.dense_steps is None else self.dense_steps
        number = inner_step // self.inner_steps - dense_steps // self.inner_steps
        return None if number < 1 else LEFT if number % 2 else RIGHT

    def _renewed(self, mean: Tensor, side: str, inner_step: int) -> Tensor:
        """The mean's factors, orthonormal: [thin_numel]. New memory."""
        layout = self._layout()
        factors = mean[: layout.thin_numel(side)].clone()
        for matrix in layout.matrices:
            factor = orthonormalise(matrix.factor(side, factors))
            if not bool(factor.any(0).all()):
                orthonormalise(warm_start(factor, self._seed(matrix, side) + inner_step))
        return factors

    def _seed(self, matrix: _Matrix, side: str) -> int:
        return self.seed + 2 * matrix.number + (side == RIGHT)

    def _layout(self) -> _Layout:
        if self.shapes is None:
            raise ValueError("the model's shapes are not known: call fitted(table) first")
        return _layout(self.shapes, self.rank, self.min_compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """Where a compressed matrix lies."""

    number: int
    place: slice
    """In the flat vector."""
    sizes: Mapping[str, tuple[int, int]]
    """By side, of its factor."""
    thin_places: Mapping[str, slice]
    """By side, in the factors that lie end to end."""

    @property
    def numel(self) -> int:
        return self.sizes[LEFT][0] * self.sizes[RIGHT][0]

    def view(self, flat: Tensor) -> Tensor:
        """This matrix of a flat vector, [n, m]. A tensor of more dimensions has all but the first as columns."""
        return flat[self.place].view(self.sizes[LEFT][0], self.sizes[RIGHT][0])

    def factor(self, side: str, flat: Tensor) -> Tensor:
        """This matrix' factor, [n or m, rank], in a payload or in a state's factors."""
        return flat[self.thin_places[side]].view(self.sizes[side])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What is compressed, and what a payload looks like: all factors of one side, then the other tensors."""

    numel: int
    matrices: tuple[_Matrix, ...]
    rest: tuple[slice, ...]
    """Places of the tensors that travel as they are."""

    def thin_numel(self, side: str) -> int:
        return sum(math.prod(matrix.sizes[side]) for matrix in self.matrices)

    def payload_numel(self, side: str | None) -> int:
        if side is None:
            return self.numel
        return self.numel - sum(matrix.numel - math.prod(matrix.sizes[side]) for matrix in self.matrices)

    def as_they_are(self, side: str) -> list[tuple[slice, slice]]:
        """(place in the flat vector, place in the payload) of what is not compressed."""
        pairs, start = [], self.thin_numel(side)
        for place in self.rest:
            stop = start + place.stop - place.start
            pairs.append((place, slice(start, stop)))
            start = stop
        return pairs

    def decompressed(self, payload: Tensor, side: str | None, factors: Mapping[str, Tensor], *, out: Tensor) -> Tensor:
        """The flat vector that a payload stands for, to `out` [numel]; equal bits from equal payloads and factors."""
        if side is None:
            return out.copy_(payload)
        pair = {side: payload, _OTHER[side]: factors.get(_OTHER[side], payload)}
        for matrix in self.matrices:
            decompress(matrix.factor(LEFT, pair[LEFT]), matrix.factor(RIGHT, pair[RIGHT]), matrix.view(out))
        for place, sent in self.as_they_are(side):
            out[place] = payload[sent]
        return out


@functools.lru_cache(maxsize=16)
def _layout(shapes: tuple[tuple[int, ...], ...], max_rank: int, min_compression: float) -> _Layout:
    start = 0
    matrices: list[_Matrix] = []
    rest: list[slice] = []
    thin = {LEFT: 0, RIGHT: 0}
    for shape in shapes:
        place = slice(start, start := start + math.prod(shape))
        numel = place.stop - place.start
        rows, columns = (shape[0], numel // shape[0]) if len(shape) > 1 and numel else (0, 0)
        rank = min(max_rank, rows, columns)
        if rank < 1 or numel < min_compression * 0.5 * rank * (rows + columns):
            rest.append(place)
            continue
        sizes = {LEFT: (rows, rank), RIGHT: (columns, rank)}
        places = {side: slice(thin[side], thin[side] + math.prod(size)) for side, size in sizes.items()}
        thin = {side: place.stop for side, place in places.items()}
        matrices.append(_Matrix(number=len(matrices), place=place, sizes=sizes, thin_places=places))
    return _Layout(numel=start, matrices=tuple(matrices), rest=tuple(rest))
