# SPDX-License-Identifier: Apache-2.0
"""Members that say that rounds cannot be finished: of others, of themselves, or that somebody told them so."""

from tests.unit.elastic.machines import CoordinatorDriver, key, ref

from isthmus.elastic.core.messages import Evicted, Refused, RoundFailed


def was_told(driver: CoordinatorDriver, number: int, by: int, *suspects: int) -> None:
    """A member says that it gave the round up since this one told it to."""
    current = driver.machine.state.view
    report = RoundFailed(
        key=key(current.epoch, current.outer_step),
        suspects=tuple(ref(suspect).peer_id for suspect in suspects),
        cause="told",
        told_by=ref(by).peer_id,
    )
    driver.says(number, report)


def rest(driver: CoordinatorDriver) -> None:
    """The others' reports were awaited."""
    driver.wait(0.3)


def commit(driver: CoordinatorDriver) -> None:
    step = driver.machine.state.outer_step
    for number in driver.member_numbers():
        driver.vote(number)
    assert driver.machine.state.outer_step == step + 1


def commits_until_back(driver: CoordinatorDriver, number: int) -> int:
    """How many commits are made before this peer, which joins at once, is a member again."""
    count = 0
    driver.join(number, driver.machine.state.committed, epoch=driver.machine.state.epoch)
    while number not in driver.member_numbers():
        commit(driver)
        driver.join(number, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        count += 1
    return count


# ------------------------------------------------------------------------ what somebody was told


def test_who_says_that_one_who_has_voted_told_it_to_give_up_does_not_keep_the_others_from_their_commits() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    epoch = driver.machine.state.epoch
    for _ in range(2):
        for number in (1, 2, 3):
            driver.vote(number)
        was_told(driver, 4, by=1)
        rest(driver)
    assert driver.machine.state.epoch == epoch + 2
    assert len(driver.member_numbers()) == 3, "one end of the link is out"
    commit(driver)


def test_who_says_that_it_told_itself_goes() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for _ in range(2):
        was_told(driver, 4, by=4)
        rest(driver)
    assert driver.member_numbers() == [1, 2, 3]


def test_who_tells_the_others_to_give_up_and_says_nothing_of_it_goes() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for _ in range(2):
        driver.vote(4)
        for number in (1, 2, 3):
            was_told(driver, number, by=4)
        rest(driver)
    assert driver.member_numbers() == [1, 2, 3]


def test_who_says_that_it_was_told_by_those_whom_it_told_goes() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for _ in range(2):
        was_told(driver, 4, by=1)
        for number in (1, 2, 3):
            was_told(driver, number, by=4)
        rest(driver)
    assert len(driver.member_numbers()) == 3
    commit(driver)


def test_who_was_told_by_one_that_was_told_accuses_nobody() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for _ in range(2):
        driver.fail(4)
        was_told(driver, 3, by=4)
        was_told(driver, 2, by=3)
        rest(driver)
    assert driver.member_numbers() == [1, 2, 3]


def test_a_report_that_comes_late_costs_one_more_try_and_nobody_its_place() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for number in (1, 2, 4):
        was_told(driver, number, by=3)
    rest(driver)
    assert driver.member_numbers() == [1, 2, 3, 4]
    driver.fail(3, 4)
    for number in (1, 2):
        was_told(driver, number, by=3)
    rest(driver)
    assert driver.member_numbers() == [1, 2, 3], "what three were told by one whose word was late counts no more"


def test_who_accuses_one_member_in_every_outer_step_goes_as_often_as_that_one() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    out = []
    for _ in range(6):
        for _ in range(2):
            driver.fail(4, 1)
            rest(driver)
        out += {1, 2, 3, 4}.difference(driver.member_numbers())
        commits_until_back(driver, out[-1])
    assert out == [1, 4, 1, 4, 1, 4]


def test_who_accuses_another_member_in_every_outer_step_goes_from_the_second_time_on() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    out = []
    for suspect in (1, 2, 3):
        for _ in range(2):
            driver.fail(4, suspect)
            rest(driver)
        out += {1, 2, 3, 4}.difference(driver.member_numbers())
        commits_until_back(driver, out[-1])
    assert out == [1, 4, 4]


# ------------------------------------------------------------------------ pauses


def test_the_first_time_a_blamed_member_is_back_at_the_next_boundary_and_then_stays_out_for_longer_each_time() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    pauses = []
    for _ in range(5):
        while 4 in driver.member_numbers():
            was_told(driver, 4, by=4)
            rest(driver)
        pauses.append(commits_until_back(driver, 4))
    assert pauses == [1, 2, 4, 8, 16]
