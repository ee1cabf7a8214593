# SPDX-License-Identifier: Apache-2.0
"""What a line carries, from noisy windows of it."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.collective.core.held_rate import HeldRate


def most_of(*stretches, is_padding=False):
    """What is held of stretches of windows, with a pause after each."""
    held = HeldRate()
    for stretch in stretches:
        for rate in stretch:
            held.window(rate, is_padding=is_padding)
        held.pause()
    return held.most()


def test_nothing_is_known_before_the_first_window():
    assert most_of() == most_of([]) == 0.0


@pytest.mark.parametrize(
    ("rates", "held"),
    [
        ([80.0], 80.0),
        ([60.0, 100.0], 80.0),
        ([0.0, 90.0, 120.0, 90.0, 0.0], 100.0),  # three
        ([0.0] * 4 + [90.0, 120.0, 90.0, 100.0] + [0.0], 100.0),  # half of them
        ([0.0] * 20 + [80.0, 120.0] * 5 + [0.0] * 20, 100.0),  # eight
    ],
)
def test_a_transfer_has_carried_what_its_best_half_did_from_three_windows_to_eight(rates, held):
    assert most_of(rates) == pytest.approx(held)


def test_padding_is_steady_and_short_so_two_windows_are_enough():
    assert most_of([10.0, 90.0, 110.0, 10.0], is_padding=True) == pytest.approx(100.0)


def test_a_mean_does_not_reach_over_a_pause():
    assert most_of([10.0, 10.0, 100.0], [100.0, 100.0]) == pytest.approx(100.0)
    assert most_of([10.0, 10.0, 100.0], [100.0, 10.0, 10.0]) == pytest.approx(40.0)


def test_nor_from_padding_into_a_transfer():
    held = HeldRate()
    for rate, is_padding in ((10.0, True), (100.0, True), (100.0, False), (10.0, False)):
        held.window(rate, is_padding=is_padding)
    assert held.most() == pytest.approx(55.0)


def test_what_64_windows_ago_was_carried_is_forgotten():
    assert most_of([100.0] * 10, [50.0] * 63) == pytest.approx(100.0)
    assert most_of([100.0] * 10, [50.0] * 64) == pytest.approx(50.0)


def test_acknowledgements_that_wait_up_to_a_quarter_of_a_window_make_a_steady_line_little_faster():
    chance = random.Random(7)
    for _ in range(200):
        late = [chance.uniform(0.0, 0.25) for _ in range(21)]
        line = [24.0 * (1.0 + before - after) for before, after in pairwise(late)]
        assert 24.0 * 0.98 <= most_of(line) <= 24.0 * (1.0 + 0.25 / 8)


@given(st.lists(st.lists(st.floats(1.0, 1e9), max_size=10), min_size=1, max_size=6), st.booleans())
def test_it_is_a_mean_of_what_was_seen(stretches, is_padding):
    seen = [rate for stretch in stretches for rate in stretch]
    held = most_of(*stretches, is_padding=is_padding)
    assert min(seen, default=0.0) * 0.999 <= held <= max(seen, default=0.0) * 1.001
