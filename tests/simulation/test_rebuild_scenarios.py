# SPDX-License-Identifier: Apache-2.0
"""Histories with a name in which the coordinator's disk is lost."""

from isthmus.elastic.core.events import CoordinatorEffect, SendToPeer
from isthmus.elastic.core.messages import Commit
from isthmus.elastic.core.records import RebuildRecord
from tests.simulation.stage import Stage


def rebuilds(stage: Stage) -> list[RebuildRecord]:
    return [record for record in stage.sim.coordinator.journal if isinstance(record, RebuildRecord)]


def commit_told_to(stage: Stage, index: int) -> bool:
    """Let the coordinator lose its disk right after it has told this peer, and nobody else, of a commit."""
    ref = stage.peers[index].ref
    lost = False

    def dies(effect: CoordinatorEffect) -> bool:
        nonlocal lost
        if isinstance(effect, SendToPeer) and isinstance(effect.message, Commit):
            lost = effect.to == ref
        return lost

    stage.sim.coordinator.dies_after = dies
    stage.until(lambda: lost, within_s=20.0)
    stage.sim.coordinator.lose_disk()
    return lost


def test_run_goes_on_from_the_newest_commit_soon_after_the_disk_is_lost() -> None:
    stage = Stage(3)
    stage.start()
    stage.until_active(0, 1, 2)
    stage.until_committed(2)
    newest = stage.sim.checkers.history.newest
    stage.sim.coordinator.lose_disk()
    stage.sim.coordinator.start()
    took_s = stage.until(lambda: bool(rebuilds(stage)), within_s=10.0)
    (record,) = rebuilds(stage)
    assert record.certificate is not None
    assert record.certificate.made == newest
    assert took_s < 3.0, "nobody is missing, so nobody is awaited"
    stage.until_committed(2)
    assert sorted(stage.members()) == ["1", "2", "3"]


def test_commit_that_one_peer_alone_has_heard_of_is_not_lost_while_that_peer_lives() -> None:
    stage = Stage(3)
    stage.start()
    stage.until_active(0, 1, 2)
    stage.until_committed(2)
    assert commit_told_to(stage, 0)
    newest = stage.sim.checkers.history.newest
    stage.run(0.5)
    stage.sim.coordinator.start()
    stage.until(lambda: bool(rebuilds(stage)), within_s=10.0)
    (record,) = rebuilds(stage)
    assert record.certificate is not None
    assert record.certificate.made == newest
    stage.until_active(0, 1, 2)
    stage.until_committed(2)


def test_peer_that_alone_heard_of_the_last_commit_and_comes_late_goes_back_to_the_run() -> None:
    stage = Stage(3)
    stage.start()
    stage.until_active(0, 1, 2)
    stage.until_committed(2)
    assert commit_told_to(stage, 0)
    lost = stage.sim.checkers.history.newest
    stage.until(lambda: stage.peers[0].state is not None and stage.peers[0].state.held == lost, within_s=5.0)
    stage.peers[0].pause(20.0)
    stage.sim.coordinator.start()
    stage.until(lambda: bool(rebuilds(stage)), within_s=15.0)
    stage.until_committed(3)
    assert lost in stage.sim.checkers.history.given_up
    stage.until(lambda: len(stage.commits[-1].contributions) == 3, within_s=40.0)
    assert stage.is_active(stage.peers[0])


def test_disk_that_is_lost_again_and_again_costs_no_commit_that_all_have_heard_of() -> None:
    stage = Stage(2)
    stage.start()
    stage.until_active(0, 1)
    for _ in range(5):
        stage.until_committed(2)
        stage.run(0.1)
        before = stage.sim.checkers.history.newest
        assert before is not None
        stage.sim.coordinator.lose_disk()
        stage.sim.coordinator.start()
        stage.until(lambda: bool(rebuilds(stage)), within_s=15.0)
        (record,) = rebuilds(stage)
        assert record.certificate is not None
        assert record.certificate.made == before
    stage.until_committed(2)
