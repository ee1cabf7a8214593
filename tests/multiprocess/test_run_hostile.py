# SPDX-License-Identifier: Apache-2.0
"""What a stranger can send to a peer's port: it is closed and counted, and the run does not notice."""

import contextlib
import json
import os
import random
import re
import socket
import ssl
import struct
import urllib.request
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from isthmus.collective.core.types import Incarnation, PeerId
from isthmus.collective.transport import FrameType, Hello, Purpose
from isthmus.collective.transport.wire import PROTOCOL_VERSION, Header, pack
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, at_home, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

CLOSED_WITHIN_S = 15.0
"""A hello has 5 s; the rest is for a busy machine."""
PARTING_FAULTS = {"peer_disconnected", "coordinator_lost", "round_broke"}
"""What may be written down when everybody leaves in the end."""

COUNTER = re.compile(r'^isthmus_refused_connections_total\{reason="([^"]+)"\} (\S+)$', re.MULTILINE)


@pytest.mark.parametrize("tls", ["auto", "on"])
def test_hostile_bytes_are_closed_and_counted_while_the_run_goes_on(tmp_path: Path, tls: str) -> None:
    rng = random.Random(11)
    with running(tmp_path) as run:
        flags = ("--node.metrics_port", "0")
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END), "--tls", tls, *flags, *NEVER_LATE)
        run.wait_for_ticket()
        peers = (founder, run.join(*flags))
        run.until_step(3, *peers)
        hello = strangers_hello()
        plain = {
            rng.randbytes(4096): "wrong magic",
            b"GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: a browser\r\n\r\n": "wrong magic",
            b"XX" + hello[2:]: "wrong magic",
            hello[:-1] + b"\0": "checksum does not fit",
            struct.pack("!2sBBI", b"IS", PROTOCOL_VERSION, FrameType.HELLO, 2**32 - 1) + bytes(40): "payload too long",
            hello: "refused",  # in every respect as it should be, but for the run and its key
            hello[:7]: "no hello in time",
        }
        if tls == "on":
            plain = dict.fromkeys(plain, "not encrypted")
        plain |= {
            b"": "no hello in time",
            b"\x16\x03\x01\x02\x00\x01": "no hello in time",  # TLS begins like this
            b"\x16\x03\x01\x00\x05hello": "TLS: unexpected message",
        }
        encrypted = {
            hello: "no certificate",
            b"IS, but not so": "no hello in time",
            b"GET / HTTP/1.1\r\n" * 8: "wrong magic",
        }
        step = founder.step
        strangers = [_dial(peer, content) for peer in peers for content in plain]
        strangers += [_dial(peer, content, _whoever_answers()) for peer in peers for content in encrypted]
        for stranger in strangers:
            _read_until_closed(stranger)
        # At least: the port may be an old one of another run, which somebody still looks for.
        counted = Counter((*plain.values(), *encrypted.values()))
        run.until("counters", lambda: all(_refused(peer) >= counted for peer in peers))
        assert not any("handler failed" in _refused(peer) for peer in peers)
        run.until_step(step + 10, *peers)
        before = {peer.name: peer.step for peer in peers}
        run.leave_all()
    for peer in peers:
        assert {event["kind"] for event in peer.events("fault")} <= PARTING_FAULTS
        assert sorted(peer.commits())[: before[peer.name]] == list(range(1, before[peer.name] + 1))
        assert not re.search("Traceback|ERROR", peer.console.with_suffix(".err").read_text())
    assert_same_commits(*peers)
    audit = Audit.of(read_journal(founder.directory))
    assert all(len(record.contributions) == 2 for record in audit.commits[: min(before.values())])


def test_idle_connections_to_the_metrics_port_cost_no_descriptors_and_a_scrape_succeeds(tmp_path: Path) -> None:
    with running(tmp_path) as run, contextlib.ExitStack() as idle:
        founder = run.found("--outer-steps", str(OPEN_END), "--node.metrics_port", "0")
        run.until_step(2, founder)
        num_before = _num_descriptors(founder)
        host, _, port = _metrics_address(founder).rpartition(":")
        for _ in range(500):
            idle.enter_context(socket.create_connection((host, int(port)), timeout=CLOSED_WITHIN_S))
        step = founder.step
        run.until("refusals", lambda: _has_refused(founder, 484))
        run.until_step(step + 5, founder)
        run.until("descriptors", lambda: _num_descriptors(founder) <= num_before + 20)
        run.leave_all()
    said = founder.console.with_suffix(".err").read_text().splitlines()
    assert len([line for line in said if "connection_ended" in line and "too many connections" in line]) == 1


def _has_refused(peer: Process, number: int) -> bool:
    try:
        return _refused(peer)["metrics: too many connections"] >= number
    except OSError:  # the scrape itself was one too many
        return False


def _num_descriptors(peer: Process) -> int:
    return len(os.listdir(f"/proc/{peer.popen.pid}/fd"))


def _metrics_address(peer: Process) -> str:
    return str(json.loads((peer.directory / "peer.json").read_bytes())["metrics_address"])


def strangers_hello() -> bytes:
    """A frame such as a stranger would make who knows the protocol and not the run."""
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        run_id="run-00000000",
        purpose=Purpose.CONTROL,
        peer_id=PeerId("0123456789abcdef"),
        incarnation=Incarnation(1),
        credential=b"guess" * 6 + b"!!",
        num_streams=1,
    )
    payload = msgspec.msgpack.encode(hello)
    return pack(Header(type=FrameType.HELLO, payload_nbytes=len(payload)), payload) + payload


def _whoever_answers() -> ssl.SSLContext:
    """A TLS client without a certificate, content with any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _dial(peer: Process, content: bytes, encryption: ssl.SSLContext | None = None) -> socket.socket:
    host, _, port = at_home(peer.events("started")[0]["address"]).rpartition(":")
    stranger = socket.create_connection((host, int(port)), timeout=CLOSED_WITHIN_S)
    if encryption is not None:
        stranger = encryption.wrap_socket(stranger)
    stranger.sendall(content)
    return stranger


def _read_until_closed(stranger: socket.socket) -> None:
    """Fails with a timeout if the other side does not close."""
    with stranger:
        try:
            while stranger.recv(4096):
                pass
        except (ConnectionResetError, ssl.SSLError):
            pass  # closed before all of ours was read


def _refused(peer: Process) -> Counter[str]:
    """Connections that were not let in, by reason, as Prometheus would read them."""
    with urllib.request.urlopen(f"http://{_metrics_address(peer)}/metrics", timeout=CLOSED_WITHIN_S) as answer:
        return Counter({reason: int(float(value)) for reason, value in COUNTER.findall(answer.read().decode())})
