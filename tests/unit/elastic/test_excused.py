# SPDX-License-Identifier: Apache-2.0
"""Who was late comes back when it has worked, and later each time it was waited for in vain. On the pure machine."""

import pytest

from isthmus.collective.core.types import Epoch, OuterStep
from isthmus.elastic.core.events import PeerConnectionLost
from isthmus.elastic.core.messages import Heartbeat, Leave, Synced, Welcome
from isthmus.elastic.core.pauses import LONGEST, Pauses
from isthmus.elastic.core.records import ViewRecord
from tests.unit.elastic.machines import CoordinatorDriver, held, ref

OTHERS, LATE = (1, 2, 3), 4


def _beat(
    driver: CoordinatorDriver, number: int, *, progress: int = 0, steps: int = 0, ready: bool = False, epoch: int = -1
) -> None:
    state = driver.machine.state
    beat = Heartbeat(
        epoch=state.epoch if epoch < 0 else Epoch(epoch),
        outer_step=state.outer_step,
        progress=progress,
        blocked=ready,
        ready=ready,
        inner_steps=steps,
    )
    driver.says(number, beat)


def _commit(driver: CoordinatorDriver) -> None:
    """One round of whoever is a member; the late one follows it."""
    for number in driver.member_numbers():
        driver.vote(number)
    if LATE not in driver.member_numbers():
        committed = driver.machine.state.committed
        assert committed is not None
        driver.says(LATE, Synced(held=committed))


def _excused(driver: CoordinatorDriver, steps: int) -> None:
    """The others have handed in and waited; the late one has been heard of so many steps before."""
    _beat(driver, LATE, progress=steps, steps=steps)
    while LATE in driver.member_numbers():
        for number in OTHERS:
            _beat(driver, number, ready=True)
        _beat(driver, LATE, progress=steps, steps=steps)
        driver.wait(0.5)
    assert driver.machine.state.is_excused(ref(LATE))


@pytest.fixture
def driver() -> CoordinatorDriver:
    made = CoordinatorDriver(round_inner_steps=3).with_veterans(*OTHERS, LATE)
    _excused(made, steps=10)
    return made


def test_bytes_bring_nobody_back(driver: CoordinatorDriver) -> None:
    for progress in range(100, 2000, 100):
        _beat(driver, LATE, progress=progress, steps=10)
        _commit(driver)
        assert driver.member_numbers() == list(OTHERS)
    assert driver.machine.state.is_excused(ref(LATE)), "nor is it put out: it keeps payload and leases"


@pytest.mark.parametrize(("steps", "is_back"), [(12, False), (13, True)])
def test_inner_steps_of_a_round_bring_it_back_at_the_next_commit(
    driver: CoordinatorDriver, steps: int, is_back: bool
) -> None:
    _beat(driver, LATE, steps=10)
    _commit(driver)
    _beat(driver, LATE, steps=steps)
    assert driver.member_numbers() == list(OTHERS)
    _commit(driver)
    assert (LATE in driver.member_numbers()) == is_back


def test_steps_that_it_did_before_it_heard_of_its_excuse_do_not_count(driver: CoordinatorDriver) -> None:
    _beat(driver, LATE, steps=50, epoch=driver.machine.state.epoch - 1)
    _beat(driver, LATE, steps=60)  # the first word of who knows: so far, and then it hung
    for _ in range(5):
        _beat(driver, LATE, steps=60)
        _commit(driver)
    assert driver.member_numbers() == list(OTHERS)


def test_work_that_is_handed_in_brings_it_back(driver: CoordinatorDriver) -> None:
    _beat(driver, LATE, steps=10, ready=True)
    _commit(driver)
    assert LATE in driver.member_numbers()


def test_a_restarted_coordinator_counts_from_what_it_hears_first(driver: CoordinatorDriver) -> None:
    again = driver.recovered()
    for progress in (100, 200, 300):
        for number in OTHERS:
            _beat(again, number)
        _beat(again, LATE, progress=progress, steps=40)
        _commit(again)
    assert again.member_numbers() == list(OTHERS)
    _beat(again, LATE, steps=43)
    for number in OTHERS:
        _beat(again, number)  # a coordinator that has started again asks whether they have links
    _commit(again)
    assert LATE in again.member_numbers()


def test_every_wait_in_vain_doubles_the_pause_and_a_contribution_ends_that(driver: CoordinatorDriver) -> None:
    pauses, steps = [], 10
    for _ in range(5):
        num_commits = 0
        while LATE not in driver.member_numbers():
            _beat(driver, LATE, steps=steps)
            steps += 3
            _beat(driver, LATE, steps=steps)
            _commit(driver)
            num_commits += 1
        pauses.append(num_commits)
        _excused(driver, steps)
    assert pauses == [1, 2, 4, 8, 16]
    while LATE not in driver.member_numbers():
        steps += 3
        _beat(driver, LATE, steps=steps)
        _commit(driver)
    _commit(driver)  # with its work
    _excused(driver, steps)
    _beat(driver, LATE, steps=steps)
    _beat(driver, LATE, steps=steps + 3)
    _commit(driver)
    assert LATE in driver.member_numbers()


def test_who_is_needed_for_a_commit_is_awaited_before_its_pause_is_over() -> None:
    driver = CoordinatorDriver(min_peers=3, round_inner_steps=3).with_veterans(*OTHERS, LATE)
    _excused(driver, steps=10)
    for steps in (10, 13):
        _beat(driver, LATE, steps=steps)
    _commit(driver)
    assert LATE in driver.member_numbers()
    _excused(driver, steps=20)  # again: the pause is two commits now
    for steps in (20, 23):
        _beat(driver, LATE, steps=steps)
    _commit(driver)
    assert driver.member_numbers() == list(OTHERS)
    driver.says(3, Leave(now=True))
    assert driver.member_numbers() == [1, 2, LATE]


def test_a_long_wait_is_followed_by_a_pause_nine_times_as_long() -> None:
    pauses = Pauses(max_peers=2)
    assert pauses.missed(ref(1), OuterStep(100), 50.0, waited_s=20.0) == pytest.approx(180.0)
    assert not pauses.is_over(ref(1), OuterStep(3000), 229.0)
    assert not pauses.is_over(ref(1), OuterStep(100), 231.0), "and at least until the next commit"
    assert pauses.is_over(ref(1), OuterStep(101), 231.0)


def test_pause_is_of_one_start_and_bounded() -> None:
    pauses = Pauses(max_peers=2)
    for _ in range(20):
        pauses.missed(ref(1), OuterStep(100), 0.0)
    assert not pauses.is_over(ref(1), OuterStep(99 + LONGEST), 0.0)
    assert pauses.is_over(ref(1), OuterStep(100 + LONGEST), 0.0)
    assert pauses.is_over(ref(1, 2), OuterStep(100), 0.0), "a new start begins anew"
    pauses.missed(ref(2), OuterStep(100), 0.0)
    pauses.missed(ref(3), OuterStep(100), 0.0)
    assert pauses.is_over(ref(1), OuterStep(100), 0.0), "forgotten"
    pauses.contributed([ref(2)])
    assert pauses.is_over(ref(2), OuterStep(100), 0.0)


def test_a_member_that_has_not_heard_of_its_admission_is_put_out_and_not_excused() -> None:
    driver = CoordinatorDriver(grace_floor_s=0.5, grace_initial_s=0.5).with_veterans(1, 2)
    while 2 in driver.member_numbers():
        _beat(driver, 1, ready=True)
        _beat(driver, 2)
        driver.wait(0.2)
    driver.join(3, driver.machine.state.committed)
    for _ in range(4):
        _beat(driver, 2, ready=True)  # of the round that goes on without it
        _beat(driver, 3)
        driver.wait(1.0)  # they meet
    driver.says(1, Leave(now=True))
    assert driver.member_numbers() == [2, 3]
    driver.wait(1.0)
    views = [[int(item.peer_id, 16) for item in record.view.members] for record in driver.records(ViewRecord)]
    assert views[-3:] == [[], [2, 3], [2]]
    assert not driver.machine.state.is_excused(ref(3))
    causes = [record.cause for record in driver.records(ViewRecord)]
    assert "has not heard that it is a member" in causes[-1]


def test_round_that_newcomers_finish_for_others_is_none_from_which_the_grace_is_learned() -> None:
    """Whoever had handed in was gone. Those that came in began long after the round had (seed 23422)."""
    driver = CoordinatorDriver(recover_s=3.0, grace_initial_s=6.0).with_veterans(1)
    for number in (3, 4):
        driver.join(number, driver.machine.state.committed)
    for _ in range(5):
        driver.now += 1.0
        _beat(driver, 1, ready=True)
        for number in (3, 4):
            _beat(driver, number)
    driver.feed(PeerConnectionLost(sender=ref(1)))
    while driver.member_numbers() != [3, 4]:
        driver.now += 1.0
        for number in (3, 4):
            driver.says(number, Synced(held=held(driver.machine.state.outer_step)))
            _beat(driver, number)
    for seconds in range(6):
        driver.now += 1.0
        _beat(driver, 3, ready=True)
        _beat(driver, 4, progress=seconds, ready=seconds == 5)
    for number in (3, 4):
        driver.vote(number)
    _beat(driver, 3, ready=True)
    for seconds in range(10, 20):
        driver.now += 1.0
        _beat(driver, 3, ready=True)
        _beat(driver, 4, progress=seconds)
    assert driver.member_numbers() == [3], "the other one was never that late in a whole round"


def test_where_no_member_is_left_a_late_peer_serves_the_state_that_it_holds(driver: CoordinatorDriver) -> None:
    """Its trainer may hang for ever while its daemon lives: a learner waited for it without a donor (seed 200156)."""
    _commit(driver)
    driver.join(5)
    assert ref(LATE) not in [item.ref for item in driver.told(5, Welcome).donors]
    for number in OTHERS:
        driver.feed(PeerConnectionLost(sender=ref(number)))
    for _ in range(3):
        driver.now += 1.0
        _beat(driver, LATE)
        driver.join(5)
    assert driver.member_numbers() == []
    assert [item.ref for item in driver.told(5, Welcome).donors] == [ref(LATE)]
