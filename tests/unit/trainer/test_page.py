# SPDX-License-Identifier: Apache-2.0
"""The live page: what the metrics port answers, and what a browser makes of it."""

import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html import unescape
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from isthmus.trainer.record.board import grafana_board
from isthmus.trainer.record.figures import BLANK
from isthmus.trainer.record.metrics import Metrics
from isthmus.trainer.record.metrics_server import MetricsServer
from isthmus.trainer.record.page import make_application
from isthmus.trainer.record.status import CoordinationStatus, MemberStatus, PeerStatus, Status, StepStatus
from tests.unit.trainer.test_top import at_step

LEARNER = PeerStatus(peer_id="ab12" * 4, state="learner", address="10.0.0.9:7000")
NAMED_BY_A_LIAR = "<b>bold</b>"


class Shown:
    """What a peer would show, to be changed while it is looked at."""

    def __init__(self) -> None:
        self.status: Status = at_step(9)
        self.peers: tuple[PeerStatus, ...] = (LEARNER,)
        self.is_gone = False

    def __call__(self) -> tuple[Status, tuple[PeerStatus, ...]]:
        if self.is_gone:
            raise ConnectionResetError
        return self.status, self.peers


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def server(shown: Shown) -> Iterator[MetricsServer]:
    with MetricsServer(make_application(Metrics(lambda: BLANK), shown), port=0) as server:
        yield server


def ask(server: MetricsServer, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.address, timeout=10)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_it_tells_what_status_and_peers_print_as_json(server: MetricsServer, shown: Shown) -> None:
    assert msgspec.json.decode(ask(server, "/status.json")[1], type=Status) == shown.status
    assert json.loads(ask(server, "/peers.json")[1]) == msgspec.to_builtins([LEARNER])
    shown.status, shown.peers = at_step(10), ()
    assert json.loads(ask(server, "/status.json")[1])["outer_step"] == 10
    assert json.loads(ask(server, "/peers.json")[1]) == []


def test_it_has_a_board_for_grafana(server: MetricsServer) -> None:
    status, content = ask(server, "/grafana.json")
    assert (status, json.loads(content)) == (200, grafana_board())


def test_no_file_but_its_own_can_be_asked_for_and_nothing_can_be_sent(server: MetricsServer) -> None:
    for path in ("/__init__.py", "/page.css/..", "/../metrics.py", "/%2e%2e/metrics.py", "/etc/passwd", "/metrics/.."):
        assert ask(server, path)[0] in (400, 404), path
    assert ask(server, "/status.json", method="POST")[0] == 405
    assert ask(server, "/", method="HEAD") == (200, b"")


@pytest.mark.parametrize("host", ["localhost:9100", "127.0.0.1:1", "LOCALHOST", "[::1]:9100", "10.1.2.3"])
def test_whoever_asks_by_an_address_or_as_localhost_is_answered(server: MetricsServer, host: str) -> None:
    assert ask(server, "/status.json", host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example:9100", "127.0.0.1.evil.example", "[::1", "", "localhost.evil.example"])
def test_a_web_page_whose_name_leads_here_reads_nothing(server: MetricsServer, host: str) -> None:
    status, content = ask(server, "/status.json", host=host)
    assert (status, content) == (403, b"ask for this page by an address, or as localhost\n")
    assert ask(server, "/metrics", host=host)[0] == 200, "a scraper may have a name for this machine"


def test_the_page_takes_nothing_from_another_host() -> None:
    for file in resources.files("isthmus.trainer.record.page").iterdir():
        if file.name.endswith((".html", ".css", ".js")):
            found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[^\"\s)]*", file.read_text()))
            assert found <= {"http://www.w3.org/2000/svg"}, file.name


# ------------------------------------------------------------------------------------ in a browser


@pytest.fixture
def browser(tmp_path: Path) -> list[str]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium is installed here")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    return [program, *quiet, f"--user-data-dir={tmp_path}/profile"]


def page_after(browser: list[str], server: MetricsServer, seconds: float) -> str:
    """What stands on the page then, as HTML; its clock runs as fast as it can."""
    command = [*browser, f"--virtual-time-budget={seconds * 1e3:.0f}", "--dump-dom", f"http://{server.address}/"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def words_of(page: str, name: str) -> str:
    """The text of the element with this id, its cells by a space."""
    found = re.search(rf'<(\w+)[^>]*\bid="{name}"[^>]*>(.*?)</\1>', page, re.DOTALL)
    assert found is not None, name
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found[2]))).strip()


def test_a_browser_shows_run_loss_round_peers_and_pace(browser: list[str], server: MetricsServer, shown: Shown) -> None:
    step = StepStatus(
        seconds=2.0,
        data_seconds=0.1,
        passes_seconds=1.5,
        clip_seconds=0.1,
        update_seconds=0.2,
        tokens_per_s=2048.0,
        mfu=0.4321,
    )
    late = CoordinationStatus(epoch=2, outer_step=9, num_members=2, voted=("a",), num_learners=1, num_late=3)
    shown.status = replace(shown.status, step=step, coordination=late, tokens_per_s=1234.5)
    page = page_after(browser, server, 2.5)
    assert words_of(page, "run") == "demo-0123abcd"
    assert words_of(page, "phase") == "training"
    assert words_of(page, "where") == (
        "outer step 9 of 20, inner step 4 of 50, view 2 of 2 peers, up 0:00, about 1:23 left"
    )
    assert "training 4.1000 nats a token held out 4.2500, 6.1314 bits a byte at outer step 8" in words_of(
        page, "losses"
    )
    assert len(re.findall(r"[\d.]+,[\d.]+", page.partition('class="curve" points="')[2].partition('"')[0])) == 9
    assert words_of(page, "rounds").startswith("last round 1.25 s with 2 peers waited 0.90 s exchange 0.500 s, 2.0 kB")
    assert page.count('class="bar"') == 1, "the same round is one bar, however often it is looked at"
    assert words_of(page, "peers") == (
        "01234567 member, this fedcba98 member to 10.0.0.2 12.3 ms ab12ab12 learner 10.0.0.9:7000"
    )
    assert "round 10 1 of 2 votes, 1 learner, 3 late" in words_of(page, "traffic")
    assert "of the devices' peak 43.2 %" in words_of(page, "pace")
    assert "passes 75.0 %" in words_of(page, "pace")
    assert "rest 5.0 %" in words_of(page, "pace")
    assert 'id="notice" role="status" hidden=""' in page


def test_a_peer_that_has_just_started_has_a_page(browser: list[str], server: MetricsServer, shown: Shown) -> None:
    shown.status, shown.peers = replace(BLANK, run_id="new-0123abcd", peer_id="01" * 8), ()
    page = page_after(browser, server, 1.5)
    assert words_of(page, "where") == "outer step 0 of 0, view 0 of 0 peers, up 0:00"
    assert "training unknown nats a token held out not judged here yet" in words_of(page, "losses")
    assert words_of(page, "rounds") == "last round none yet"


def test_what_others_send_is_text_and_never_markup(browser: list[str], server: MetricsServer, shown: Shown) -> None:
    liar = MemberStatus(peer_id=NAMED_BY_A_LIAR, incarnation=1, address=NAMED_BY_A_LIAR)
    shown.status = replace(shown.status, run_id=NAMED_BY_A_LIAR, members=(liar,))
    page = page_after(browser, server, 1.5)
    assert "<b>" not in page
    assert page.count("&lt;b&gt;bold&lt;/b&gt;") >= 2


def test_it_says_so_if_the_peer_tells_nothing_new(browser: list[str], server: MetricsServer) -> None:
    page = page_after(browser, server, 8.5)
    assert words_of(page, "notice").startswith("the peer has told nothing new for 0:0")


def test_it_says_so_if_the_peer_does_not_answer(browser: list[str], server: MetricsServer, shown: Shown) -> None:
    shown.is_gone = True
    page = page_after(browser, server, 1.5)
    assert words_of(page, "notice") == (
        "the peer does not answer (Failed to fetch); isthmus status on its machine says whether it has ended"
    )
