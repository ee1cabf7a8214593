# SPDX-License-Identifier: Apache-2.0
"""Histories that ask more than a file of scenarios/ can: each death, join and leave once on purpose, bugs of seeds."""

import pytest

from isthmus.elastic.core.events import CoordinatorEffect, LeaveRequested, Persist, SendToPeer
from isthmus.elastic.core.messages import Commit
from isthmus.elastic.core.records import CommitRecord
from tests.simulation.network import COORDINATOR
from tests.simulation.stage import Stage

# ------------------------------------------------------------------------ deaths


@pytest.mark.parametrize("silently", [False, True])
def test_survivors_commit_the_same_payloads_without_the_dead(silently: bool) -> None:
    stage = Stage(3)
    stage.start()
    stage.until_active(0, 1, 2)
    stage.run(0.3)
    stage.peers[2].crash(silently=silently)
    stage.until_committed(2, within_s=12.0)
    assert stage.members() == ["1", "2"]


def test_restarted_peer_replaces_its_old_start_at_once() -> None:
    stage = Stage(2)
    stage.start()
    stage.until_active(0, 1)
    stage.peers[1].crash(silently=True)
    stage.start(1)
    took_s = stage.until(lambda: any(item.cause.endswith("started again") for item in stage.views), within_s=5.0)
    assert took_s < 1.0, "it does not wait until the old start counts as silent"
    stage.until_active(0, 1)


# ------------------------------------------------------------------------ the coordinator


@pytest.mark.parametrize("moment", ["before the commit is told", "after the first is told", "after all are told"])
def test_coordinator_that_dies_around_a_commit_goes_on_under_the_same_epoch(moment: str) -> None:
    stage = Stage(3)
    stage.start()
    stage.until_active(0, 1, 2)
    told = {"before the commit is told": 0, "after the first is told": 1, "after all are told": 3}[moment]
    commits_told = 0

    def dies_after(effect: CoordinatorEffect) -> bool:
        nonlocal commits_told
        match effect:
            case SendToPeer(message=Commit()):
                commits_told += 1
                return commits_told == told
            case Persist(record=CommitRecord()):
                return told == 0
            case _:
                return False

    epoch = stage.views[-1].view.epoch
    stage.sim.coordinator.dies_after = dies_after
    stage.until(lambda: not stage.sim.coordinator.alive, within_s=5.0)
    stage.until_committed(2)
    assert stage.views[-1].view.epoch == epoch, "nobody has lost anything"


def test_members_train_on_while_the_coordinator_is_away() -> None:
    stage = Stage(2)
    stage.start()
    stage.until_active(0, 1)
    stage.sim.coordinator.crash()
    stage.until(lambda: all(node.staged is not None for node in stage.peers), within_s=5.0)
    stage.until_committed(2)


# ------------------------------------------------------------------------ the network


@pytest.mark.parametrize("both_ways", [False, True])
def test_two_members_that_cannot_reach_each_other_do_not_stop_the_run(both_ways: bool) -> None:
    stage = Stage(3)
    stage.start()
    stage.until_active(0, 1, 2)
    one, other = stage.peers[0].peer_id, stage.peers[2].peer_id
    stage.sim.network.cut(one, other)
    if both_ways:
        stage.sim.network.cut(other, one)
    stage.until_committed(2, within_s=40.0)


# ------------------------------------------------------------------------ joining and leaving


def test_members_never_wait_for_a_joiner_that_freezes_in_mid_transfer() -> None:
    stage = Stage(3, snapshot_s=(3.0, 4.0))
    stage.start(0, 1)
    stage.until_active(0, 1)
    stage.start(2)
    stage.run(1.0)
    stage.peers[2].pause(60.0)
    assert stage.longest_gap_s(15.0) < 1.5


def test_joiner_changes_to_another_donor_when_its_donor_dies_in_mid_transfer() -> None:
    stage = Stage(3, snapshot_s=(3.0, 4.0))
    stage.start(0, 1)
    stage.until_active(0, 1)
    stage.start(2)
    stage.until(lambda: stage.peers[2].transfer is not None, within_s=3.0)
    stage.run(1.0)
    stage.peers[0].crash(silently=True)
    stage.until_active(1, 2, within_s=25.0)
    stage.until_committed(2)


def test_leaver_goes_at_the_commit_boundary_with_its_steps_committed() -> None:
    stage = Stage(2)
    stage.start()
    stage.until_active(0, 1)
    stage.run(0.2)
    stage.peers[1].feed(LeaveRequested(now=False))
    num_commits = len(stage.commits)
    stage.until(lambda: stage.peers[1].exit is not None, within_s=5.0)
    assert stage.peers[1].exit is not None
    assert stage.peers[1].exit.code == 20
    assert stage.peers[1].ref in [item.ref for item in stage.commits[num_commits].contributions]
    stage.until_committed(2)


def test_leaver_is_let_go_although_no_commit_is_possible() -> None:
    stage = Stage(2, min_peers=2)
    stage.start(0)
    stage.until_active(0)
    stage.peers[0].feed(LeaveRequested(now=False))
    stage.until(lambda: stage.peers[0].exit is not None, within_s=3.0)


def test_final_commit_ends_every_peer_with_code_0() -> None:
    stage = Stage(3, outer_steps=5)
    stage.start()
    stage.until(lambda: all(node.exit is not None for node in stage.peers), within_s=30.0)
    assert [node.exit.code for node in stage.peers if node.exit is not None] == [0, 0, 0]
    assert stage.sim.coordinator.machine is not None
    assert stage.sim.coordinator.machine.finished


def test_peer_with_another_manifest_is_refused() -> None:
    stage = Stage(2, wrong_manifest=True)
    stage.start()
    stage.until(lambda: stage.peers[1].exit is not None, within_s=3.0)
    assert stage.peers[1].exit is not None
    assert stage.peers[1].exit.code == 5


# ------------------------------------------------------------------------ found by seeds


def test_idle_learner_is_not_stalled_at_its_admission() -> None:
    # It stood still for longer than the stall timeout, because it had nothing left to fetch.
    stage = Stage(3, train_s=(6.0, 6.1))
    stage.sim._speed = {node.peer_id: speed for node, speed in zip(stage.peers, (1.0, 1.4, 1.0), strict=True)}
    stage.start(0, 1)
    stage.until_active(0, 1)
    stage.start(2)
    stage.until(lambda: "3" in stage.members(), within_s=20.0)
    num_views = len(stage.views)
    stage.run(6.0)
    assert len(stage.views) == num_views, [item.cause for item in stage.views]


def test_far_learner_arrives_in_a_run_whose_commits_outpace_its_messages() -> None:
    # Its "I hold 215" arrives when 216 is committed, at every boundary: one commit of slack was not enough.
    stage = Stage(2, train_s=(0.2, 0.25), latency_s=(0.15, 0.2), samples_per_round=1)
    stage.sim.network._base.update({("0" * 15 + "1", COORDINATOR): 0.001, (COORDINATOR, "0" * 15 + "1"): 0.001})
    stage.start(0)
    stage.until_active(0)
    stage.start(1)
    stage.until(lambda: stage.members() == ["1", "2"], within_s=15.0)


def test_recovered_view_without_a_voter_of_the_last_commit_is_kept() -> None:
    # The restarted coordinator took "has not spoken yet" for "does not hold the state" and found nobody who does.
    stage = Stage(2)
    stage.start(0)
    stage.until_active(0)
    stage.until_committed(2)
    stage.run(0.1)  # the newest commit is on its disk
    stage.peers[0].crash(silently=False)
    stage.run(1.0)
    stage.start(0)
    stage.until_active(0)
    stage.start(1)
    stage.sim.coordinator.crash()
    num_views = len(stage.views)
    stage.sim.network.cut(stage.peers[0].peer_id, COORDINATOR)
    stage.until(lambda: bool(stage.sim.coordinator.connections), within_s=10.0)
    stage.run(0.5)  # another peer is heard first
    stage.sim.network.mend(stage.peers[0].peer_id, COORDINATOR)
    stage.until_committed()
    assert "1" in stage.members()
    assert all("nobody holds" not in item.cause for item in stage.views[num_views:])
