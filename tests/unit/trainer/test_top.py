# SPDX-License-Identifier: Apache-2.0
"""`isthmus top`: its page over a daemon's control socket, driven by textual's own pilot."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual.screen import Screen
from textual.widgets import DataTable, Sparkline, Static

from isthmus.trainer.cli.app import run
from isthmus.trainer.cli.dashboard import Dashboard, rows_of
from isthmus.trainer.errors import ExitCode, NobodyReachable
from isthmus.trainer.record.status import CoordinationStatus, MemberStatus, PeerStatus, RoundStatus, Status
from isthmus.trainer.run.control_socket import ControlClient
from tests.unit.trainer.test_control_socket import Daemon, a_status, running

OTHER = "fedcba9876543210"
MEMBERS = (
    *a_status().members,
    MemberStatus(
        peer_id=OTHER, incarnation=1, address="10.0.0.2:7000", host="10.0.0.2", is_dialled=True, round_trip_ms=12.34
    ),
)


def at_step(step: int) -> Status:
    return replace(
        a_status(),
        outer_step=step,
        members=MEMBERS,
        losses=tuple((number, 5.0 - number / 10) for number in range(1, step + 1)),
        train_loss=5.0 - step / 10,
        validation_loss=4.25,
        validation_bits_per_byte=6.1314,
        validation_outer_step=step - 1,
        last_round=RoundStatus(
            outer_step=step, seconds=1.25, exchange_seconds=0.5, bytes=2048, num_members=2, wait_seconds=step / 10
        ),
        coordination=CoordinationStatus(epoch=2, outer_step=step, num_members=2, voted=(OTHER,), num_learners=1),
        seconds_left=83.0,
    )


class Progressing(Daemon):
    """A daemon that is one outer step further whenever it is asked."""

    step = 5

    def status(self) -> Status:
        self.step += 1
        return at_step(self.step)


def text_of(app: Dashboard, name: str) -> str:
    return str(app.query_one(name, Static).content)


async def test_it_follows_a_daemon_over_its_socket_and_q_ends_it(tmp_path: Path) -> None:
    with running(tmp_path, Progressing()):
        client = ControlClient(tmp_path)
        app = Dashboard(lambda: (client.status(), client.peers()), look_s=0.01)
        async with app.run_test(size=(110, 34)) as pilot:
            while app.num_looks < 3:
                await pilot.pause(0.01)
            head, losses = text_of(app, "#head"), text_of(app, "#loss-text")
            curve = app.query_one("#loss-curve", Sparkline).data
            waits = app.query_one("#waits-curve", Sparkline).data
            table = app.query_one(DataTable)
            rows = [table.get_row_at(number) for number in range(table.row_count)]
            picture = app.export_screenshot()
            await pilot.press("q")
        assert app.return_code == 0
    assert curve is not None
    assert waits is not None
    assert "demo-0123abcd  peer 01234567  training  view 2" in head
    assert "about 1:23 left" in head
    assert list(curve) == pytest.approx([5.0 - number / 10 for number in range(1, len(curve) + 1)])
    assert len(curve) >= 8
    assert list(waits)[:3] == pytest.approx([0.6, 0.8, 1.0]), "a round is counted once; the peers ask for a status too"
    assert "held out 4.2500, 6.1314 bits a byte" in losses
    assert rows == [["01234567", "member, this", "", ""], ["fedcba98", "member", "to 10.0.0.2", "12.3"]]
    for shown in ("peers&#160;and&#160;links", "to&#160;10.0.0.2", "1&#160;of&#160;2&#160;votes"):
        assert shown in picture


async def test_a_peer_that_does_not_answer_is_told_and_asked_again() -> None:
    answers = iter(["silence", "status", "silence"])

    def look() -> tuple[Status, Sequence[PeerStatus]]:
        if next(answers, "silence") == "status":
            return at_step(6), ()
        raise NobodyReachable("the daemon in runs/x did not answer in 2 s", cure="try again, or look at its log")

    app = Dashboard(look, look_s=0.01)
    told = []
    async with app.run_test() as pilot:
        for number in (1, 2, 3):
            while app.num_looks < number:
                await pilot.pause(0.001)
            told.append((text_of(app, "#notice"), app.query_one("#notice").has_class("told")))
    assert "did not answer" in told[0][0]
    assert told[0][1]
    assert told[-1][1]


@pytest.mark.parametrize("is_silent", [True, False], ids=["no answer", "an answer"])
async def test_a_page_that_is_closed_while_the_peer_is_asked_ends_in_order(is_silent: bool) -> None:
    is_asked, is_closed = threading.Event(), threading.Event()

    def look() -> tuple[Status, Sequence[PeerStatus]]:
        is_asked.set()
        is_closed.wait(60.0)
        if is_silent:
            raise NobodyReachable("the daemon in runs/x did not answer in 2 s")
        return at_step(6), ()

    class Emptied(Screen[None]):
        async def on_unmount(self) -> None:
            """Of the parts of the page none is left."""
            is_closed.set()
            await asyncio.sleep(0.2)

    class Closing(Dashboard):
        def get_default_screen(self) -> Screen[None]:
            return Emptied(id="_default")

    async with Closing(look, look_s=0.01).run_test():
        await asyncio.to_thread(is_asked.wait, 60.0)


async def test_the_end_of_the_peer_stays_on_the_page(tmp_path: Path) -> None:
    def look() -> tuple[Status, Sequence[PeerStatus]]:
        client = ControlClient(tmp_path)
        return client.status(), client.peers()

    app = Dashboard(look, look_s=0.01)
    with running(tmp_path, Progressing()):
        pass
    async with app.run_test() as pilot:
        while app.num_looks < 1:
            await pilot.pause(0.01)
        assert "no isthmus runs in" in text_of(app, "#notice")
        await pilot.press("q")
    assert app.return_code == 0


def test_learners_and_who_is_kept_out_come_after_the_members() -> None:
    peers = (
        PeerStatus(peer_id=OTHER, state="late"),
        PeerStatus(peer_id="a" * 16, state="learner", address="10.0.0.3:1"),
        PeerStatus(peer_id="b" * 16, state="banned"),
    )
    assert rows_of(at_step(6), peers) == [
        ("01234567", "member, this", "", ""),
        ("fedcba98", "late", "to 10.0.0.2", "12.3"),
        ("aaaaaaaa", "learner", "10.0.0.3:1", ""),
        ("bbbbbbbb", "banned", "", ""),
    ]


def test_without_a_peer_or_a_terminal_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--dir", str(tmp_path)]) == ExitCode.NOBODY_REACHABLE
    assert "no isthmus runs in" in capsys.readouterr().err
    with running(tmp_path, Daemon()):
        assert run(["top", "--dir", str(tmp_path)]) == ExitCode.USAGE
    assert "isthmus top needs a terminal; isthmus status prints the same figures once" in capsys.readouterr().err
