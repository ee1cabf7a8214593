# SPDX-License-Identifier: Apache-2.0
"""A client of etcd (3.4 and newer) over its JSON gateway, /v3/..., with the standard library alone.

    EtcdClient.call     one request, repeated at one endpoint after the other until it is answered or its time is over

Rules: one connection that is kept; every attempt has a deadline of its own, because a node without a leader holds a
request for seven seconds where another node could answer; answers are bounded and decoded into typed structs. Only
requests that may be carried out twice are to be sent: an answer may be lost after etcd has done its part. Blocking:
for threads. Must not know what the keys mean.
"""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from isthmus.elastic.errors import EtcdRefused, EtcdTooMuch, EtcdUnavailable
from isthmus.elastic.journal.etcd_wire import Request

ATTEMPT_S = 0.5
"""For one attempt. A healthy cluster answers within 10 ms, and a new leader is there after a second or two."""
_SLOWEST_ATTEMPT_S = 4.0
"""Attempts that time out get longer up to this: a cluster that is slow for good is still used."""
_PAUSE_S = 0.1
"""Between two rounds over the endpoints, so that refused connections do not spin."""
MAX_ANSWER_NBYTES = 8 << 20
_READ_NBYTES = 64 << 10

# What gRPC says, and the gateway repeats in its answers.
_UNAUTHENTICATED = 16
_PASSING = frozenset({1, 2, 4, 10, 13, 14})
"""Cancelled, unknown, deadline, aborted, internal, unavailable: no leader, leader changed, timed out, shutting down."""
_PASSING_REASONS = ("etcdserver: too many requests",)


class _Token(msgspec.Struct):
    token: str


class _Fault(msgspec.Struct):
    error: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """Where etcd is and what it wants to see.

    Attributes:
        endpoints: `host:port` of its nodes, the nearest first.
        ca_file: PEM of the authority that signed the nodes' certificates; None: the connections are plain.
        cert_file, key_file: PEM of our own certificate, if etcd asks for one.
        user, password: for a cluster with users; None: it has none.
    """

    endpoints: tuple[str, ...]
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def tls_context(self) -> ssl.SSLContext | None:
        """How connections are encrypted; None if they are not.

        Raises:
            OSError: a file cannot be read, or holds no certificate (ssl.SSLError).
        """
        if self.ca_file is None:
            return None
        context = ssl.create_default_context(cafile=self.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


class _Failed(Exception):
    """This attempt has failed; the next one, perhaps at another endpoint, may not."""


_Answer = TypeVar("_Answer")


class EtcdClient:
    """Talks with one cluster over one connection. Of several threads each call waits for the one before.

    Args:
        access: see `EtcdAccess`.
        clock: monotonic seconds.

    Raises:
        OSError: a file of `access` cannot be used.
    """

    def __init__(self, access: EtcdAccess, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._access = access
        self._clock = clock
        self._tls = access.tls_context()
        self._endpoints = deque(access.endpoints)
        self._connection: http.client.HTTPConnection | None = None
        self._token: str | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def call(
        self, path: str, request: Request, answer: type[_Answer], *, timeout_s: float, attempt_s: float = ATTEMPT_S
    ) -> _Answer:
        """Send a request until it is answered. It may have been carried out more than once, or once without an answer.

        Args:
            path: behind /v3/, such as "kv/txn".
            request: its JSON.
            answer: the struct to decode the answer into; unknown fields are passed over.
            timeout_s: for everything; at least one attempt is made.
            attempt_s: for the first attempt.

        Raises:
            EtcdRefused: etcd does not do this, and would not if it were asked again.
            EtcdTooMuch: the answer is longer than MAX_ANSWER_NBYTES.
            EtcdUnavailable: no answer in time, or the client was closed.
        """
        body = msgspec.json.encode(request)
        began = self._clock()
        causes: dict[str, str] = {}
        num_failed = 0
        with self._lock:
            while not self._closed.is_set():
                left_s = timeout_s - (self._clock() - began)
                if causes and left_s <= 0:
                    break
                growth = 1.5 ** (num_failed // len(self._endpoints))
                longest_s = min(attempt_s * growth, max(attempt_s, _SLOWEST_ATTEMPT_S))
                try:
                    return self._attempt(path, body, answer, min(longest_s, max(left_s, 0.05)))
                except _Failed as failure:
                    causes[self._endpoints[0]] = str(failure)
                    num_failed += 1
                    self._hang_up()
                    self._endpoints.rotate(-1)
                if num_failed % len(self._endpoints) == 0:
                    self._closed.wait(_PAUSE_S)
        raise EtcdUnavailable(self._clock() - began, causes)

    def close(self) -> None:
        """End, and a call that is under way with it. May be called twice, from any thread."""
        self._closed.set()
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it may be closed at the same moment
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._hang_up()

    # -------------------------------------------------------------------------------- one attempt

    def _attempt(self, path: str, body: bytes, answer: type[_Answer], timeout_s: float) -> _Answer:
        deadline = self._clock() + timeout_s
        if self._access.user is not None and self._token is None:
            credentials = {"name": self._access.user, "password": self._access.password}
            encoded = msgspec.json.encode(credentials)
            self._token = self._exchange("auth/authenticate", encoded, _Token, deadline).token
        try:
            return self._exchange(path, body, answer, deadline)
        except EtcdRefused as refused:
            if refused.code == _UNAUTHENTICATED and self._token is not None:
                self._token = None  # tokens end, and a restarted node has forgotten them
                raise _Failed(refused.reason) from refused
            raise

    def _exchange(self, path: str, body: bytes, answer: type[_Answer], deadline: float) -> _Answer:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = self._token
        try:
            connection = self._dialled(deadline)
            connection.request("POST", f"/v3/{path}", body, headers)
            with contextlib.closing(connection.getresponse()) as response:
                content = self._read(connection, response, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise _Failed(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status == http.HTTPStatus.OK:
            return _decode(content, answer)
        raise _fault(response.status, content)

    def _dialled(self, deadline: float) -> http.client.HTTPConnection:
        left_s = max(deadline - self._clock(), 0.001)
        if self._connection is None or self._connection.sock is None:  # None: they have closed it behind an answer
            host, _, port = self._endpoints[0].rpartition(":")
            make = http.client.HTTPConnection if self._tls is None else self._encrypted
            self._connection = make(host.strip("[]"), int(port), timeout=left_s)
            self._connection.connect()
        self._connection.timeout = left_s
        self._connection.sock.settimeout(left_s)
        return self._connection

    def _encrypted(self, host: str, port: int, *, timeout: float) -> http.client.HTTPConnection:
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)

    def _read(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float
    ) -> bytes:
        content = bytearray()
        while piece := response.read(_READ_NBYTES):
            content += piece
            if len(content) > MAX_ANSWER_NBYTES:
                self._hang_up()
                raise EtcdTooMuch(MAX_ANSWER_NBYTES)
            left_s = deadline - self._clock()
            if left_s <= 0:
                raise TimeoutError("the answer comes too slowly")
            if connection.sock is not None:  # None after the last byte, if the other side closes
                connection.sock.settimeout(left_s)
        return bytes(content)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _decode(content: bytes, answer: type[_Answer]) -> _Answer:
    try:
        # Not strict: the gateway writes 64-bit numbers as texts.
        return msgspec.json.decode(content, type=answer, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Failed(f"an answer that is not etcd's: {error}") from error


def _fault(status: int, content: bytes) -> Exception:
    """What an answer other than 200 means: to be tried again, or to be given up."""
    # An answer that began as a stream repeats the error and adds a trailer: the first JSON value counts.
    end = content.find(b"}") + 1
    try:
        fault = msgspec.json.decode(content[:end], type=_Fault)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Failed(f"HTTP status {status}: no etcd with the gateway of 3.4 or newer")
    if fault.code in _PASSING or fault.error in _PASSING_REASONS or not fault.code:
        return _Failed(fault.error or f"HTTP status {status}")
    return EtcdRefused(fault.code, fault.error)
