# SPDX-License-Identifier: Apache-2.0
"""A journal that is compacted while the run goes on: whoever is killed when, nothing is lost, and all is proved."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.elastic.core.records import Record, SnapshotRecord
from isthmus.elastic.journal.archive import archives_of
from isthmus.elastic.journal.reader import read_file
from tests.multiprocess.processes import LEFT, Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, Run, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

EVERY = 30
COMPACTED = ("--coordinator.compact_every", str(EVERY))


def report_of(run: Run, *processes: Process) -> dict[str, Any]:
    done = run.command("audit", "--json", *(str(process.directory) for process in processes))
    assert (done.code, done.err) == (0, ""), done.out
    report = json.loads(done.out)
    return report | {check["check"]: check["num_looked_at"] for check in report["checks"]}


def snapshots_in(records: Sequence[Record]) -> list[int]:
    """Their slots."""
    return [slot for slot, record in enumerate(records) if isinstance(record, SnapshotRecord)]


def is_compacted(coordinator: Process, journal: Path) -> bool:
    """Whether there are five snapshots, and the journal begins with the newest one.

    Who is killed between writing a snapshot and dropping what came before it leaves that to the next snapshot. Then the
    same records are in two archives.
    """
    snapshots = snapshots_in(read_journal(coordinator.directory))
    return len(snapshots) >= 5 and read_file(journal).base.slot == snapshots[-1]


def test_a_coordinator_that_compacts_is_killed_again_and_again_and_the_run_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--members.start_peers", "3", "--members.min_peers", "2", "--run.outer_steps", str(OPEN_END)]
        flags += ["--checkpoint.every", "4", *NEVER_LATE]
        coordinator = run.coordinator(*flags, *COMPACTED)
        run.wait_for_ticket()
        peers = [run.join(), run.join(), run.join()]
        journal = coordinator.directory / "journal.sqlite"
        for number in range(4):
            run.until_step(peers[0].step + 6, *peers)
            known = len(archives_of(journal))
            run.until("archive", lambda known=known: len(archives_of(journal)) > known)  # and at once
            coordinator.kill()
            coordinator = run.coordinator(*flags, *COMPACTED, folder=coordinator.directory)
            run.wait_for_ticket()
            if number == 2:
                peers[1].kill()
                peers[1] = run.join(folder=peers[1].directory)
        run.until_step(peers[0].step + 6, *peers)
        run.until("compaction by a coordinator that lives on", lambda: is_compacted(coordinator, journal))
        report = report_of(run, coordinator, *peers)  # beside the live writer
        assert (report["holds"], report["exactly_once"], report["first_record"]) == (True, True, 0)
        for peer in peers:
            peer.signal(signal.SIGINT)
        assert run.until_ended(*peers) == [LEFT] * 3
        coordinator.signal(signal.SIGINT)
        assert run.until_ended(coordinator) == [LEFT]

        records = read_journal(coordinator.directory)
        Audit.of(records)
        assert_same_commits(*peers)
        for peer in (peers[0], peers[2]):
            assert len(peer.events("join")) == 1, "it never lost its membership"
        snapshots = snapshots_in(records)
        archives = archives_of(journal)
        assert len(archives) >= len(snapshots) >= 5
        assert read_file(journal).base.slot == snapshots[-1]
        report = report_of(run, coordinator, *peers)
        assert report["account"]["num_records"] == len(records)
        assert report["snapshots"] == len(snapshots)
        assert report["archives"] == [str(path) for path in archives if str(path) in report["archives"]]

        for path in archives[1:-1]:  # two of them may hold the same records
            path.unlink()
        less = report_of(run, coordinator, *peers)
        assert 0 < less["first_record"] < snapshots[-1]
        assert less["account"]["outer_step"] == report["account"]["outer_step"]
        assert less["certificates"] == report["certificates"]
        told = run.command("audit", *(str(process.directory) for process in (coordinator, *peers))).out
        assert f"{less['first_record']:,} older records are in archives that are not here" in told


def test_after_a_power_cut_a_compacted_run_goes_back_to_what_the_disks_hold(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--outer-steps", str(OPEN_END), "--checkpoint.every", "3", "--members.recover", "3s"]
        flags += ["--coordinator.compact_every", "5", "--coordinator.keep_archives", "2"]
        founder = run.found("--peers", "2", "--min-peers", "2", *flags)
        run.wait_for_ticket()
        peer = run.join()
        for _ in range(2):
            run.until_step(max(founder.step, peer.step) + 8, founder, peer)
            founder.popen.kill()
            peer.popen.kill()
            founder.kill()
            peer.kill()
            step = max(founder.step, peer.step)
            founder = run.found("--peers", "2", "--min-peers", "2", *flags, folder=founder.directory)
            run.wait_for_ticket()
            peer = run.join(folder=peer.directory)
            run.until_step(step + 3, founder, peer)
        run.leave_all()
        assert len(archives_of(founder.directory / "journal.sqlite")) == 2
        report = report_of(run, founder, peer)
        assert report["first_record"] > 0
        assert report["holds"]
