# SPDX-License-Identifier: Apache-2.0
"""Nobody holds the committed state: the run goes back, openly, to the newest commit that somebody holds who is here."""

import pytest

from isthmus.elastic.core.events import PeerConnectionLost
from isthmus.elastic.core.leases import count
from isthmus.elastic.core.member import went_back
from isthmus.elastic.core.messages import (
    Commit,
    Heartbeat,
    IndexRange,
    LeaseRequest,
    NewView,
    Rebuilt,
    Refused,
    Synced,
    Vote,
    Welcome,
)
from isthmus.elastic.core.past import Pasts
from isthmus.elastic.core.place import Phase
from isthmus.elastic.core.records import RollbackRecord
from isthmus.elastic.core.run_state import RunState
from tests.unit.elastic.machines import KEYS, CoordinatorDriver, MemberDriver, certificate, held, key, ref, view

GRACE_S, RECOVER_S, ORPHAN_S = 5.0, 30.0, 600.0
HEARTBEAT_S = 1.0


def after_power_cut(*numbers: int) -> CoordinatorDriver:
    """The coordinator's new process, which finds these members in its journal; outer step 3 is committed."""
    driver = CoordinatorDriver().with_members(*numbers)
    while driver.machine.state.outer_step < 3:
        for number in numbers:
            driver.vote(number)
    return driver.recovered()


def come_back(driver: CoordinatorDriver, number: int, step: int, incarnation: int = 2) -> None:
    """A newer start, whose disk leads to this step."""
    driver.join(number, held(step), epoch=driver.machine.state.epoch, incarnation=incarnation)


def live_on(driver: CoordinatorDriver, seconds: float, **steps: int) -> list[object]:
    """Heartbeats of learners that hold these steps; returns what everybody was told meanwhile."""
    told: list[object] = []
    until = driver.now + seconds
    while driver.now < until - 1e-9:
        driver.wait(min(HEARTBEAT_S, until - driver.now))
        told += [effect for effect in driver.effects if hasattr(effect, "message")]
        for name, step in steps.items():
            number = int(name[1:])
            beat = Heartbeat(
                epoch=driver.machine.state.epoch, outer_step=held(step).outer_step, progress=1, blocked=False
            )
            driver.says(ref(number, 2), beat)
            told += [effect for effect in driver.effects if hasattr(effect, "message")]
    return told


def the_rollback(driver: CoordinatorDriver) -> RollbackRecord:
    (record,) = driver.records(RollbackRecord)
    return record


def test_when_all_members_are_back_without_the_newest_state_the_run_goes_back_after_a_moment() -> None:
    driver = after_power_cut(1, 2, 3)
    epoch = driver.machine.state.epoch
    for number in (1, 2, 3):
        come_back(driver, number, 2)
    live_on(driver, GRACE_S - 0.5, p1=2, p2=2, p3=2)
    assert not driver.records(RollbackRecord), "somebody might still bring it"
    live_on(driver, 1.0, p1=2, p2=2, p3=2)
    record = the_rollback(driver)
    assert record.given_up == 3
    assert record.certificate is not None
    assert record.certificate.made == held(2)
    assert set(record.holders) == {ref(number, 2) for number in (1, 2, 3)}
    assert record.epoch > epoch
    assert driver.machine.state.committed == held(2)


def test_the_newest_state_that_anybody_holds_is_the_one() -> None:
    driver = after_power_cut(1, 2, 3)
    come_back(driver, 1, 1)
    come_back(driver, 2, 2)
    come_back(driver, 3, 0)
    live_on(driver, GRACE_S + 1.0, p1=1, p2=2, p3=0)
    assert the_rollback(driver).holders == (ref(2, 2),)
    assert driver.machine.state.committed == held(2)


def test_who_brings_the_committed_state_in_time_saves_it() -> None:
    driver = after_power_cut(1, 2, 3)
    come_back(driver, 1, 2)
    come_back(driver, 2, 2)
    live_on(driver, GRACE_S + RECOVER_S / 2, p1=2, p2=2)
    come_back(driver, 3, 3)
    live_on(driver, RECOVER_S, p1=2, p2=2, p3=3)
    assert not driver.records(RollbackRecord)
    assert driver.machine.state.committed == held(3)


def test_half_of_the_members_go_back_when_the_others_had_their_time() -> None:
    driver = after_power_cut(1, 2)
    come_back(driver, 1, 2)
    live_on(driver, RECOVER_S, p1=2)
    assert not driver.records(RollbackRecord), "it began to count when the other one was given up"
    live_on(driver, driver.config.recover_grace_s + 2.0, p1=2)
    assert the_rollback(driver).given_up == 3


def test_a_member_that_is_back_in_the_same_start_may_have_the_newest_commit_staged_and_is_waited_for() -> None:
    driver = after_power_cut(1, 2)
    driver.wait(driver.config.recover_grace_s + 1.0)
    come_back(driver, 1, 2)
    driver.join(2, held(2), epoch=driver.machine.state.epoch, incarnation=1)  # it was alive behind a broken line
    beat = Heartbeat(epoch=driver.machine.state.epoch, outer_step=held(2).outer_step, progress=1, blocked=False)
    for _ in range(int(GRACE_S) + 2):
        driver.wait(HEARTBEAT_S)
        driver.says(ref(1, 2), beat)
        driver.says(ref(2, 1), beat)
    assert not driver.records(RollbackRecord), "its words may have been lost"


def test_a_minority_waits_as_long_as_the_others_may_be_alive() -> None:
    driver = after_power_cut(1, 2, 3)
    come_back(driver, 1, 2)
    live_on(driver, ORPHAN_S - 10.0, p1=2)
    assert not driver.records(RollbackRecord)
    live_on(driver, 30.0, p1=2)
    assert the_rollback(driver).given_up == 3


def test_who_holds_nothing_of_the_run_is_sent_home_in_the_end() -> None:
    driver = after_power_cut(1, 2)
    come_back(driver, 1, 0)
    driver.machine.state._past = Pasts()  # too long ago for the journal's memory
    told = live_on(driver, ORPHAN_S + driver.config.recover_grace_s + 2.0, p1=0)
    refused = [effect.message for effect in told if isinstance(effect.message, Refused)]
    assert [said.code for said in refused] == [7]
    assert not driver.records(RollbackRecord)


def test_a_run_that_has_made_one_commit_goes_back_to_its_beginning() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.vote(1)
    driver = driver.recovered()
    come_back(driver, 1, 0)
    live_on(driver, GRACE_S + 1.0, p1=0)
    assert the_rollback(driver).certificate is None
    assert driver.machine.state.committed == held(0)


def test_everybody_is_told_and_begins_together() -> None:
    driver = after_power_cut(1, 2)
    come_back(driver, 1, 2)
    come_back(driver, 2, 2)
    told = live_on(driver, GRACE_S + 1.0, p1=2, p2=2)
    said = [effect.message for effect in told if isinstance(effect.message, Rebuilt)]
    assert {message.given_up for message in said} == {3}
    assert all(message.certificate is not None and message.certificate.check(KEYS) for message in said)
    epoch = driver.machine.state.epoch
    driver.join(1, held(2), epoch=epoch, incarnation=2)
    assert not driver.member_numbers(), "whoever came first would go on alone"
    driver.join(2, held(2), epoch=epoch, incarnation=2)
    assert driver.member_numbers() == [1, 2]


def test_who_brings_what_was_given_up_afterwards_is_told_so() -> None:
    driver = after_power_cut(1, 2, 3)
    for number in (1, 2):
        come_back(driver, number, 2)
    live_on(driver, RECOVER_S + driver.config.recover_grace_s + 2.0, p1=2, p2=2)
    rollback = the_rollback(driver)
    driver.join(3, held(3), epoch=rollback.epoch - 1, incarnation=1)
    told = driver.told(3, Rebuilt)
    assert told.epoch == rollback.epoch
    assert told.committed == held(2)


def test_leases_since_then_are_void_and_their_samples_are_given_again() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.says(1, LeaseRequest(epoch=driver.machine.state.epoch, serial=0, num_samples=10))
    driver.vote(1, None, IndexRange(0, 4))
    before = driver.machine.state.leases.position()
    driver.vote(1, None, IndexRange(4, 8))
    driver = driver.recovered()
    come_back(driver, 1, driver.machine.state.outer_step - 1)
    live_on(driver, GRACE_S + 1.0, p1=driver.machine.state.outer_step - 1)
    leases = driver.machine.state.leases
    assert leases.position() == before
    assert not leases.owners()
    assert count(leases.free) == 6


def test_a_coordinator_that_starts_again_after_it_knows_the_same() -> None:
    driver = after_power_cut(1, 2)
    come_back(driver, 1, 2)
    come_back(driver, 2, 2)
    live_on(driver, GRACE_S + 1.0, p1=2, p2=2)
    again = RunState.replay(driver.journal)
    state = driver.machine.state
    assert (again.epoch, again.committed, again.certificate) == (state.epoch, state.committed, state.certificate)
    assert again.rebuilt == the_rollback(driver)


def test_the_run_may_go_back_a_second_time() -> None:
    driver = after_power_cut(1)
    come_back(driver, 1, 2)
    live_on(driver, GRACE_S + 1.0, p1=2)
    driver.join(1, held(2), epoch=driver.machine.state.epoch, incarnation=2)
    driver.says(ref(1, 2), Synced(held=held(2)))
    assert driver.member_numbers() == [1]
    again = driver.recovered()
    come_back(again, 1, 1, incarnation=3)
    for _ in range(10):
        again.wait(1.0)
        beat = Heartbeat(epoch=again.machine.state.epoch, outer_step=held(1).outer_step, progress=1, blocked=False)
        again.says(ref(1, 3), beat)
    assert [record.given_up for record in again.records(RollbackRecord)] == [3, 2]
    assert again.machine.state.committed == held(1)


# ------------------------------------------------------------------------------------------------------------ a member


def test_a_member_that_holds_what_was_given_up_gives_it_up() -> None:
    first, second = certificate(1, 1), certificate(1, 2, parent=certificate(1, 1))
    driver = MemberDriver(held(3), certificate=second)
    driver.active_in(view(1, 3, 1, 2))
    driver.hears(Rebuilt(epoch=view(2, 2).epoch, certificate=first, committed=held(2), given_up=held(3).outer_step))
    assert driver.machine.phase is Phase.JOINING
    assert driver.machine.held is None
    assert driver.machine.certificate == first


def test_what_an_earlier_start_voted_for_is_installed_if_it_was_committed() -> None:
    driver = MemberDriver(held(2), aside=(key(1, 2), held(3)))
    made = certificate(1, 2)
    driver.hears(Welcome(epoch=view(2, 3).epoch, target=held(3), donors=()))
    assert driver.machine.held == held(3)
    driver.hears(Commit(certificate=made))
    assert driver.machine.held == held(3)


def test_what_an_earlier_start_voted_for_is_dropped_if_another_state_was_committed() -> None:
    driver = MemberDriver(held(2), aside=(key(1, 2), held(3)))
    driver.hears(Welcome(epoch=view(2, 3).epoch, target=held(3, kind=1), donors=()))
    assert driver.machine.held == held(2)
    driver.hears(NewView(view=view(3, 2, 1, 2)))
    assert driver.machine.held == held(2)


@pytest.mark.parametrize("given_up", [0, 3])
def test_the_reason_says_what_has_happened(given_up: int) -> None:
    said = went_back(Rebuilt(epoch=view(2, 2).epoch, certificate=certificate(1, 1), given_up=held(given_up).outer_step))
    assert ("outer step 3" in said) == (given_up == 3)
    assert ("journal was lost" in said) == (given_up == 0)


def test_a_learner_that_was_seen_to_hold_the_state_is_awaited_although_all_members_are_back_without() -> None:
    driver = after_power_cut(1, 2)
    come_back(driver, 4, 3)
    driver.says(ref(4, 2), Synced(held=held(3)))
    driver.feed(PeerConnectionLost(sender=ref(4, 2)))
    for number in (1, 2):
        come_back(driver, number, 2)
    live_on(driver, RECOVER_S - 5.0, p1=2, p2=2)
    assert not driver.records(RollbackRecord), "it may still be alive, behind a broken line"
    live_on(driver, 10.0, p1=2, p2=2)
    assert driver.machine.state.committed == held(2), "half of those who might bring it are here"


# ------------------------------------------------------------------------ who alone says that it holds the state

HANDOVER_S = 60.0


def with_a_false_holder() -> CoordinatorDriver:
    """After a power cut three of four members are back one step behind, and one says that it has the newest commit."""
    driver = after_power_cut(1, 2, 3, 4)
    for number in (1, 2, 3):
        come_back(driver, number, 2)
    come_back(driver, 4, 3)
    assert driver.member_numbers() == [4]
    return driver


def wait_for(driver: CoordinatorDriver, seconds: float, *, moves: bool, votes_per_s: int = 0) -> None:
    """The learners of step 2 live on, and the bytes that they fetch move, or do not."""
    until = driver.now + seconds
    while driver.now < until - 1e-9 and not driver.records(RollbackRecord):
        driver.wait(HEARTBEAT_S)
        state = driver.machine.state
        for number in (1, 2, 3, 4):
            step = state.outer_step if number == 4 else held(2).outer_step
            progress = int(driver.now) if moves or number == 4 else 1
            driver.says(ref(number, 2), Heartbeat(epoch=state.epoch, outer_step=step, progress=progress, blocked=False))
        for _ in range(votes_per_s):
            if driver.member_numbers() == [4]:
                round_key = key(state.epoch, state.outer_step)
                made = round_key.outer_step.to_bytes(32, "big")
                vote = Vote(key=round_key, digest=made, weight=1.0, num_tokens=1, consumed=())
                driver.says(ref(4, 2), vote)


def test_who_alone_says_that_it_holds_the_state_and_serves_nobody_is_dropped_and_the_run_goes_back() -> None:
    driver = with_a_false_holder()
    wait_for(driver, HANDOVER_S - 2.0, moves=False)
    assert not driver.records(RollbackRecord)
    wait_for(driver, 5.0, moves=False)
    record = the_rollback(driver)
    assert record.given_up == 3
    assert set(record.holders) == {ref(number, 2) for number in (1, 2, 3)}
    assert driver.machine.counters["dropped: alone says that it holds the state, and serves nobody"] == 1
    for number in (1, 2, 3):
        come_back(driver, number, 2)
    come_back(driver, 4, 3, incarnation=3)  # it says so again
    live_on(driver, GRACE_S + 1.0, p1=2, p2=2, p3=2)
    assert set(driver.member_numbers()) == {1, 2, 3}


@pytest.mark.parametrize("votes_per_s", [1, 10])
def test_commits_that_a_false_holder_makes_alone_are_no_proof_however_many_they_are(votes_per_s: int) -> None:
    driver = with_a_false_holder()
    wait_for(driver, HANDOVER_S + 5.0, moves=False, votes_per_s=votes_per_s)
    assert the_rollback(driver).given_up > 50 * votes_per_s
    assert driver.machine.state.committed == held(2)
    assert RunState.replay(driver.journal).committed == held(2)


def test_learners_that_get_on_slowly_are_waited_for_but_not_for_ever() -> None:
    driver = with_a_false_holder()
    wait_for(driver, ORPHAN_S - 5.0, moves=True)
    assert not driver.records(RollbackRecord)
    wait_for(driver, 10.0, moves=True)
    assert the_rollback(driver).given_up == 3


def test_who_has_served_one_of_them_holds_the_state() -> None:
    driver = with_a_false_holder()
    driver.says(ref(3, 2), Synced(held=held(3)))
    wait_for(driver, 2 * ORPHAN_S, moves=False)
    assert not driver.records(RollbackRecord)


def test_too_few_give_up_nobodys_claim() -> None:
    driver = after_power_cut(1, 2, 3, 4)
    come_back(driver, 3, 2)
    come_back(driver, 4, 3)
    until = driver.now + 2 * ORPHAN_S
    while driver.now < until:
        live_on(driver, 60.0, p3=2, p4=3)
    assert not driver.records(RollbackRecord), "one of four"


def test_a_member_of_the_newest_commit_in_the_same_start_has_proved_what_it_holds() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    while driver.machine.state.outer_step < 3:
        for number in (1, 2):
            driver.vote(number)
    driver.feed(PeerConnectionLost(sender=ref(2)))
    driver.wait(1.0)
    assert driver.member_numbers() == [1]
    come_back(driver, 2, 2)
    until = driver.now + 2 * ORPHAN_S
    while driver.now < until:
        driver.wait(HEARTBEAT_S)
        for sender, step in ((ref(1), 3), (ref(2, 2), 2)):
            state = driver.machine.state
            beat = Heartbeat(
                epoch=state.epoch, outer_step=held(step).outer_step, progress=int(driver.now), blocked=False
            )
            driver.says(sender, beat)
    assert not driver.records(RollbackRecord)
