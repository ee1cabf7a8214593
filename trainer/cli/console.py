# SPDX-License-Identifier: Apache-2.0
"""What a long-running command says: results on stdout, log lines on stderr, and on a terminal one live line below them.

A thread of its own writes, so that nobody else waits for a terminal or a pipe that is slow, full or gone, and no run
ends because of one. Lines that come faster than they can be written are dropped and counted. The live line is made when
it is drawn, a few times a second, never wraps, and is taken away before anything else is written. Must not know what
the lines say.
"""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable

STDOUT, STDERR = 1, 2
_INTERVAL_S = 0.25
_MAX_LINES = 1000
_FAREWELL_S = 2.0
"""How long the end waits until everything is written."""
_FULL_S = 0.05
_ERASE = b"\r\x1b[K"


class Console:
    """See the module. `close` at the end, or use it as a context manager.

    Args:
        out: descriptor for results.
        err: descriptor for log lines, and for the live line if it is a terminal.
    """

    def __init__(self, *, out: int = STDOUT, err: int = STDERR) -> None:
        self._out, self._err = out, err
        self._has_live_line = os.isatty(err) and os.environ.get("TERM") != "dumb"
        self._news = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._num_lost = 0
        self._live: Callable[[], str] | None = None
        self._is_closing = False
        self._gone: set[int] = set()
        self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_live_line(self) -> bool:
        """Whether what is watched is shown."""
        return self._has_live_line

    def log(self, text: str) -> None:
        """A line for stderr, or several. Returns at once."""
        self._put(self._err, text)

    def result(self, text: str) -> None:
        """A line for stdout, or several. Returns at once."""
        self._put(self._out, text)

    def watch(self, line: Callable[[], str]) -> None:
        """Show what this says, again and again, if there is a terminal. It is called by another thread."""
        with self._news:
            self._live = line if self._has_live_line else None
            self._news.notify()

    def close(self) -> None:
        """Take the live line away and write what is left, as far as that goes in time. May be called twice."""
        with self._news:
            self._is_closing = True
            self._news.notify()
        self._thread.join(_FAREWELL_S)

    def _put(self, descriptor: int, text: str) -> None:
        line = f"{text}\n".encode(errors="replace")
        with self._news:
            if len(self._waiting) >= _MAX_LINES:
                self._num_lost += 1
                return
            self._waiting.append((descriptor, line))
            self._news.notify()

    # -------------------------------------------------------------------------------- the thread

    def _write_all(self) -> None:
        shown = b""
        while True:
            with self._news:
                if not self._waiting and not self._is_closing:
                    self._news.wait(None if self._live is None else _INTERVAL_S)
                lines = list(self._waiting)
                self._waiting.clear()
                lost, self._num_lost = self._num_lost, 0
                live, is_closing = self._live, self._is_closing
            if lost:
                lines.append((self._err, f"{lost} log lines were not written\n".encode()))
            wanted = b"" if live is None or is_closing else _fitting(live(), _columns(self._err))
            if shown and (lines or wanted != shown):
                self._write(self._err, _ERASE)
                shown = b""
            for descriptor, line in lines:
                self._write(descriptor, line)
            if wanted != shown:
                self._write(self._err, wanted)
                shown = wanted
            if is_closing and not lines:
                return

    def _write(self, descriptor: int, content: bytes) -> None:
        """All of it, however long that takes; nothing to a descriptor that is gone."""
        while content and descriptor not in self._gone:
            try:
                content = content[os.write(descriptor, content) :]
            except BlockingIOError:
                time.sleep(_FULL_S)  # somebody else has made it so
            except InterruptedError:
                continue
            except OSError as error:
                if _is_gone(error):
                    self._gone.add(descriptor)
                return  # a full disk may have room again for the next line


def _is_gone(error: OSError) -> bool:
    return error.errno in (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)


def _columns(descriptor: int) -> int:
    with contextlib.suppress(OSError):
        return os.get_terminal_size(descriptor).columns or 80
    return 80


def _fitting(text: str, columns: int) -> bytes:
    """One line that does not reach the last column, after which terminals wrap."""
    line = " ".join(text.split())
    return line[: max(0, columns - 1)].encode(errors="replace")
