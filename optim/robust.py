# SPDX-License-Identifier: Apache-2.0
"""Guards on the receiving side, around any method that averages differences: a member that lies moves nobody far.

A member can say of its payload, weight and notes what it likes, so EDiT's guards (guards.py), in which each judges
itself, stop a fault and not a lie. Here every mean becomes a GATHER: each member sees all payloads, in the same bits,
and makes the aggregate in `step`. Of n members' payloads x, weights w:

    norm      Σ w s x / Σ w,   s = min(1, median length / own length): none goes further than the median one
    trimmed   element by element without the f smallest and the f largest: Σ w x / Σ w of the rest
    centred   c <- c + Σ w s (x - c) / Σ w,   s = min(1, median distance / own distance), three times, from the c of the
              round before: centred clipping

with f = (n - 1) // 4, and at least 1. `trimmed` stays among honest values, element by element, while no more than f
lie. `norm` bounds lengths and lets directions be. `centred` bounds both and keeps what is rare. Notes, which methods
average too, are brought into the range of all but the f lowest and highest. One or two members have no majority: theirs
is the weighted mean, whatever one of them sends.

Rounds that a method gathers itself (SparseLoCo, asynchronous DiLoCo) are guarded by `norm` alone, which scales rows.
Moments and gradients that a method averages are guarded by nothing, so such a method is refused, and so is `centred`
for payloads that have no common space (PowerSGD).

What it costs: a gather sends each payload to all, (n - 1) of them where a mean sends 2 (n - 1) / n; a receiver holds n
payloads in fp32. They are read in tiles, so nothing more of that size is allocated.

Weights are not judged: the coordinator bounds those by samples, `trimmed` bounds what any weight can do.

Shared state: the method's; with `centred` the aggregate of the last round too. All members compute it in operations
that round alike (optim/stable.py).

Source: trimmed mean (arXiv:1803.01498); centred clipping (arXiv:2012.10333), whose radius is a constant; norms against
the median as in Covenant-72B (arXiv:2603.08163).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from isthmus.optim.flat import overlap
from isthmus.optim.outer import ANCHOR, PARAM, Op, successor
from isthmus.optim.stable import norm
from isthmus.optim.wrapper import Wrapper, copy_into, first_difference, without

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Emitted, Outcome, Result, Round, Settled, Tensors, Work
    from isthmus.optim.run_facts import RunFacts

Guard: TypeAlias = Literal["norm", "trimmed", "centred"]

CENTRE: Final = "guard_centre"
"""Name, in shared state, of the aggregate of the last round, [numel]."""

_LEAST_MAJORITY: Final = 3
_PASSES: Final = 3
"""Of centred clipping in a round. After the first the centre is among the payloads, and the radius is their spread."""
_MOST_WEIGHT: Final = 2.0**20
"""Of a member against the median one, and the inverse: what weighs 0 in fp32 and is not trimmed has no mean."""
_TILE_NUMEL: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust(Wrapper):
    """The method with its means guarded."""

    guard: Guard

    def fitted(self, table: FragmentTable, run: RunFacts | None = None, /) -> Self:
        """Around the method with all settings known.

        Raises:
            ValueError: the guard does not fit the method.
        """
        outer = self.outer.fitted(table, run)
        others = sorted({fragment.kind for fragment in outer.fragments(table)} - {PARAM})
        if others:
            raise self._misfit(f'it averages {", ".join(others)} too, which no guard judges; take guard = "none"')
        try:
            round_ = first_difference(outer, table)
        except ValueError as error:
            raise self._misfit(f'{error}; take guard = "none"') from error
        if outer.reads_payloads and self.guard != "norm":
            raise self._misfit('its own step takes every payload; take guard = "norm"')
        if round_.numel is not None and self.guard == "centred":
            raise self._misfit('its payloads of one round say nothing of the next one\'s; take guard = "trimmed"')
        return dataclasses.replace(self, outer=outer)

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """The method's shared state; with `centred`, zeros beside it."""
        shared = self.outer.init(fragment, value)
        return {**shared, CENTRE: torch.zeros_like(value)} if self.guard == "centred" else shared

    def init_private(self, fragment: Fragment, shared: Tensors, value: Tensor, /) -> Tensors:
        """The method's."""
        return self.outer.init_private(fragment, without(CENTRE, shared), value)

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """The method's rounds, as gathers."""
        return tuple(dataclasses.replace(round_, op=Op.GATHER) for round_ in self.outer.plan(inner_step))

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The method's payload."""
        return self.outer.emit(self._own(round_), value, without(CENTRE, shared), private, work, out=out)

    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """Let the method step with the aggregate.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        result, own = dataclasses.replace(result, notes=in_middle_range(result.notes)), self._own(round_)
        if own.op is Op.GATHER:
            scales = torch.tensor(scales_of([norm(row) for row in result.value])).unsqueeze(1)
            return self.outer.step(round_, dataclasses.replace(result, value=result.value * scales), shared, out=out)
        if self.guard != "centred":
            value = guarded_mean(self.guard, result, out=_room(result, out))
            return self.outer.step(own, dataclasses.replace(result, value=value), shared, out=out)
        out = successor(shared, out)
        value = clip_around(shared[CENTRE], result, out=out[CENTRE])
        merged = dataclasses.replace(result, value=value)
        stepped = self.outer.step(own, merged, without(CENTRE, shared), out=without(CENTRE, out))
        copy_into(stepped, out)
        return out

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """What the method does."""
        bare = dataclasses.replace(
            outcome,
            round_=self._own(outcome.round_),
            before=without(CENTRE, outcome.before),
            after=without(CENTRE, outcome.after),
        )
        return self.outer.settle(bare, out=out)

    def _own(self, round_: Round) -> Round:
        """As the method planned it."""
        return next(own for own in self.outer.plan(round_.inner_step) if own.fragment == round_.fragment)

    def _misfit(self, problem: str) -> ValueError:
        return ValueError(f'guard = "{self.guard}" does not fit: {problem}')


def num_trimmed(num_members: int) -> int:
    """f: how many members a guard takes to be liars, at most; 0 where there is no majority."""
    return max(1, (num_members - 1) // 4) if num_members >= _LEAST_MAJORITY else 0


def in_middle_range(notes: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """Notes, a tuple a member, each brought between the lowest and the highest when f are left out at both ends."""
    f = num_trimmed(len(notes))
    ranges = [(ranked[f], ranked[-1 - f]) for ranked in map(sorted, zip(*notes, strict=True))]
    return tuple(
        tuple(min(max(note, low), high) for note, (low, high) in zip(own, ranges, strict=True)) for own in notes
    )


def scales_of(lengths: Sequence[float]) -> list[float]:
    """min(1, median / length) of each member; 1 for all where there is no majority."""
    median = statistics.median(lengths) if len(lengths) >= _LEAST_MAJORITY else math.inf
    return [median / length if length > median else 1.0 for length in lengths]


def guarded_mean(guard: Guard, result: Result, *, out: Tensor) -> Tensor:
    """The aggregate by `norm` or `trimmed`: from [members, numel] to `out`, [numel], which is returned.

    It is the weighted mean where there is no majority.
    """
    f = num_trimmed(len(result.members)) if guard == "trimmed" else 0
    scales = [1.0] * len(result.members) if guard == "trimmed" else scales_of([norm(row) for row in result.value])
    typical = statistics.median(result.weights)
    weights = [min(max(weight / typical, 1.0 / _MOST_WEIGHT), _MOST_WEIGHT) for weight in result.weights]
    for tile in _tiles(out.numel()):
        total, weight = _trimmed_sums([row[tile] * s for row, s in zip(result.value, scales, strict=True)], weights, f)
        torch.div(total, weight, out=out[tile])
    return out


def clip_around(centre: Tensor, result: Result, *, out: Tensor) -> Tensor:
    """Centred clipping: from [members, numel] and the last aggregate, [numel], to `out`, which is returned."""
    total = math.fsum(result.weights)
    shares = [weight / total for weight in result.weights]
    old = centre
    for _ in range(_PASSES):
        scales = scales_of([_distance(row, old) for row in result.value])
        factors = [scale * share for scale, share in zip(scales, shares, strict=True)]
        for tile in _tiles(out.numel()):
            moved = old[tile].clone()
            for row, factor in zip(result.value, factors, strict=True):
                moved += (row[tile] - old[tile]) * factor
            out[tile] = moved
        old = out
    return out


def _trimmed_sums(rows: Sequence[Tensor], weights: Sequence[float], f: int) -> tuple[Tensor, Tensor]:
    """(Σ w x, Σ w) element by element over all but the f smallest and the f largest x; all are [n]."""
    pairs = [(row, torch.full_like(row, weight)) for row, weight in zip(rows, weights, strict=True)]
    for first in range(f):
        last = len(pairs) - 1 - first
        for place in range(first, last):  # the largest goes up
            pairs[place], pairs[place + 1] = _ordered(*pairs[place], *pairs[place + 1])
        for place in reversed(range(first, last - 1)):  # the smallest goes down
            pairs[place], pairs[place + 1] = _ordered(*pairs[place], *pairs[place + 1])
    total, weight = torch.zeros_like(rows[0]), torch.zeros_like(rows[0])
    for value, its_weight in pairs[f : len(pairs) - f]:
        total += value * its_weight
        weight += its_weight
    return total, weight


def _ordered(
    left: Tensor, left_weight: Tensor, right: Tensor, right_weight: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Element by element the smaller one with its weight, then the larger one; equal ones stay where they are."""
    swap = left > right
    low = torch.where(swap, right, left), torch.where(swap, right_weight, left_weight)
    high = torch.where(swap, left, right), torch.where(swap, left_weight, right_weight)
    return low, high


def _distance(row: Tensor, centre: Tensor) -> float:
    lengths = (norm(row[tile] - centre[tile]) for tile in _tiles(row.numel()))
    return math.sqrt(math.fsum(length * length for length in lengths))


def _tiles(numel: int) -> Iterator[slice]:
    return (slice(start, start + _TILE_NUMEL) for start in range(0, numel, _TILE_NUMEL))


def _room(result: Result, out: Tensors | None) -> Tensor:
    """Where an aggregate goes, [numel]: the memory of the next anchor, which a method lets its mean have, or new."""
    numel = result.value.shape[1]
    if out is not None and ANCHOR in out and out[ANCHOR].numel() == numel and not overlap(out[ANCHOR], result.value):
        return out[ANCHOR]
    return torch.empty(numel)
