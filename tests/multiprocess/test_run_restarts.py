# SPDX-License-Identifier: Apache-2.0
"""Processes that die and are started again in their folders: they find their run, and the run finds them."""

import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from isthmus.elastic.core.records import ViewRecord
from tests.multiprocess.processes import LEFT, Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import (
    NEVER_LATE,
    OPEN_END,
    is_frozen_between_checkpoints,
    newest_checkpoint,
    running,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

WORKER_CRASHED = 10


def _told_at(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}/{path}", timeout=60) as answer:
        return str(answer.read().decode())


def _page_of(process: Process) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What its page in a browser is drawn from."""
    address = json.loads((process.directory / "peer.json").read_bytes())["metrics_address"]
    return json.loads(_told_at(address, "status.json")), json.loads(_told_at(address, "peers.json"))


def _states_on(process: Process) -> list[tuple[str, str]]:
    return [(one["peer_id"], one["state"]) for one in _page_of(process)[1]]


def test_a_coordinator_that_is_stopped_before_its_run_is_complete_has_left(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        coordinator = run.coordinator()
        run.wait_for_ticket()
        coordinator.signal(signal.SIGTERM)
        assert run.until_ended(coordinator) == [LEFT]
        told = run.command("status", "--dir", str(coordinator.directory))
    assert f"ended with {LEFT} (stopped)" in told.err


def test_metrics_and_page_of_a_coordinator_are_of_its_run_also_after_it_was_started_again(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--run.outer_steps", str(OPEN_END), "--node.metrics_port", "0")
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        peer = run.join("--node.metrics_port", "0")
        run.until_step(2, peer)
        coordinator.kill()
        again = run.coordinator(*flags, folder=coordinator.directory)
        run.wait_for_ticket()
        told = json.loads(run.command("status", "--json", "--dir", str(again.directory)).out)
        run.until("its metrics", lambda: "isthmus_world_size 1.0" in _told_at(told["metrics_address"], "metrics"))
        run.until("the peer's page", lambda: _page_of(peer)[0]["outer_step"] >= 2)
        is_member = [(peer.peer_id, "member")]
        for process in (again, peer):
            run.until("the member on its page", lambda process=process: _states_on(process) == is_member)
        coordinates, _ = _page_of(again)
        trains, _ = _page_of(peer)
        peer.signal(signal.SIGINT)
        assert run.until_ended(peer) == [LEFT]
    assert (coordinates["phase"], coordinates["coordination"]["num_members"]) == ("coordinating", 1)
    assert trains["peer_id"] == peer.peer_id


def test_a_founder_that_has_resumed_its_folder_and_is_killed_goes_on_when_its_command_is_given_again(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        flags = ("--checkpoint.every", "2", "--outer-steps", str(OPEN_END), *NEVER_LATE)
        before = run.found(*flags)
        run.until("checkpoint", lambda: len(before.events("checkpoint")) > 1)
        before.kill()
        words = ("--resume", str(before.directory), *flags)
        resumed = run.found(*words, folder=before.directory)
        run.wait_for_ticket()
        joiner = run.join()
        run.until_step(max(joiner.commits(), default=0) + 8, joiner)
        newest = max(joiner.commits())
        resumed.kill()
        again = run.found(*words, folder=before.directory)
        run.until_step(newest + 4, joiner)
        for process in (joiner, again):
            process.signal(signal.SIGINT)
        assert run.until_ended(joiner) == [LEFT]
        assert run.until_ended(again) == [LEFT]
    assert len(joiner.events("join")) == 1, "it has found its run again"
    assert [path.name for path in before.directory.glob("lineage-*")] == ["lineage-1"]


def test_a_coordinator_that_is_killed_and_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    last = 120
    with running(tmp_path) as run:
        flags = ["--members.start_peers", "2", "--members.min_peers", "2", "--run.outer_steps", str(last), *NEVER_LATE]
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        peers = [run.join(), run.join()]
        run.until_step(2, *peers)
        peers[0].signal(signal.SIGSTOP)  # the run stands still while it is asked
        told = run.told("status", "--dir", str(coordinator.directory)).splitlines()
        peers[0].signal(signal.SIGCONT)
        assert re.fullmatch(r"run run-[0-9a-f]{8}, coordinator [0-9a-f]{16}", told[0])
        assert re.fullmatch(rf"outer step \d+ of {last}, view \d+ of 2 peers", told[1])
        assert re.fullmatch(r"round \d+: [012] of 2 votes, 0 learners, 0 late", told[2])
        assert sorted(line.split()[0] for line in told[3:]) == sorted(peer.peer_id for peer in peers)
        run.until_step(last // 4, *peers)
        coordinator.kill()
        before = max(event["outer_step"] for event in coordinator.events("commit_decided"))
        again = run.coordinator(*flags, folder=coordinator.directory)
        assert run.until_ended(again, *peers) == [0, 0, 0]
    assert again.events("coordinator_ended", complete=True)
    records = read_journal(coordinator.directory)
    audit = Audit.of(records)  # no committed step is missing or there twice
    assert [record.outer_step for record in audit.commits] == list(range(1, last + 1))
    assert last // 4 <= before < last
    assert len(assert_same_commits(*peers)) == last
    for peer in peers:
        assert sorted(peer.commits()) == list(range(1, last + 1))
        assert len(peer.events("fault", kind="coordinator_lost")) >= 1
        assert len(peer.events("join")) == 1  # it never lost its membership
    # Nobody lost its place: the view in which both began is the last one with members.
    refs = {contribution.ref for record in audit.commits for contribution in record.contributions}
    assert len(refs) == 2
    views = [record.view for record in records if isinstance(record, ViewRecord)]
    assert {member.ref for view in views for member in view.members} == refs
    assert max(view.epoch for view in views if view.members) == audit.commits[0].key.epoch


def test_a_founder_that_is_killed_and_started_again_finds_its_run(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--peers", "3", "--min-peers", "2", "--outer-steps", str(OPEN_END)]
        founder = run.found(*flags)
        run.wait_for_ticket()
        others = [run.join(), run.join()]
        run.until_step(5, founder, *others)
        founder.kill()
        before = max(event["outer_step"] for event in founder.events("commit_decided"))
        again = run.found(*flags, folder=founder.directory)
        run.until("membership", lambda: len(again.events("join")) == 2)
        run.until_step(again.events("join")[-1]["outer_step"] + 5, again, *others)
        run.leave_all()
    digests = assert_same_commits(again, *others)
    assert sorted(digests) == list(range(1, len(digests) + 1))
    audit = Audit.of(read_journal(founder.directory))
    for peer in others:
        assert len(peer.events("join")) == 1
    refs = {c.ref for record in audit.commits for c in record.contributions if c.ref.peer_id == founder.peer_id}
    assert len(refs) == 2  # two starts of one peer
    assert len(audit.commits) > before + 5


def test_a_peer_that_is_killed_comes_back_from_its_disk_and_fetches_only_what_it_missed(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--peers", "2", "--min-peers", "2", "--outer-steps", str(OPEN_END), "--checkpoint.every", "4"]
        founder = run.found(*flags)
        run.wait_for_ticket()
        peer = run.join()
        run.until("checkpoint", lambda: len(peer.events("checkpoint")) >= 2)
        run.until("a commit after the newest checkpoint", lambda: is_frozen_between_checkpoints(peer))
        peer.kill()
        kept = newest_checkpoint(peer)
        num_parameters = peer.events("started")[0]["num_parameters"]
        num_catch_ups, num_joins = len(peer.events("catch_up")), len(peer.events("join"))
        again = run.join(folder=peer.directory)
        run.until("membership", lambda: len(again.events("join")) > num_joins)
        joined = again.events("join")[-1]["outer_step"]
        run.until_step(joined + 3, founder, again)
        run.leave_all()
    assert_same_commits(founder, again)
    # The one that was left waited for the other, and the disk has the results since the checkpoint.
    fetched = [event["bytes"] for event in again.events("catch_up")[num_catch_ups:]]
    assert kept < joined <= kept + 8
    assert sum(fetched) < 8 * num_parameters / 2
    err = again.console.with_suffix(".err").read_text()
    assert f"checkpoint_adopted outer_step={kept}" in err
