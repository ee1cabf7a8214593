# SPDX-License-Identifier: Apache-2.0
"""One process in each namespace, all of which are told the same and answer: orders and answers are lines of JSON.

Rules: every answer has a deadline; one thread. A process that dies is reported with the end of what it said on its
standard error. It knows nothing of what the orders mean.
"""

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from scripts.wanlink.wan import Wan, WanError

START_S = 60.0
COMPLAINT_NBYTES = 2000
_READ_NBYTES = 1 << 16


class Fleet:
    """The processes; a context manager within that of its network.

    Args:
        wan: running.
        argv: the command line of a peer.
        environment: of all of them; None for ours.
    """

    def __init__(
        self, wan: Wan, argv: Callable[[int], Sequence[str | Path]], environment: Mapping[str, str] | None = None
    ) -> None:
        self._wan, self._argv, self._environment = wan, argv, environment
        self._processes: list[subprocess.Popen[bytes]] = []
        self._complaints: list[IO[bytes]] = []

    def __enter__(self) -> "Fleet":
        for peer in range(self._wan.peers):
            self._complaints.append(tempfile.TemporaryFile())
            process = self._wan.popen(
                peer,
                self._argv(peer),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints[-1],
                bufsize=0,
                env=self._environment,
                # Peers are machines of their own: where the kernel shares processors out by session, each has a share.
                start_new_session=True,
            )
            self._processes.append(process)
        self._answers(START_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for complaints in self._complaints:
            complaints.close()

    def ask(self, order: Mapping[str, object], *, timeout: float) -> list[dict[str, Any]]:
        """Tell all peers the same; returns their answers in the order of peers.

        Raises:
            WanError: a peer has ended, or did not answer within `timeout` seconds.
        """
        line = json.dumps(order).encode() + b"\n"
        for peer, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
            except BrokenPipeError as error:
                raise self._dead(peer) from error
        return self._answers(timeout)

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        received = [b""] * len(self._processes)
        with selectors.DefaultSelector() as selector:
            for peer, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, peer)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = [key.data for key in selector.get_map().values()]
                    raise WanError(f"no answer from peers {silent} within {timeout:g} s")
                for key, _ in ready:
                    piece = os.read(key.fd, _READ_NBYTES)
                    if not piece:
                        raise self._dead(key.data)
                    received[key.data] += piece
                    if piece.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [json.loads(line) for line in received]

    def _dead(self, peer: int) -> WanError:
        complaints = self._complaints[peer]
        end = complaints.seek(0, os.SEEK_END)
        complaints.seek(max(0, end - COMPLAINT_NBYTES))
        return WanError(f"peer {peer} has ended:\n{complaints.read().decode(errors='replace').strip()}")
