# SPDX-License-Identifier: Apache-2.0
"""Encryption and caps as users meet them: nothing in plain, joiners that would not encrypt, a line that is capped."""

import json
import re
import socket
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

import pytest

from isthmus.trainer.config.quantities import parse_rate
from isthmus.trainer.contact.ticket import read_ticket
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, broken_rounds, running
from tests.multiprocess.test_run_hostile import strangers_hello

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

REFUSED = 5
HOME = ("--listen", "127.0.0.1:0")
TIMEOUT_S = 15.0
BURST_NBYTES = 16 << 10
"""What a capped peer may send at once after a pause, at the rates used here."""
SENT = re.compile(r"^isthmus_sent_bytes_total (\S+)$", re.MULTILINE)


def _own_address() -> str | None:
    """An address of this machine that is not loopback, if it has one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return None
        host = str(sock.getsockname()[0])
    return None if host.startswith("127.") else host


@pytest.mark.parametrize("tls", ["auto", "on"])
def test_an_encrypted_run_trains_ends_with_equal_digests_and_talks_to_nobody_in_plain(tmp_path: Path, tls: str) -> None:
    last = 10
    host = "127.0.0.1" if tls == "on" else _own_address()
    if host is None:
        pytest.skip("this machine has no address but loopback")
    with running(tmp_path) as run:
        listen = ("--listen", f"{host}:0")
        founder = run.found("--peers", "3", "--outer-steps", str(last), "--tls", tls, *listen, *NEVER_LATE)
        run.wait_for_ticket()
        ticket = read_ticket(f"@{run.ticket}")
        assert len(ticket.fingerprint) == 32
        assert ticket.addresses[0].startswith(f"{host}:")
        assert not _answers_in_plain(ticket.addresses[0])
        joiner = run.join(*listen)
        run.until("address", lambda: bool(joiner.events("started")))
        assert not _answers_in_plain(joiner.events("started")[0]["address"])
        third = run.join(*listen)  # for which the two have waited
        assert run.until_ended(founder, joiner, third) == [0, 0, 0]
    assert len(assert_same_commits(founder, joiner, third)) == last
    for peer in (founder, joiner, third):
        assert sorted(peer.commits()) == list(range(1, last + 1))
        assert not broken_rounds(peer)
    audit = Audit.of(read_journal(founder.directory))
    assert all(len(record.contributions) == 3 for record in audit.commits)


def test_an_encrypted_run_goes_on_after_a_kill_and_brings_a_late_peer_to_its_state(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END), "--tls", "on")
        run.wait_for_ticket()
        victim = run.join()
        run.until_step(3, founder, victim)
        late = run.join()
        victim.kill()
        run.until_step(1, late)
        run.until_step(late.step + 3, founder, late)
        run.leave_all()
    digests = assert_same_commits(founder, victim, late)
    fetched = [event for event in late.events("catch_up") if event["bytes"] > 0 and event["outer_step"] is not None]
    assert all(event["digest"] == digests[event["outer_step"]] for event in fetched)
    assert fetched
    Audit.of(read_journal(founder.directory))


@pytest.mark.parametrize("flag", [("--tls", "off"), ("--insecure",)], ids=["tls off", "insecure"])
def test_a_joiner_that_would_not_encrypt_is_refused_with_a_sentence(tmp_path: Path, flag: tuple[str, ...]) -> None:
    with running(tmp_path) as run:
        run.coordinator("--tls", "on", *HOME)
        run.wait_for_ticket()
        refused = run.join(*flag, *HOME).outcome()
    assert refused.code == REFUSED
    assert refused.out == ""
    (sentence,) = refused.sentences
    assert f'net.tls (here "off" from {flag[0]}, in the run "on")' in sentence
    assert ("WARNING" in refused.err) is (flag == ("--insecure",))


def test_a_run_without_encryption_is_joined_only_by_who_says_so(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", "3", "--tls", "off", *HOME)
        run.wait_for_ticket()
        ticket = read_ticket(f"@{run.ticket}")
        assert ticket.fingerprint == b""
        assert _answers_in_plain(ticket.addresses[0])
        refused = run.join(*HOME).outcome()
        (sentence,) = refused.sentences
        assert refused.code == REFUSED
        assert "the ticket has no fingerprint to know the run by" in sentence
        assert "join with --insecure" in sentence
        joiner = run.join("--tls", "off", *HOME)
        assert run.until_ended(founder, joiner) == [0, 0]
    assert_same_commits(founder, joiner)


def test_a_capped_peer_sends_no_more_than_its_cap(tmp_path: Path) -> None:
    cap = parse_rate("640kbit")
    assert isinstance(cap, float)
    with running(tmp_path) as run:
        flags = ("--outer.codec", "raw", "--model.dim", "32", "--model.hidden_dim", "64")
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END), *flags, *NEVER_LATE)
        run.wait_for_ticket()
        capped = run.join("--max-upload", "640kbit", "--node.metrics_port", "0")
        run.until_step(1, capped)
        began, sent_before = time.monotonic(), _sent_nbytes(capped)
        run.until_step(capped.step + 4, founder, capped)
        sent = _sent_nbytes(capped) - sent_before
        taken_s = time.monotonic() - began
        run.leave_all()
    rounds = capped.events("round")
    # A round counts when it is over: what the first one had sent before we looked may be in `sent`.
    longest = max(event["bytes_sent"] for event in rounds)
    assert longest > 2 * BURST_NBYTES
    assert 3 * BURST_NBYTES < sent <= cap * taken_s + longest + BURST_NBYTES
    for event in rounds:
        assert event["seconds"] >= (event["bytes_sent"] - BURST_NBYTES) / cap
    for earlier, later in pairwise(rounds):
        assert later["t_s"] - earlier["t_s"] >= (later["bytes_sent"] - BURST_NBYTES) / cap
    assert not broken_rounds(capped)
    assert_same_commits(founder, capped)


def _answers_in_plain(address: str) -> bool:
    """Whether a hello of our own protocol gets any answer there. Without encryption that is at least a refusal."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as stranger:
        stranger.sendall(strangers_hello())
        try:
            return stranger.recv(1) != b""
        except ConnectionResetError:
            return False


def _sent_nbytes(peer: Process) -> int:
    """Bytes of exchanges, as Prometheus would read them."""
    address = json.loads((peer.directory / "peer.json").read_bytes())["metrics_address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        (sent,) = SENT.findall(answer.read().decode())
    return int(float(sent))
