# SPDX-License-Identifier: Apache-2.0
"""Members that give false sums, or frame others by what they send to one alone."""

import pytest

from isthmus.collective.core.types import HUGE
from isthmus.elastic.core.messages import (
    Vote,
)
from isthmus.elastic.core.records import CommitRecord, ViewRecord
from tests.unit.elastic.liars.members import OTHER, Members, members
from tests.unit.elastic.machines import held, key, ref


def framed(driver: Members, *, liar: int, victim: int, size: float = 100.0, mean: float = 25.0) -> None:
    """The liar's part is large in the victim's slice alone: it is a part to that one, and its sum to all others."""
    for number in driver.member_numbers():
        is_victim = number == victim
        driver.votes(number, sizes={liar: size} if is_victim else None, sums=None if is_victim else {victim: mean})


def test_who_is_sent_large_numbers_for_its_own_slice_is_not_named_for_the_sum_that_holds_them() -> None:
    """Before, all others pointed at it (code 9 after three rounds), and it alone at the liar."""
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    framed(driver, liar=4, victim=3)
    assert not driver.is_struck(3)
    assert not driver.is_struck(4), "one word against another"
    assert 4 not in driver.member_numbers()


@pytest.mark.parametrize("liar", [1, 4])
def test_who_frames_another_goes_first_though_it_votes_as_if_it_had_sent_nothing(liar: int) -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    framed(driver, liar=liar, victim=3)
    assert {1, 2, 3, 4}.difference(driver.member_numbers()) == {liar}


def test_who_frames_one_member_after_the_other_has_lied() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    framed(driver, liar=4, victim=3)
    driver.comes_back(4)
    framed(driver, liar=4, victim=2)
    assert driver.is_struck(4)
    assert driver.member_numbers() == [1, 2, 3]


def test_who_is_framed_by_the_same_member_again_and_again_is_never_named_and_out_for_every_other_time() -> None:
    driver = Members().with_veterans(1, 2, 3, 4)
    assert isinstance(driver, Members)
    driver.all_vote_but()
    out = []
    for _ in range(4):
        framed(driver, liar=4, victim=3)
        (gone,) = {1, 2, 3, 4}.difference(driver.member_numbers())
        out.append(gone)
        while gone not in driver.member_numbers():
            driver.join(gone, driver.machine.state.committed, epoch=driver.machine.state.epoch)
            driver.all_vote_but()
    assert out == [4, 3, 4, 3]
    assert not any(driver.is_struck(number) for number in (1, 2, 3, 4))


def test_a_sum_of_numbers_that_their_senders_work_allows_counts() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    step, weights = driver.step, {1: 1.0, 2: 1.0, 3: 1.0, 4: 16.0}
    for number in (1, 2, 3, 4):
        sizes, sums = {4: 100.0} if number >= 3 else None, None if number >= 3 else {3: 84.0}
        driver.votes(number, weight=weights[number], seen=weights, sizes=sizes, sums=sums)
    assert driver.step == step + 1


def test_numbers_that_cannot_be_counted_and_go_to_one_root_alone_do_not_make_that_one_a_liar() -> None:
    driver = members(1, 2, 3, 4, norm_guard=float("inf"))
    framed(driver, liar=4, victim=3, size=HUGE, mean=HUGE)
    assert driver.member_numbers() == [1, 2, 3]
    assert not driver.is_struck(4)


def test_a_sum_is_measured_by_numbers_of_another_place_than_the_part_that_explains_it() -> None:
    """Where the root adds up all numbers are a tenth as large as where the others do."""
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for number in (1, 2, 4):
        driver.votes(number, sums={3: 25.0})
    driver.votes(3, sizes={1: 0.1, 2: 0.1, 3: 0.1, 4: 12.0})
    assert not driver.is_struck(3)
    assert driver.member_numbers() == [1, 2, 3]


def test_a_root_that_gives_all_a_false_sum_and_says_that_nobodys_part_was_large_is_named() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for number in (2, 3, 4):
        driver.votes(number, sums={1: 25.0})
    driver.votes(1)
    assert driver.is_struck(1)
    assert "25 times as large as the others'" in driver.records(ViewRecord)[-1].cause


def test_a_root_that_blames_another_member_for_its_false_sum_is_at_odds_with_that_one_and_then_with_a_second() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for blamed in (1, 2):
        for number in (1, 2, 3):
            driver.votes(number, sums={4: 25.0})
        driver.votes(4, sizes={blamed: 100.0})
        if blamed == 1:
            assert not any(driver.is_struck(number) for number in (1, 2, 3, 4))
            (gone,) = {1, 2, 3, 4}.difference(driver.member_numbers())
            assert gone in (1, 4)
            driver.comes_back(gone)
    assert driver.is_struck(4)
    assert not any(driver.is_struck(number) for number in (1, 2, 3))


def test_what_a_root_says_of_a_members_part_explains_no_sum_to_that_member() -> None:
    """So no part that is just in range hides a false sum."""
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    step = driver.step
    for number in (2, 3, 4):
        driver.votes(number, sums={1: 15.0})
    driver.votes(1, sizes={2: 8.0})
    assert driver.step == step
    assert driver.member_numbers() == [2, 3, 4]


def test_who_sends_large_numbers_to_all_is_named_whatever_it_says_of_others() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for number in (1, 2, 3):
        driver.votes(number, sizes={4: 100.0})
    driver.votes(4, sizes={1: 100.0, 2: 100.0})
    assert driver.is_struck(4)


def test_sums_do_not_become_usual() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for _ in range(8):
        for number in (1, 2, 3, 4):
            driver.votes(number, sums={1: 9.0} if number != 1 else None)
    for number in (1, 2, 3, 4):
        driver.votes(number, sizes={1: 12.0} if number != 1 else None)
    assert driver.is_struck(1)


def test_who_tells_the_sums_of_some_members_alone_is_put_out() -> None:
    driver = members(1, 2, 3)
    driver.all_vote_but(3)
    current = driver.machine.state.view
    vote = Vote(
        key=key(current.epoch, current.outer_step),
        digest=held(current.outer_step + 1).digest,
        weight=3.0,
        num_tokens=1,
        consumed=(),
        weights=(1.0, 2.0, 3.0),
        sizes=(1.0, 1.0, 1.0),
        sums=(0.0,),
    )
    driver.says(3, vote)
    assert driver.member_numbers() == [1, 2]
    assert driver.is_struck(3)


def test_a_member_that_gives_half_of_the_others_another_sum_is_put_out_instead_of_halting_the_run() -> None:
    driver = members(1, 2, 3, 4)
    step = driver.step
    for number in (1, 4):
        driver.votes(number)
    for number in (2, 3):
        driver.votes(number, digest=OTHER, results={4: b"another"})
    assert driver.member_numbers() == [1, 2, 3]
    assert driver.is_struck(4)
    driver.all_vote_but()
    assert driver.step == step + 1


def test_to_be_overruled_for_a_sum_that_one_member_gave_is_no_strike() -> None:
    driver = members(1, 2, 3)
    step = driver.step
    for number in (1, 2):
        driver.votes(number)
    driver.votes(3, digest=OTHER, results={1: b"another"})
    assert (driver.step, driver.member_numbers()) == (step + 1, [1, 2])
    assert driver.machine.state.strikes.of(ref(3).peer_id) == 0
    assert driver.records(CommitRecord)[-1].disputed == (ref(3),)


def test_where_all_have_the_same_result_what_they_say_of_sums_is_nothing() -> None:
    driver = members(1, 2, 3)
    step = driver.step
    driver.all_vote_but(3)
    driver.votes(3, results={1: b"another", 2: b"another"})
    assert driver.step == step + 1
