# SPDX-License-Identifier: Apache-2.0
"""Who gets in, who is dropped, and what everybody is told."""

import pytest

from isthmus.collective.core.types import Epoch, OuterStep
from isthmus.elastic.core.events import PeerConnectionLost, Persist, SendToPeer, Tick
from isthmus.elastic.core.messages import (
    Commit,
    Evicted,
    Goodbye,
    Heartbeat,
    Join,
    LeaseRequest,
    Leave,
    Meet,
    NewView,
    PeerMessage,
    Refused,
    Synced,
    Welcome,
)
from isthmus.elastic.core.records import Genesis, ViewRecord
from tests.unit.elastic.machines import MANIFEST, CoordinatorDriver, held, key, ref


def beat(driver: CoordinatorDriver, number: int, progress: int = 0, *, blocked: bool = False) -> None:
    state = driver.machine.state
    driver.says(number, Heartbeat(epoch=state.epoch, outer_step=state.outer_step, progress=progress, blocked=blocked))


# ------------------------------------------------------------------------ beginning


def test_first_join_that_holds_a_state_begins_the_run_from_it() -> None:
    driver = CoordinatorDriver(first_index=500)
    driver.join(1, held(7))
    assert driver.records(Genesis) == [Genesis(outer_step=OuterStep(7), digest=held(7).digest, next_index=500)]
    assert driver.told(1, NewView).view.outer_step == 7
    assert driver.member_numbers() == [1]


def test_exactly_one_of_those_who_hold_nothing_is_asked_to_found() -> None:
    driver = CoordinatorDriver()
    driver.join(1)
    assert driver.told(1, Welcome).found
    driver.join(2)
    assert not driver.told(2, Welcome).found
    driver.says(1, Synced(held=held(0)))
    assert driver.member_numbers() == [1]


def test_founder_that_dies_is_replaced_by_another_learner() -> None:
    driver = CoordinatorDriver()
    driver.join(1)
    driver.join(2)
    driver.feed(PeerConnectionLost(sender=ref(1)))
    driver.now = 0.6
    driver.feed(Tick())
    assert driver.told(2, Welcome).found


def test_founder_that_comes_back_late_with_its_own_state_is_sent_the_runs() -> None:
    driver = CoordinatorDriver()
    driver.join(2, held(0))
    driver.join(1, held(0, kind=9))
    assert driver.told(1, Welcome).target == held(0)
    assert driver.member_numbers() == [2]


# ------------------------------------------------------------------------ refusals and strangers


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"manifest_digest": b"\0" * 32}, 5),
        ({"held": held(99)}, 5),
        ({"epoch": Epoch(99)}, 9),
    ],
)
def test_join_that_cannot_take_part_is_refused_with_the_exit_code(change: dict[str, object], code: int) -> None:
    driver = CoordinatorDriver().with_members(1)
    good = Join(address="host2:1", manifest_digest=driver.config.manifest_digest)
    fields = {name: getattr(good, name) for name in good.__struct_fields__} | change
    driver.says(2, Join(**fields))
    assert driver.told(2, Refused).code == code
    assert driver.member_numbers() == [1]


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(epoch=Epoch(0), outer_step=OuterStep(0), progress=0, blocked=False),
        Synced(held=held(0)),
        LeaseRequest(epoch=Epoch(0), serial=1, num_samples=1),
    ],
)
def test_stranger_that_speaks_is_always_answered(message: PeerMessage) -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.says(5, message)
    assert driver.told(5, Evicted).epoch == driver.machine.state.epoch


def test_former_member_must_hear_that_it_was_dropped_before_it_may_learn() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.says(2, Leave(now=True))
    dropped_in = driver.machine.state.epoch
    driver.join(2, held(1), epoch=dropped_in - 1)
    assert driver.told(2, Evicted).epoch == dropped_in
    driver.join(2, held(1), epoch=dropped_in)
    assert driver.told(2, Welcome).target == driver.machine.state.committed


def test_newer_start_of_a_member_takes_its_place_at_once_and_the_older_is_told() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.join(2, incarnation=2)
    assert driver.member_numbers() == [1]
    assert driver.told(2, Welcome, incarnation=2).donors
    driver.join(2, held(1), epoch=99)
    assert driver.told(2, Refused).code == 5
    assert driver.all_told(2, incarnation=2) == []
    assert driver.machine.counters["older_incarnation"] == 1


# ------------------------------------------------------------------------ admission


def test_learner_one_commit_behind_is_admitted_at_the_boundary_and_not_before() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.join(2)
    driver.says(2, Synced(held=held(0)))
    assert driver.member_numbers() == [1]
    driver.vote(1)
    assert driver.member_numbers() == [1, 2]
    assert [type(item) for item in driver.all_told(2)] == [Commit, NewView]


def test_learner_far_behind_is_not_admitted_and_is_named_donors() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.join(2)
    for _ in range(3):
        driver.now += 3.0
        beat(driver, 2)
        driver.vote(1)
    driver.says(2, Synced(held=held(0)))
    assert driver.told(2, Welcome).target == held(3)
    assert [item.peer_id for item in driver.told(2, Welcome).donors] == [ref(1).peer_id]
    driver.vote(1)
    assert driver.member_numbers() == [1]


def test_learner_that_is_behind_by_the_last_seconds_only_is_admitted() -> None:
    # Commits may come faster than a message and its answer.
    driver = CoordinatorDriver(admission_lag_s=2.0).with_members(1)
    driver.join(2, held(0))
    driver.machine._roster.sessions[ref(2).peer_id].disconnected = True  # not reachable at the first boundaries
    for _ in range(3):
        driver.now += 0.3
        driver.vote(1)
    driver.says(2, Synced(held=held(0)))
    driver.vote(1)
    assert driver.member_numbers() == [1, 2]


def test_too_few_members_take_in_a_synced_learner_at_once() -> None:
    driver = CoordinatorDriver(min_peers=2)
    driver.join(1, held(0))
    driver.join(2, held(0))
    assert driver.member_numbers() == [1, 2]


def test_synced_learner_is_admitted_when_the_last_member_dies() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.join(2, held(0))
    driver.feed(PeerConnectionLost(sender=ref(1)))
    driver.now = 0.6
    driver.feed(Tick())
    assert driver.member_numbers() == [2]


def test_learners_that_nobody_can_serve_are_sent_home_in_the_end() -> None:
    driver = CoordinatorDriver(orphan_timeout_s=3.0).with_members(1)
    driver.vote(1)
    driver.join(2)
    driver.says(1, Leave(now=True))
    driver.wait(3.0)
    assert driver.told(2, Refused).code == 7


# ------------------------------------------------------------------------ liveness


def test_lost_connection_is_forgiven_within_its_grace() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.feed(PeerConnectionLost(sender=ref(2)))
    driver.now = 0.4
    driver.join(2, held(1), epoch=driver.machine.state.epoch)
    driver.now = 2.0
    driver.feed(Tick())
    assert driver.member_numbers() == [1, 2]


def test_lost_connection_costs_the_place_after_its_grace() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.feed(PeerConnectionLost(sender=ref(2)))
    assert driver.machine.next_deadline() == pytest.approx(0.5)
    driver.now = 0.5
    driver.feed(Tick())
    assert driver.member_numbers() == [1]
    assert driver.told(2, Evicted).epoch == driver.machine.state.epoch


def test_silent_member_is_dropped() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    for driver.now in (1.0, 2.0, 3.0, 4.0, 5.0):
        beat(driver, 1)
    assert driver.member_numbers() == [1]


def test_member_that_hangs_while_others_wait_is_dropped_by_its_own_measured_pace() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    for second in range(1, 40):
        driver.now = float(second)
        beat(driver, 1, second, blocked=second >= 12)
        if driver.member_numbers() == [1]:
            break
        beat(driver, 2, min(second, 10))
    assert driver.member_numbers() == [1]
    assert driver.now == pytest.approx(18.0)  # stall_floor_s after its last progress at 10


def test_member_that_stands_still_while_nobody_waits_is_kept() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    for second in range(1, 60):
        driver.now = float(second)
        beat(driver, 1, second)
        beat(driver, 2, min(second, 10))
    assert driver.member_numbers() == [1, 2]


def test_member_that_speaks_but_shows_no_sign_of_hearing_is_told_again_and_then_dropped() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    old = Heartbeat(epoch=Epoch(0), outer_step=OuterStep(0), progress=0, blocked=True)
    driver.now = 1.0
    driver.says(2, old)
    assert driver.told(2, NewView)
    for driver.now in (2.0, 3.0, 4.0, 5.0):
        beat(driver, 1)
        driver.says(2, old)
    assert driver.member_numbers() == [1]


def test_member_that_is_on_its_way_to_the_views_state_hears_and_stays() -> None:
    driver = CoordinatorDriver(heartbeat_timeout_s=3.0).with_members(1, 2)
    state = driver.machine.state
    driver.vote(1)
    driver.vote(2)
    for progress in range(6):
        driver.wait(1.0)
        beat(driver, 1, progress)
        behind = OuterStep(state.outer_step - 1)
        driver.says(2, Heartbeat(epoch=state.epoch, outer_step=behind, progress=progress, blocked=False))
    assert driver.member_numbers() == [1, 2]


def test_older_start_of_a_former_member_stays_out_while_the_newer_one_is_away() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.join(2, driver.machine.state.committed, incarnation=5)
    driver.vote(1)
    driver.feed(PeerConnectionLost(sender=ref(2, 5)))
    driver.wait(driver.config.reconnect_grace_s + 0.1)
    assert driver.member_numbers() == [1]
    driver.join(2, driver.machine.state.committed, epoch=driver.machine.state.epoch, incarnation=4)
    assert "newer start" in driver.told(2, Refused, incarnation=4).reason


def test_coordinator_that_was_paused_judges_nobody_by_that_time() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.now = 60.0
    driver.feed(Tick())
    assert driver.member_numbers() == [1, 2]
    driver.wait(5.0)
    assert driver.member_numbers() == []


# ------------------------------------------------------------------------ leaving


def test_leaver_stays_until_the_commit_that_holds_its_last_steps() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.says(2, Leave())
    assert driver.member_numbers() == [1, 2]
    driver.vote(1)
    driver.vote(2)
    assert driver.member_numbers() == [1]
    assert [type(item) for item in driver.all_told(2)] == [Commit, Goodbye]


def test_leaver_that_cannot_wait_goes_at_once() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.says(2, Leave(now=True))
    assert driver.member_numbers() == [1]
    assert driver.told(2, Goodbye)


def test_repeated_leave_of_who_has_gone_is_answered() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.says(2, Leave(now=True))
    driver.says(2, Leave(now=True))
    assert driver.told(2, Goodbye)


def test_every_view_is_journaled_before_anybody_hears_of_it() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.join(2, held(0))
    driver.vote(1)
    kinds = [effect.record if isinstance(effect, Persist) else effect.message for effect in driver.effects]
    order = [type(item).__name__ for item in kinds]
    assert order == ["CommitRecord", "Commit", "Commit", "ViewRecord", "NewView", "NewView"]
    assert all(isinstance(effect, Persist | SendToPeer) for effect in driver.effects)
    assert [record.view.epoch for record in driver.records(ViewRecord)] == [1, 2]
    assert key(2, 1).epoch == driver.machine.state.epoch


# ------------------------------------------------------------------------ where peers are


def test_a_member_that_says_where_it_is_now_is_looked_for_there_by_donors_meetings_and_views() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    state = driver.machine.state
    driver.says(1, Join(epoch=state.epoch, address="elsewhere:1", manifest_digest=MANIFEST, held=state.committed))
    assert driver.member_numbers() == [1, 2], "it is still here"
    driver.unreachable.add(ref(2))
    driver.join(3)
    assert [donor.address for donor in driver.told(3, Welcome).donors] == ["elsewhere:1", "host2:1"]
    assert driver.told(3, Meet).peers[0].address == "elsewhere:1"
    driver.feed(PeerConnectionLost(sender=ref(2)))
    driver.wait(1.0)
    assert [member.address for member in driver.told(1, NewView).view.members] == ["elsewhere:1"]
    assert driver.recovered().machine.addresses()[ref(1)] == "elsewhere:1"
