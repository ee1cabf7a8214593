# SPDX-License-Identifier: Apache-2.0
"""The coordinator is killed and its disk is lost: the run goes on from its peers' certificates."""

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.elastic.core.leases import count
from isthmus.elastic.core.records import CommitRecord, LeaseRecord, RebuildRecord, Record, ReleaseRecord
from isthmus.elastic.core.run_state import RunState
from tests.multiprocess.processes import LEFT, Process
from tests.multiprocess.run_audit import assert_same_commits, read_journal
from tests.multiprocess.run_harness import OPEN_END, Run, lose_journal, running, until_rebuilt

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

NUM_LOSSES = 4
INTEGRITY = 9


def rebuilt_event(coordinator: Process, number: int) -> dict[str, object]:
    """What the coordinator wrote down when it rebuilt the run for the `number`-th time."""
    return coordinator.events("rebuilt")[number]


def until_going_on(run: Run, peers: Sequence[Process], steps: int = 3) -> None:
    """Every peer makes this many more commits."""
    goal = max(peer.step for peer in peers) + steps
    run.until_step(goal, *peers)


def leave(run: Run, peers: Sequence[Process], coordinator: Process) -> None:
    """The peers leave in order, and then there is nothing left to coordinate."""
    for peer in peers:
        peer.signal(signal.SIGINT)
    assert run.until_ended(*peers) == [LEFT] * len(peers)
    coordinator.signal(signal.SIGINT)
    assert run.until_ended(coordinator) == [LEFT]


def consumed_after(records: Sequence[Record]) -> set[int]:
    """Samples that the commits of this journal consumed."""
    return {
        index
        for record in records
        if isinstance(record, CommitRecord)
        for item in record.contributions
        for piece in item.consumed
        for index in range(piece.start, piece.stop)
    }


def test_run_goes_on_from_its_peers_certificates_whenever_the_coordinator_loses_its_journal(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--members.start_peers", "3", "--members.min_peers", "2", "--run.outer_steps", str(OPEN_END)]
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        peers = [run.join(), run.join(), run.join()]
        run.until_step(4, *peers)
        consumed: set[int] = set()
        for loss in range(NUM_LOSSES):
            lose_journal(coordinator)
            known = max(peer.step for peer in peers)
            # With the flag, and (where the folder knows of the run) without it.
            again = ["--rebuild"] if loss % 2 == 0 else flags
            coordinator = run.coordinator(*again, folder=coordinator.directory)
            until_rebuilt(run, coordinator, loss + 1)
            event = rebuilt_event(coordinator, loss)
            said = [item["testified"] for item in peers[0].events("fault", kind="journal_lost")]
            assert len(said) <= 3 * (loss + 1), f"said again without anything new: {said}"
            assert int(str(event["outer_step"])) >= known, "a step that a peer had committed is lost"
            assert event["insisted"] is False
            until_going_on(run, peers)
        leave(run, peers, coordinator)
    digests = assert_same_commits(*peers)
    assert sorted(digests) == list(range(1, len(digests) + 1)), "no committed step is missing"
    for number, event in enumerate(coordinator.events("rebuilt")):
        step = int(str(event["outer_step"]))
        assert digests[step] == event["digest"]
        assert int(str(event["epoch"])) >= (number + 1) << 20
    records = read_journal(coordinator.directory)
    rebuild, *rest = records
    assert isinstance(rebuild, RebuildRecord)
    assert rebuild.certificate is not None
    assert len(rebuild.testified) == 3
    assert not any(isinstance(record, RebuildRecord) for record in rest)
    state = RunState.replay(records)
    assert state.outer_step == max(digests)
    # What the certificate says is consumed is never given again.
    position = rebuild.certificate.position
    free = {index for piece in position.unconsumed for index in range(piece.start, piece.stop)}
    consumed = consumed_after(records)
    assert all(index in free or index >= position.next_index for index in consumed)
    leased = sum(count(record.ranges) for record in records if isinstance(record, LeaseRecord))
    returned = sum(count(record.ranges) for record in records if isinstance(record, ReleaseRecord))
    assert leased - returned >= len(consumed)


def test_folder_of_a_dead_peer_is_enough_when_the_coordinators_whole_disk_is_lost(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--members.start_peers", "3", "--members.min_peers", "1", "--run.outer_steps", str(OPEN_END)]
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        peers = [run.join(), run.join(), run.join()]
        run.until_step(4, *peers)
        coordinator.kill()
        shutil.rmtree(coordinator.directory)
        peers[2].kill()
        rest = peers[:2]
        known = max(peer.step for peer in rest)
        # One machine is the peer and the coordinator from now on, at the address where the others look for it.
        heir = run.start(
            "up", "--rebuild", "--ticket-file", str(run.ticket), "--node.threads", "1", folder=peers[2].directory
        )
        until_rebuilt(run, heir, 1)
        assert int(str(rebuilt_event(heir, 0)["outer_step"])) >= known
        until_going_on(run, [*rest, heir])
        run.wait_for_ticket()
        newcomer = run.join()  # the tickets of the lost coordinator are void, new ones are not
        run.until("membership", lambda: bool(newcomer.events("join")))
        until_going_on(run, [*rest, heir, newcomer])
        run.leave_all()
    digests = assert_same_commits(*peers, newcomer)
    assert sorted(digests) == list(range(1, len(digests) + 1))


def test_coordinator_that_comes_back_with_the_lost_journal_is_refused_and_the_members_go_on(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--members.start_peers", "2", "--members.min_peers", "2", "--run.outer_steps", str(OPEN_END)]
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        peers = [run.join(), run.join()]
        run.until_step(4, *peers)
        coordinator.kill()
        # Its disk is away, with a journal that is whole.
        away = tmp_path / "away"
        shutil.copytree(coordinator.directory, away)
        for path in coordinator.directory.glob("journal.sqlite*"):
            path.unlink()
        again = run.coordinator("--rebuild", folder=coordinator.directory)
        until_rebuilt(run, again, 1)
        until_going_on(run, peers)
        again.kill()
        stale = run.coordinator(*flags, folder=away)
        ended = stale.outcome()
        assert ended.code == INTEGRITY
        (sentence,) = ended.sentences
        assert "it is an old copy" in sentence
        again = run.coordinator("--rebuild", folder=coordinator.directory)  # its journal is there, and gone on with
        until_going_on(run, peers)
        assert len(again.events("rebuilt")) == 1
        leave(run, peers, again)
    assert_same_commits(*peers)
