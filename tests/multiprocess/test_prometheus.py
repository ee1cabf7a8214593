# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes two peers, and every line of the Grafana board has numbers in it."""

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isthmus.trainer.record.board import RUN_LABEL, RUN_METRIC
from tests.multiprocess.ports import free_ports
from tests.multiprocess.processes import TIMEOUT_S, Process
from tests.multiprocess.run_harness import OPEN_END, running

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (apt-get install prometheus)"),
]

WINDOW = "10s"
MAY_BE_EMPTY = {"Connections that were not let in"}


def test_every_line_of_the_board_has_numbers_of_both_peers_in_a_real_prometheus(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--node.metrics_port", "0")
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END), "--eval.every", "1", *flags)
        run.wait_for_ticket()
        joiner = run.join(*flags)
        run.until_step(2, founder, joiner)
        addresses = [_metrics_address(founder), _metrics_address(joiner)]
        board = json.loads(_get(f"http://{addresses[0]}/grafana.json"))
        with prometheus(tmp_path / "prometheus", addresses) as server:
            run.until("both peers are scraped", lambda: len(_query(server, RUN_METRIC)) == 2)
            (run_id,) = _ask(server, f"label/{RUN_LABEL}/values", **{"match[]": RUN_METRIC})
            for panel, target in _targets(board):
                expression = target["expr"].replace("$__rate_interval", WINDOW).replace("$run", run_id)
                least = 0 if panel in MAY_BE_EMPTY else 2 if target["legendFormat"].startswith("{{instance}}") else 1
                run.until(f"{least} in {panel}: {expression}", partial(_has_numbers, server, expression, least))
            _, outer_step = next(_targets(board))
            assert _query(server, outer_step["expr"].replace("$run", "of-another-run")) == []
        run.leave_all()


@contextlib.contextmanager
def prometheus(folder: Path, targets: Sequence[str]) -> Iterator[str]:
    """One that scrapes these every second; gives its address."""
    assert PROMETHEUS is not None
    folder.mkdir()
    config = {"scrape_configs": [{"job_name": "isthmus", "static_configs": [{"targets": list(targets)}]}]}
    (folder / "prometheus.yml").write_text(json.dumps({"global": {"scrape_interval": "1s"}, **config}))
    (port,) = free_ports(1)
    command = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def _targets(board: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each panel's title with each of its queries."""
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target


def _has_numbers(server: str, expression: str, least: int) -> bool:
    return len(_query(server, expression)) >= least


def _metrics_address(peer: Process) -> str:
    return str(json.loads((peer.directory / "peer.json").read_bytes())["metrics_address"])


def _query(server: str, expression: str) -> list[Any]:
    """The series of it that have a number now; none as long as the server does not listen yet."""
    answer = _ask(server, "query", query=expression)
    return [] if answer is None else [series for series in answer["result"] if series["value"][1] != "NaN"]


def _ask(server: str, what: str, **parameters: str) -> Any:
    try:
        return json.loads(_get(f"http://{server}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"))["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it reads its configuration
            return None
        raise AssertionError(f"{parameters}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return None


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return bytes(answer.read())
