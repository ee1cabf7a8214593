# SPDX-License-Identifier: Apache-2.0
"""`isthmus audit` over a real run: while it goes on, when it is over, and after somebody has touched its journal."""

import json
from pathlib import Path

import msgspec
import pytest

from isthmus.elastic.core.certificate import decode_certificate
from isthmus.elastic.core.records import CommitRecord
from isthmus.trainer.checkpoint.checkpoint import newest_usable
from isthmus.trainer.record.event_log import FILE_NAME, older_files, read_events
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import read_journal
from tests.multiprocess.run_harness import OPEN_END, Run, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

INTEGRITY = 9


def audited(run: Run, *processes: Process) -> dict[str, dict[str, object]]:
    """The checks of a run that holds, by name; asks the command for its figures too."""
    done = run.command("audit", "--json", *(str(process.directory) for process in processes))
    assert (done.code, done.err) == (0, ""), done.out
    report = json.loads(done.out)
    assert report["schema"] == "isthmus.audit/1"
    assert report["holds"]
    assert report["exactly_once"]
    return {"": report} | {check["check"]: check for check in report["checks"]}


def test_a_run_with_a_kill_and_a_late_joiner_is_proved_and_a_changed_byte_in_its_journal_is_named(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), "--checkpoint.every", "4")
        run.wait_for_ticket()
        victim, survivor = run.join(), run.join()
        run.until_step(5, founder, victim, survivor)
        victim.kill()
        run.until_step(founder.step + 3, founder, survivor)
        late = run.join()
        run.until_step(1, late)
        run.until_step(late.step + 3, founder, survivor, late)

        # Beside the live writer, in any order of the folders, again and again.
        peers = [late, victim, founder, survivor]
        seen = late.step
        steps = [audited(run, *peers)[""]["account"]["outer_step"] for _ in range(2)]
        assert seen > 0
        assert [seen, *steps] == sorted([seen, *steps])
        run.leave_all()

        checks = audited(run, *peers)
        report = checks[""]
        records = read_journal(founder.directory)
        commits = [record for record in records if isinstance(record, CommitRecord)]
        account = report["account"]
        assert (account["num_records"], account["num_commits"]) == (len(records), len(commits))
        assert {share["peer_id"] for share in account["shares"]} == {peer.peer_id for peer in peers}
        assert any(item["peer_id"] == victim.peer_id and "dropped" in item["cause"] for item in account["departures"])
        assert report["samples"]["num_returns"] > 0
        assert report["samples"]["data_epochs"]["num_samples"] > 0
        assert all(
            check["num_looked_at"] > 0 for name, check in checks.items() if name not in ("", "rollbacks", "snapshots")
        )
        assert checks["checkpoints"]["num_looked_at"] >= 3
        for peer in (founder, survivor, late):
            saved = newest_usable(peer.directory)
            assert saved is not None
            proof = decode_certificate(saved.meta.certificate)
            assert proof is not None
            assert (proof.made.outer_step, proof.made.digest) == (saved.meta.outer_step, saved.meta.digest)

        slot = len(records) // 2
        _flip_a_byte_of(founder.directory / "journal.sqlite", msgspec.msgpack.encode(records[slot]))
        broken = run.command("audit", str(tmp_path))  # the folder above all of theirs
        assert broken.code == INTEGRITY
        (sentence,) = broken.sentences
        assert f"is damaged at record {slot}: its checksum is wrong" in sentence
        assert "journal        FAILS, 1 finding" in broken.out


def test_logs_that_go_on_in_new_files_are_audited_as_one_and_the_oldest_may_be_gone(tmp_path: Path) -> None:
    keeps = ("--node.events", "64KiB", "--node.events_keep")
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END), *keeps, "2")
        run.wait_for_ticket()
        victim = run.join(*keeps, "0")
        run.until("dropped files", lambda: len(_numbers(founder)) == 2 and _numbers(founder)[0] > 2)
        audited(run, founder, victim)  # beside the writers
        victim.kill()
        back = run.join(*keeps, "0", folder=victim.directory)
        run.until_step(founder.step + 3, founder, back)
        run.leave_all()
        report = audited(run, founder, back)[""]
        numbers = _numbers(founder)
        assert len(numbers) == 2
        assert report["missing_logs"] == [{"folder": str(founder.directory), "number": numbers[0] - 1}]
        told = run.command("audit", str(tmp_path)).out
        assert f"{numbers[0] - 1} older files of {founder.directory} gone: what was in them is not checked" in told
        assert _numbers(back)[0] == 1
        steps = [event["outer_step"] for event in read_events(back.directory / FILE_NAME) if event["event"] == "commit"]
        assert steps == sorted(set(steps))
        assert back.commits().keys() == set(steps)


def _numbers(process: Process) -> list[int]:
    return sorted(older_files(process.directory / FILE_NAME))


def _flip_a_byte_of(path: Path, record: bytes) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(record)
    content[place + len(record) // 2] ^= 1
    path.write_bytes(content)
