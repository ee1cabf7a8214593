# SPDX-License-Identifier: Apache-2.0
"""What a method says of its step (`elementwise`) holds: its parts, made one by one, have the bits of the whole."""

import dataclasses

import pytest
import torch

from isthmus.optim import DiLoCo, FragmentTable, Result, RunFacts, build_outer, outer_types
from isthmus.optim.outer import empty_like, is_elementwise

TABLE = FragmentTable.from_named_shapes([("embed", (40, 5)), *((f"layers.{n}.w", (20, 7)) for n in range(4))])
RUN = RunFacts(num_peers=3, outer_steps=12, peak_lr=0.001, schedule="cosine")
SETTINGS = {"qsr": {"alpha": 0.01, "inner_steps": 200}}
ELEMENTWISE = [name for name in outer_types() if is_elementwise(build_outer(name, **SETTINGS.get(name, {})))]


def first_round(outer):
    """The first round of the plan that exchanges parameters."""
    return next(rounds[0] for step in range(1, 1000) if (rounds := outer.plan(step)))


def test_diloco_and_its_kin_say_so_and_those_that_look_at_the_whole_do_not():
    assert {"diloco", "streaming", "delayed", "eager", "qsr", "co2"} <= set(ELEMENTWISE)
    assert {"autoloco", "powersgd", "sparseloco", "noloco", "decoupled"}.isdisjoint(ELEMENTWISE)


def test_a_step_that_a_subclass_puts_in_its_place_says_nothing_of_itself():
    class Other(DiLoCo):
        def step(self, round_, result, shared, /, *, out=None):
            return super().step(round_, result, shared, out=out)

    assert is_elementwise(DiLoCo())
    assert not is_elementwise(Other())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_parts_have_the_bits_of_the_whole_also_where_the_mean_lies_in_the_new_state(name):
    outer = build_outer(name, **SETTINGS.get(name, {})).fitted(TABLE, RUN)
    round_ = first_round(outer)
    fragment = next(part for part in outer.fragments(TABLE) if part.key == round_.fragment)
    numbers = torch.Generator().manual_seed(3)
    shared = outer.init(fragment, torch.randn(fragment.numel, generator=numbers))
    shared = {part: torch.randn(tensor.numel(), generator=numbers) for part, tensor in shared.items()}
    mean = torch.randn(fragment.numel, generator=numbers)
    result = Result(value=mean, members=("ash", "birch"), weight_sum=3.0, weights=(1.0, 2.0))
    whole = outer.step(round_, result, shared, out=empty_like(shared))
    parts = empty_like(shared)
    parts["anchor"].copy_(mean)
    for start in range(0, fragment.numel, 77):
        part = slice(start, start + 77)
        outer.step(
            round_,
            dataclasses.replace(result, value=parts["anchor"][part]),
            {part_name: tensor[part] for part_name, tensor in shared.items()},
            out={part_name: tensor[part] for part_name, tensor in parts.items()},
        )
    assert all(torch.equal(parts[part_name], tensor) for part_name, tensor in whole.items())
