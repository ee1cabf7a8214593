# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules of the inner optimizer."""

import pytest

from isthmus.optim.schedule import build_schedule, constant, cosine, wsd


def test_warm_up_is_linear_and_wastes_no_step():
    schedule = constant(warmup_steps=4)
    assert [schedule(t) for t in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert constant()(0) == 1.0


def test_cosine_goes_from_one_through_the_middle_to_the_minimum_and_stays():
    schedule = cosine(total_steps=110, warmup_steps=10, min_ratio=0.2)
    assert schedule(10) == 1.0
    assert schedule(60) == pytest.approx(0.6)
    assert schedule(110) == pytest.approx(0.2)
    assert schedule(500) == pytest.approx(0.2)
    assert all(schedule(t) > schedule(t + 1) for t in range(10, 109))


def test_wsd_is_flat_and_then_falls_linearly():
    schedule = wsd(total_steps=100, warmup_steps=10, decay_steps=20, min_ratio=0.1)
    assert {schedule(t) for t in range(10, 81)} == {1.0}
    assert schedule(90) == pytest.approx(0.55)
    assert schedule(100) == schedule(1000) == pytest.approx(0.1)
    assert wsd(total_steps=10, decay_steps=0)(50) == 1.0


def test_a_prolonged_wsd_run_is_unchanged_before_its_decay():
    short, long = (wsd(total_steps=total, warmup_steps=5, decay_steps=10) for total in (50, 500))
    assert [short(t) for t in range(41)] == [long(t) for t in range(41)]


def test_every_factor_lies_between_nought_and_one():
    for type_ in ("constant", "cosine", "wsd"):
        schedule = build_schedule(type_, total_steps=50, warmup_steps=7)
        assert all(0.0 < schedule(t) <= 1.0 for t in range(100))


def test_wsd_decays_over_a_tenth_by_default():
    schedule = build_schedule("wsd", total_steps=100)
    assert schedule(90) == 1.0
    assert schedule(91) < 1.0


@pytest.mark.parametrize(
    ("type_", "settings"),
    [
        ("constant", {"total_steps": 10, "warmup_steps": -1}),
        ("cosine", {"total_steps": 10, "warmup_steps": 10}),
        ("cosine", {"total_steps": 10, "min_ratio": 1.5}),
        ("cosine", {"total_steps": 10, "decay_steps": 2}),
        ("wsd", {"total_steps": 10, "warmup_steps": 6, "decay_steps": 5}),
        ("wsd", {"total_steps": 10, "decay_steps": -1}),
        ("wsd", {"total_steps": 0, "decay_steps": 0}),
    ],
)
def test_impossible_schedules_are_refused(type_, settings):
    with pytest.raises(ValueError, match=r"must|need|belongs"):
        build_schedule(type_, **settings)
