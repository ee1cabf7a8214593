# SPDX-License-Identifier: Apache-2.0
"""Serves a page and numbers (page/) over HTTP, from a thread of its own, and lets nobody hold more than a little.

At most `_MAX_OPEN` connections are open, each with a thread, for at most `_DEADLINE_S` and `_MAX_REQUEST_NBYTES` of
request. Where there is one more, the oldest connection of the address that has the most is ended for it: whoever asks
as it connects is answered, however many connect and say nothing.

Rules: it listens on 127.0.0.1 unless `node.metrics_host` says otherwise, reads only, and has no secrets. Ended
connections are counted and told of like those of the peer's own port.

Errors: `EnvironmentFault` (3) if the port is taken.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from io import BufferedIOBase
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from isthmus.collective.transport.refusal_log import RefusalLog
from isthmus.trainer.errors import EnvironmentFault

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

log = logging.getLogger(__name__)

_MAX_OPEN = 16
_DEADLINE_S = 5.0
_MAX_REQUEST_NBYTES = 8 << 10
_BACKLOG = 128
_RESOURCE_PAUSE_S = 0.1
_POLL_S = 0.1
_STOP_TIMEOUT_S = 5.0

TOO_MANY = "metrics: too many connections"
TOO_SLOW = "metrics: no end in time"
TOO_LONG = "metrics: request too long"


class _RequestTooLong(ConnectionError):
    """More came than any browser or scraper sends."""


class _Head:
    """The lines of a request, up to a number of bytes. No request here has a body."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._nbytes_left = _MAX_REQUEST_NBYTES

    def readline(self, limit: int = -1) -> bytes:
        """As of a file. Raises _RequestTooLong."""
        most = self._nbytes_left + 1
        line = self._stream.readline(most if limit < 0 else min(limit, most))
        self._nbytes_left -= len(line)
        if self._nbytes_left < 0:
            raise _RequestTooLong
        return line

    def close(self) -> None:
        """As of a file."""
        self._stream.close()


class _Handler(WSGIRequestHandler):
    timeout = _DEADLINE_S  # of one call; the server ends what takes longer in all

    def setup(self) -> None:
        super().setup()
        self.rfile = cast("Any", _Head(self.rfile))

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    host: str
    opened_at: float
    is_ended: bool = False


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = _BACKLOG

    def __init__(self, *args: Any, **more: Any) -> None:  # noqa: ANN401 - the base's
        self.refused: Counter[str] = Counter()
        self._refusals = RefusalLog(self.refused)
        self._lock = threading.Lock()
        self._open: dict[int, _Connection] = {}  # by descriptor, oldest first
        super().__init__(*args, **more)

    def get_request(self) -> tuple[socket.socket, Any]:
        """As of the base, which would try again at once where there is no descriptor left."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_RESOURCE_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the base's
        """Give it a thread, and end another one for it if need be."""
        now = time.monotonic()
        connection = _Connection(request, str(client_address[0]), now)
        with self._lock:
            standing = [other for other in self._open.values() if not other.is_ended]
            if len(standing) >= _MAX_OPEN:
                self._end(_oldest_of_many(standing), TOO_MANY, now)
            if len(self._open) >= 2 * _MAX_OPEN:  # the ended ones have not even got a processor to close
                self._end(connection, TOO_MANY, now)
            self._open[request.fileno()] = connection
        if connection.is_ended:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ten times a second: end what takes too long, in whatever pieces it comes or is read."""
        now = time.monotonic()
        with self._lock:
            for connection in list(self._open.values()):
                if not connection.is_ended and now - connection.opened_at > _DEADLINE_S:
                    self._end(connection, TOO_SLOW, now)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - the base's
        """It is over, in the one way or the other."""
        with self._lock:
            self._open.pop(request.fileno(), None)
        super().shutdown_request(request)

    def end_all(self) -> None:
        """Let no thread wait for anybody."""
        with self._lock:
            for connection in self._open.values():
                _shut(connection.sock)

    def handle_error(self, request: object, client_address: Any) -> None:  # noqa: ANN401, ARG002 - the base's
        """A scraper that hangs up is no news; the socketserver would print a traceback."""
        log.debug("metrics_request_failed client=%s", client_address, exc_info=True)

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the base's
        """As of the base."""
        try:
            super().finish_request(request, client_address)
        except _RequestTooLong:
            with self._lock:
                self._refusals.ended(TOO_LONG, time.monotonic(), host=str(client_address[0]))

    def _end(self, connection: _Connection, kind: str, now: float) -> None:
        """Its thread hears of it and closes it."""
        connection.is_ended = True
        _shut(connection.sock)
        self._refusals.ended(kind, now, host=connection.host)


def _oldest_of_many(standing: list[_Connection]) -> _Connection:
    hosts = Counter(connection.host for connection in standing)
    return next(connection for connection in standing if hosts[connection.host] == max(hosts.values()))


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # gone already
        sock.shutdown(socket.SHUT_RDWR)


class MetricsServer:
    """See the module. Serves until `close`.

    Args:
        application: what answers, in any thread.
        host: an IPv4 address of this machine, or 0.0.0.0 for all.
        port: 0 lets the system choose; see `address`.

    Raises:
        EnvironmentFault: the port is taken, or there is no such address here.
    """

    def __init__(self, application: "WSGIApplication", *, host: str = "127.0.0.1", port: int) -> None:
        try:
            self._server = make_server(host, port, application, _Server, _Handler)
        except OSError as error:
            raise EnvironmentFault(
                f"metrics cannot listen on {host}:{port}: {error.strerror}",
                cure="set node.metrics_port to 0 for a free port, node.metrics_host to an address of this machine",
            ) from error
        self._host = host
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S}, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """`host:port`, with the real port."""
        return f"{self._host}:{self._server.server_port}"

    @property
    def refused(self) -> Counter[str]:
        """Connections that were ended, by reason."""
        return self._server.refused

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_all()
        self._thread.join(_STOP_TIMEOUT_S)
