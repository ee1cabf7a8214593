# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers by name."""

import pytest

from isthmus.optim import DiLoCo, FragmentTable, RunFacts, build_outer, outer_from_config, outer_types
from isthmus.optim.registry import register


def test_a_method_is_built_from_its_name_and_settings():
    assert build_outer("diloco", lr=0.4, inner_steps=30) == DiLoCo(lr=0.4, momentum=None, inner_steps=30)
    assert "diloco" in outer_types()


def test_a_whole_number_is_a_float_too():
    assert build_outer("diloco", lr=1, momentum=0) == DiLoCo(lr=1.0, momentum=0.0)


def test_unknown_type_names_the_known_and_the_closest():
    with pytest.raises(
        ValueError, match=r"unknown outer optimizer 'DiLoco' \(did you mean 'diloco'\?\); known: .*diloco"
    ):
        build_outer("DiLoco")
    with pytest.raises(ValueError, match=r"unknown outer optimizer 'zzz'; known: "):
        build_outer("zzz")


def test_unknown_setting_names_the_known_and_the_closest():
    with pytest.raises(ValueError, match=r"no setting 'inner_step' \(did you mean 'inner_steps'\?\)"):
        build_outer("diloco", inner_step=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": "0.7"}, "'lr' .* must be float, got '0.7'"),
        ({"inner_steps": 1.5}, "'inner_steps' .* must be int"),
        ({"inner_steps": True}, "'inner_steps' .* must be int"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"inner_steps": 0}, "inner_steps must be at least 1"),
    ],
)
def test_a_setting_of_another_type_or_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_outer("diloco", **settings)


def test_a_section_names_the_method_and_what_it_leaves_out_is_the_methods_default():
    for section in ({}, {"lr": None}):
        assert outer_from_config({"type": "diloco", **section}) == DiLoCo(), "by the members of a round"
        assert outer_from_config({"type": "eager", **section}) == build_outer("eager"), "its evidence is its own"
    assert outer_from_config({"type": "diloco", "lr": 0.3}) == DiLoCo(lr=0.3)
    streaming = build_outer("streaming", num_fragments=3)
    assert outer_from_config({"type": "streaming", "num_fragments": 3}) == streaming


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "needs a type: one of .*diloco"),
        ({"type": "dilocco"}, "did you mean 'diloco'"),
        ({"type": "diloco", "inner_step": 3}, "did you mean 'inner_steps'"),
    ],
)
def test_a_section_that_is_wrong_is_refused_in_one_sentence(section, message):
    with pytest.raises(ValueError, match=message):
        outer_from_config(section)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize("type_", outer_types())
def test_every_method_has_sound_defaults_for_any_model_and_any_run(type_, schedule):
    """With nothing said but its name it is fitted, splits the model and plans."""
    table = FragmentTable.from_named_shapes([(f"layers.{i}.weight", (8, 4)) for i in range(3)])
    for num_peers, outer_steps in ((1, 10), (2, 40), (16, 160), (1000, 1)):
        run = RunFacts(num_peers=num_peers, outer_steps=outer_steps, peak_lr=1e-3, schedule=schedule)
        outer = outer_from_config({"type": type_}).fitted(table, run)
        assert outer.fitted(table, run) == outer
        fragments = {fragment.key: fragment for fragment in outer.fragments(table)}
        table.check_partition(fragments.values())
        planned = (round_ for step in range(2000) for round_ in outer.plan(step))
        assert next(planned).fragment in fragments


def test_a_name_is_given_once():
    assert register("diloco")(DiLoCo) is DiLoCo
    with pytest.raises(ValueError, match="registered by DiLoCo already"):
        register("diloco")(type("Other", (), {}))
