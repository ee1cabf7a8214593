# SPDX-License-Identifier: Apache-2.0
"""Real `isthmus` processes for the tests of the whole product: started, watched by their own events, and cleared away.

Not a test. `with running(tmp_path) as run:` gives a `Run`; `run.found()`, `run.join()` and the like start processes,
each in a folder of its own; `run.until(...)` waits for what they write down. On the way out everything is killed, and
a process, a socket's folder or a crash report that should not be there fails the test.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.collective.core.address import candidates_of
from isthmus.collective.transport.certificates import key_to_pem, peer_id_of_key
from tests.multiprocess.forked import MARK
from tests.multiprocess.ports import free_ports
from tests.multiprocess.processes import (
    END_TIMEOUT_S,
    FORCED,
    ISTHMUS,
    KILLED,
    LEFT,
    POLL_INTERVAL_S,
    TIMEOUT_S,
    Event,
    Outcome,
    Process,
    command_of,
    has_mark,
    pids,
    start_program,
)

CaseT = TypeVar("CaseT")

NEVER_LATE = ("--members.grace", "1h", "--members.heartbeat_timeout", "60s")
"""For runs whose views are counted: a busy machine makes peers late, and silent for seconds. Deaths are found by broken
connections all the same."""
OPEN_END = 20_000
"""Outer steps of a run that the test ends itself: more than any machine does while a test waits, and yet an end."""

_ORDERLY = (0, LEFT, FORCED, KILLED)
_ACCUSATION = re.compile("has sent numbers|different (weights|sums) to|(their|its) numbers are|sends too much")
_OF_ANOTHER_VIEW = ("cancelled by its caller", "it has left that view", "ended before it began")
_TEXT = "Peers come and go, and the run goes on; a bridge is no wider than it must be. " * 200
_CONFIG = """
[model]
dim = 16
num_layers = 1
num_heads = 2
hidden_dim = 32
seq_len = 32
[inner]
batch_size = 2
[outer]
inner_steps = 3
[members]
reconnect_grace = "500ms"
[checkpoint]
every = 0
[eval]
every = 0
[metrics]
port = "none"
"""


def now_s() -> float:
    """The wall clock that the events have, in seconds."""
    return datetime.now(UTC).timestamp()


def wall_s(event: Event) -> float:
    """When it happened, in seconds of the wall clock."""
    return datetime.fromisoformat(event["wall"]).timestamp()


def todays(cases: Sequence[CaseT], days: int) -> Sequence[CaseT]:
    """The cases whose turn it is: each comes up once in so many days. MATRIX_DAY=n is another day, "all" is all."""
    day = os.environ.get("MATRIX_DAY") or str(datetime.now(UTC).date().toordinal())
    return cases if day == "all" else cases[int(day) % days :: days]


class Run:
    """Processes that work together, in one folder. Made by `running`."""

    def __init__(self, folder: Path, temporary: Path, environment: Mapping[str, str], *, forks: bool = True) -> None:
        self.folder = folder
        self._forks = forks
        self._has_liar = False
        self.temporary = temporary
        self.text = folder / "text.txt"
        self.text.write_text(_TEXT)
        self.config = folder / "run.toml"
        self.config.write_text(_CONFIG)
        self.ticket = folder / "ticket"
        self.processes: list[Process] = []
        self.mark = uuid.uuid4().hex
        own = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS__")}
        self._environment = own | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            MARK: self.mark,
            **environment,
        }

    # -------------------------------------------------------------------------------- starting

    def found(self, *flags: str, folder: Path | None = None, inside: Sequence[str] = ()) -> Process:
        """`isthmus up`: a founding peer. `wait_for_ticket` before anybody joins."""
        self.ticket.unlink(missing_ok=True)  # of the founder before, if there was one
        flags = ("-c", str(self.config), "--data", str(self.text), "--node.threads", "1", *flags)
        flags = (*_own_port(folder, inside), *flags)
        return self.start("up", "--ticket-file", str(self.ticket), *flags, folder=folder, inside=inside)

    def coordinator(self, *flags: str, folder: Path | None = None, inside: Sequence[str] = ()) -> Process:
        """`isthmus coordinator`: a founder without a peer."""
        self.ticket.unlink(missing_ok=True)
        flags = ("-c", str(self.config), "--data.path", str(self.text), *flags)
        flags = (*_own_port(folder, inside), *flags)
        return self.start("coordinator", "--ticket-file", str(self.ticket), *flags, folder=folder, inside=inside)

    def join(self, *flags: str, folder: Path | None = None, inside: Sequence[str] = ()) -> Process:
        """`isthmus join` with the founder's ticket."""
        return self.start("join", f"@{self.ticket}", "--node.threads", "1", *flags, folder=folder, inside=inside)

    def join_as_liar(self, kind: str, *flags: str, folder: Path | None = None, inside: Sequence[str] = ()) -> Process:
        """The same by a peer that lies about its work: see tests/multiprocess/liar.py."""
        self._has_liar = True
        program = (sys.executable, str(Path(__file__).with_name("liar.py")), kind)
        words = ("join", f"@{self.ticket}", "--node.threads", "1", *flags)
        return self.start(*words, folder=folder, program=program, inside=inside)

    def command(self, *arguments: str, inside: Sequence[str] = (), timeout_s: float = TIMEOUT_S) -> Outcome:
        """Run a command to its end; `inside` is what goes before one on another machine."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            popen = start_program(
                [*inside, ISTHMUS, *arguments],
                cwd=self.folder,
                env=self._environment,
                stdout=out.fileno(),
                stderr=err.fileno(),
                forks=self._forks,
            )
            try:
                code = popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()
                raise
            out.seek(0)
            err.seek(0)
            return Outcome(code, out.read().decode(), err.read().decode())

    def told(self, *arguments: str) -> str:
        """What a question to a daemon is answered with; it asks again while a busy machine keeps the daemon from it."""
        for _ in range(6):
            done = self.command(*arguments)
            if done.code != 4:
                break
        assert done.code == 0, done.err
        return done.out

    def wait_for_ticket(self) -> None:
        """Wait until the founder has written its ticket: others can join from then on."""
        self.until("ticket", self.ticket.exists)

    def start(
        self,
        *arguments: str,
        folder: Path | None = None,
        program: Sequence[str] = (ISTHMUS,),
        inside: Sequence[str] = (),
        terminal: int | None = None,
        errors: int | None = None,
        as_typed: bool = False,
    ) -> Process:
        """Any command that gets a folder, in one of its own.

        Args:
            folder: of another start, to go on in it.
            program: instead of `isthmus`.
            inside: what goes before a command that runs on another machine.
            terminal: descriptor that takes stdout instead of a file.
            errors: descriptor that takes stderr instead of a file.
            as_typed: without `--dir`: `folder` is what the command takes by itself.
        """
        name = f"{len(self.processes)}-{arguments[0]}"
        directory = folder or self.folder / name
        command = [*inside, *program, *arguments, *(() if as_typed else ("--dir", str(directory)))]
        return self._spawn(name, directory, command, terminal=terminal, errors=errors)

    def found_loop(
        self, *flags: str, program: Sequence[str], folder: Path | None = None, inside: Sequence[str] = ()
    ) -> Process:
        """A training loop of its own that founds a run. `wait_for_ticket` before anybody joins."""
        self.ticket.unlink(missing_ok=True)
        words = ("--members.reconnect-grace", "500ms", "--checkpoint.every", "0")
        words = ("up", "--ticket-file", str(self.ticket), *words, *flags)
        return self.loop(*words, program=program, folder=folder, inside=inside)

    def join_loop(
        self, *flags: str, program: Sequence[str], folder: Path | None = None, inside: Sequence[str] = ()
    ) -> Process:
        """A training loop of its own that joins with the founder's ticket."""
        return self.loop("join", f"@{self.ticket}", *flags, program=program, folder=folder, inside=inside)

    def loop(
        self, *words: str, program: Sequence[str], folder: Path | None = None, inside: Sequence[str] = ()
    ) -> Process:
        """A program with a training loop; `words` are for its daemon, whose folder is this process's.

        Args:
            words: "up" or "join", and its flags.
            program: of Python, with its arguments; `-m` and a module's name will do.
            folder: of another start, to go on in it.
            inside: what goes before a command that runs on another machine; without it the loop stays on this one.
        """
        name = f"{len(self.processes)}-loop-{words[0]}"
        directory = folder or self.folder / name
        flags = ["--dir", str(directory), "--metrics.port", "none", *(() if inside else ("--listen", "127.0.0.1:0"))]
        command = [*inside, sys.executable, *program]
        # Python's own end, which a forked process does not have, is part of what a loop does.
        return self._spawn(name, directory, command, forks=False, ISTHMUS_COMMAND=shlex.join((*words, *flags)))

    def _spawn(
        self,
        name: str,
        directory: Path,
        command: Sequence[str],
        *,
        terminal: int | None = None,
        errors: int | None = None,
        forks: bool = True,
        **environment: str,
    ) -> Process:
        console = self.folder / f"{name}.out"
        with console.open("wb") as out, console.with_suffix(".err").open("wb") as err:
            popen = start_program(
                command,
                cwd=self.folder,
                env=self._environment | environment,
                stdout=out.fileno() if terminal is None else terminal,
                stderr=err.fileno() if errors is None else errors,
                forks=forks and self._forks,
            )
        process = Process(directory, popen, console)
        self.processes.append(process)
        return process

    # -------------------------------------------------------------------------------- waiting

    def until(self, what: str, condition: Callable[[], bool], *, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the processes have done something; fails at once if one of them has ended badly."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for process in self.processes:
                code = process.popen.poll()
                assert code is None or code in _ORDERLY or process.is_judged, (
                    f"{process.name} ended with {code}\n{self.story()}"
                )
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s\n{self.story()}"
            time.sleep(POLL_INTERVAL_S)

    def until_step(self, outer_step: int, *processes: Process) -> None:
        """Wait until all these have committed this outer step."""
        self.until(f"outer step {outer_step}", lambda: all(process.step >= outer_step for process in processes))

    def until_ended(self, *processes: Process) -> list[int]:
        """Wait until these have ended; returns their exit codes."""
        self.until("end", lambda: not any(process.is_running for process in processes))
        return [process.popen.returncode for process in processes]

    def leave_all(self) -> None:
        """End a run without an end: interrupt everybody that still runs, and see everybody leave in order."""
        left = [process for process in self.processes if process.is_running]
        for process in left:
            process.signal(signal.SIGINT)
        assert self.until_ended(*left) == [LEFT] * len(left), self.story()

    def story(self) -> str:
        """What everybody said last, for the message of a failed test."""
        tails = []
        for process in self.processes:
            err = process.console.with_suffix(".err").read_text(errors="replace").splitlines()[-25:]
            events = [f"{e['t_s']:.3f} {json.dumps(e)[:200]}" for e in process.events()[-12:]]
            tails.append("\n".join([f"--- {process.name} (code {process.popen.poll()})", *err, *events]))
        return "\n".join(tails)

    # -------------------------------------------------------------------------------- clearing away

    def alive(self) -> dict[int, str]:
        """Processes of this run that live, workers too, by id with their command."""
        return {pid: command_of(pid) for pid in pids() if has_mark(pid, self.mark)}

    def accusations(self) -> list[str]:
        """What honest members were said to have lied about, where all are honest."""
        if self._has_liar:
            return []
        views = (event for process in self.processes for event in process.events("view_decided"))
        return [event["cause"] for event in views if _ACCUSATION.search(event["cause"])]

    def stop(self) -> list[str]:
        """Kill everything that is left; returns what should not have been there."""
        wrong = []
        for process in self.processes:
            if process.is_running:
                process.popen.kill()
            process.popen.wait()
        deadline = time.monotonic() + END_TIMEOUT_S  # a worker hears of its daemon's end from the kernel
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        if alive:
            wrong.append(f"processes outlived their daemons: {alive}")
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        wrong += [f"a crash report:\n{path.read_text()}" for path in self.temporary.glob("isthmus-crash-*")]
        if all(process.popen.returncode != KILLED for process in self.processes):
            wrong += [f"left behind: {path}" for path in self.temporary.glob("isthmus-*")]
        return wrong


def _own_port(folder: Path | None, inside: Sequence[str]) -> tuple[str, ...]:
    """Where a founder listens first. Started again it wants that port, which no connection may have taken meanwhile."""
    return () if folder is not None or inside else ("--listen", f"*:{free_ports(1)[0]}")


def at_home(address: str) -> str:
    """Where a peer that listens on every interface is found from this machine."""
    return candidates_of(address)[-1]


def make_folder(folder: Path, *, id_begins: str) -> Path:
    """The folder of a peer with an id of this kind, before its first start. Of two peers the smaller id dials first."""
    keys = (Ed25519PrivateKey.generate() for _ in range(100_000))
    key = next(key for key in keys if peer_id_of_key(key.public_key().public_bytes_raw()).startswith(id_begins))
    folder.mkdir()
    (folder / "key.pem").write_bytes(key_to_pem(key))
    return folder


def lose_journal(coordinator: Process) -> None:
    """SIGKILL, and everything that begins with the journal's name is gone."""
    coordinator.kill()
    for path in coordinator.directory.glob("journal.sqlite*"):
        path.unlink()


def until_rebuilt(run: Run, coordinator: Process, times: int) -> None:
    """Wait until it has rebuilt the run so many times."""
    run.until("rebuilt run", lambda: len(coordinator.events("rebuilt")) >= times)


def at_once(*processes: Process) -> None:
    """End them as a power cut would."""
    for process in processes:
        process.popen.kill()
    for process in processes:
        process.kill()


def newest_checkpoint(peer: Process) -> int:
    """The outer step of the newest checkpoint that it has told of."""
    return max(event["outer_step"] for event in peer.events("checkpoint"))


def is_frozen_between_checkpoints(peer: Process) -> bool:
    """Stop a peer, and let it go on unless it has committed one or two outer steps since its newest checkpoint."""
    peer.signal(signal.SIGSTOP)
    if newest_checkpoint(peer) < peer.step < newest_checkpoint(peer) + 3:
        return True
    peer.signal(signal.SIGCONT)
    return False


def broken_rounds(process: Process) -> list[Event]:
    """But for those that ended because another member heard of the next view first."""
    broke = process.events("fault", kind="round_broke")
    return [event for event in broke if not any(word in event["cause"] for word in _OF_ANOTHER_VIEW)]


@contextlib.contextmanager
def running(folder: Path, *, forks: bool = True, **environment: str) -> Iterator[Run]:
    """A run whose processes are gone afterwards, whatever happens.

    Args:
        folder: where they work.
        forks: whether they are forked (forked.py), and not started as a user starts them.
        **environment: variables for all of them.
    """
    # Sockets have short names only: the test's own folder lies too deep for them.
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        run = Run(folder, Path(temporary), environment, forks=forks)
        try:
            yield run
        except BaseException:
            run.stop()
            raise
        wrong = run.stop() + run.accusations()
        assert not wrong, "\n".join([*wrong, run.story()])
