# SPDX-License-Identifier: Apache-2.0
"""Members whose numbers are out of the others' range, and members that say so of others."""

import pytest

from isthmus.collective.core.types import HUGE
from isthmus.elastic.core.records import ViewRecord
from tests.unit.elastic.liars.members import Members, members


def test_a_part_that_all_find_too_large_is_left_out_and_its_sender_is_struck() -> None:
    driver = members(1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        driver.votes(number, sizes={3: 1e6})
    assert driver.member_numbers() == [1, 2, 4]
    assert driver.is_struck(3)
    assert "times as large as the others'" in driver.records(ViewRecord)[-1].cause


def test_a_part_that_one_member_finds_too_large_is_left_out_but_one_voice_is_no_strike() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but(1)
    driver.votes(1, sizes={3: 1e6})
    assert driver.member_numbers() == [1, 2, 4]
    assert not driver.is_struck(3)
    driver.all_vote_but(1)
    driver.votes(1, sizes={2: 1e6})
    assert driver.member_numbers() == [2, 4], "who points at one after the other goes itself"
    assert driver.is_struck(1)


def test_who_finds_the_same_members_part_too_large_again_goes_itself_by_turns_and_stays_out_for_longer() -> None:
    driver = Members().with_veterans(1, 2, 3, 4)
    assert isinstance(driver, Members)
    out, pauses = [], []
    for _ in range(6):
        for number in (1, 2, 3, 4):
            driver.votes(number, sizes={1: 1e6} if number == 4 else None)
        assert len(driver.member_numbers()) == 3
        assert not driver.is_struck(1)
        (gone,) = {1, 2, 3, 4}.difference(driver.member_numbers())
        num_commits = 0
        while gone not in driver.member_numbers():
            driver.join(gone, driver.machine.state.committed, epoch=driver.machine.state.epoch)
            driver.all_vote_but()
            num_commits += 1
        out.append(gone)
        pauses.append(num_commits)
    assert out == [1, 4, 1, 4, 1, 4]
    assert pauses == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(("accuser", "accused"), [(1, 2), (2, 1)])
def test_of_two_members_the_newer_one_goes_whoever_finds_the_others_part_too_large(accuser: int, accused: int) -> None:
    driver = Members()
    driver.with_members(1, 2)
    for number in (1, 2):
        driver.votes(number, sizes={accused: 1e6} if number == accuser else None)
    assert driver.member_numbers() == [1]
    assert not driver.is_struck(2)


@pytest.mark.parametrize(("accuser", "accused"), [(1, 2), (2, 1)])
def test_of_two_members_that_can_commit_only_together_each_goes_in_turn(accuser: int, accused: int) -> None:
    # Seed 9379: the older one's payload was wrong, and it kept that payload for ever.
    driver = members(1, 2, min_peers=2)
    out = []
    for _ in range(4):
        for number in (1, 2):
            driver.votes(number, sizes={accused: 1e6} if number == accuser else None)
        (gone,) = {1, 2}.difference(driver.member_numbers())
        driver.join(gone, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        out.append(gone)
    assert out == [2, 1, 2, 1]
    driver.all_vote_but()
    assert driver.step == 1
    for number in (1, 2):
        driver.votes(number, sizes={accused: 1e6} if number == accuser else None)
    assert driver.member_numbers() == [2], "a commit begins the turns anew: 1 came last"


def test_who_has_done_more_may_send_more_in_proportion_and_a_fresh_member_less() -> None:
    driver = members(1, 2, 3)
    step = driver.step
    weights = {1: 500.0, 2: 2.0, 3: 2.0}
    for number in (1, 2, 3):
        driver.votes(number, weight=weights[number], seen=weights, sizes={1: 200.0, 2: 1.0, 3: 2.0})
    assert driver.step == step + 1


def test_of_two_the_usual_size_of_the_last_rounds_says_what_is_large() -> None:
    driver = members(1, 2)
    driver.all_vote_but()
    step = driver.step
    for number in (1, 2):
        driver.votes(number, sizes={1: 0.01, 2: 2.0})
    assert driver.step == step + 1, "nearly as usual, whatever the other one sends"
    for number in (1, 2):
        driver.votes(number, sizes={2: 1e6})
    assert driver.member_numbers() == [1]


def test_members_without_weight_or_numbers_are_no_measure() -> None:
    driver = members(1, 2, 3)
    step = driver.step
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 0.0, 2: 0.0, 3: 50.0})
    assert driver.step == step + 1


def test_without_a_guard_numbers_may_be_as_large_as_they_like() -> None:
    driver = members(1, 2, 3, norm_guard=float("inf"))
    step = driver.step
    for number in (1, 2, 3):
        driver.votes(number, sizes={3: 1e29})
    assert driver.step == step + 1


@pytest.mark.parametrize("norm_guard", [10.0, float("inf")])
def test_numbers_that_cannot_be_counted_are_too_large_without_a_guard_and_beside_members_that_send_none(
    norm_guard: float,
) -> None:
    driver = members(1, 2, 3, norm_guard=norm_guard)
    step = driver.step
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 0.0, 2: 0.0, 3: HUGE})
    assert driver.is_struck(3)
    assert (driver.step, driver.member_numbers()) == (step, [1, 2])


def test_a_veteran_among_newcomers_that_warm_up_is_measured_by_what_was_usual() -> None:
    driver = members(1, 2, 3)
    driver.all_vote_but()
    step = driver.step
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 1.0, 2: 0.05, 3: 0.05})
    assert driver.step == step + 1


def test_a_founder_that_has_trained_alone_stays_beside_a_first_newcomer_that_warms_up() -> None:
    driver = members(1)
    for _ in range(3):
        driver.votes(1, sizes={1: 1.0})
    driver.comes_back(2)
    step = driver.step
    for _ in range(3):
        for number in (1, 2):
            driver.votes(number, sizes={1: 1.0, 2: 0.03})
    assert driver.step == step + 3
    assert driver.member_numbers() == [1, 2]


def test_a_veteran_stays_beside_newcomers_that_warm_up_for_longer_than_what_was_usual_is_known() -> None:
    """Before, it was called a liar (scripts/methods: a peer of a Streaming run that had been there all the time)."""
    driver = members(1, 2, 3)
    driver.all_vote_but()
    step = driver.step
    for _ in range(30):
        for number in (1, 2, 3):
            driver.votes(number, sizes={1: 1.4, 2: 0.05, 3: 0.05})
    assert driver.step == step + 30
    assert driver.member_numbers() == [1, 2, 3]
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 3.0, 2: 0.05, 3: 0.05})
    assert driver.member_numbers() == [2, 3], "twice what it has sent before is no habit of it"
    assert driver.is_struck(1)


def test_what_a_member_says_of_its_own_numbers_excuses_nothing() -> None:
    driver = members(1, 2, 3)
    for _ in range(10):
        for number in (1, 2, 3):
            driver.votes(number, sizes={3: 1e6} if number == 3 else {})
    for number in (1, 2, 3):
        driver.votes(number, sizes={3: 1e6})
    assert driver.is_struck(3)


def test_noise_of_who_alone_gave_something_does_not_become_usual() -> None:
    """The others' parts weighed nothing, so nobody could compare (seed 5060 of the simulator)."""
    driver = members(1, 2, 3)
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 0.0, 2: 0.0, 3: 1e6})
    for number in (1, 2, 3):
        driver.votes(number, sizes={3: 1e6})
    assert driver.is_struck(3)


def test_noise_that_went_through_while_nothing_was_known_is_its_senders_own_for_twenty_rounds_and_never_usual() -> None:
    driver = members(1, 2)
    step = driver.step
    for number in (1, 2) * 21:
        driver.votes(number, sizes={1: 1.0, 2: 90.0})
    assert driver.step == step + 21, "before the first commit nobody knows what is large"
    assert driver.member_numbers() == [1, 2]
    for number in (1, 2):
        driver.votes(number, sizes={1: 1.0, 2: 90.0})
    assert driver.member_numbers() == [1]


def test_a_veteran_stays_if_nobody_knows_it_and_newcomers_warm_up_over_more_rounds_than_one() -> None:
    """A run that is resumed from a checkpoint: the founder has its moments, the first newcomers have none."""
    driver = members(1, 2, 3)
    step = driver.step
    for done in range(30):
        fresh = (done + 0.5) / 30
        for number in (1, 2, 3):
            driver.votes(number, sizes={1: 1.0, 2: fresh, 3: fresh})
    assert driver.member_numbers() == [1, 2, 3]
    assert driver.step == step + 30


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_coordinator_that_starts_again_knows_what_is_usual_and_what_each_member_has_sent(is_compacted: bool) -> None:
    """Before, honest veterans were put out after a power cut: the first that warmed up was the measure of all."""
    driver = members(1, 2, 3)
    for _ in range(6):
        driver.all_vote_but()
    if is_compacted:
        driver.journal[:] = [driver.machine.state.snapshot()]
    again = driver.recovered()
    for number in (1, 2, 3):
        again.join(number, again.machine.state.committed, epoch=again.machine.state.epoch)
    assert again.member_numbers() == [1, 2, 3]
    step = again.step
    for _ in range(8):
        for number in (1, 2, 3):
            again.votes(number, sizes={1: 1.0, 2: 0.005, 3: 0.005})
    assert again.step == step + 8
    for number in (1, 2, 3):
        again.votes(number, sizes={1: 1.0, 2: 0.005, 3: 90.0})
    assert again.is_struck(3), "the wide limit is for a run of which nothing is known"
