# SPDX-License-Identifier: Apache-2.0
"""Members that say that rounds cannot be finished: of others, of themselves, or that somebody told them so."""

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.messages import Evicted, Heartbeat, Refused, RoundFailed
from isthmus.elastic.core.pauses import FORGIVEN, Pauses
from tests.unit.elastic.machines import CoordinatorDriver, key, ref

HELD_UP_S = 20.0


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


# ------------------------------------------------------------------------ newcomers


def come_in(driver: CoordinatorDriver, number: int) -> None:
    """A newcomer joins, and is a member after a commit."""
    driver.join(number, driver.machine.state.committed, epoch=driver.machine.state.epoch)
    commit(driver)
    assert number in driver.member_numbers()


def apart(driver: CoordinatorDriver) -> list[set[int]]:
    numbers = driver.member_numbers()
    return [{numbers[one], numbers[other]} for one, other in driver.machine.state.view.apart]


def test_one_voice_costs_a_newcomer_its_link_with_that_member_and_not_its_place() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    come_in(driver, 5)
    driver.fail(4, 5)
    rest(driver)
    assert driver.member_numbers() == [1, 2, 3, 4, 5]
    assert apart(driver) == [{4, 5}]
    commit(driver)
    assert driver.member_numbers() == [1, 2, 3, 4, 5]


def test_who_accuses_a_newcomer_that_it_has_no_link_with_accuses_itself() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    come_in(driver, 5)
    for _ in range(3):
        driver.fail(4, 5)
        rest(driver)
    assert driver.member_numbers() == [1, 2, 3, 5]
    commit(driver)


def test_one_voice_sends_no_newcomer_home_however_often_it_speaks() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for _ in range(3):
        if 5 not in driver.member_numbers():
            come_in(driver, 5)
        driver.fail(4, 5)
        rest(driver)
        assert not [word for word in driver.all_told(5) if isinstance(word, Refused)]
        commit(driver)
    assert 5 in driver.member_numbers()


def test_a_parted_pair_is_together_again_after_a_while_and_is_parted_for_longer_the_next_time() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    sessions = driver.machine._roster.sessions
    sessions[ref(4).peer_id].part(ref(3), 0.0, 60.0)
    sessions[ref(4).peer_id].rejoin(59.0)
    assert ref(3) in sessions[ref(4).peer_id].parted
    sessions[ref(4).peer_id].rejoin(60.0)
    assert not sessions[ref(4).peer_id].parted
    sessions[ref(4).peer_id].part(ref(3), 60.0, 60.0)
    assert sessions[ref(4).peer_id].parted == {ref(3): 180.0}


def test_a_newcomer_that_a_second_member_cannot_exchange_with_is_sent_home() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    come_in(driver, 5)
    for accuser in (4, 3):
        driver.fail(accuser, 5)
        rest(driver)
    assert driver.member_numbers() == [1, 2, 3, 4]
    assert driver.told(5, Refused).code == 4


def test_the_only_other_member_sends_a_newcomer_home_as_ever() -> None:
    driver = CoordinatorDriver().with_veterans(1)
    for _ in range(2):
        come_in(driver, 5)
        driver.fail(1, 5)
        rest(driver)
        assert driver.member_numbers() == [1]
    assert driver.told(5, Refused).code == 4


def test_a_newcomer_that_names_nobody_goes_without_last_words_and_pauses() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for _ in range(3):
        driver.join(5, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        while 5 not in driver.member_numbers():
            commit(driver)
        driver.fail(5)
        rest(driver)
        assert driver.member_numbers() == [1, 2, 3, 4]
        assert isinstance(driver.all_told(5)[-1], Evicted)


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


def _spend(driver: CoordinatorDriver, seconds: float) -> None:
    """All members have handed in, and exchange for so long."""
    view, until = driver.machine.state.view, driver.now + seconds
    while driver.now < until:
        for number in driver.member_numbers():
            beat = Heartbeat(
                epoch=view.epoch, outer_step=view.outer_step, progress=int(10 * driver.now), blocked=True, ready=True
            )
            driver.says(number, beat)
        driver.wait(min(1.0, until - driver.now))


def test_who_holds_up_every_round_that_it_is_in_costs_the_others_a_tenth_of_their_time() -> None:
    driver = CoordinatorDriver(outer_steps=100_000).with_veterans(1, 2, 3, 4)
    began, wasted_s, num_rounds = driver.now, 0.0, 0
    while driver.now < began + 2000.0:
        if 4 in driver.member_numbers():
            _spend(driver, HELD_UP_S)
            for number in (1, 2, 3):
                driver.fail(number, 4)
            rest(driver)
            wasted_s += HELD_UP_S
        else:
            _spend(driver, 1.0)
            commit(driver)
            num_rounds += 1
            driver.join(4, driver.machine.state.committed, epoch=driver.machine.state.epoch)
    assert wasted_s <= 0.15 * 2000.0, "the first time costs it nothing"
    assert num_rounds > 1600
    assert wasted_s >= 8 * HELD_UP_S, "it was let in again each time"


def test_who_holds_a_round_up_is_forgiven_by_commits_and_by_time() -> None:
    pauses = Pauses(max_peers=2)
    pauses.blamed(ref(1), OuterStep(10), 0.0, waited_s=40.0)
    assert pauses.is_over(ref(1), OuterStep(11), 0.0), "the first time may be somebody else's fault"
    _contribute(pauses, FORGIVEN)
    pauses.blamed(ref(1), OuterStep(100), 359.0, waited_s=1.0)
    assert not pauses.is_over(ref(1), OuterStep(1000), 359.0 + 9 * 40.0), "both are paid for"
    assert pauses.is_over(ref(1), OuterStep(1000), 359.0 + 9 * 41.0)

    pauses.blamed(ref(2), OuterStep(10), 0.0, waited_s=40.0)
    _contribute(pauses, FORGIVEN, 2)
    pauses.blamed(ref(2), OuterStep(100), 360.0, waited_s=40.0)
    assert pauses.is_over(ref(2), OuterStep(101), 360.0), "it was forgiven"

    pauses.blamed(ref(2), OuterStep(200), 800.0, waited_s=40.0)
    assert not pauses.is_over(ref(2), OuterStep(1000), 800.0 + 9 * 79.0)
    _contribute(pauses, FORGIVEN, 2)
    pauses.blamed(ref(2), OuterStep(2000), 2000.0, waited_s=10.0)
    assert pauses.is_over(ref(2), OuterStep(3000), 2091.0), "what a pause has made up for is not owed again"


def _contribute(pauses: Pauses, num_commits: int, number: int = 1) -> None:
    for _ in range(num_commits):
        pauses.contributed([ref(number)])
