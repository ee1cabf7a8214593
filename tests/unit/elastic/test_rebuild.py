# SPDX-License-Identifier: Apache-2.0
"""A coordinator whose journal is lost: what it asks, when it goes on, from what, and who is told."""

from typing import Any

import msgspec
import pytest

from isthmus.collective.core.types import Epoch, OuterStep
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.config import RebuildRule
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.events import (
    BecomeLearner,
    CatchUp,
    CaughtUp,
    Connected,
    InstallStaged,
    LeaveRequested,
    Resign,
    Tick,
)
from isthmus.elastic.core.messages import (
    Commit,
    Evicted,
    Goodbye,
    Heartbeat,
    Held,
    IndexRange,
    Join,
    LeaseGrant,
    LeaseRequest,
    Leave,
    NewView,
    Rebuilding,
    Rebuilt,
    Refused,
    Synced,
    Welcome,
)
from isthmus.elastic.core.place import Phase
from isthmus.elastic.core.rebuild import EPOCHS_A_REBUILD, MAX_EPOCH, MOST_AHEAD
from isthmus.elastic.core.records import Genesis, RebuildRecord, ViewRecord
from tests.unit.elastic.machines import (
    KEYS,
    MANIFEST,
    OTHERS,
    CoordinatorDriver,
    MemberDriver,
    certificate,
    held,
    key,
    member,
    ref,
    view,
)

LAST = certificate(3, 4, 1, 2, 3)
"""The newest commit: members 1, 2 and 3 made step 5 in epoch 3."""
BEFORE = certificate(3, 3, 1, 2, 3)
FORGED = certificate(9, 90, 1, 2, 3, keys=OTHERS)
OLDER_RUN = certificate(2, 3, 1, 2)
GRACE_S = 5.0


def rebuilding(rule: RebuildRule = RebuildRule.MAJORITY, **config: Any) -> CoordinatorDriver:
    driver = CoordinatorDriver(**config)
    driver.machine = CoordinatorMachine.recover(driver.config, [], driver.now, rebuild=rule)
    return driver


def joins(
    driver: CoordinatorDriver,
    number: int,
    proof: Certificate | None = LAST,
    *,
    epoch: int = 3,
    state: Held | None = None,
    incarnation: int = 1,
) -> None:
    holds = state if state is not None or proof is None else proof.made
    message = Join(
        epoch=Epoch(epoch), address=f"host{number}:1", manifest_digest=MANIFEST, held=holds, certificate=proof
    )
    driver.says(ref(number, incarnation), message)


def rebuilt(*numbers: int) -> CoordinatorDriver:
    """Rebuilt from LAST, and these have come back as learners that know of it."""
    driver = rebuilding()
    for number in (1, 2, 3):
        joins(driver, number)
    driver.wait(GRACE_S)
    (record,) = driver.records(RebuildRecord)
    for number in numbers:
        joins(driver, number, epoch=record.epoch)
    return driver


# ------------------------------------------------------------------------ when it goes on


def test_nobody_is_asked_to_found_a_run_whose_journal_is_lost() -> None:
    driver = rebuilding()
    joins(driver, 1, None)
    assert driver.all_told(1) == [Rebuilding(testified=0, needed=1)]
    joins(driver, 2)
    assert driver.all_told(2) == [Rebuilding(testified=1, needed=2)]
    assert driver.journal == []


def test_when_all_members_of_the_newest_certificate_have_testified_everybody_else_has_time() -> None:
    driver = rebuilding()
    joins(driver, 1)
    joins(driver, 2, BEFORE)
    assert driver.journal == []
    joins(driver, 3)
    assert driver.journal == [], "there may be newer members that have not dialled yet"
    driver.wait(GRACE_S)
    assert driver.journal == [
        RebuildRecord(
            epoch=Epoch(3 + EPOCHS_A_REBUILD),
            certificate=LAST,
            testified=(ref(1), ref(2), ref(3)),
            insisted=False,
        )
    ]
    for number in (1, 2, 3):
        rebuilt = Rebuilt(epoch=Epoch(3 + EPOCHS_A_REBUILD), certificate=LAST, committed=LAST.made)
        assert driver.told(number, Rebuilt) == rebuilt


def test_majority_is_enough_when_the_others_have_had_their_time() -> None:
    driver = rebuilding(rebuild_grace_s=5.0)
    joins(driver, 1)
    driver.now = 1.0
    joins(driver, 2)
    driver.wait(4.9)
    assert driver.journal == []
    driver.wait(0.2)
    (record,) = driver.records(RebuildRecord)
    assert (record.certificate, record.testified, record.insisted) == (LAST, (ref(1), ref(2)), False)


def test_absence_of_the_coordinator_that_ends_just_after_its_patience_is_one_all_the_same() -> None:
    driver = rebuilding(orphan_timeout_s=40.0)
    joins(driver, 1)
    driver.wait(2.0)
    driver.now = 40.1  # it was suspended: nobody could testify
    driver.feed(Tick())
    assert driver.all_told(1) == []
    driver.wait(39.0)
    assert driver.all_told(1) == []
    driver.wait(1.0)
    assert driver.told(1, Refused).code == 7


def test_half_of_the_members_is_no_majority_and_they_are_told_after_the_timeout() -> None:
    newest = certificate(3, 4, 1, 2, 3, 4)
    driver = rebuilding(orphan_timeout_s=60.0)
    joins(driver, 1, newest)
    joins(driver, 2, newest)
    driver.wait(59.0)
    assert driver.journal == []
    driver.wait(1.0)
    for number in (1, 2):
        refused = driver.told(number, Refused)
        assert refused.code == 7
        assert "2 of the 4 members" in refused.reason
    assert driver.journal == []
    joins(driver, 3, newest)
    assert driver.told(3, Rebuilding) == Rebuilding(testified=1, needed=3), "it goes on asking"


def test_operator_who_insists_goes_on_with_fewer_and_it_is_written_down() -> None:
    driver = rebuilding(RebuildRule.INSIST, rebuild_grace_s=5.0)
    joins(driver, 1)
    driver.wait(5.0)
    (record,) = driver.records(RebuildRecord)
    assert (record.certificate, record.testified, record.insisted) == (LAST, (ref(1),), True)


def test_who_brings_no_certificate_testifies_nothing() -> None:
    driver = rebuilding()
    joins(driver, 1)
    joins(driver, 2, None, state=held(5))
    joins(driver, 3, None, state=held(5))
    driver.wait(30.0)
    assert driver.journal == []


def test_stranger_with_an_old_certificate_is_none_of_the_majority_and_no_harm() -> None:
    driver = rebuilding()
    joins(driver, 8, OLDER_RUN, epoch=2)
    joins(driver, 9, OLDER_RUN, epoch=2)
    joins(driver, 1)
    driver.wait(30.0)
    assert driver.journal == []
    joins(driver, 2)
    joins(driver, 3)
    driver.wait(GRACE_S)
    (record,) = driver.records(RebuildRecord)
    assert record.certificate == LAST


def test_all_of_an_old_view_are_not_the_run_while_the_members_of_a_newer_one_are_on_their_way() -> None:
    driver = rebuilding()
    joins(driver, 1, certificate(1, 1, 1), epoch=1)  # it was alone once, and away for long
    driver.wait(0.5)
    assert driver.journal == []
    joins(driver, 2)
    joins(driver, 3)
    driver.wait(GRACE_S)
    (record,) = driver.records(RebuildRecord)
    assert record.certificate == LAST


def test_newer_certificate_gives_its_own_members_time_to_come() -> None:
    driver = rebuilding(rebuild_grace_s=5.0)
    joins(driver, 1, OLDER_RUN, epoch=2)
    driver.now = 4.0
    joins(driver, 3)  # names 1, 2 and 3; 1 and 3 are a majority of them from now on
    driver.wait(4.0)
    assert driver.journal == []
    driver.wait(1.0)
    (record,) = driver.records(RebuildRecord)
    assert record.certificate == LAST


def test_commit_of_a_newer_epoch_counts_before_a_later_step_that_an_earlier_rebuild_gave_up() -> None:
    driver = rebuilding()
    given_up, newer = certificate(3, 9, 1, 2, 3), certificate(EPOCHS_A_REBUILD, 5, 1, 2, 3)
    joins(driver, 1, newer, epoch=EPOCHS_A_REBUILD)
    joins(driver, 2, newer, epoch=EPOCHS_A_REBUILD)
    joins(driver, 3, given_up)
    driver.wait(GRACE_S)
    (record,) = driver.records(RebuildRecord)
    assert record.certificate == newer


def test_forged_certificate_is_counted_and_counts_for_nothing() -> None:
    driver = rebuilding()
    joins(driver, 1, FORGED)
    assert driver.machine.counters["forged_certificate"] == 1
    joins(driver, 2)
    joins(driver, 3)
    driver.wait(5.0)
    (record,) = driver.records(RebuildRecord)
    assert (record.certificate, record.testified) == (LAST, (ref(2), ref(3)))


def test_rebuilt_epoch_is_beyond_every_epoch_that_anybody_has_named() -> None:
    driver = rebuilding()
    joins(driver, 1, epoch=3)
    joins(driver, 2, epoch=17)
    joins(driver, 3, epoch=5)
    driver.wait(GRACE_S)
    (record,) = driver.records(RebuildRecord)
    assert record.epoch == 17 + EPOCHS_A_REBUILD
    assert driver.machine.state.epoch == record.epoch


def test_rebuilt_epoch_is_beyond_that_of_an_older_start_whose_folder_was_copied() -> None:
    """Seed 2481, while methods could be planned that are refused now."""
    driver = rebuilding()
    joins(driver, 1, epoch=3, incarnation=2)
    joins(driver, 1, epoch=17, incarnation=1)
    joins(driver, 2, epoch=5)
    joins(driver, 3, epoch=5)
    driver.wait(GRACE_S)
    (record,) = driver.records(RebuildRecord)
    assert record.epoch == 17 + EPOCHS_A_REBUILD


def test_an_epoch_that_one_peer_names_far_beyond_every_proof_uses_up_none_of_the_others() -> None:
    driver = rebuilding()
    joins(driver, 66, None, epoch=MAX_EPOCH)  # before anybody has proved anything
    joins(driver, 66, None, epoch=3 + MOST_AHEAD + 1, incarnation=2)
    for number in (1, 2, 3):
        joins(driver, number, epoch=17)
    joins(driver, 66, None, epoch=MAX_EPOCH, incarnation=3)
    driver.wait(GRACE_S)
    (record,) = driver.records(RebuildRecord)
    assert record.epoch == 17 + EPOCHS_A_REBUILD


def test_epochs_of_eight_rebuilds_that_were_lost_again_count_whoever_has_heard_of_them() -> None:
    driver = rebuilding()
    joins(driver, 4, None, epoch=3 + MOST_AHEAD)
    for number in (1, 2, 3):
        joins(driver, number)
    driver.wait(GRACE_S)
    (record,) = driver.records(RebuildRecord)
    assert record.epoch == 3 + MOST_AHEAD + EPOCHS_A_REBUILD


def test_epoch_that_no_run_reaches_is_refused() -> None:
    driver = rebuilding()
    joins(driver, 1, epoch=2**40)
    assert driver.told(1, Refused).code == 5


def test_other_manifest_is_refused_while_rebuilding() -> None:
    driver = rebuilding()
    driver.says(1, Join(address="host1:1", manifest_digest=b"\0" * 32, certificate=LAST))
    assert driver.told(1, Refused).code == 5


def test_newer_start_of_a_peer_speaks_for_it_and_the_older_is_ignored() -> None:
    driver = rebuilding()
    joins(driver, 1, BEFORE, incarnation=2)
    joins(driver, 1, LAST, incarnation=1)
    assert driver.all_told(1) == []
    joins(driver, 2, BEFORE)
    joins(driver, 3, BEFORE)
    driver.wait(GRACE_S)
    (record,) = driver.records(RebuildRecord)
    assert record.certificate == BEFORE


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(epoch=Epoch(3), outer_step=OuterStep(5), progress=0, blocked=False),
        Synced(held=held(5)),
        LeaseRequest(epoch=Epoch(3), serial=1, num_samples=4),
    ],
)
def test_whatever_is_said_while_rebuilding_is_answered_with_the_question(message: Any) -> None:
    driver = rebuilding()
    driver.says(1, message)
    assert driver.all_told(1) == [Rebuilding(testified=0, needed=1)]


def test_peer_that_leaves_while_rebuilding_may_go_and_testifies_no_more() -> None:
    driver = rebuilding()
    joins(driver, 1)
    joins(driver, 2)
    driver.says(2, Leave())
    assert isinstance(driver.told(2, Goodbye), Goodbye)
    driver.wait(30.0)
    assert driver.journal == []


def test_who_leaves_in_order_and_holds_a_state_stays_until_the_journal_is_rebuilt_and_another_holds_it() -> None:
    driver = rebuilding()
    joins(driver, 1)
    joins(driver, 2)
    leave = Leave(held=LAST.made, address="host2:1")
    driver.says(2, leave)
    assert driver.told(2, Rebuilding).testified == 2
    driver.wait(GRACE_S)
    assert driver.told(2, Rebuilt).certificate == LAST
    driver.says(2, leave)
    assert driver.told(2, Welcome).target == LAST.made, "it stays"
    joins(driver, 1, epoch=driver.machine.state.epoch)
    driver.says(2, leave)
    assert driver.told(2, Goodbye) == Goodbye(outer_step=LAST.made.outer_step, held=LAST.made)


def test_who_wants_to_go_at_once_goes_while_the_journal_is_rebuilt() -> None:
    driver = rebuilding()
    joins(driver, 1)
    driver.says(1, Leave(now=True, held=LAST.made, address="host1:1"))
    assert isinstance(driver.told(1, Goodbye), Goodbye)


def test_empty_journal_is_a_lost_one_as_soon_as_somebody_proves_that_the_run_has_begun() -> None:
    driver = CoordinatorDriver()
    joins(driver, 9, None, epoch=0)
    assert driver.told(9, Welcome).found
    joins(driver, 1)
    assert driver.all_told(1) == [Rebuilding(testified=1, needed=2)]
    driver.says(9, Synced(held=held(0, kind=9)))
    assert driver.told(9, Rebuilding).needed == 2, "the founder's state is no beginning any more"
    joins(driver, 2)
    joins(driver, 3)
    driver.wait(GRACE_S)
    assert driver.machine.state.committed == LAST.made


def test_run_that_committed_nothing_begins_anew_if_the_operator_insists() -> None:
    driver = rebuilding(RebuildRule.INSIST, first_index=7)
    joins(driver, 1, None, epoch=2, state=held(0))
    driver.wait(5.0)
    (record,) = driver.records(RebuildRecord)
    assert (record.certificate, record.epoch) == (None, 2 + EPOCHS_A_REBUILD)
    assert driver.told(1, Rebuilt) == Rebuilt(epoch=record.epoch)
    joins(driver, 1, None, epoch=record.epoch, state=held(0))
    assert driver.records(Genesis) == [Genesis(outer_step=OuterStep(0), digest=held(0).digest, next_index=7)]
    assert driver.told(1, NewView).view.epoch == record.epoch + 1


# ------------------------------------------------------------------------ what follows


def test_all_who_testified_begin_together_from_the_certificates_state_and_data() -> None:
    driver = rebuilt(1, 2)
    assert driver.records(ViewRecord) == [], "the third is awaited"
    joins(driver, 3, epoch=driver.machine.state.epoch)
    (record,) = driver.records(ViewRecord)
    assert record.view.epoch == 3 + EPOCHS_A_REBUILD + 1
    assert driver.member_numbers() == [1, 2, 3]
    assert (record.view.outer_step, record.view.digest) == (LAST.made.outer_step, LAST.digest)
    assert driver.machine.state.leases.position() == LAST.position


def test_who_does_not_come_back_is_not_awaited_for_ever() -> None:
    driver = rebuilt(1, 2)
    beat = Heartbeat(epoch=driver.machine.state.epoch, outer_step=OuterStep(5), progress=0, blocked=False)
    for _ in range(2):
        assert driver.member_numbers() == []
        driver.wait(2.5)
        for number in (1, 2):
            driver.says(number, beat)
    assert driver.member_numbers() == [1, 2]


def test_while_the_coordinator_was_away_nobody_could_come_back() -> None:
    driver = rebuilt(1, 2)
    driver.now += 30.0
    driver.feed(Tick())
    assert driver.member_numbers() == [], "the third may have dialled already"
    joins(driver, 3, epoch=driver.machine.state.epoch)
    assert driver.member_numbers() == [1, 2, 3]


def test_samples_that_the_lost_journal_gave_away_are_given_again_and_consumed_ones_never() -> None:
    driver = rebuilt(1, 2, 3)
    epoch = driver.machine.state.epoch
    driver.says(1, LeaseRequest(epoch=epoch, serial=1, num_samples=12))
    assert driver.told(1, LeaseGrant).ranges == (IndexRange(40, 50), IndexRange(100, 102))


def test_first_commit_after_the_rebuild_continues_the_chain() -> None:
    driver = rebuilt(1, 2, 3)
    for number in (1, 2, 3):
        driver.vote(number)
    told = driver.told(1, Commit).certificate
    assert told.follows(LAST)
    assert told.order == (3 + EPOCHS_A_REBUILD + 1, 6)


def test_restarted_coordinator_goes_on_from_the_rebuilt_journal() -> None:
    driver = rebuilt(1, 2, 3).recovered()
    assert driver.member_numbers() == [1, 2, 3]
    for number in (1, 2, 3):
        driver.vote(number)
    assert driver.machine.state.outer_step == 6
    again = CoordinatorMachine.recover(driver.config, driver.journal, 9.0, rebuild=RebuildRule.MAJORITY)
    assert not again.is_rebuilding, "a supervisor may start it with the same flag for ever"


def test_member_that_comes_late_must_hear_that_the_run_was_rebuilt_before_it_may_learn() -> None:
    driver = rebuilding()
    joins(driver, 1)
    joins(driver, 2)
    driver.wait(5.0)
    epoch = driver.machine.state.epoch
    driver.says(3, Heartbeat(epoch=Epoch(3), outer_step=OuterStep(5), progress=0, blocked=False))
    assert driver.all_told(3) == [Rebuilt(epoch=epoch, certificate=LAST, committed=LAST.made)]
    joins(driver, 3)
    assert driver.all_told(3) == [Rebuilt(epoch=epoch, certificate=LAST, committed=LAST.made)]
    joins(driver, 3, epoch=epoch)
    assert driver.told(3, Welcome).target == LAST.made


def test_peer_that_has_heard_of_another_rebuild_which_was_lost_too_takes_the_run_above_it() -> None:
    driver = rebuilt(1, 2, 3)
    heard = driver.machine.state.epoch + EPOCHS_A_REBUILD
    joins(driver, 4, epoch=heard)
    (_, record) = driver.records(ViewRecord)
    assert record.view.epoch > heard + EPOCHS_A_REBUILD
    assert driver.member_numbers() == [1, 2, 3]
    assert driver.told(1, NewView).view == driver.told(3, NewView).view == record.view
    assert driver.told(4, Welcome).epoch == record.view.epoch


def test_no_peer_takes_the_run_above_an_epoch_that_no_rebuild_reaches() -> None:
    driver = rebuilt(1, 2, 3)
    joins(driver, 4, epoch=2**31)
    assert driver.told(4, Refused).code == 9
    assert len(driver.records(ViewRecord)) == 1


def test_new_starts_that_name_ever_later_epochs_lift_a_rebuilt_run_a_few_times_and_not_above_its_bound() -> None:
    driver = rebuilt(1, 2, 3)
    began = driver.machine.state.epoch
    for incarnation in range(1, 100):
        state = driver.machine.state
        joins(driver, 66, None, epoch=state.epoch + 1, incarnation=2 * incarnation)
        joins(driver, 66, None, epoch=state.epoch + 8 * EPOCHS_A_REBUILD, incarnation=2 * incarnation + 1)
        refused = driver.all_told(66, 2 * incarnation + 1)
        for number in driver.member_numbers():
            driver.vote(number)  # what is committed above makes no more room
    assert [item.code for item in refused if isinstance(item, Refused)] == [9]
    lifts = [item for item in driver.records(ViewRecord) if "has seen epoch" in item.cause]
    assert 1 <= len(lifts) <= MOST_AHEAD // EPOCHS_A_REBUILD
    assert driver.machine.state.epoch < began + MOST_AHEAD + 2 * EPOCHS_A_REBUILD
    assert driver.member_numbers()[:3] == [1, 2, 3]


def test_peer_that_alone_heard_of_a_later_commit_is_told_and_counted() -> None:
    driver = rebuilding()
    joins(driver, 1)
    joins(driver, 2)
    driver.wait(5.0)
    later = certificate(3, 5, 1, 2, 3, parent=LAST)
    joins(driver, 3, later)
    epoch = driver.machine.state.epoch
    assert driver.all_told(3) == [Rebuilt(epoch=epoch, certificate=LAST, committed=LAST.made)]
    assert driver.machine.counters["newer_certificate_given_up"] == 1


def test_run_whose_last_commit_is_the_newest_is_complete() -> None:
    driver = rebuilding()
    end = certificate(3, 4, 1, 2, final=True)
    joins(driver, 1, end)
    joins(driver, 2, end)
    driver.wait(GRACE_S)
    assert driver.machine.state.final
    assert driver.told(1, Rebuilt).certificate == end
    joins(driver, 3, None, epoch=0)
    assert driver.told(3, Refused).code == 0


# ------------------------------------------------------------------------ at a member


def active(**config: Any) -> MemberDriver:
    """Member 1, active from LAST in epoch 3."""
    return MemberDriver(held(5), certificate=LAST, **config).active_in(view(4, 5, 1, 2, 3))


def staged() -> MemberDriver:
    return active().hands_in()


REBUILT_EPOCH = Epoch(4 + EPOCHS_A_REBUILD)


def test_join_carries_the_newest_certificate() -> None:
    driver = MemberDriver(held(5), certificate=LAST)
    driver.feed(Connected())
    (join,) = driver.said()
    assert isinstance(join, Join)
    assert (join.certificate, join.epoch) == (LAST, 3)


def test_certificate_with_a_wrong_seal_is_never_installed_from() -> None:
    driver = staged()
    forged = certificate(4, 5, parent=LAST, keys=OTHERS)
    assert driver.hears(Commit(certificate=forged)) == []
    assert driver.machine.counters["forged_certificate"] == 1
    driver.hears(Commit(certificate=certificate(4, 5, parent=LAST)))
    assert [type(effect) for effect in driver.ordered()] == [InstallStaged]


def test_certificate_that_does_not_follow_its_parent_is_never_installed_from() -> None:
    driver = staged()
    assert driver.hears(Commit(certificate=certificate(4, 5, parent=BEFORE))) == []
    assert driver.machine.counters["broken_chain"] == 1
    assert driver.machine.held == held(5)


def test_member_that_is_asked_repeats_its_join_on_its_timer_until_it_is_told_more() -> None:
    driver = active(resend_interval_s=1.0, heartbeat_interval_s=1.0)
    driver.hears(Rebuilding(testified=0, needed=1))
    assert driver.said() == []
    for _ in range(2):
        driver.now += 1.0
        driver.feed(Tick())
        assert Join in {type(item) for item in driver.said()}
    driver.hears(NewView(view=view(4, 5, 1, 2, 3)))
    driver.now += 1.0
    driver.feed(Tick())
    assert {type(item) for item in driver.said()} == {Heartbeat}


def test_member_that_leaves_and_is_asked_what_it_holds_says_that_too_and_stays() -> None:
    driver = active(resend_interval_s=1.0, heartbeat_interval_s=1.0)
    driver.feed(LeaveRequested(now=False))
    driver.hears(Rebuilding(testified=0, needed=2))
    assert driver.machine.leaves_after == "handover"
    driver.now += 1.0
    driver.feed(Tick())
    assert {type(said) for said in driver.said()} >= {Join, Leave}


def test_member_of_a_rebuilt_run_forgets_payload_and_leases_and_joins_again() -> None:
    driver = staged()
    driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=LAST))
    assert BecomeLearner in [type(effect) for effect in driver.ordered()]
    (join,) = driver.said()
    assert isinstance(join, Join)
    assert (join.epoch, join.held, join.certificate) == (REBUILT_EPOCH, held(5), LAST)
    assert driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=LAST)) == [], "a second copy"


def test_member_that_has_the_newest_commit_staged_installs_it_when_it_hears_of_the_rebuild() -> None:
    driver = staged()
    made = certificate(4, 5, 1, 2, 3, parent=LAST)
    driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=made))
    assert InstallStaged(key=key(4, 5), held=held(6), final=False, position=made.position) in driver.ordered()
    assert driver.kept() == [made]
    (join,) = driver.said()
    assert isinstance(join, Join)
    assert join.held == held(6)


def test_member_that_alone_heard_of_a_later_commit_goes_back_and_fetches_the_runs_state() -> None:
    driver = staged()
    driver.hears(Commit(certificate=certificate(4, 5, 1, 2, 3, parent=LAST)))
    assert driver.machine.held == held(6)
    driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=LAST))
    (join,) = driver.said()
    assert isinstance(join, Join)
    assert (join.held, join.certificate) == (None, LAST)
    assert driver.kept() == [LAST]
    donors = (member(2), member(3))
    driver.hears(Welcome(epoch=Epoch(REBUILT_EPOCH + 1), target=held(5), donors=donors))
    assert driver.ordered() == [CatchUp(target=held(5), donors=donors)]
    driver.feed(CaughtUp(held=held(5)))
    assert driver.said() == [Synced(held=held(5))]


def test_word_from_before_the_rebuild_that_comes_late_sends_nobody_home() -> None:
    driver = rebuilding()
    joins(driver, 1)
    joins(driver, 2)
    driver.wait(5.0)
    epoch = driver.machine.state.epoch
    joins(driver, 3, epoch=epoch)
    joins(driver, 3, certificate(3, 5, 1, 2, 3, parent=LAST))
    assert driver.all_told(3) == []
    driver.says(3, Synced(held=held(6)))
    assert driver.all_told(3) == []
    assert driver.machine.counters["belated_word"] == 2


def test_who_holds_what_it_cannot_prove_either_is_told_again_and_gives_it_up() -> None:
    driver = rebuilding(RebuildRule.INSIST)
    joins(driver, 1, None, epoch=2, state=held(0))
    driver.wait(5.0)
    epoch = driver.machine.state.epoch
    joins(driver, 1, None, epoch=epoch, state=held(0))
    joins(driver, 2, None, epoch=epoch, state=held(1))
    rebuilt = driver.told(2, Rebuilt)
    assert rebuilt.committed == held(0)
    member = MemberDriver(held(1))
    member.feed(Connected())
    member.hears(Rebuilt(epoch=epoch))
    assert member.machine.held == held(1), "it may be what the run begins with"
    member.hears(rebuilt)
    (join,) = member.said()
    assert isinstance(join, Join)
    assert join.held is None
    assert member.hears(rebuilt) == [], "a second copy"


@pytest.mark.parametrize(("committed", "kept"), [(held(6), held(6)), (held(7), None), (None, None)])
def test_state_that_the_run_holds_is_kept_by_who_has_not_written_down_that_it_was_rebuilt(committed, kept) -> None:
    driver = staged()
    driver.hears(Commit(certificate=certificate(4, 5, 1, 2, 3, parent=LAST)))
    driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=LAST, committed=committed))
    (join,) = driver.said()
    assert isinstance(join, Join)
    assert join.held == kept


def test_catch_up_that_ends_in_a_state_that_was_given_up_meanwhile_counts_for_nothing() -> None:
    driver = MemberDriver(catch_up_retry_s=0.5)
    driver.feed(Connected())
    driver.hears(Welcome(epoch=Epoch(4), target=held(6), donors=(member(2),)))
    driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=LAST))
    driver.feed(CaughtUp(held=held(6)))
    assert driver.machine.held is None
    driver.hears(Welcome(epoch=Epoch(REBUILT_EPOCH + 1), target=held(5), donors=(member(2),)))
    driver.now = 0.5
    driver.feed(Tick())
    assert driver.ordered() == [CatchUp(target=held(5), donors=(member(2),))]


def test_commit_that_the_run_has_gone_back_behind_is_not_believed_by_a_learner_that_was_on_its_way_to_it() -> None:
    """Another coordinator told of it, and with it the run's next commits did not fit the chain (seed 55061)."""
    driver = MemberDriver()
    driver.feed(Connected())
    given_up = certificate(4, 5, 1, 2, 3, parent=LAST)
    driver.hears(Welcome(epoch=Epoch(4), target=given_up.made, donors=(member(2),)))
    driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=None))
    driver.hears(Commit(certificate=given_up))
    assert driver.kept() == []
    made = certificate(REBUILT_EPOCH + 1, 5, 2)
    driver.hears(Commit(certificate=made))
    assert driver.kept() == [made]


def test_rebuilt_from_a_forged_certificate_is_not_believed() -> None:
    driver = active()
    assert driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=FORGED)) == []
    assert driver.machine.phase is Phase.ACTIVE
    assert driver.machine.counters["forged_certificate"] == 1


@pytest.mark.parametrize(
    "word",
    [
        NewView(view=view(1000, 6, 1, 2)),
        Welcome(epoch=Epoch(1000), target=held(6), donors=(member(2),)),
        Evicted(epoch=Epoch(1000), reason="dropped"),
        Rebuilt(epoch=Epoch(4), certificate=LAST),
        Commit(certificate=certificate(1000, 5, parent=LAST)),
        Commit(certificate=certificate(1000, 5, parent=LAST, final=True)),
    ],
)
def test_words_of_a_coordinator_that_came_back_with_the_lost_journal_are_refused(word: Any) -> None:
    driver = active()
    driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=LAST))
    driver.hears(Welcome(epoch=REBUILT_EPOCH, target=held(5), donors=()))
    assert driver.machine.phase is Phase.LEARNING
    assert driver.hears(word) == []
    assert driver.machine.phase is Phase.LEARNING
    assert driver.machine.counters["old_epoch"] == 1
    driver.hears(NewView(view=view(REBUILT_EPOCH + 1, 5, 1, 2, 3)))
    assert driver.machine.phase is Phase.ACTIVE
    before = driver.machine.counters["old_epoch"]
    assert driver.hears(word) == []
    assert driver.machine.phase is Phase.ACTIVE
    assert driver.machine.counters["old_epoch"] == before + 1


def test_peer_that_starts_again_remembers_from_its_certificate_which_journal_is_too_old() -> None:
    newest = certificate(REBUILT_EPOCH + 1, 5, parent=LAST)
    driver = MemberDriver(certificate=newest)
    driver.feed(Connected())
    (join,) = driver.said()
    stale = CoordinatorDriver().with_members(2, 3)
    stale.says(1, msgspec.structs.replace(join, certificate=None))
    assert stale.told(1, Refused).code == 9


# ------------------------------------------------------------------------ a journal that is an old copy


def stale_coordinator() -> CoordinatorDriver:
    """Its journal ends at step 1; members 1 and 2 are in its view."""
    return CoordinatorDriver().with_members(1, 2)


@pytest.mark.parametrize("number", [1, 5], ids=["member", "stranger"])
def test_coordinator_whose_journal_is_proved_to_be_an_old_copy_resigns(number: int) -> None:
    driver = stale_coordinator()
    state = driver.machine.state
    assert state.certificate is not None
    own = state.certificate.sealed(KEYS.of_the_run)
    joins(driver, number, own, epoch=state.epoch)
    assert not any(isinstance(effect, Resign) for effect in driver.effects)
    newer = certificate(state.view.epoch, state.outer_step, 1, 2, parent=own)
    joins(driver, number, newer, epoch=state.epoch)
    (resign,) = driver.effects
    assert isinstance(resign, Resign)
    assert "this journal ends at 1" in resign.reason


def test_certificate_without_the_runs_seal_proves_nothing_against_a_journal() -> None:
    driver = stale_coordinator()
    joins(driver, 5, FORGED, epoch=driver.machine.state.epoch, state=held(1))
    assert not any(isinstance(effect, Resign) for effect in driver.effects)


def test_final_commit_that_only_a_rebuild_tells_ends_the_run_here() -> None:
    driver = staged()
    end = certificate(4, 5, 1, 2, 3, parent=LAST, final=True)
    driver.hears(Rebuilt(epoch=REBUILT_EPOCH, certificate=end))
    assert InstallStaged(key=key(4, 5), held=held(6), final=True, position=end.position) in driver.ordered()
    assert Leave(now=True) in driver.said()
