# SPDX-License-Identifier: Apache-2.0
"""Members that vote long after the others: how long they are awaited, what is learned from that, and what follows."""

from isthmus.elastic.core.events import PeerConnectionLost
from isthmus.elastic.core.messages import Heartbeat
from isthmus.elastic.core.records import CommitRecord
from tests.unit.elastic.machines import CoordinatorDriver, ref

EXCHANGE_S = 10.0


class Voters(CoordinatorDriver):
    """A coordinator whose members' progress grows all the time, as their bytes do."""

    progress = 0
    dead: tuple[int, ...] = ()

    def all_hand_in(self) -> None:
        for number in self.member_numbers():
            self.beat(number, ready=True)

    def beat(self, number: int, *, ready: bool = False, grows: bool = True) -> None:
        self.progress += grows
        view = self.machine.state.view
        beat = Heartbeat(
            epoch=view.epoch, outer_step=view.outer_step, progress=self.progress, blocked=True, ready=ready
        )
        self.says(number, beat)

    def last(self, seconds: float, *, grows: bool = True) -> None:
        """Time goes by, and everybody shows signs of life."""
        until = self.now + seconds
        while self.now < until:
            self.wait(min(1.0, until - self.now))
            for number in self.member_numbers():
                if number not in self.dead:
                    self.beat(number, grows=grows)

    def loses(self, number: int, *, grows: bool = False) -> None:
        """This member dies, and the others soon go on without it."""
        self.dead = (number,)
        self.feed(PeerConnectionLost(sender=ref(number)))
        self.last(2.0, grows=grows)
        assert number not in self.member_numbers()

    def round(self, last: int, after_s: float) -> float:
        """All vote after an exchange, the last one so much later. How long the round took."""
        began, step = self.now, self.machine.state.outer_step
        self.all_hand_in()
        self.last(EXCHANGE_S)
        for number in self.member_numbers():
            if number != last:
                self.vote(number)
        if last in self.member_numbers():
            self.last(after_s)
            self.vote(last)
        assert self.machine.state.outer_step == step + 1
        return self.now - began


def voters(*numbers: int) -> Voters:
    driver = Voters(stall_floor_s=20.0)
    driver.with_veterans(*numbers)
    return driver


def test_who_votes_just_before_it_would_be_given_up_makes_one_round_long_and_then_stays_out() -> None:
    driver = voters(1, 2, 3, 4)
    long_s = driver.round(last=4, after_s=100.0)
    assert driver.member_numbers() == [1, 2, 3]
    assert 4 in [int(item.ref.peer_id, 16) for item in driver.records(CommitRecord)[-1].contributions]
    began = driver.now
    while 4 not in driver.member_numbers():
        driver.all_hand_in()
        driver.last(EXCHANGE_S)
        driver.join(4, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        step = driver.machine.state.outer_step
        for number in driver.member_numbers():
            driver.vote(number)
        assert driver.machine.state.outer_step == step + 1
    assert driver.now - began >= 9 * (long_s - EXCHANGE_S)


def test_what_an_exchange_takes_is_learned_from_the_majority() -> None:
    driver = voters(1, 2, 3, 4)
    for _ in range(5):
        driver.round(last=4, after_s=3.0 * EXCHANGE_S)
    driver.all_hand_in()
    driver.last(EXCHANGE_S)
    for number in (1, 2, 3):
        driver.vote(number)
    driver.last(4.0 * EXCHANGE_S - 1.0, grows=False)
    assert driver.member_numbers() == [1, 2, 3, 4]
    driver.last(2.0, grows=False)
    assert driver.member_numbers() == [1, 2, 3], "four times what the others take, as in the first round"


def test_who_takes_twice_as_long_as_the_others_stays_a_member() -> None:
    driver = voters(1, 2, 3, 4)
    for _ in range(20):
        driver.round(last=4, after_s=EXCHANGE_S)
        assert driver.member_numbers() == [1, 2, 3, 4]


def test_a_vote_that_is_given_early_and_changed_makes_nobody_late() -> None:
    driver = voters(1, 2)
    for _ in range(3):
        driver.all_hand_in()
        driver.vote(2, b"early" + bytes(27))
        driver.last(25.0)
        driver.vote(2)
        driver.vote(1)
        assert driver.member_numbers() == [1, 2]


def _vote_and_wait(driver: Voters, *numbers: int, seconds: float) -> None:
    """A whole exchange, and the others wait for who does not vote."""
    driver.all_hand_in()
    driver.last(EXCHANGE_S)
    for number in numbers:
        driver.vote(number)
    driver.last(seconds, grows=False)


def test_the_wait_for_a_vote_goes_on_when_another_member_dies() -> None:
    driver = voters(1, 2, 3, 4)
    driver.round(last=4, after_s=0.0)
    _vote_and_wait(driver, 1, 2, 3, seconds=30.0)
    driver.loses(1)
    assert driver.member_numbers() == [2, 3, 4]
    _vote_and_wait(driver, 2, 3, seconds=EXCHANGE_S - 1.0)
    assert driver.member_numbers() == [2, 3, 4], "it may always take as long as one more exchange"
    driver.last(EXCHANGE_S, grows=False)
    assert driver.member_numbers() == [2, 3], "after another view it had less than half of its time left"


def test_a_member_whose_exchange_still_grew_when_another_died_is_awaited_anew() -> None:
    driver = voters(1, 2, 3, 4)
    driver.round(last=4, after_s=0.0)
    driver.all_hand_in()
    driver.last(EXCHANGE_S)
    for number in (1, 2, 3):
        driver.vote(number)
    driver.last(30.0)
    driver.loses(1, grows=True)
    assert driver.member_numbers() == [2, 3, 4]
    _vote_and_wait(driver, 2, 3, seconds=30.0)
    assert driver.member_numbers() == [2, 3, 4]


def test_a_round_that_is_committed_ends_what_a_member_kept_the_others_waiting_for() -> None:
    driver = voters(1, 2, 3, 4)
    driver.round(last=4, after_s=0.0)
    _vote_and_wait(driver, 1, 2, 3, seconds=30.0)
    driver.loses(1)
    for number in (2, 3, 4):
        driver.vote(number)
    assert driver.member_numbers() == [2, 3, 4]
    _vote_and_wait(driver, 2, 3, seconds=30.0)
    assert driver.member_numbers() == [2, 3, 4]
