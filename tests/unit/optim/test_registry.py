# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers by name."""

import pytest

from isthmus.optim import DiLoCo, build_outer, outer_from_config, outer_types
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


def test_a_section_names_the_method_and_what_it_leaves_out_depends_on_the_peers():
    for peers in (1, 4, 8):
        assert outer_from_config({"type": "diloco"}, num_peers=peers) == DiLoCo(lr=None), "by the members of a round"
        assert outer_from_config({"type": "diloco", "lr": None}, num_peers=peers) == DiLoCo(lr=None)
        assert outer_from_config({"type": "diloco", "lr": 0.3}, num_peers=peers) == DiLoCo(lr=0.3)
        assert outer_from_config({"type": "async"}, num_peers=peers) == build_outer("async", buffer=peers)
        streaming = build_outer("streaming", lr=None, num_fragments=3)
        assert outer_from_config({"type": "streaming", "num_fragments": 3}, num_peers=peers) == streaming
        assert outer_from_config({"type": "eager"}, num_peers=peers) == build_outer("eager"), "its evidence is its own"


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
        outer_from_config(section, num_peers=2)


@pytest.mark.parametrize("type_", outer_types())
def test_every_method_has_sound_defaults_for_any_number_of_peers(type_):
    needed = {"qsr": {"alpha": 0.01, "peak_lr": 1e-3, "total_steps": 100}}
    needed["autoloco"] = needed["qsr"]
    for peers in (1, 2, 16, 1000):
        outer_from_config({"type": type_, **needed.get(type_, {})}, num_peers=peers)


def test_a_name_is_given_once():
    assert register("diloco")(DiLoCo) is DiLoCo
    with pytest.raises(ValueError, match="registered by DiLoCo already"):
        register("diloco")(type("Other", (), {}))
