"""The numbers for Prometheus, read the way Prometheus reads them."""

import http.client
import re
import socket
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from trainer.errors import EnvironmentFault, ExitCode
from trainer.metrics import Metrics, MetricsServer


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(run_id="demo-0123abcd", peer_id="0123456789abcdef")


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    with MetricsServer(metrics, port=0) as server:
        yield server


def ask(server: MetricsServer, method: str = "GET", path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.address, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_numbers_are_served_as_they_are_now(metrics: Metrics, server: MetricsServer) -> None:
    metrics.outer_step.set(7)
    metrics.sent_bytes.inc(1000)
    metrics.sent_bytes.inc(24)
    metrics.round_seconds.observe(1.5)
    metrics.refused_connections.labels(reason="forged").inc()
    status, text = ask(server)
    assert status == 200
    values = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    assert values["isthmus_outer_step"] == 7
    assert values["isthmus_sent_bytes_total"] == 1024
    assert values["isthmus_round_seconds_sum"] == 1.5
    assert values["isthmus_refused_connections_total"] == 1
    assert values["isthmus_peer_info"] == 1


def test_names_follow_the_rules_and_nothing_is_global(metrics: Metrics) -> None:
    for family in metrics.registry.collect():
        assert re.fullmatch(r"isthmus_[a-z_]+", family.name)
        assert family.documentation.endswith(".") or family.documentation.endswith("it.")
        assert family.type != "histogram" or family.name.endswith("_seconds")
    assert not [family for family in REGISTRY.collect() if family.name.startswith("isthmus")]


def test_two_peers_in_one_process_do_not_meet(metrics: Metrics) -> None:
    other = Metrics(run_id="demo-0123abcd", peer_id="fedcba9876543210")
    metrics.outer_step.set(1)
    assert other.registry.get_sample_value("isthmus_outer_step") == 0


def test_endpoint_listens_on_this_machine_only_and_only_reads(server: MetricsServer) -> None:
    assert server.address.startswith("127.0.0.1:")
    status, text = ask(server, "POST")
    assert status == 405 or "isthmus_outer_step 0.0" in text  # older clients answer a POST as a GET


def test_strange_requests_do_not_end_it(server: MetricsServer) -> None:
    host, _, port = server.address.rpartition(":")
    for junk in (b"\x00\xff" * 100 + b"\r\n\r\n", b"GET /" + b"a" * 100_000 + b" HTTP/1.0\r\n\r\n", b""):
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(junk)
    assert ask(server)[0] == 200


def test_taken_port_is_told_with_a_cure(metrics: Metrics, server: MetricsServer) -> None:
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(EnvironmentFault, match=r"set node\.metrics_port to 0") as caught:
        MetricsServer(metrics, port=port)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


def test_closed_endpoint_is_gone(metrics: Metrics) -> None:
    server = MetricsServer(metrics, port=0)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(server)
