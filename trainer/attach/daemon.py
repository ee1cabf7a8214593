# SPDX-License-Identifier: Apache-2.0
"""The daemon beside a loop: `isthmus up` or `isthmus join`, started by the loop's first process and owned by it.

Rules: it is in a session of its own, so that Ctrl-C reaches the loop alone; it ends when the loop does, at the latest,
unless it has told the loop that it lives on as the others' coordinator. Must not know what is said to it.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from isthmus.trainer.contact.ticket import COMMAND_VARIABLE
from isthmus.trainer.errors import ExitCode
from isthmus.trainer.workers.loop import SOCKET_NAME, LoopFacts, end_of, write_facts
from isthmus.trainer.workers.shared_buffer import SharedBuffer

_ORDERLY = frozenset({ExitCode.DONE, ExitCode.LEFT})
_STOP_S = 10.0
_LOOK_S = 0.1


class RunEnded(RuntimeError):
    """The peer's part in the run ended, and not in a good way. What was wrong is what the daemon printed.

    Attributes:
        exit_code: of the daemon, see trainer/README.md; -n if signal n ended it; None: another process knows it. A
            daemon that lives on for the others will end with it.

    Args:
        command, exit_code: of the daemon.
        cause: why it lives on without this loop; empty: it has ended.
    """

    def __init__(self, command: str, exit_code: int | None, *, cause: str = "") -> None:
        how = "has ended" if exit_code is None else f"ended with code {exit_code}"
        why = f"isthmus {command} {how}; the line that it printed last says why"
        if cause:
            why = f"{cause} (isthmus {command} coordinates for as long as others are there, or until isthmus leave)"
        super().__init__(why)
        self.exit_code = exit_code


class Daemon:
    """A started daemon.

    Args:
        command: what stands behind `isthmus` on a command line: "up --peers 2", or its words one by one.
        facts: of the loop, but for the mailbox.
        mailbox: of all parameters; inherited by the daemon.

    Raises:
        ValueError: the command is neither `up` nor `join`.
        OSError: there is no folder, or no process can be started.
    """

    def __init__(self, command: str | Sequence[str] | None, facts: LoopFacts, mailbox: SharedBuffer) -> None:
        words = _words(command)
        self.command = words[0]
        self.folder = Path(tempfile.mkdtemp(prefix="isthmus-"))
        write_facts(self.folder, facts)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "isthmus.trainer.cli", *words, "--attach", str(self.folder)],
            stdin=subprocess.DEVNULL,
            pass_fds=(mailbox.fd,),
            start_new_session=True,
        )

    @property
    def socket_path(self) -> str:
        """Where it listens."""
        return str(self.folder / SOCKET_NAME)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def coordinates(self) -> bool:
        """Whether the run's coordinator lives in it."""
        return self.command == "up"

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it at once: what was trained since the last commit is lost."""
        for number in (signal.SIGTERM, signal.SIGINT):  # the second one does not wait for the loop's next step
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> None:
        """Until it has ended by itself: a founder's waits until the others have gone.

        Raises:
            RunEnded: not in order.
        """
        self.raise_if_bad(self._process.wait())

    def wait_for_leave(self) -> None:
        """Until its peer has left the run: it has ended then, or lives on for the others. People are told that."""
        while (end := end_of(self.folder)) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)
                return
        with contextlib.suppress(OSError):  # nobody reads it
            print(f"isthmus: {end.cause}", file=sys.stderr, flush=True)  # noqa: T201

    def raise_if_bad(self, code: int | None = None) -> None:
        """Raise RunEnded if it has ended, and not in order."""
        code = self._process.poll() if code is None else code
        if code is not None and code not in _ORDERLY:
            raise RunEnded(self.command, code)

    def close(self) -> None:
        """Tidy up; it has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _words(command: str | Sequence[str] | None) -> list[str]:
    if command is None:
        command = os.environ.get(COMMAND_VARIABLE, "")
    words = shlex.split(command) if isinstance(command, str) else list(command)
    words = words[1:] if words[:1] == ["isthmus"] else words
    if words[:1] not in (["up"], ["join"]):
        raise ValueError(
            f"isthmus.attach founds a run with 'up' or joins one with 'join TICKET', not with {shlex.join(words)!r}; "
            f"say it as its argument or in {COMMAND_VARIABLE}"
        )
    return words
