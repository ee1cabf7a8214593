# SPDX-License-Identifier: Apache-2.0
"""L-GreCo: every layer gets its own codec; together they send least and lose no more than one codec for all would.

    minimise  Σ nbytes(layer, c_layer)    subject to    Σ ‖layer - decoded(c_layer)‖²  <=  the same sum, c = reference

Dynamic programming, layer by layer, over the pairs (error so far, bytes so far) that no other pair beats in both. When
there are more than `num_bins` of them, the cheapest of each of `num_bins` equal ranges of the error goes on. A pair
keeps its exact error, so discretising can cost bytes but never error, and with few pairs the answer is the optimum.

Many equal layers get the reference where each byte more helps less than the one before it, as with bits a number;
else a mixture may send less. A solution that sends no less than the reference is not taken.

The choice decides how payloads travel, so members must agree on it: all compute it from the same numbers (measured by
one, or means that travelled as notes), now and then anew. It is arithmetic in a fixed order: equal costs give equal
choices on every machine. Between two choices `with_codecs` puts the codecs into the rounds of any method.

Source: L-GreCo (arXiv:2210.17357), from its abstract; the discretisation is our own, its code was not at hand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from isthmus.optim.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from isthmus.optim.fragments import Fragment, FragmentKey, FragmentTable
    from isthmus.optim.outer import Outer, Round

_ROUNDING: Final = 1e-12
"""Above the relative rounding error of a sum in another order."""

LayerT = TypeVar("LayerT", bound=Hashable)
ChoiceT = TypeVar("ChoiceT", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one choice costs one layer.

    Raises:
        ValueError: if a value is negative or not finite.
    """

    nbytes: float
    """Length of its payload in wire form."""
    squared_error: float
    """‖x - decoded‖², summed over the layer's elements."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.nbytes < math.inf and 0.0 <= self.squared_error < math.inf):
            raise ValueError(f"a cost must be finite and not negative, got {self}")


class _Partial(NamedTuple):
    """A choice for each of the first layers, as a chain."""

    squared_error: float
    nbytes: float
    earlier: int
    """Which of the layer before it continues."""
    choice: int
    """The last layer's, by position."""


def choose(
    costs: Mapping[LayerT, Mapping[ChoiceT, Cost]], reference: ChoiceT, *, num_bins: int = 1000
) -> dict[LayerT, ChoiceT]:
    """One choice a layer: the fewest bytes with no more squared error in all than `reference` for every layer.

    Args:
        costs: by layer, what may be chosen and what it costs: codecs by name, ranks, anything. Layers need not have
            the same choices, but all have `reference`. The order of the layers decides nothing but the last bits.
        reference: the uniform choice.
        num_bins: how finely the error is discretised where it must be, >= 1. Time grows with it, and with the number of
            layers and of choices: about 2 s for 300 layers with 6 choices.

    Raises:
        ValueError: if a layer cannot choose the reference, or num_bins < 1.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    lacking = [layer for layer, choices in costs.items() if reference not in choices]
    if lacking:
        raise ValueError(f"layer {lacking[0]!r} cannot choose the reference {reference!r}")
    budget = _total(choices[reference].squared_error for choices in costs.values())
    # What the layers after each one lose at least: a pair that leaves them less leads nowhere.
    least_after = [0.0]
    for choices in reversed(list(costs.values())[1:]):
        least_after.append(least_after[-1] + min(cost.squared_error for cost in choices.values()))
    layers = [[_Partial(0.0, 0.0, 0, 0)]]
    for choices, least in zip(costs.values(), reversed(least_after), strict=False):
        forgiven = 1.0 - _ROUNDING if least > 0.0 else 1.0
        longer = sorted(
            (error, partial.nbytes + cost.nbytes, earlier, choice)
            for earlier, partial in enumerate(layers[-1])
            for choice, cost in enumerate(choices.values())
            if ((error := partial.squared_error + cost.squared_error) + least) * forgiven <= budget
        )
        layers.append(_unbeaten(longer, num_bins))
    best = min(layers[-1], key=lambda partial: partial.nbytes, default=None)
    if best is None or best.nbytes >= _total(choices[reference].nbytes for choices in costs.values()):
        return dict.fromkeys(costs, reference)
    chosen: dict[LayerT, ChoiceT] = {}
    for layer, partials in zip(reversed(list(costs)), reversed(layers[:-1]), strict=True):
        chosen[layer] = list(costs[layer])[best.choice]
        best = partials[best.earlier]
    return dict(reversed(chosen.items()))


def with_codecs(outer: Outer, codecs: Mapping[FragmentKey, str]) -> Outer:
    """The same method, with `Round.codec` set by fragment.

    Args:
        outer: any method. Where its own rounds name a codec, that is replaced too: a method whose residual or whose
            step relies on its codec should not be listed.
        codecs: by fragment, as collective names them; a fragment that is not listed keeps what it has.
    """
    return _WithCodecs(outer=outer, codecs=dict(codecs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WithCodecs(Wrapper):
    codecs: Mapping[FragmentKey, str]

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """Those of the method.

        Raises:
            ValueError: if a codec is meant for a fragment that the method does not have.
        """
        fragments = self.outer.fragments(table)
        unknown = sorted(set(self.codecs) - {fragment.key for fragment in fragments})
        if unknown:
            raise ValueError(f"the method has no fragment {unknown[0]}")
        return fragments

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """The method's rounds, with their codecs."""
        return tuple(
            dataclasses.replace(round_, codec=self.codecs.get(round_.fragment, round_.codec))
            for round_ in self.outer.plan(inner_step)
        )


def _total(values: Iterable[float]) -> float:
    """One addition after another, as along a chain; Python's own `sum` is more exact in some versions."""
    total = 0.0
    for value in values:
        total += value
    return total


def _unbeaten(partials: list[tuple[float, float, int, int]], num_bins: int) -> list[_Partial]:
    """Of sorted ones, those that no other beats in both; at most `num_bins` + 1, with rising error."""
    unbeaten: list[_Partial] = []
    for partial in partials:
        if not unbeaten or partial[1] < unbeaten[-1].nbytes:
            unbeaten.append(_Partial(*partial))
    if len(unbeaten) <= num_bins:
        return unbeaten
    lowest = unbeaten[0].squared_error
    bin_width = (unbeaten[-1].squared_error - lowest) / num_bins or 1.0
    # The last of a bin is its cheapest.
    return list({int((partial.squared_error - lowest) / bin_width): partial for partial in unbeaten}.values())
