# SPDX-License-Identifier: Apache-2.0
"""What `isthmus leave` says of a peer that leaves, without a peer."""

import contextlib
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from isthmus.elastic.observation import Finished
from isthmus.trainer.cli.console import Console
from isthmus.trainer.cli.leaving import describe, follow
from isthmus.trainer.errors import NothingRuns
from isthmus.trainer.record.event_log import FILE_NAME, EventLog
from isthmus.trainer.record.status import FetchStatus, LeavingStatus, Status
from isthmus.trainer.run.control_socket import PEER_FILE_NAME, ControlClient, PeerFile
from tests.unit.trainer.test_control_socket import Daemon, running

STATUS = Status(
    run_id="demo-0123abcd",
    peer_id="0123456789abcdef",
    incarnation=1,
    pid=os.getpid(),
    phase="leaving",
    outer_step=3,
    total_outer_steps=20,
    inner_step=4,
    inner_steps_per_round=50,
)


@pytest.fixture
def console() -> Iterator[Console]:
    with Console() as console:
        yield console


def test_a_round_that_is_handed_in_is_told_with_how_far_it_is() -> None:
    status = msgspec.structs.replace(STATUS, leaving=LeavingStatus(waits_for="commit"))
    assert describe(status) == (
        "leaving: waits for the commit that holds its last steps (outer step 3, inner step 4 of 50, 0 in the round)"
    )


def test_a_handover_is_told_with_who_fetches_how_much() -> None:
    fetches = (FetchStatus(peer_id="aa", sent_bytes=500_000, total_bytes=2_000_000),)
    status = msgspec.structs.replace(STATUS, leaving=LeavingStatus(waits_for="handover", fetches=fetches))
    assert describe(status) == (
        "leaving: nobody else holds the state: waits until another peer has fetched it (outer step 3); "
        "500.0 kB of 2.0 MB, 25 % to aa"
    )


class Leaving(Daemon):
    """Is one inner step further whenever it is asked, and in the next outer step after thirty."""

    def status(self) -> Status:
        self.asked.append("status")
        outer, inner = divmod(len(self.asked), 30)
        leaving = LeavingStatus(waits_for="commit")
        return msgspec.structs.replace(STATUS, outer_step=outer, inner_step=inner, leaving=leaving)


def test_without_a_terminal_it_writes_a_line_when_the_wait_changes_and_not_for_each_inner_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("isthmus.trainer.cli.leaving._POLL_S", 0.0)
    monkeypatch.setattr("isthmus.trainer.cli.leaving._QUIET_S", 0.0)
    daemon = Leaving()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.ExitStack())
        server.enter_context(running(tmp_path, daemon))
        console = stack.enter_context(Console())
        pool = stack.enter_context(ThreadPoolExecutor(1))
        answer = pool.submit(follow, ControlClient(tmp_path), console)
        while len(daemon.asked) < 75:
            assert not answer.done()
        server.close()
        assert answer.result(20) is None
    told = [line.partition("(")[2].partition(",")[0] for line in capfd.readouterr().err.splitlines()]
    assert told[:3] == ["outer step 0", "outer step 1", "outer step 2"]
    assert len(told) == len(set(told))


@pytest.mark.parametrize("is_started_again", [True, False], ids=["started again", "killed"])
def test_a_peer_that_a_supervisor_has_started_again_has_left_and_one_that_was_killed_has_not(
    tmp_path: Path, console: Console, is_started_again: bool
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        before = PeerFile(socket=str(tmp_path / "control"), pid=os.getpid(), peer_id="a", run_id="b")
        (tmp_path / PEER_FILE_NAME).write_bytes(msgspec.json.encode(before))
        client = ControlClient(tmp_path)
    with EventLog(tmp_path / FILE_NAME, "a" * 16) as log:
        log.write(Finished(code=20, cause="left at outer step 3"))
    if not is_started_again:
        with pytest.raises(NothingRuns, match="has ended without a word before it had left"):
            follow(client, console)
        return
    after = msgspec.structs.replace(before, socket="/another")
    (tmp_path / PEER_FILE_NAME).write_bytes(msgspec.json.encode(after))
    assert follow(client, console) == "left at outer step 3"


@pytest.mark.parametrize("waits_for", ["start", "answer", "checkpoint", "others"])
def test_every_wait_has_a_line(waits_for: str) -> None:
    leaving = msgspec.convert({"waits_for": waits_for}, LeavingStatus)
    assert describe(msgspec.structs.replace(STATUS, leaving=leaving)).startswith("leaving: ")
