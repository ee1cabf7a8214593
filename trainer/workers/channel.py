# SPDX-License-Identifier: Apache-2.0
"""A worker's end of the socket to its daemon (the daemon's is link.py). Must not know what is asked."""

from collections.abc import Callable

import zmq

from isthmus.trainer.workers import ipc

_LOOK_S = 1.0
_LINGER_S = 1.0


class DaemonGone(Exception):
    """The daemon has ended, without a word."""


class DaemonChannel:
    """One socket, of one thread.

    Args:
        path: where the daemon listens, or soon will.
        local_rank: who we are.
        is_there: whether the daemon lives.
    """

    def __init__(self, path: str, *, local_rank: int, is_there: Callable[[], bool]) -> None:
        self._is_there = is_there
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        ipc.configure(self._socket, linger_s=_LINGER_S)
        self._socket.setsockopt(zmq.ROUTING_ID, ipc.worker_identity(local_rank))
        self._socket.connect(f"ipc://{path}")
        self._next: ipc.Request | None = None  # was looked at, and is to be received

    def receive(self) -> ipc.Request:
        """The next request; waits for as long as the daemon lives.

        Raises:
            DaemonGone: it does not.
            MalformedMessage: what came is no request.
        """
        while self.look_ahead(_LOOK_S) is None:
            if not self._is_there() and self.look_ahead() is None:  # its last words may have come meanwhile
                raise DaemonGone
        request, self._next = self._next, None
        assert request is not None, "it was looked at"
        return request

    def look_ahead(self, timeout_s: float = 0.0) -> ipc.Request | None:
        """The request that `receive` gives next, if it comes within so long.

        Raises:
            MalformedMessage: what came is no request.
        """
        if self._next is None and self._socket.poll(round(1000 * timeout_s)):
            self._next = ipc.decode_request(self._socket.recv())
        return self._next

    def send(self, reply: ipc.Reply) -> None:
        """Hand a reply to the socket; never waits, the queue is longer than the daemon's window of requests."""
        self._socket.send(ipc.encode(reply), zmq.DONTWAIT)

    def close(self) -> None:
        """Flush what was sent, for a second at most."""
        self._socket.close()
        self._context.term()
