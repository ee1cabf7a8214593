# SPDX-License-Identifier: Apache-2.0
"""The numbers for Prometheus, read the way Prometheus reads them."""

import contextlib
import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from isthmus.trainer.errors import EnvironmentFault, ExitCode
from isthmus.trainer.record.events import Checkpoint
from isthmus.trainer.record.figures import BLANK, fold
from isthmus.trainer.record.metrics import Metrics
from isthmus.trainer.record.metrics_server import TOO_LONG, TOO_MANY, TOO_SLOW, MetricsServer
from isthmus.trainer.record.page import make_application

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(lambda: BLANK)


def application_of(metrics: Metrics) -> "WSGIApplication":
    return make_application(metrics, lambda: (BLANK, ()))


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    with MetricsServer(application_of(metrics), port=0) as server:
        yield server


def ask(server: MetricsServer, method: str = "GET", path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.address, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_numbers_are_served_as_they_are_now() -> None:
    figures = replace(BLANK, run_id="demo-0123abcd", refused={"forged": 1}, sent_bytes=1000)
    with MetricsServer(application_of(Metrics(lambda: figures)), port=0) as server:
        ask(server)
        figures = fold(replace(figures, sent_bytes=1024), Checkpoint(outer_step=7, seconds=1.5))
        status, text = ask(server)
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {sample.name: sample.value for sample in samples}
    assert values["isthmus_sent_bytes_total"] == 1024
    assert (values["isthmus_checkpoints_total"], values["isthmus_checkpoint_seconds_sum"]) == (1, 1.5)
    assert values["isthmus_refused_connections_total"] == 1
    assert values["isthmus_peer_info"] == 1
    assert not {"isthmus_validation_loss", "isthmus_last_exchange_seconds"} & set(values), "they are not known yet"
    buckets = {
        sample.labels["le"]: sample.value for sample in samples if sample.name == "isthmus_checkpoint_seconds_bucket"
    }
    assert (buckets["1.0"], buckets["2.5"], buckets["600.0"], buckets["+Inf"]) == (0, 1, 1, 1)


def test_names_follow_the_rules_and_nothing_is_global(metrics: Metrics) -> None:
    for family in metrics.registry.collect():
        assert re.fullmatch(r"isthmus_[a-z_]+", family.name)
        assert family.documentation.endswith(".") or family.documentation.endswith("it.")
        assert family.type != "histogram" or family.name.endswith("_seconds")
    assert not [family for family in REGISTRY.collect() if family.name.startswith("isthmus")]


def test_two_peers_in_one_process_do_not_meet(metrics: Metrics) -> None:
    other = Metrics(lambda: replace(BLANK, outer_step=1))
    assert other.registry.get_sample_value("isthmus_outer_step") == 1
    assert metrics.registry.get_sample_value("isthmus_outer_step") == 0


def test_endpoint_listens_on_this_machine_only_by_itself_and_only_reads(server: MetricsServer) -> None:
    assert server.address.startswith("127.0.0.1:")
    status, text = ask(server, "POST")
    assert status == 405 or "isthmus_outer_step 0.0" in text  # older clients answer a POST as a GET


def test_endpoint_listens_where_it_is_told_to(metrics: Metrics) -> None:
    with MetricsServer(application_of(metrics), host="127.0.0.2", port=0) as elsewhere:
        assert elsewhere.address.startswith("127.0.0.2:")
        assert ask(elsewhere)[0] == 200
    with pytest.raises(EnvironmentFault, match=r"node\.metrics_host to an address of this machine"):
        MetricsServer(application_of(metrics), host="203.0.113.1", port=0)


def test_strange_requests_do_not_end_it(server: MetricsServer) -> None:
    host, _, port = server.address.rpartition(":")
    for junk in (b"\x00\xff" * 100 + b"\r\n\r\n", b"GET /" + b"a" * 100_000 + b" HTTP/1.0\r\n\r\n", b""):
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(junk)
    assert ask(server)[0] == 200


def dial(server: MetricsServer, source: str = "127.0.0.1") -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10, source_address=(source, 0))


def accepted(server: MetricsServer) -> int:
    """Descriptors of this process that are the server's side of a connection."""
    port = int(server.address.rpartition(":")[2])
    wanted = f":{port:04X} "
    inodes = {
        fields[9]
        for fields in map(str.split, Path("/proc/self/net/tcp").read_text().splitlines()[1:])
        if f"{fields[1]} ".endswith(wanted) and fields[3] in ("01", "08")
    }
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.removeprefix("socket:[").removesuffix("]") in inodes for link in links)


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_five_hundred_that_say_nothing_keep_nobody_from_asking(server: MetricsServer) -> None:
    with contextlib.ExitStack() as idle:
        for _ in range(500):
            idle.enter_context(dial(server))
        until(lambda: accepted(server) <= 16)
        for _ in range(20):
            assert ask(server)[0] == 200
        assert accepted(server) <= 16
        assert server.refused[TOO_MANY] >= 484
        assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) <= 40


def test_address_with_most_connections_makes_room(server: MetricsServer) -> None:
    with contextlib.ExitStack() as idle:
        slow = idle.enter_context(dial(server, "127.0.0.2"))  # the oldest of all
        for _ in range(100):
            idle.enter_context(dial(server))
        until(lambda: server.refused[TOO_MANY] >= 85)  # more where threads wait for a processor
        slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert slow.recv(100).startswith(b"HTTP/1.0 200")


def _is_refused(client: socket.socket) -> bool:
    """Send one byte more; whether the other side has closed."""
    try:
        client.sendall(b"G")
    except OSError:
        return True
    return False


def test_request_that_does_not_end_is_ended_though_a_byte_comes_now_and_then(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.trainer.record.metrics_server._DEADLINE_S", 0.3)
    with dial(server) as client:
        until(lambda: _is_refused(client), timeout_s=5)
    assert server.refused == {TOO_SLOW: 1}


def test_request_without_end_of_its_lines_is_ended(server: MetricsServer, caplog: pytest.LogCaptureFixture) -> None:
    for head in (b"GET /metrics HTTP/1.0\r\n" + (b"X-Y: " + b"z" * 500 + b"\r\n") * 50, b"GET /" + b"a" * 20_000):
        with dial(server) as client, contextlib.suppress(OSError):
            client.sendall(head)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
    until(lambda: server.refused == {TOO_LONG: 2})
    assert [record.getMessage() for record in caplog.records] == [
        f"connection_ended host='127.0.0.1' reason={TOO_LONG!r} so_far=1"
    ]


def test_taken_port_is_told_with_a_cure(metrics: Metrics, server: MetricsServer) -> None:
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(EnvironmentFault, match=r"set node\.metrics_port to 0") as caught:
        MetricsServer(application_of(metrics), port=port)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


def test_closed_endpoint_is_gone(metrics: Metrics) -> None:
    server = MetricsServer(application_of(metrics), port=0)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(server)
