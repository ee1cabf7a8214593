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

    def receive(self) -> ipc.Request:
        """The next request; waits for as long as the daemon lives.

        Raises:
            DaemonGone: it does not.
            MalformedMessage: what came is no request.
        """
        while not self._socket.poll(round(1000 * _LOOK_S)):
            if not self._is_there() and not self._socket.poll(0):  # its last words may have come meanwhile
                raise DaemonGone
        return ipc.decode_request(self._socket.recv())

    def send(self, reply: ipc.Reply) -> None:
        """Hand a reply to the socket; never waits, the queue is longer than the daemon's window of requests."""
        self._socket.send(ipc.encode(reply), zmq.DONTWAIT)

    def close(self) -> None:
        """Flush what was sent, for a second at most."""
        self._socket.close()
        self._context.term()
