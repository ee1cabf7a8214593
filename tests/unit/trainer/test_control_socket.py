# SPDX-License-Identifier: Apache-2.0
"""The command line's questions to a daemon, over a real socket."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from isthmus.collective.core.types import PeerId
from isthmus.trainer.contact.ticket import Ticket, make_ticket
from isthmus.trainer.errors import EnvironmentFault, ExitCode, NobodyReachable, NothingRuns, Refused
from isthmus.trainer.record.status import (
    CoordinationStatus,
    MemberStatus,
    PeerStatus,
    RoundStatus,
    Status,
    members_of,
    render_peers,
    render_status,
)
from isthmus.trainer.run.control_messages import LeaveRequest, PutOutRequest, RevokeRequest, StopRequest, TicketRequest
from isthmus.trainer.run.control_socket import (
    PEER_FILE_NAME,
    ControlClient,
    ControlServer,
    PeerFile,
    find_peer,
    is_running,
)


def a_status() -> Status:
    return Status(
        run_id="demo-0123abcd",
        peer_id="0123456789abcdef",
        incarnation=5,
        pid=os.getpid(),
        phase="training",
        outer_step=3,
        total_outer_steps=20,
        inner_step=4,
        inner_steps_per_round=50,
        epoch=2,
        members=(MemberStatus(peer_id="0123456789abcdef", incarnation=5, address="127.0.0.1:1", is_me=True),),
        train_loss=2.5,
        tokens=12345,
        goodput=0.918,
        sent_bytes=1_500_000,
        last_round=RoundStatus(
            outer_step=3, seconds=1.25, exchange_seconds=0.5, predicted_seconds=0.4, bytes=2048, num_members=2
        ),
        metrics_address="127.0.0.1:9",
    )


PEER_ID = PeerId("0123456789abcdef")
PEER = PeerStatus(peer_id=PEER_ID, state="member", incarnation=5, address="127.0.0.1:1")
BANNED = PeerStatus(peer_id="f" * 16, state="banned")
TICKET = make_ticket(
    ticket_id=b"ticket 1", secret=b"s" * 32, run_id="demo-0123abcd", addresses=["127.0.0.1:1"], expires_at_s=1
)


class Daemon:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.office: Office | None = None

    def status(self) -> Status:
        self.asked.append("status")
        return a_status()

    def peers(self) -> tuple[PeerStatus, ...]:
        return members_of(self.status()) if self.office is None else self.office.peers()

    def leave(self) -> None:
        self.asked.append("leave")

    def stop(self) -> None:
        self.asked.append("stop")


class Office:
    """Where a coordinator lives."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refuses = False
        self.program: tuple[str, ...] | None = None

    def peers(self) -> tuple[PeerStatus, ...]:
        return (PEER, BANNED)

    def ticket(self) -> Ticket:
        self.asked.append("ticket")
        return TICKET

    def new_ticket(self, *, is_once: bool, lifetime_s: float | None) -> Ticket:
        self.asked.append(f"new ticket {is_once} {lifetime_s}")
        return TICKET

    async def put_out(self, peer_id: PeerId, *, for_ever: bool) -> str | None:
        self.asked.append(f"put out {peer_id} {for_ever}")
        return "no such peer" if self.refuses else None

    async def revoke(self, ticket_id: bytes | None, expires_at_s: int | None) -> str | None:
        self.asked.append(f"revoke {ticket_id!r} {expires_at_s}")
        return "no time" if self.refuses else None


@contextlib.contextmanager
def running(run_dir: Path, daemon: Daemon) -> Iterator[ControlServer]:
    """The server on an event loop in a thread, as a daemon has it."""
    opened, closing = threading.Event(), threading.Event()
    server = ControlServer(run_dir, daemon, peer_id="0123456789abcdef", run_id="demo-0123abcd")

    async def serve() -> None:
        with server:
            task = asyncio.get_running_loop().create_task(server.serve())
            opened.set()
            await asyncio.to_thread(closing.wait)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert opened.wait(20)
        yield server
    finally:
        closing.set()
        thread.join(20)
        assert not thread.is_alive()


def test_questions_reach_the_daemon_and_answers_come_back(tmp_path: Path) -> None:
    daemon = Daemon()
    with running(tmp_path, daemon):
        client = ControlClient(tmp_path)
        assert client.status() == a_status()
        client.order(LeaveRequest())
        client.order(StopRequest())
        assert not client.has_ended()
        assert daemon.asked == ["status", "leave", "stop"]
    assert client.has_ended()


def test_an_operators_orders_reach_the_coordinators_process_and_a_refusal_comes_back_as_one(tmp_path: Path) -> None:
    daemon = Daemon()
    daemon.office = office = Office()
    orders = (PutOutRequest(PEER_ID, for_ever=True), RevokeRequest(b"ticket 1", 7), RevokeRequest())
    with running(tmp_path, daemon):
        client = ControlClient(tmp_path)
        assert client.peers() == (PEER, BANNED)
        assert client.ticket(TicketRequest(is_new=False)) == (TICKET, None)
        office.program = ("python", "loop.py")
        assert client.ticket(TicketRequest(is_new=True, is_once=True, lifetime_s=60.0)) == (TICKET, office.program)
        for order in orders:
            client.order(order)
        assert office.asked == [
            "ticket",
            "new ticket True 60.0",
            f"put out {PEER_ID} True",
            "revoke b'ticket 1' 7",
            "revoke None None",
        ]
        office.refuses = True
        for order, reason in zip(orders, ("no such peer", "no time", "no time"), strict=True):
            with pytest.raises(Refused, match=reason):
                client.order(order)


def test_a_peer_without_the_coordinator_tells_whom_it_knows_and_where_to_ask_for_more(tmp_path: Path) -> None:
    with running(tmp_path, Daemon()):
        client = ControlClient(tmp_path)
        assert client.peers() == (PEER,)
        with pytest.raises(Refused, match="does not live in this folder"):
            client.ticket(TicketRequest(is_new=False))
        for order in (PutOutRequest(PEER_ID, for_ever=False), RevokeRequest(b"ticket 1")):
            with pytest.raises(Refused, match="does not live in this folder"):
                client.order(order)


def test_peers_are_shown_one_a_line() -> None:
    assert render_peers([PEER, BANNED]).splitlines() == [
        f"{PEER_ID}  member    127.0.0.1:1",
        f"{'f' * 16}  banned    -",
    ]


def test_peer_file_tells_where_and_disappears_with_the_daemon(tmp_path: Path) -> None:
    with running(tmp_path, Daemon()):
        told = json.loads((tmp_path / PEER_FILE_NAME).read_text())
        assert told["schema"] == "isthmus.peer/1"
        assert told["pid"] == os.getpid()
        path = Path(told["socket"])
        assert path.is_socket()
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert len(told["socket"]) < 100
    assert not (tmp_path / PEER_FILE_NAME).exists()
    assert not path.parent.exists()


def test_several_clients_at_once_are_all_answered(tmp_path: Path) -> None:
    daemon = Daemon()
    answers: list[Status] = []
    with running(tmp_path, daemon):
        threads = [threading.Thread(target=lambda: answers.append(ControlClient(tmp_path).status())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert answers == [a_status()] * 8


@pytest.mark.parametrize(
    "junk",
    [[b"", b"\xc1"], [b"", b""], [b"x", b"y", b"z"], [b""], [b"", msgspec.msgpack.encode({"type": "Format"})]],
)
def test_what_is_no_question_does_not_disturb_the_daemon(tmp_path: Path, junk: list[bytes]) -> None:
    with running(tmp_path, Daemon()):
        peer = find_peer(tmp_path)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"ipc://{peer.socket}")
            dealer.send_multipart(junk)
            assert ControlClient(tmp_path).status() == a_status()


def test_where_nothing_runs_is_told(tmp_path: Path) -> None:
    with pytest.raises(NothingRuns, match="name the folder of a running peer with --dir") as caught:
        ControlClient(tmp_path)
    assert caught.value.exit_code == ExitCode.NOBODY_REACHABLE


def test_daemon_that_was_killed_is_told_from_one_that_never_was(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    peer = PeerFile(socket="/nowhere", pid=gone.pid, peer_id="a", run_id="b")
    (tmp_path / PEER_FILE_NAME).write_bytes(msgspec.json.encode(peer))
    with pytest.raises(NothingRuns, match=f"has ended without a word \\(process {gone.pid}\\)"):
        ControlClient(tmp_path)


def test_a_killed_daemons_process_id_may_be_another_programs_by_now(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:  # nobody removes the file of one
        killed.bind(str(tmp_path / "control"))
    for path in ("control", "gone", "peer.json/control"):
        peer = PeerFile(socket=str(tmp_path / path), pid=os.getppid(), peer_id="a", run_id="b")
        (tmp_path / PEER_FILE_NAME).write_bytes(msgspec.json.encode(peer))
        assert not is_running(tmp_path)
        with pytest.raises(NothingRuns, match="has ended without a word"):
            ControlClient(tmp_path)


def test_damaged_peer_file_is_told(tmp_path: Path) -> None:
    (tmp_path / PEER_FILE_NAME).write_text("{")
    with pytest.raises(NothingRuns, match="is damaged"):
        ControlClient(tmp_path)


def test_daemon_that_does_not_answer_is_not_waited_for_longer_than_said(tmp_path: Path) -> None:
    peer = PeerFile(socket=str(tmp_path / "deaf"), pid=os.getpid(), peer_id="a", run_id="b")
    (tmp_path / PEER_FILE_NAME).write_bytes(msgspec.json.encode(peer))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
        deaf.bind(f"ipc://{tmp_path / 'deaf'}")
        with pytest.raises(NobodyReachable, match=r"did not answer in 0\.2 s"):
            ControlClient(tmp_path, timeout_s=0.2).status()


async def test_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    server = ControlServer(tmp_path / "none", Daemon(), peer_id="a", run_id="b")
    with pytest.raises(EnvironmentFault, match="control socket cannot be made"), server:
        pass


async def test_a_machine_without_a_temporary_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose file system is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    server = ControlServer(tmp_path, Daemon(), peer_id="a", run_id="b")
    with pytest.raises(EnvironmentFault, match=r"the control socket has no folder: .* in TMPDIR"), server:
        pass


# ------------------------------------------------------------------------------------------------------------- status


def test_status_as_json_has_a_versioned_schema_and_reads_back() -> None:
    encoded = msgspec.json.encode(a_status())
    assert json.loads(encoded)["schema"] == "isthmus.status/1"
    assert msgspec.json.decode(encoded, type=Status) == a_status()


def test_status_for_people_says_what_is_known_and_what_is_not() -> None:
    text = render_status(a_status())
    assert "outer step 3 of 20, inner step 4 of 50, view 2 of 1 peer\n" in text
    assert "train loss 2.5000, validation loss unknown" in text
    assert "12,345 tokens, unknown a second, goodput 91.8%" in text
    assert "sent 1.5 MB, received 0 B" in text
    assert "last round 1.25 s (exchange 0.500 s, planned 0.400 s, 2.0 kB) with 2 peers" in text
    assert "0123456789abcdef  127.0.0.1:1  (this)" in text
    assert "votes" not in text


def test_a_coordinator_alone_tells_view_round_and_votes() -> None:
    coordination = CoordinationStatus(
        epoch=2, outer_step=3, num_members=2, voted=(PEER_ID,), num_learners=1, num_late=0
    )
    status = msgspec.structs.replace(a_status(), phase="coordinating", coordination=coordination)
    assert render_status(status).splitlines() == [
        "run demo-0123abcd, coordinator 0123456789abcdef",
        "outer step 3 of 20, view 2 of 1 peer",
        "round 4: 1 of 2 votes, 1 learner, 0 late",
        "page at http://127.0.0.1:9/, metrics at http://127.0.0.1:9/metrics",
        "  0123456789abcdef  127.0.0.1:1  (this)",
    ]
