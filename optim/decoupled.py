# SPDX-License-Identifier: Apache-2.0
"""Decoupled DiLoCo: many balanced fragments that take turns, late results, and a mean that does not shrink.

The mean of M differences that point anywhere is shorter than they are, by up to 1/√M. Radial-directional averaging
keeps the length; v is a worker's anchor - local, w = samples² / inner steps is what it did for the fragment since the
fragment last merged, quantity times quality:

    RDA   = (Σ w‖v‖ / Σ w) · unit(Σ w · unit(v) / Σ w)
    anchor <- Nesterov(anchor, RDA);   local <- anchor

So a MEAN of unit vectors, and one exact number a member, ‖v‖, are enough. While a run without a momentum of its own
warms up (`DiLoCo.warmth`), the length goes in a line from the one that the mean of unit vectors has to that of RDA.
Fragments of embeddings are merged by the plain mean. Every inner step emits a fragment, each of them once in H, and it
is merged τ steps later.

Shared state: anchor, momentum, and by which rule the fragment is merged. Private state: none.

w is the *whole* weight, so rounds weigh their members alike and not by samples once more. Whose payload has not come,
or is late, weighs nothing: for whom a round waits is not decided here.

Departures: the paper's radial factor, as printed, is a vector; this is the reading that type-checks. Public
re-implementations take a unit vector of each tensor, here of each fragment; where the unit vectors cancel they fall
back to the mean, here nothing moves. Fragments do not mix embeddings with the rest.

Source: Decoupled DiLoCo (arXiv:2604.21428).
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.diloco import DiLoCo, step_anchor
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import PARAM, Emitted, Op, Round, Weigh
from isthmus.optim.registry import register
from isthmus.optim.stable import norm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable, ParameterSpec
    from isthmus.optim.outer import Result, Tensors, Work
    from isthmus.optim.run_facts import RunFacts

PLAIN_MEAN: Final = "plain_mean"
"""Name, in shared state, of the fragment's rule, [1]: 1 if it is merged by the plain mean, 0 by RDA."""

_INNER_STEPS: Final = 24
_DELAY: Final = 2
"""The paper's."""
_LONGEST: Final = 10.0
"""How many times the middle one of the lengths a length counts for at most. Ours, not the paper's."""
_SAMPLES: Final = 2.0**20
"""Unit of samples in a weight: squares of tokens by themselves come near to the largest weight that can be sent."""


@register("decoupled")
@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledDiLoCo(DiLoCo):
    """Settings of Decoupled DiLoCo.

    The paper publishes no outer constants; `lr` and `momentum` are DiLoCo's. As RDA does not shrink, its steps are
    longer than those of a mean: with few inner steps a momentum below 0.9 may be better.

    Raises:
        ValueError: if a setting is out of its range.
    """

    inner_steps: int = _INNER_STEPS
    """H, inner steps between two merges of a fragment, >= 1."""
    num_fragments: int = 24
    """P, >= 1, and at most as many as the model has tensors (see `fitted`). With P = H every inner step emits one."""
    delay: int | None = None
    """τ, inner steps until a merge is done, in [0, H). What a worker does meanwhile to the fragment is lost. None: the
    paper's 2, and of rounds shorter than its 24 steps a twelfth, rounded up. A quarter of 8 steps lost made 1 %."""
    embeddings: str = r"embed|wte|wpe|lm_head|^head\."
    """Regular expression; the tensors in whose names it is found are merged by the plain mean. "": none."""

    def __post_init__(self) -> None:
        DiLoCo.__post_init__(self)
        if self.num_fragments < 1:
            raise ValueError(f"num_fragments must be at least 1, got {self.num_fragments}")
        if self.delay is not None and not 0 <= self.delay < self.inner_steps:
            raise ValueError(f"delay must be in [0, inner_steps), got {self.delay} of {self.inner_steps}")
        try:
            re.compile(self.embeddings)
        except re.error as error:
            raise ValueError(f"embeddings is not a regular expression: {error}") from error

    def fitted(self, table: FragmentTable, _run: RunFacts | None = None, /) -> DecoupledDiLoCo:
        """The same settings with no more fragments than the model has tensors."""
        return dataclasses.replace(self, num_fragments=min(self.num_fragments, len(table.specs)))

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """Balanced by size, in the order of their first tensors; embeddings apart from the rest.

        Raises:
            ValueError: if there are fewer tensors than fragments, or a single fragment for embeddings and the rest.
        """
        groups = balanced_groups(table, self.num_fragments, self._is_embedding)
        return tuple(table.fragment(index, names) for index, names in enumerate(groups))

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """As DiLoCo; and the rule by which the fragment is merged, which no round can see."""
        rule = torch.tensor([float(self._is_embedding(fragment.specs[0]))])
        return {**DiLoCo.init(self, fragment, value), PLAIN_MEAN: rule}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """The fragments whose turn it is: p at step p * H // P of every H, none at step 0."""
        turn = inner_step % self.inner_steps
        return tuple(
            Round(
                fragment=FragmentKey(kind=PARAM, index=index),
                op=Op.MEAN,
                inner_step=inner_step,
                delay=default_delay(self.inner_steps) if self.delay is None else self.delay,
                num_notes=1,
                weigh=Weigh.ALIKE,
            )
            for index in range(self.num_fragments)
            if inner_step > 0 and index * self.inner_steps // self.num_fragments == turn
        )

    def emit(
        self, round_: Round, value: Tensor, shared: Tensors, private: Tensors, work: Work, /, *, out: Tensor
    ) -> Emitted:
        """The direction of anchor - value, and its length as a note; embeddings: the difference itself."""
        difference = DiLoCo.emit(self, round_, value, shared, private, work, out=out).payload
        length = norm(difference)
        if length > 0.0 and not _is_plain(shared):
            difference.div_(length)
        weight = (work.samples / _SAMPLES) ** 2 / work.inner_steps if work.inner_steps > 0 else 0.0
        return Emitted(payload=difference, weight=weight, notes=(length,))

    def step(self, round_: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """Give the mean direction the mean length, then one Nesterov step. The workers go to the new anchor.

        Raises:
            ValueError: if `out` shares memory with `shared`, or a tensor has the wrong size.
        """
        merged = result.value if _is_plain(shared) else radial_directional(result, warmth=self.warmth(round_))
        lr, momentum = self.rates(round_, result)
        stepped = step_anchor(shared, merged, lr=lr, momentum=momentum, out=out)
        stepped[PLAIN_MEAN].copy_(shared[PLAIN_MEAN])
        return stepped

    def _is_embedding(self, spec: ParameterSpec) -> bool:
        return bool(self.embeddings) and re.search(self.embeddings, spec.name) is not None


def default_delay(inner_steps: int) -> int:
    """τ where nobody says anything: the paper's 2 in rounds like its own, less in short ones."""
    return min(_DELAY, -(-_DELAY * inner_steps // _INNER_STEPS), inner_steps - 1)


def _is_plain(shared: Tensors) -> bool:
    return shared[PLAIN_MEAN].item() > 0.0


def radial_directional(result: Result, *, warmth: float = 1.0) -> Tensor:
    """RDA of unit vectors: their mean, stretched to the weighted mean of the lengths in the notes.

    A length counts for ten times the others' in the middle at most: whoever says more would stretch the mean alone.

    Args:
        result: value [numel], weights and one note a member.
        warmth: in [0, 1], how much of the stretching is done.

    Returns:
        [numel], new memory, with the same bits on every machine; zeros where the directions cancel.
    """
    known = [note[0] for note in result.notes if note[0] > 0.0]
    longest = _LONGEST * statistics.median_low(known) if known else 0.0
    # fsum rounds once, whatever the order: sum() adds differently from one Python to the next.
    weighted = math.fsum(
        weight * min(note[0], longest) for weight, note in zip(result.weights, result.notes, strict=True)
    )
    mean_length = weighted / math.fsum(result.weights)
    length = norm(result.value)
    stretched = (1.0 - warmth) * mean_length + warmth * mean_length / length if length > 0.0 else 0.0
    return result.value * stretched


def balanced_groups(
    table: FragmentTable, num_groups: int, is_apart: Callable[[ParameterSpec], bool]
) -> tuple[tuple[str, ...], ...]:
    """Split the tensors into groups of about equal size, none with tensors of both kinds.

    Greedy: the largest tensor of each kind opens a group; then, in falling size, each tensor goes to the smallest group
    of its kind or to an empty one. Ties go to the tensor and the group that come first, so all peers split alike.

    Args:
        table: the tensors.
        num_groups: exactly so many are made, none empty.
        is_apart: tells the two kinds apart.

    Returns:
        Names in table order; groups in the order of their first tensors.

    Raises:
        ValueError: if there are fewer tensors than groups, or fewer groups than kinds.
    """
    if len(table.specs) < num_groups:
        raise ValueError(f"the model has {len(table.specs)} tensors, too few for {num_groups} fragments")
    falling = sorted(table.specs, key=lambda spec: (-spec.numel, spec.offset, spec.name))
    kinds = {spec: is_apart(spec) for spec in falling}
    openers = [next(spec for spec in falling if kinds[spec] is kind) for kind in sorted(set(kinds.values()))]
    if len(openers) > num_groups:
        raise ValueError("embeddings and the rest are not mixed: at least 2 fragments are needed")
    groups: list[list[ParameterSpec]] = [[] for _ in range(num_groups)]
    for spec in [*openers, *(spec for spec in falling if spec not in openers)]:
        eligible = [group for group in groups if not group or kinds[group[0]] is kinds[spec]]
        # Empty ones first: a tensor without elements must not leave a group without tensors.
        min(eligible, key=lambda group: (bool(group), sum(held.numel for held in group))).append(spec)
    place = {spec: index for index, spec in enumerate(table.specs)}
    ordered = sorted((sorted(group, key=place.__getitem__) for group in groups), key=lambda group: place[group[0]])
    return tuple(tuple(spec.name for spec in group) for group in ordered)
