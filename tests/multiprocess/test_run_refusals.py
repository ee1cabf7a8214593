# SPDX-License-Identifier: Apache-2.0
"""What people get wrong: each mistake is one sentence on stderr, the right exit code, and nothing on stdout."""

import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest

from isthmus.trainer.contact.ticket import read_ticket
from tests.multiprocess.processes import Outcome, Process
from tests.multiprocess.run_harness import OPEN_END, Run, at_home, now_s, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

USAGE, ENVIRONMENT, NOBODY_REACHABLE, REFUSED, WORKER_CRASHED = 2, 3, 4, 5, 10
COLUMNS = 80


def _sentence(outcome: Outcome, code: int) -> str:
    """The one sentence, after checking that it is one and nothing else was said."""
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    (sentence,) = outcome.sentences
    assert sentence.startswith("isthmus: ")
    assert "Traceback" not in outcome.err
    assert not sentence.endswith(".")
    return sentence.removeprefix("isthmus: ")


def _end_of(*processes: Process) -> list[Outcome]:
    return [process.outcome() for process in processes]


def test_how_a_process_has_failed_is_told_afterwards(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        (tmp_path / "file").touch()
        founder = run.start("up", "-c", str(run.config), "--data", str(run.text), "--ticket-file", "file/ticket")
        assert founder.outcome().code == ENVIRONMENT
        told = run.command("status", "--dir", str(founder.directory))
    assert f"ended with {ENVIRONMENT} (the ticket cannot be written to file/ticket: Not a directory)" in told.err


def test_a_coordinator_refuses_what_does_not_belong_to_its_run(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.coordinator()
        run.wait_for_ticket()
        other_text = tmp_path / "other.txt"
        other_text.write_text(run.text.read_text().replace("bridge", "tunnel"))
        differing, misread, taken = _end_of(
            run.join("--outer.inner_steps", "99"),
            run.join("--data", str(other_text)),
            run.start("up", "-c", str(run.config), "--data", str(run.text), "--listen", _address_of(run)),
        )
        sentence = _sentence(differing, REFUSED)
        assert "outer.inner_steps (here 99 from --outer.inner_steps, in the run 3)" in sentence
        assert "the text here (other.txt) is not the run's" in _sentence(misread, REFUSED)
        assert _address_of(run) in _sentence(taken, ENVIRONMENT)


def test_a_ticket_that_has_expired_or_is_of_another_run_admits_nobody(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        first = run.coordinator("--members.ticket_lifetime", "1s")
        run.wait_for_ticket()
        address, old_ticket = _address_of(run), run.ticket.read_text()
        expires_at_s = read_ticket(old_ticket).expires_at_s
        run.until("expiry", lambda: now_s() >= expires_at_s)
        (expired,) = _end_of(run.join())
        assert _sentence(expired, REFUSED).startswith("the ticket expired ")
        first.kill()

        run.coordinator("--listen", address)
        run.wait_for_ticket()
        run.ticket.write_text(old_ticket)
        (stranger,) = _end_of(run.join())
        sentence = _sentence(stranger, REFUSED)
        # Its token is not even shown: the certificate is not that of the run in the ticket.
        assert sentence.startswith("who answers is not the run of this ticket")
        assert "ask for a new ticket" in sentence


def test_a_join_without_anybody_there_says_so_once_and_gets_in_when_the_coordinator_is_back(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        coordinator = run.coordinator()
        run.wait_for_ticket()
        address = _address_of(run)
        waits = re.compile(rf"waiting_for_coordinator .*{address} \(refused\)")
        for _ in range(5):  # it waits for 12 s, and a coordinator may take that long to start
            coordinator.kill()
            early = run.join()
            early.is_judged = True
            log = early.console.with_suffix(".err")
            run.until("patience", lambda log=log: waits.search(log.read_text()) is not None)
            coordinator = run.coordinator("--listen", address, folder=coordinator.directory)
            run.until("join", lambda peer=early: bool(peer.events("join")) or not peer.is_running)
            assert log.read_text().count("waiting_for_coordinator") == 1
            if early.events("join"):
                break
            assert early.outcome().code == NOBODY_REACHABLE
        assert early.events("join"), run.story()


def test_mistakes_on_the_command_line_are_told_before_anything_starts(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        garbage = run.command("join", "isthmus1thisisnoticket", "--dir", str(tmp_path / "a"))
        assert "ticket" in _sentence(garbage, REFUSED)
        misspelt = run.command("up", "--outer.inner_stepz", "3", "--dir", str(tmp_path / "b"))
        assert "unknown key outer.inner_stepz" in (sentence := _sentence(misspelt, USAGE))
        assert "did you mean outer.inner_steps?" in sentence
        missing = run.command("up", "--data", "nowhere.txt", "--dir", str(tmp_path / "c"))
        assert f"{tmp_path / 'nowhere.txt'} does not exist" in _sentence(missing, USAGE)


def test_a_worker_that_cannot_start_ends_its_peer_with_the_reason(tmp_path: Path) -> None:
    with running(tmp_path, GLOO_SOCKET_IFNAME="no-such-interface") as run:
        founder = run.found()
        ended = founder.outcome()
        assert f"isthmus join {run.ticket.read_text()}" in ended.out
        ended.out = ""
        sentence = _sentence(ended, WORKER_CRASHED)
        assert sentence.startswith("worker 0 ended with exit code 1: ")
        assert str(founder.directory / "worker-0.log") in sentence


def test_the_line_that_a_terminal_shows_joins_however_it_was_copied(tmp_path: Path) -> None:
    """Of 80 columns: whoever copies from it may get a line break after each."""
    with running(tmp_path) as run:
        screen, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        flags = ("-c", str(run.config), "--data", str(run.text), "--ticket-file", str(run.ticket))
        founder = run.start("up", *flags, "--outer-steps", str(OPEN_END), terminal=terminal)
        run.wait_for_ticket()
        os.close(terminal)
        shown = ""
        while run.ticket.read_text().strip() not in shown:
            shown += os.read(screen, 1 << 16).decode().replace("\r\n", "\n")
        os.close(screen)
        assert shown.startswith("others join with (until ")
        (line,) = (line.strip() for line in shown.splitlines() if "isthmus join " in line)
        ticket = line.removeprefix("isthmus join ")
        assert ticket == run.ticket.read_text().strip()
        pieces = [ticket[start : start + COLUMNS] for start in range(0, len(ticket), COLUMNS)]
        assert len(pieces) > 1

        copied = tmp_path / "copied"
        copied.write_text("\n".join(pieces))
        peers = [
            run.start("join", *given, "--node.threads", "1")
            for given in ((ticket,), tuple(pieces), ("\n".join(pieces),), (f"@{copied}",))
        ]
        run.until("members", lambda: all(len(peer.commits()) > 2 for peer in (founder, *peers)))
        run.leave_all()


def _address_of(run: Run) -> str:
    """Where the newest ticket says that the coordinator is."""
    (address,) = read_ticket(f"@{run.ticket}").addresses
    return at_home(address)
