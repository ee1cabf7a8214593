# SPDX-License-Identifier: Apache-2.0
"""Who deviates three times in a row is sent home."""

from isthmus.elastic.core.messages import (
    Evicted,
    Refused,
    Welcome,
)
from isthmus.elastic.core.records import CommitRecord
from isthmus.elastic.core.work import MAX_STRIKES, Strikes
from tests.unit.elastic.liars.members import OTHER, Members, members
from tests.unit.elastic.machines import ref


def test_who_deviates_three_times_in_a_row_is_sent_home_and_a_restart_of_the_coordinator_does_not_forget() -> None:
    driver = members(1, 2, 3)
    for deviation in range(1, MAX_STRIKES + 1):
        if deviation > 1:
            driver.join(3, driver.machine.state.committed, epoch=driver.machine.state.epoch)
            for number in (1, 2):
                driver.vote(number)
        driver.vote(1)
        driver.vote(3, OTHER)
        driver.vote(2)
        assert driver.member_numbers() == [1, 2]
        if deviation < MAX_STRIKES:
            assert driver.told(3, Evicted)
    refused = driver.told(3, Refused)
    assert refused.code == 9
    assert ref(3).peer_id in refused.reason
    assert "3 times in a row" in refused.reason
    assert driver.recovered().machine.state.strikes.of(ref(3).peer_id) == MAX_STRIKES


def deviates(driver: Members) -> None:
    driver.vote(1)
    driver.vote(3, OTHER)
    driver.vote(2)


def deviated_twice() -> Members:
    driver = members(1, 2, 3)
    for _ in range(MAX_STRIKES - 1):
        deviates(driver)
        driver.join(3, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        for number in (1, 2):
            driver.vote(number)
    assert driver.member_numbers() == [1, 2, 3]
    return driver


def test_who_deviates_for_the_third_time_goes_also_if_the_coordinator_dies_before_it_says_so() -> None:
    driver = deviated_twice()
    deviates(driver)
    last = max(at for at, record in enumerate(driver.journal) if isinstance(record, CommitRecord))
    del driver.journal[last + 1 :]
    again = driver.recovered()
    assert again.member_numbers() == [1, 2, 3], "no view has followed the commit"
    again.join(1, driver.machine.state.committed, epoch=driver.machine.state.epoch)
    assert again.member_numbers() == [1, 2]
    assert again.told(3, Refused).code == 9


def test_start_of_a_peer_that_was_sent_home_for_its_deviations_is_not_let_in_again_but_the_next_one_is() -> None:
    driver = deviated_twice()
    deviates(driver)
    driver.join(3, epoch=driver.machine.state.epoch)
    assert driver.told(3, Refused).code == 9
    driver.join(3, epoch=driver.machine.state.epoch, incarnation=2)
    assert driver.told(3, Welcome, incarnation=2)


def test_one_round_that_a_deviant_agrees_to_ends_the_row() -> None:
    driver = members(1, 2, 3)
    for _ in range(MAX_STRIKES):
        driver.vote(1)
        driver.vote(3, OTHER)
        driver.vote(2)
        driver.told(3, Evicted)
        driver.join(3, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        for number in (1, 2):
            driver.vote(number)
        driver.all_vote_but()
        assert driver.member_numbers() == [1, 2, 3]
    assert driver.machine.state.strikes.of(ref(3).peer_id) == 0


def test_a_commit_to_which_a_liar_gave_nothing_does_not_end_the_row() -> None:
    driver = members(1, 2, 3)
    driver.vote(1)
    driver.vote(3, OTHER)
    driver.vote(2)
    driver.join(3, driver.machine.state.committed, epoch=driver.machine.state.epoch)
    for number in (1, 2):
        driver.vote(number)
    for number in (1, 2, 3):
        driver.vote(number)  # without a weight
    assert driver.machine.state.strikes.of(ref(3).peer_id) == 1


def test_strikes_are_kept_of_so_many_peers_and_no_more() -> None:
    strikes = Strikes()
    for number in range(2000):
        strikes.add(ref(number))
    assert strikes.of(ref(1999).peer_id) == 1
    assert strikes.of(ref(0).peer_id) == 0
