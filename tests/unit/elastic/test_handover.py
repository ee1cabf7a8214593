# SPDX-License-Identifier: Apache-2.0
"""The last holder of the committed state leaves in order: it stays until somebody else holds it."""

from isthmus.collective.core.types import Epoch, OuterStep
from isthmus.elastic.core.events import (
    BecomeLearner,
    Disconnected,
    Finish,
    LeaveRequested,
    PeerConnectionLost,
    SendToPeer,
    Tick,
)
from isthmus.elastic.core.messages import Commit, Goodbye, Heartbeat, Leave, Synced, Welcome
from tests.unit.elastic.machines import CoordinatorDriver, MemberDriver, certificate, held, ref, view

TIMEOUT_S = 30.0


def last_holder() -> CoordinatorDriver:
    """Peer 1 has left the view with outer step 1, which learner 2 does not hold yet."""
    driver = CoordinatorDriver(handover_timeout_s=TIMEOUT_S).with_members(1)
    driver.join(2)
    driver.says(1, Leave(held=held(0), address="host1:1"))
    driver.vote(1)
    return driver


def goodbye(driver: CoordinatorDriver, number: int) -> Goodbye | None:
    return next((item for item in driver.all_told(number) if isinstance(item, Goodbye)), None)


def test_the_last_holder_is_no_member_any_more_and_serves_the_state() -> None:
    driver = last_holder()
    assert driver.member_numbers() == []
    said = [type(item) for item in driver.all_told(1)]
    assert said.index(Commit) < said.index(Welcome), "what it has staged it would forget with its membership"
    assert goodbye(driver, 1) is None
    driver.join(2)
    assert [item.ref for item in driver.told(2, Welcome).donors] == [ref(1)]
    driver.join(3)
    assert [item.ref for item in driver.told(3, Welcome).donors] == [ref(1)]


def test_it_goes_as_soon_as_a_learner_holds_the_state_which_is_a_member_at_once() -> None:
    driver = last_holder()
    state = driver.machine.state.committed
    assert state is not None
    driver.says(2, Synced(held=state))
    assert driver.member_numbers() == [2]
    assert goodbye(driver, 1) == Goodbye(outer_step=OuterStep(1), held=state)


def test_who_is_alone_in_the_run_goes_at_once_and_hears_that_nobody_else_holds_the_state() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.says(1, Leave(held=held(0), address="host1:1"))
    driver.vote(1)
    assert goodbye(driver, 1) == Goodbye(outer_step=OuterStep(1), alone=True, held=driver.machine.state.committed)


def test_of_two_that_leave_together_each_hears_that_nobody_who_stays_holds_the_state() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    for number in (1, 2):
        driver.says(number, Leave(held=held(0), address=f"host{number}:1"))
    for number in (1, 2):
        driver.vote(number)
    for number in (1, 2):
        assert goodbye(driver, number) == Goodbye(
            outer_step=OuterStep(2), alone=True, held=driver.machine.state.committed
        )


def test_of_two_that_leave_together_the_first_in_the_view_stays() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.join(3)
    driver.says(2, Leave(held=held(1), address="host2:1"))
    driver.says(1, Leave(held=held(1), address="host1:1"))
    driver.vote(1)
    driver.vote(2)
    assert goodbye(driver, 2) is not None
    assert goodbye(driver, 1) is None
    assert driver.told(1, Welcome)


def test_it_goes_when_the_learner_is_gone_and_does_not_come_back() -> None:
    driver = last_holder()
    driver.feed(PeerConnectionLost(sender=ref(2)))
    driver.wait(3.0)
    assert goodbye(driver, 1) is None, "it may only have lost its connection"
    for _ in range(5):
        driver.now += 1.0
        driver.says(1, Leave(held=driver.machine.state.committed, address="host1:1"))
    assert goodbye(driver, 1) == Goodbye(outer_step=OuterStep(1), alone=True, held=driver.machine.state.committed)


def test_it_waits_for_a_learner_that_gets_on_and_not_for_one_that_does_not() -> None:
    driver = last_holder()

    def beat(progress: int) -> None:
        driver.now += 2.0
        driver.says(1, Leave(held=driver.machine.state.committed, address="host1:1"))
        if goodbye(driver, 1) is None:
            beat = Heartbeat(
                epoch=driver.machine.state.epoch, outer_step=OuterStep(0), progress=progress, blocked=False
            )
            driver.says(2, beat)

    for progress in range(60):
        beat(progress)
        assert goodbye(driver, 1) is None
    for _ in range(int(TIMEOUT_S / 2)):
        beat(60)
    driver.now += 2.0
    driver.says(1, Leave(held=driver.machine.state.committed, address="host1:1"))
    assert goodbye(driver, 1) == Goodbye(outer_step=OuterStep(1), alone=True, held=driver.machine.state.committed)


def test_a_restarted_coordinator_asks_the_leaver_that_it_does_not_know_to_stay() -> None:
    driver = last_holder().recovered()
    driver.says(1, Leave(held=driver.machine.state.committed, address="host1:1"))
    assert goodbye(driver, 1) is None, "learners may be on their way to this coordinator"
    driver.join(2, epoch=2)
    assert [item.ref for item in driver.told(2, Welcome).donors] == [ref(1)]
    driver.wait(3.0)
    assert goodbye(driver, 1) is None


def test_the_start_before_does_not_hold_the_state_for_the_one_that_leaves() -> None:
    """It crashed, nobody has noticed, and its next start wants to go at once (seed 49817)."""
    driver = CoordinatorDriver(handover_timeout_s=TIMEOUT_S).with_members(1)
    driver.join(2)
    again = ref(1, incarnation=2)
    driver.says(again, Leave(held=driver.machine.state.committed, address="host1:1"))
    assert driver.member_numbers() == []
    told = [effect.message for effect in driver.effects if isinstance(effect, SendToPeer) and effect.to == again]
    assert any(isinstance(item, Welcome) for item in told), "it stays until the learner holds the state"
    assert not any(isinstance(item, Goodbye) for item in told)


def test_a_leave_from_before_the_last_commit_does_not_say_that_the_state_is_older() -> None:
    driver = last_holder()
    driver.says(1, Leave(held=held(0), address="host1:1"))
    assert goodbye(driver, 1) is None


def test_who_does_not_want_to_wait_goes_at_once_and_hears_what_is_lost() -> None:
    driver = last_holder()
    driver.says(1, Leave(now=True))
    assert goodbye(driver, 1) == Goodbye(outer_step=OuterStep(1), alone=True)


# ------------------------------------------------------------------------ the leaver's side


def leaver() -> MemberDriver:
    """Its last steps are in a commit, and it was told that nobody else holds the state."""
    driver = MemberDriver(held(4), farewell_timeout_s=10.0, coordinator_timeout_s=100.0).active_in(view(3, 4, 1))
    driver.feed(LeaveRequested(now=False))
    assert driver.machine.leaves_after == "commit"
    driver.hands_in()
    driver.hears(Commit(certificate=certificate(3, 4, 1)))
    driver.hears(Welcome(epoch=Epoch(4), target=held(5), donors=()))
    return driver


def test_a_leaver_that_is_needed_trains_no_more_and_waits_beyond_the_time_of_an_answer() -> None:
    driver = leaver()
    assert [type(item) for item in driver.ordered()] == [BecomeLearner]
    assert driver.machine.leaves_after == "handover"
    driver.now = 90.0
    driver.feed(Tick())
    assert driver.said()[-1] == Leave(held=held(5), address="host1:1")
    driver.hears(Goodbye(outer_step=OuterStep(5), held=held(5)))
    assert driver.ordered() == [Finish(code=20, reason="left at outer step 5")]


def test_a_leaver_that_is_needed_does_not_outwait_a_coordinator_that_is_gone() -> None:
    driver = leaver()
    driver.feed(Disconnected())
    driver.now = 100.0
    driver.feed(Tick())
    assert [item.code for item in driver.ordered() if isinstance(item, Finish)] == [20]


def test_a_leaver_that_is_needed_and_wants_to_go_at_once_does_not_wait_for_a_coordinator_that_is_cut_off() -> None:
    """It waited for as long as it would have served the state (seed 8627 of the simulator)."""
    driver = leaver()
    driver.feed(Disconnected())
    driver.feed(LeaveRequested(now=True))
    assert driver.machine.leaves_after == "answer"
    driver.now = 10.0
    driver.feed(Tick())
    assert [item.code for item in driver.ordered() if isinstance(item, Finish)] == [20]


def test_who_takes_the_only_copy_along_says_so() -> None:
    driver = leaver()
    driver.hears(Goodbye(outer_step=OuterStep(5), alone=True, held=held(5)))
    reason = "left at outer step 5, which nobody else holds: start this peer again to go on from there"
    assert driver.ordered() == [Finish(code=20, reason=reason)]
