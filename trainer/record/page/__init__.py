# SPDX-License-Identifier: Apache-2.0
"""What the metrics port answers: a live page of the peer for a browser, the same as JSON, and numbers for Prometheus.

    /              the page, with page.css and page.js: no other file, nothing from another host
    /status.json   what `isthmus status --json` prints
    /peers.json    what `isthmus peers --json` prints
    /metrics       for Prometheus
    /grafana.json  a Grafana board of these numbers (board.py)

Rules: it reads only, and has no secrets. Everything but the numbers is for whoever asks by an address, or as localhost:
a web page elsewhere whose name leads to this machine (DNS rebinding) reads nothing. Must not know how a request came.
"""

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.exposition import make_wsgi_app

from isthmus.trainer.record.board import grafana_board
from isthmus.trainer.record.metrics import Metrics
from isthmus.trainer.record.status import PeerStatus, Status

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Look = Callable[[], tuple[Status, Sequence[PeerStatus]]]
"""What is shown now. Called from any thread; returns at once."""

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_HEADERS = [
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
]


def make_application(metrics: Metrics, look: Look) -> "WSGIApplication":
    """All that one peer answers.

    Args:
        metrics: numbers of this peer.
        look: its status, and the peers of the run as far as it knows them.
    """
    numbers: WSGIApplication = make_wsgi_app(metrics.registry)
    files = {path: (_read(name), kind) for path, (name, kind) in _FILES.items()}

    def answer(path: str) -> tuple[str, str, bytes]:
        if path in files:
            content, kind = files[path]
            return "200 OK", kind, content
        if path == "/status.json":
            return "200 OK", _JSON, msgspec.json.encode(look()[0])
        if path == "/peers.json":
            return "200 OK", _JSON, msgspec.json.encode(look()[1])
        if path == "/grafana.json":
            return "200 OK", _JSON, msgspec.json.encode(grafana_board())
        return "404 Not Found", _TEXT, b"here are /, /status.json, /peers.json, /metrics and /grafana.json\n"

    def application(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path, host = environ.get("PATH_INFO", ""), environ.get("HTTP_HOST", "")
        if path == "/metrics":
            return numbers(environ, start_response)
        if not _is_of_this_machine(host):
            status, kind, content = "403 Forbidden", _TEXT, b"ask for this page by an address, or as localhost\n"
        elif environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            status, kind, content = "405 Method Not Allowed", _TEXT, b"this page only reads\n"
        else:
            status, kind, content = answer(path)
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(content))), *_HEADERS])
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [content]

    return application


def _read(name: str) -> bytes:
    return resources.files(__package__).joinpath(name).read_bytes()


def _is_of_this_machine(host: str) -> bool:
    """Whether it is an address or `localhost`, with or without a port."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
