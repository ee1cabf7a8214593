# SPDX-License-Identifier: Apache-2.0
"""Several processes that prepare lots side by side (lot_process.py), each driven by a thread.

Rules: they end with the process that started them, however it ends: their stdin does. The first that fails ends all.
What they say is told in the caller's thread.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from isthmus.trainer.data.prep.lot_process import WORDS, Advanced, Done, Failed, error_of
from isthmus.trainer.data.prep.lots import Lot, LotRecord, Task
from isthmus.trainer.errors import EnvironmentFault

_PROGRAM: Final = ("-P", "-m", "isthmus.trainer.data.prep.lot_process")
_QUEUE_LENGTH: Final = 256


def prepare_lots(task: Task, lots: Sequence[Lot], jobs: int, advanced: Callable[[int], None]) -> Iterator[LotRecord]:
    """Prepare lots; yields the records as they come.

    Args:
        task: equal for all.
        lots: in any order.
        jobs: processes at most.
        advanced: is told of bytes that were read.

    Raises:
        IsthmusError: what a process could not do.
    """
    words: queue.Queue[Advanced | Done | Failed] = queue.Queue(_QUEUE_LENGTH)
    waiting: queue.SimpleQueue[Lot] = queue.SimpleQueue()
    for lot in lots:
        waiting.put(lot)
    over = threading.Event()
    hands = [_Hand(task, waiting, words, over) for _ in range(min(jobs, len(lots)))]
    try:
        for hand in hands:
            hand.start()
        rest = len(lots)
        while rest:
            match words.get():
                case Advanced(nbytes=nbytes):
                    advanced(nbytes)
                case Done(record=record):
                    rest -= 1
                    yield record
                case Failed() as failed:
                    raise error_of(failed)
    finally:
        over.set()
        for hand in hands:
            hand.end(words)


class _Hand:
    """One process and the thread that gives it lots and hands on what it says."""

    def __init__(
        self,
        task: Task,
        waiting: "queue.SimpleQueue[Lot]",
        words: "queue.Queue[Advanced | Done | Failed]",
        over: threading.Event,
    ) -> None:
        self._task = task
        self._waiting = waiting
        self._words = words
        self._over = over
        self._thread = threading.Thread(target=self._drive, name="prepares")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin."""
        self._process = subprocess.Popen(
            [sys.executable, *_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )
        self._thread.start()

    def end(self, words: "queue.Queue[Advanced | Done | Failed]") -> None:
        """Kill the process if it still works, and wait for both."""
        if self._process is None:
            return
        self._process.kill()
        while self._thread.is_alive():  # it may wait for room
            with contextlib.suppress(queue.Empty):
                words.get_nowait()
            self._thread.join(0.01)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _drive(self) -> None:
        try:
            self._send(self._task)
            while not self._over.is_set():
                try:
                    lot = self._waiting.get_nowait()
                except queue.Empty:
                    return
                self._send(lot)
                if not self._listen():
                    return
        except (OSError, msgspec.MsgspecError):  # whoever waits for words hears of it, whatever it was
            assert self._process is not None, "it was started"
            self._process.kill()
            self._words.put(self._gone())

    def _send(self, message: Task | Lot) -> None:
        assert self._process is not None, "it was started"
        assert self._process.stdin is not None, "it has a pipe"
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        self._process.stdin.flush()

    def _listen(self) -> bool:
        """Hand on what it says until its lot is done; whether it is."""
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "it has a pipe"
        while line := self._process.stdout.readline():
            word = WORDS.decode(line)
            self._words.put(word)
            if not isinstance(word, Advanced):
                return isinstance(word, Done)
        self._words.put(self._gone())
        return False

    def _gone(self) -> Failed:
        assert self._process is not None, "it was started"
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        error = EnvironmentFault(
            f"a process that prepares the text ended {how}", cure="if memory ran out, give fewer --jobs; then go on"
        )
        return Failed(error.problem, error.cure, True)
