# SPDX-License-Identifier: Apache-2.0
"""EDiT: DiLoCo by layers, each guarded by itself against workers that went astray.

Every H inner steps all layers are exchanged, as fragments of their own; guards.py has what is judged, the equations and
the departures. Shared state: anchor, momentum and the guards' typical stride of each fragment. Private state: the
guards' history.

Source: EDiT (arXiv:2412.07210) and its released code.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus.optim.diloco import DiLoCo
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.guards import Guarded, Guards
from isthmus.optim.layers import layer_groups
from isthmus.optim.outer import PARAM, Round
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outer
    from isthmus.optim.run_facts import RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseDiLoCo(DiLoCo):
    """DiLoCo in fragments of whole layers, all exchanged together: the same steps, but each can be judged by itself."""

    num_fragments: int | None = None
    """At least 1 and at most as many as the model has layers, in neighbours. None: one a layer; see `fitted`."""

    def __post_init__(self) -> None:
        DiLoCo.__post_init__(self)
        if self.num_fragments is not None and self.num_fragments < 1:
            raise ValueError(f"num_fragments must be at least 1, got {self.num_fragments}")

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """Groups of neighbouring layers.

        Raises:
            ValueError: if there are more fragments than layers.
        """
        layers = layer_groups(table)
        count = len(layers) if self.num_fragments is None else self.num_fragments
        if count > len(layers):
            raise ValueError(f"{count} fragments need as many layers, this model has {len(layers)}")
        ends = [len(layers) * index // count for index in range(count + 1)]
        groups = [layers[ends[index] : ends[index + 1]] for index in range(count)]
        return tuple(table.fragment(index, list(itertools.chain(*group))) for index, group in enumerate(groups))

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A blocking mean of every fragment after every H-th inner step.

        Raises:
            ValueError: if `num_fragments` is None.
        """
        if self.num_fragments is None:
            raise ValueError("num_fragments is not known: call fitted(table) first, or set it")
        keys = [FragmentKey(kind=PARAM, index=index) for index in range(self.num_fragments)]
        whole = DiLoCo.plan(self, inner_step)
        return tuple(dataclasses.replace(round_, fragment=key) for key in keys for round_ in whole)


@register("edit")
@dataclass(frozen=True, slots=True, kw_only=True)
class EDiT(Guarded):
    """EDiT: layer-wise DiLoCo with guards, in settings of its own. For those of the guards see `Guards`.

    EDiT itself starts with data-parallel steps and exchanges a layer while the one before it runs: the run's matter.

    Raises:
        ValueError: if a setting is out of its range.
    """

    inner: Outer = field(init=False)
    guards: Guards = field(init=False)
    lr: float | None = None
    """Outer learning rate, > 0. The released settings have 0.7 to 0.8. None: DiLoCo's."""
    momentum: float | None = None
    """Outer Nesterov momentum, in [0, 1). The released settings have 0.7 to 0.8. None: DiLoCo's."""
    inner_steps: int = 128
    """H, inner steps between exchanges, >= 1."""
    num_fragments: int | None = None
    """In how many groups of layers the model is judged. None: one a layer, which `fitted` counts."""
    temperature: float = 1.0
    """T of the weights, > 0."""
    z_limit: float = 3.0
    """Deviations that make an anomaly, > 0."""
    warmup_rounds: int = 120
    """Accepted rounds before there are anomalies, >= 1."""
    decay: float = 0.02
    """Weight of the latest round in the statistics, in (0, 1]."""
    max_norm: float = 10.0
    """Largest length of a fragment's mean, > 0."""
    patience: int = 10
    """Rejections in a row before the statistics begin anew, >= 1."""

    def __post_init__(self) -> None:
        for name, cls in (("inner", LayerwiseDiLoCo), ("guards", Guards)):
            settings = {setting.name: getattr(self, setting.name) for setting in dataclasses.fields(cls)}
            object.__setattr__(self, name, cls(**settings))

    def fitted(self, table: FragmentTable, _run: RunFacts | None = None, /) -> EDiT:
        """The same settings with `num_fragments` known, which `plan` needs: it sees no model."""
        if self.num_fragments is not None:
            return self
        return dataclasses.replace(self, num_fragments=len(layer_groups(table)))
