# SPDX-License-Identifier: Apache-2.0
"""Streaming DiLoCo: the layers take turns, and the workers go on while a fragment is under way.

    every H inner steps, fragment p at an offset of its own:    send delta_p = mean over workers of (anchor_p - local_p)
    tau inner steps later:                 anchor_p <- Nesterov(anchor_p, delta_p)
                                           local_p  <- alpha * local_p + (1 - alpha) * anchor_p

Each fragment is a DiLoCo of its own, so no step sends more than a fragment. Shared state: anchor and momentum of each
fragment. Private state: none.

Source: Streaming DiLoCo (arXiv:2501.18512); we follow `t - t_p` of its listing (its prose has `t + t_p`).

On purpose unlike public code:
    * Fragment p has offset floor(p * H / P). So the period is H for any H >= P. Another implementation rounds H / P:
      with H = 30 and P = 4 its period is 32. Another refuses H that P does not divide.
    * The anchor moves when the result arrives, not when it is sent.
    * The embedding belongs to the fragment of the first layer, final norm and head to that of the last: each tensor is
      in exactly one fragment.

How payloads travel (the paper: 4 bits) is the run's codec.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from isthmus.optim.diloco import DiLoCo
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.layers import layer_groups
from isthmus.optim.outer import ANCHOR, PARAM, Op, Round, Settled
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outcome, Tensors
    from isthmus.optim.run_facts import RunFacts

_LAYERS_A_FRAGMENT: Final = 3


@register("streaming")
@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(DiLoCo):
    """Streaming DiLoCo's settings; defaults are the paper's, but for learning rate, momentum and `keep`.

    Raises:
        ValueError: if a setting is out of its range.
    """

    inner_steps: int = 30
    """H, inner steps between two exchanges of the same fragment, >= 1. The paper has 30 and 100."""
    num_fragments: int | None = None
    """P, in [1, min(H, layers)]. None: a fragment for every three layers, which `fitted` works out."""
    pattern: Literal["strided", "sequential"] = "strided"
    """Layers p, p + P, p + 2P... make fragment p, or neighbours do. The paper prefers strided."""
    delay: int = 1
    """tau, inner steps from sending to receiving, in [0, H). The paper advises up to 5 and loses < 0.2% up to 10."""
    keep: float | None = None
    """alpha, how much of the local value survives, in [0, 1]. 0 throws the overlapped steps away; 1 imports nothing.
    None: tau / H, the share of a round that is overlapped. The paper: 0.5, which loses half of each outer step."""

    def __post_init__(self) -> None:
        DiLoCo.__post_init__(self)
        if self.num_fragments is not None and not 1 <= self.num_fragments <= self.inner_steps:
            raise ValueError(
                f"num_fragments must be in [1, inner_steps = {self.inner_steps}], got {self.num_fragments}"
            )
        if self.pattern not in ("strided", "sequential"):
            raise ValueError(f"pattern must be 'strided' or 'sequential', got {self.pattern!r}")
        if not 0 <= self.delay < self.inner_steps:
            # Else a fragment would be sent again before its result is there.
            raise ValueError(f"delay must be in [0, inner_steps = {self.inner_steps}), got {self.delay}")
        if self.keep is not None and not 0.0 <= self.keep <= 1.0:
            raise ValueError(f"keep must be in [0, 1], got {self.keep}")

    def fitted(self, table: FragmentTable, _run: RunFacts | None = None, /) -> Streaming:
        """The same settings with `num_fragments` known, which `plan` needs: it sees no model.

        Raises:
            ValueError: if the model needs more fragments than there are inner steps.
        """
        if self.num_fragments is not None:
            return self
        return dataclasses.replace(self, num_fragments=default_num_fragments(table))

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """Groups of layers, see `pattern`.

        Raises:
            ValueError: if there are more fragments than layers.
        """
        layers = layer_groups(table)
        count = self.fitted(table)._count()
        if count > len(layers):
            raise ValueError(f"{count} fragments need as many layers, this model has {len(layers)}")
        if self.pattern == "strided":
            parts = [layers[index::count] for index in range(count)]
        else:
            ends = [len(layers) * index // count for index in range(count + 1)]
            parts = [layers[ends[index] : ends[index + 1]] for index in range(count)]
        return tuple(
            table.fragment(index, [name for layer in part for name in layer]) for index, part in enumerate(parts)
        )

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """The fragment whose turn it is: each exactly once in any H consecutive inner steps from the first on.

        Raises:
            ValueError: if `num_fragments` is None.
        """
        count = self._count()
        turn = inner_step % self.inner_steps
        # The only p with floor(p * H / P) = turn, if there is one; as H >= P, no two fragments have one offset.
        index = -(-turn * count // self.inner_steps)
        if inner_step == 0 or index * self.inner_steps // count != turn:
            return ()
        key = FragmentKey(kind=PARAM, index=index)
        return (Round(fragment=key, op=Op.MEAN, inner_step=inner_step, delay=self.delay),)

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """The workers come part of the way to the new anchor."""
        keep = self.delay / self.inner_steps if self.keep is None else self.keep
        if outcome.result is None or keep == 0.0:
            return DiLoCo.settle(self, outcome, out=out)
        target = None if keep == 1.0 else outcome.after[ANCHOR]
        return Settled(private=outcome.private, target=target, keep=keep)

    def _count(self) -> int:
        if self.num_fragments is None:
            raise ValueError("num_fragments is not known: call fitted(table) first, or set it")
        return self.num_fragments


def default_num_fragments(table: FragmentTable) -> int:
    """P where nobody says anything: a fragment for every three layers."""
    return -(-len(layer_groups(table)) // _LAYERS_A_FRAGMENT)
