# SPDX-License-Identifier: Apache-2.0
"""Votes, failures, commits, leases, and what a restart knows of them."""

import pytest

from isthmus.collective.core.types import Epoch, OuterStep
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.events import PeerConnectionLost, Tick
from isthmus.elastic.core.messages import (
    Commit,
    Evicted,
    Heartbeat,
    IndexRange,
    Join,
    LeaseGrant,
    LeaseRequest,
    Leave,
    NewView,
    Refused,
    RoundFailed,
)
from isthmus.elastic.core.records import CommitRecord, LeaseRecord, ReleaseRecord, RollbackRecord
from tests.unit.elastic.machines import MANIFEST, CoordinatorDriver, held, key, ref

OTHER = b"\xee" * 32


def lease(driver: CoordinatorDriver, number: int, serial: int, num_samples: int = 10) -> tuple[IndexRange, ...]:
    epoch = driver.machine.state.epoch
    driver.says(number, LeaseRequest(epoch=epoch, serial=serial, num_samples=num_samples))
    return driver.told(number, LeaseGrant).ranges


# ------------------------------------------------------------------------ votes


def test_round_is_committed_when_all_members_voted_the_same() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.vote(1)
    assert driver.machine.voted == (ref(1).peer_id,)
    assert not any(isinstance(item, Commit) for item in driver.all_told(1))
    driver.vote(2)
    assert driver.machine.voted == ()
    step = driver.machine.state.outer_step
    for number in (1, 2):
        assert driver.told(number, Commit).certificate.made.outer_step == step
    assert [item.ref for item in driver.records(CommitRecord)[-1].contributions] == [ref(1), ref(2)]


def test_nothing_is_committed_below_min_peers() -> None:
    driver = CoordinatorDriver(min_peers=2)
    driver.join(1, held(0))
    driver.vote(1)
    assert driver.machine.state.outer_step == 0


def test_first_commit_waits_for_the_start_peers() -> None:
    driver = CoordinatorDriver(start_peers=2)
    driver.join(1, held(0))
    driver.vote(1)
    assert driver.machine.state.outer_step == 0
    driver.join(2, held(0))
    for number in (1, 2):
        driver.vote(number)
    assert driver.machine.state.outer_step == 1


def test_vote_of_another_epoch_counts_for_nothing_and_is_told_the_view() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    step = driver.machine.state.outer_step
    driver.vote(1, epoch=driver.machine.state.epoch - 1)
    assert driver.told(1, NewView).view == driver.machine.state.view
    driver.vote(2)
    assert driver.machine.state.outer_step == step


def test_repeated_vote_for_a_committed_round_is_answered_with_its_commit() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.vote(1)
    commit = driver.told(1, Commit)
    late = driver.records(CommitRecord)[-1].key
    current = driver.machine.state.view.outer_step
    assert late.outer_step == current - 1
    driver.says(1, Heartbeat(epoch=Epoch(1), outer_step=late.outer_step, progress=0, blocked=True))
    driver.now = 1.0
    driver.says(1, Heartbeat(epoch=Epoch(1), outer_step=late.outer_step, progress=0, blocked=True))
    assert driver.told(1, Commit) == commit


def test_strict_majority_wins_and_the_deviant_has_to_sync() -> None:
    driver = CoordinatorDriver().with_members(1, 2, 3)
    step = driver.machine.state.outer_step
    driver.vote(1)
    driver.vote(2, OTHER)
    driver.vote(3)
    assert driver.machine.state.outer_step == step + 1
    assert driver.member_numbers() == [1, 3]
    assert [type(item) for item in driver.all_told(2)] == [Commit, Evicted]


def test_votes_without_a_majority_are_tried_again_and_then_halt_the_run() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    step, epoch = driver.machine.state.outer_step, driver.machine.state.epoch
    for attempt in range(3):
        assert driver.machine.state.epoch == epoch + attempt
        driver.vote(1)
        driver.vote(2, OTHER)
    assert driver.machine.state.outer_step == step
    for number in (1, 2):
        assert driver.told(number, Refused).code == 9
    driver.says(2, Leave())
    assert driver.told(2, Refused).code == 9


def test_final_commit_says_so_and_a_late_joiner_is_sent_home_with_code_0() -> None:
    driver = CoordinatorDriver(outer_steps=1).with_members(1)
    driver.vote(1)
    assert driver.told(1, Commit).certificate.final
    driver.join(2)
    assert driver.told(2, Refused).code == 0
    driver.says(1, Leave(now=True))
    assert driver.machine.finished


# ------------------------------------------------------------------------ failures


def test_first_failure_is_tried_again_with_the_same_members_in_the_next_epoch() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3)
    epoch = driver.machine.state.epoch
    driver.fail(1, 3)
    assert driver.machine.state.epoch == epoch, "the reports of the others are awaited first"
    driver.now += 0.2
    driver.feed(Tick())
    assert (driver.machine.state.epoch, driver.member_numbers()) == (epoch + 1, [1, 2, 3])


def test_reports_that_lie_unread_while_the_coordinator_was_away_are_awaited() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3)
    driver.fail(1, 2)
    driver.wait(0.3)
    driver.fail(1, 2)  # the second time: somebody has to go
    driver.now += 30.0
    driver.feed(Tick())
    for reporter in (1, 2):
        driver.fail(reporter, 3)
    driver.wait(0.3)
    assert driver.member_numbers() == [1, 2], "one voice alone, the other report unread, would have dropped the second"


@pytest.mark.parametrize(
    ("reports", "dropped"),
    [
        ({1: [2], 3: [2]}, 2),
        ({1: [3], 2: [3], 3: [1]}, 3),
        ({1: [2], 2: [1]}, 2),  # a tie goes against the highest rank
        ({1: [], 2: []}, 2),  # who names nobody accuses itself
        ({2: [2]}, 2),  # nobody else is to blame
    ],
)
def test_repeated_failure_drops_the_most_accused(reports: dict[int, list[int]], dropped: int) -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3)
    for _ in range(2):
        for reporter, suspects in reports.items():
            driver.fail(reporter, *suspects)
        driver.now += 0.2
        driver.feed(Tick())
    assert driver.member_numbers() == [number for number in (1, 2, 3) if number != dropped]


def test_newcomer_that_is_not_reached_goes_at_once_and_the_second_time_hears_why() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for attempt in range(2):
        driver.join(5, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        for number in (1, 2, 3, 4):
            driver.vote(number)
        assert driver.member_numbers() == [1, 2, 3, 4, 5]
        driver.fail(5, 1, 2, 3, 4)
        driver.wait(0.3)
        assert driver.member_numbers() == [1, 2, 3, 4], "one round was lost, and nobody but the newcomer"
        told = driver.all_told(5)[-1]
        assert isinstance(told, Refused if attempt else Evicted)
    assert isinstance(told, Refused)
    assert told.code == 4
    assert "host5:1" in told.reason
    assert "--advertise" in told.reason


def test_peer_that_was_reached_once_is_never_sent_home_for_a_broken_line() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for _ in range(3):
        while 4 in driver.member_numbers():
            driver.fail(4, 1, 2, 3)
            driver.wait(0.3)
        assert driver.member_numbers() == [1, 2, 3]
        assert isinstance(driver.all_told(4)[-1], Evicted)
        driver.join(4, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        while 4 not in driver.member_numbers():  # its pause grows
            for number in (1, 2, 3):
                driver.vote(number)


def test_one_accuser_after_another_view_accuses_nobody_out_but_itself() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for suspect in (4, 4, 3, 2, 3, 2):
        if 1 in driver.member_numbers():
            driver.fail(1, suspect)
            driver.wait(0.3)
    assert driver.member_numbers() == [2, 3], "the link between 1 and 4 was broken; then 1 accused everybody else too"


def test_member_that_reaches_nobody_goes_and_not_those_who_reach_each_other() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for _ in range(2):
        driver.fail(1, 2, 3, 4)
        driver.wait(0.3)
    assert driver.member_numbers() == [2, 3, 4]


def test_what_was_said_before_a_commit_counts_no_more() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    driver.fail(1, 3)
    driver.wait(0.3)
    for number in (1, 2, 3, 4):
        driver.vote(number)
    for _ in range(2):
        driver.fail(1, 2)
        driver.wait(0.3)
    assert driver.member_numbers() == [1, 3, 4], "one link is broken, and its accused end goes"


def test_what_a_member_was_told_is_no_second_voice() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for speaks in (True, True, False):
        current = driver.machine.state.view
        if speaks:
            driver.fail(4, 1, 2, 3)
        others = tuple(ref(other).peer_id for other in (1, 2, 3))
        for number in (1, 2):
            told = RoundFailed(
                key=key(current.epoch, current.outer_step), suspects=others, cause="told", told_by=ref(4).peer_id
            )
            driver.says(number, told)
        driver.wait(0.3)
        assert driver.machine.state.epoch == current.epoch + 1, "a failed round gets another view"
    assert driver.member_numbers() == [1, 2, 3], "without a voice of its own nobody was accused"


def test_accusations_alone_leave_half_of_the_last_commits_members() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    for _ in range(2):
        driver.fail(1, 2, 3)
        driver.fail(4, 1, 2, 3)
        driver.fail(2, 3)
        driver.wait(0.3)
    assert driver.member_numbers() == [1, 2, 3, 4], "three of four would have to go: the round is tried again"


def test_members_that_plan_differently_are_not_blamed_and_plan_without_a_survey_for_a_while() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3)
    step = driver.machine.state.outer_step
    driver.says(1, differs(driver, 2))
    driver.says(2, differs(driver, 1))
    driver.wait(0.3)
    assert driver.member_numbers() == [1, 2, 3]
    assert driver.told(1, NewView).survey_from == step + 64
    driver.says(1, differs(driver, 2))
    driver.wait(0.3)
    driver.says(1, differs(driver, 2))
    driver.wait(0.3)
    assert driver.member_numbers() == [1, 3], "without a survey all plan the same, or do not follow the rules"


def test_the_next_failure_for_other_plans_ends_surveys_for_twice_as_long() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3)
    for pause in (64, 128):
        until = driver.machine.state.outer_step + pause
        driver.says(1, differs(driver, 2))
        driver.wait(0.3)
        assert driver.told(2, NewView).survey_from == until
        while driver.machine.state.outer_step < until:
            for number in (1, 2, 3):
                driver.vote(number)


def differs(driver: CoordinatorDriver, from_: int) -> RoundFailed:
    """The sender has found that this member planned the round in progress otherwise."""
    view = driver.machine.state.view
    return RoundFailed(
        key=key(view.epoch, view.outer_step), suspects=(ref(from_).peer_id,), cause="other slices", differs=True
    )


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("numbers", [(1, 2), (1, 2, 3, 4)])
def test_member_that_never_votes_is_dropped_whatever_its_heart_says(numbers: tuple[int, ...], grows: bool) -> None:
    driver = CoordinatorDriver().with_veterans(*numbers)
    *others, mute = numbers
    step = driver.machine.state.outer_step
    for number in others:
        driver.vote(number)
    for second in range(100):
        epoch, progress = driver.machine.state.epoch, second if grows else 1
        for number in driver.member_numbers():
            beat = Heartbeat(epoch=epoch, outer_step=step, progress=progress, blocked=True, ready=True)
            driver.says(number, beat)
        driver.wait(1.0)
        if mute not in driver.member_numbers():
            break
    assert driver.member_numbers() == others
    # The exchange took no time: the floor counts. Bytes that still come in show a slow line, for ten times as long.
    assert (78 if grows else 7) <= second <= (80 if grows else 9)
    for number in others:
        driver.vote(number)
    assert driver.machine.state.outer_step == step + 1


def test_votes_may_take_as_long_as_a_slow_exchange_makes_likely() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    step, epoch = driver.machine.state.outer_step, driver.machine.state.epoch
    for second in range(40):
        for number in (1, 2):
            beat = Heartbeat(epoch=epoch, outer_step=step, progress=1, blocked=True, ready=True)
            driver.says(number, beat)
        if second == 10:
            driver.vote(1)
        driver.wait(1.0)
    assert driver.member_numbers() == [1, 2], "ten seconds of exchange, forty for the other vote"


def test_a_pause_of_the_coordinator_does_not_make_a_slow_exchange_a_quick_one() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    for _ in range(3):  # rounds that take ten seconds teach what the next one may take
        beat_for(driver, 10, 1, 2)
        for number in (1, 2):
            driver.vote(number)
    step, epoch = driver.machine.state.outer_step, driver.machine.state.epoch
    driver.vote(1)
    driver.now += 30.0
    driver.feed(Tick())  # the coordinator was away
    beat = Heartbeat(epoch=epoch, outer_step=step, progress=1, blocked=True, ready=True)
    for _ in range(30):
        for number in (1, 2):
            driver.says(number, beat)
        driver.wait(1.0)
    assert driver.member_numbers() == [1, 2]


def beat_for(driver: CoordinatorDriver, seconds: int, *numbers: int) -> None:
    """These say each second that they have handed in and wait for others."""
    state = driver.machine.state
    beat = Heartbeat(epoch=state.epoch, outer_step=state.outer_step, progress=1, blocked=True, ready=True)
    for _ in range(seconds):
        for number in numbers:
            driver.says(number, beat)
        driver.wait(1.0)


def test_one_exchange_that_hung_does_not_make_the_next_one_wait_four_times_as_long() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    beat_for(driver, 60, 1, 2)
    for number in (1, 2):
        driver.vote(number)
    driver.vote(1)
    beat_for(driver, 9, 1, 2)
    assert driver.member_numbers() == [1]


def test_who_never_votes_does_not_make_the_next_one_wait_longer() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3)
    for _ in range(3):  # it comes back each time
        driver.vote(1)
        driver.vote(2)
        beat_for(driver, 10, 1, 2, 3)
        assert driver.member_numbers() == [1, 2], "it went within the floor of 8 s"
        gone_at = driver.now
        while 3 not in driver.member_numbers():
            driver.join(3, driver.machine.state.committed, epoch=driver.machine.state.epoch)
            beat_for(driver, 1, 1, 2)
            driver.vote(1)
            driver.vote(2)
        assert 9 * 7 <= driver.now - gone_at <= 9 * 10, "it stays out for nine times as long as it was awaited"


def test_member_alone_that_never_votes_makes_way_for_a_learner_with_the_state() -> None:
    driver = CoordinatorDriver(stall_initial_s=20.0).with_veterans(1)
    beat_for(driver, 100, 1)
    assert driver.member_numbers() == [1], "nobody else can go on"
    driver.join(2, driver.machine.state.committed)
    beat_for(driver, 2, 1)
    assert driver.member_numbers() == [], "a newcomer waits a while for those whose work was committed"
    beat_for(driver, 30, 2)
    assert driver.member_numbers() == [2]


def test_member_that_has_voted_is_not_dropped_because_it_waits_itself() -> None:
    """It waits for a quorum that is not there, and for nobody's sake but its own."""
    driver = CoordinatorDriver(min_peers=2, stall_initial_s=5.0).with_veterans(1, 2)
    driver.says(2, Leave(now=True))
    driver.vote(1)
    state = driver.machine.state
    for _ in range(30):
        driver.says(1, Heartbeat(epoch=state.epoch, outer_step=state.outer_step, progress=1, blocked=False))
        driver.wait(1.0)
    assert driver.member_numbers() == [1]


def test_newcomer_does_not_go_on_alone_while_the_only_proven_member_is_late() -> None:
    driver = CoordinatorDriver(grace_initial_s=2.0).with_veterans(1)
    driver.join(2, driver.machine.state.committed)
    driver.vote(1)
    for _ in range(20):
        beat_for(driver, 1, 2)
        state = driver.machine.state
        works = Heartbeat(epoch=state.epoch, outer_step=state.outer_step, progress=1, blocked=False)
        driver.says(1, works)
    assert driver.member_numbers() == [1, 2], "nobody has reached the second one yet"


def test_few_votes_are_enough_when_nothing_moves_for_as_long_as_a_member_may_stand_still() -> None:
    driver = CoordinatorDriver(stall_initial_s=20.0).with_veterans(1, 2, 3, 4)
    driver.vote(1)
    beat_for(driver, 18, 1, 2, 3, 4)
    assert driver.member_numbers() == [1, 2, 3, 4]
    beat_for(driver, 4, 1, 2, 3, 4)
    assert driver.member_numbers() == [1]


def test_two_of_four_votes_start_no_deadline_of_an_exchange() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3, 4)
    step, epoch = driver.machine.state.outer_step, driver.machine.state.epoch
    driver.vote(1)
    driver.vote(2)
    beat = Heartbeat(epoch=epoch, outer_step=step, progress=1, blocked=True, ready=True)
    for _ in range(60):
        for number in (1, 2, 3, 4):
            driver.says(number, beat)
        driver.wait(1.0)
    assert driver.member_numbers() == [1, 2, 3, 4]


def test_overruled_voter_is_no_holder_after_a_restart() -> None:
    """Those who held the state never come back: the run goes back to what the overruled one holds."""
    driver = CoordinatorDriver(orphan_timeout_s=60.0).with_veterans(1, 2, 3)
    for number in (1, 2):
        driver.vote(number)
    driver.vote(3, bytes(32))
    cut = max(place for place, record in enumerate(driver.journal) if isinstance(record, CommitRecord))
    del driver.journal[cut + 1 :]  # it crashed before it wrote that the third one is out
    again = driver.recovered()
    again.join(3, held(again.machine.state.outer_step - 1), epoch=again.machine.state.epoch)
    newest = again.machine.state.outer_step
    while not again.records(RollbackRecord):
        assert again.now < 100.0, "it waits for holders that are none"
        again.join(3, held(newest - 1), epoch=again.machine.state.epoch)
        again.wait(1.0)
    assert again.machine.state.outer_step == newest - 1


def test_older_start_of_a_peer_that_still_speaks_is_told_of_the_newer_one() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    driver.join(2, incarnation=2)
    beat = Heartbeat(epoch=driver.machine.state.epoch, outer_step=OuterStep(1), progress=1, blocked=False)
    for word in (beat, Join(address="host2:1", manifest_digest=MANIFEST)):
        driver.says(ref(2, 1), word)
        refused = driver.told(2, Refused, incarnation=1)
        assert refused.code == 5
        assert "copy" in refused.reason
    assert not driver.all_told(2, incarnation=2)


@pytest.mark.parametrize("report_first", [True, False])
def test_lost_connection_and_a_report_drop_at_once_in_either_order(report_first: bool) -> None:
    driver = CoordinatorDriver().with_members(1, 2, 3)
    if report_first:
        driver.fail(1, 3)
    driver.feed(PeerConnectionLost(sender=ref(3)))
    if not report_first:
        driver.fail(1, 3)
    assert driver.member_numbers() == [1, 2]


def test_suspect_with_an_old_heartbeat_is_dropped_without_another_try() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.wait(2.6)
    driver.fail(1, 2)
    driver.wait(0.3)
    assert driver.member_numbers() == [1]


def test_vote_of_who_has_reported_a_failure_does_not_count() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    step = driver.machine.state.outer_step
    driver.fail(1, 2)
    driver.vote(1)
    driver.vote(2)
    assert driver.machine.state.outer_step == step


# ------------------------------------------------------------------------ leases


def test_same_serial_gives_the_same_leases_and_one_record() -> None:
    driver = CoordinatorDriver().with_members(1)
    assert lease(driver, 1, 1) == lease(driver, 1, 1) == (IndexRange(0, 10),)
    assert len(driver.records(LeaseRecord)) == 1
    assert lease(driver, 1, 2) == (IndexRange(10, 20),)


def test_leases_of_the_dead_return_without_what_was_committed() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    taken = lease(driver, 2, 1)
    driver.vote(1)
    driver.vote(2, None, IndexRange(taken[0].start, taken[0].start + 4))
    driver.says(2, Leave(now=True))
    rest = (IndexRange(taken[0].start + 4, taken[0].stop),)
    assert [record.ranges for record in driver.records(ReleaseRecord)] == [rest]
    assert lease(driver, 1, 1, 6) == rest


def test_member_cannot_consume_what_it_does_not_own() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    owned = lease(driver, 1, 1)
    driver.vote(1, None, *owned)
    driver.vote(2, None, *owned)
    assert [item.consumed for item in driver.records(CommitRecord)[-1].contributions] == [owned, ()]


def test_request_from_before_the_last_admission_is_void() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    before = driver.machine.state.epoch
    driver.says(2, Leave(now=True))
    driver.join(2, driver.machine.state.committed, epoch=driver.machine.state.epoch)
    driver.vote(1)
    assert driver.member_numbers() == [1, 2]
    driver.says(2, LeaseRequest(epoch=before, serial=1, num_samples=5))
    assert driver.all_told(2) == []


# ------------------------------------------------------------------------ restart


def test_restarted_coordinator_keeps_epoch_members_and_step_and_answers_with_them() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    again = driver.recovered()
    assert again.machine.state.view == driver.machine.state.view
    again.says(1, Join(epoch=again.machine.state.epoch, address="host1:1", manifest_digest=MANIFEST, held=held(1)))
    assert again.told(1, NewView).view == driver.machine.state.view
    again.vote(1)
    again.vote(2)
    assert again.machine.state.outer_step == driver.machine.state.outer_step + 1


def test_member_that_does_not_come_back_after_a_restart_is_dropped_after_the_grace() -> None:
    again = CoordinatorDriver().with_members(1, 2).recovered()
    for second in range(12):
        again.now = 1.0 + second
        again.says(1, Heartbeat(epoch=Epoch(2), outer_step=held(1).outer_step, progress=0, blocked=False))
    assert again.member_numbers() == [1]


def test_commit_that_was_journaled_but_not_told_is_told_after_the_restart() -> None:
    driver = CoordinatorDriver().with_members(1)
    old = driver.machine.state.view
    driver.vote(1)
    again = driver.recovered()
    again.says(1, Heartbeat(epoch=old.epoch, outer_step=old.outer_step, progress=0, blocked=True))
    assert again.effects == [], "it has just been opened; the next heartbeat is late enough"
    again.now += 1.0
    again.says(1, Heartbeat(epoch=old.epoch, outer_step=old.outer_step, progress=0, blocked=True))
    assert again.told(1, Commit).certificate.made.outer_step == old.outer_step + 1


def test_release_that_a_crash_cut_off_is_made_up_for() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    taken = lease(driver, 2, 1)
    driver.says(2, Leave(now=True))
    journal = driver.journal[:-1]
    assert isinstance(driver.journal[-1], ReleaseRecord)
    machine = CoordinatorMachine.recover(driver.config, journal, driver.now)
    again = CoordinatorDriver(machine, driver.now)
    again.feed(Tick())
    assert [record.ranges for record in again.records(ReleaseRecord)] == [taken]


def test_journal_cut_anywhere_gives_a_state_that_the_whole_journal_went_through() -> None:
    driver = CoordinatorDriver().with_members(1, 2, 3)
    lease(driver, 2, 1)
    driver.fail(1, 3)
    driver.now += 0.2
    driver.feed(Tick())
    for number in (1, 2, 3):
        driver.vote(number)
    newest = (0, 0)
    for length in range(len(driver.journal) + 1):
        machine = CoordinatorMachine.recover(driver.config, driver.journal[:length], 0.0)
        machine.check_invariants()
        assert (machine.state.epoch, machine.state.outer_step) >= newest
        newest = (machine.state.epoch, machine.state.outer_step)
    assert newest == (driver.machine.state.epoch, driver.machine.state.outer_step)
