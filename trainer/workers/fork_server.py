# SPDX-License-Identifier: Apache-2.0
"""A process that has loaded what others need, and forks them: to load torch takes seconds, to fork takes milliseconds.

Owns that process, how it is asked, and the forked processes as their parent sees them. It is split off from its parent
before that has a second thread (`split_off`), or started as a program (`launch`). Rules: it has one thread and computes
nothing, so that its forks are safe; what it forks are children of its parent, not its own, so its end harms none of
them; neither it nor they outlive that parent. Linux only. Must not know what a forked process does: a `Runner` does.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NoReturn, Self

from isthmus.trainer.workers.lifeline import adopt_orphans, die_with, name_process

SERVER_NAME: Final = "isthmus-fork"
"""What `top` and `ps -o comm` call a fork server."""

_MAX_REQUEST_NBYTES: Final = 1 << 16
_MAX_FDS: Final = 16
_NUM_STDIO: Final = 3
_REQUESTS: Final = 3  # descriptor of one that is launched
_ADOPTION_TIMEOUT_S: Final = 5.0
_ADOPTION_LOOK_S: Final = 0.001
_FAILED: Final = 1

Runner = Callable[[str, Sequence[int]], object]
"""What a forked process does with the text and the descriptors that were sent for it. When it returns, all is over."""


class ForkServerGone(Exception):
    """The fork server has ended: killed by the kernel, which had no memory left, or by somebody."""


class ForkServer:
    """A fork server, as its parent sees it. `split_off` and `launch` make one.

    Args:
        requests: the socket by which it is asked.
        pid: its process, a child of this one.
    """

    def __init__(self, requests: socket.socket, pid: int) -> None:
        self._requests = requests
        self._parent_pid = os.getpid()
        self.pid = pid

    @classmethod
    def split_off(cls, load: Callable[[], Runner]) -> Self:
        """Fork this process, in its main thread and only one. What it has loaded by now need not be loaded again.

        Args:
            load: loads the rest, in the fork server.

        Raises:
            OSError: there can be no other process.
        """
        ours, theirs = _pair()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.detach()
            _serve(theirs.detach(), parent_pid, load)
        theirs.close()
        return cls(ours, pid)

    @classmethod
    def launch(cls, module: str, *, environment: Mapping[str, str] | None = None) -> Self:
        """Start a module that calls `serve`, in this process's main thread: with that the fork server ends.

        Args:
            module: by its name.
            environment: all of it; None: this process's.

        Raises:
            OSError: no process can be started.
        """
        ours, theirs = _pair()
        with theirs:
            pid = os.posix_spawn(
                sys.executable,
                # -P: not the working directory, where a user's own module could hide one of ours
                [sys.executable, "-P", "-m", module, str(_REQUESTS), str(os.getpid())],
                dict(os.environ if environment is None else environment),
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), _REQUESTS)],
                setsid=True,
            )
        return cls(ours, pid)

    def fork(self, text: str, *, stdio: Sequence[int], fds: Sequence[int] = ()) -> int:
        """Ask for a process that runs `text`: a child of this one, and the leader of a session.

        Args:
            text: for the runner.
            stdio: what becomes its stdin, stdout and stderr.
            fds: for the runner, which gets copies, in this order.

        Returns:
            A pipe from which the new process's id is read, as `process_id` does; the caller closes it.

        Raises:
            ForkServerGone: ask another one.
        """
        adopt_orphans()
        answer, theirs = os.pipe()
        try:
            socket.send_fds(self._requests, [f"{os.getpid()}\n{text}".encode()], [theirs, *stdio, *fds])
        except OSError as error:
            os.close(answer)
            raise ForkServerGone(f"the fork server cannot be asked: {error.strerror}") from error
        finally:
            os.close(theirs)
        return answer

    async def process(
        self, text: str, *, stdio: Sequence[int], fds: Sequence[int] = (), timeout_s: float
    ) -> "ForkedProcess":
        """The same for a program with an event loop. Raises ForkServerGone also if no answer comes in that time."""
        answer = self.fork(text, stdio=stdio, fds=fds)
        loop, is_there = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(answer, is_there.set)
        try:
            async with asyncio.timeout(timeout_s):
                await is_there.wait()
            return ForkedProcess(process_id(answer))
        except TimeoutError:
            raise ForkServerGone(f"the fork server has not answered in {timeout_s:g} s") from None
        finally:
            loop.remove_reader(answer)
            os.close(answer)

    def close(self) -> None:
        """End it. May be called twice; in a fork of the parent it closes the socket alone."""
        if self._requests.fileno() < 0:
            return
        self._requests.close()
        if os.getpid() != self._parent_pid:
            return
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def process_id(answer: int) -> int:
    """What `fork`'s pipe says, once it can be read.

    Raises:
        ForkServerGone: nothing.
    """
    said = os.read(answer, 32)
    if not said:
        raise ForkServerGone("the fork server has ended, or can make no other process")
    return int(said)


class ForkedProcess:
    """A child that was forked, for a program with an event loop. Whoever has it awaits `wait`, or a zombie is left.

    Make it in the loop that waits for it.

    Args:
        pid: as `process_id` gave it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._on_end)

    @property
    def returncode(self) -> int | None:
        """Its exit code; -n if signal n ended it; None while it runs."""
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        """Its exit code, as soon as it has ended."""
        return await asyncio.shield(self._code)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self._code.set_result(os.waitstatus_to_exitcode(status))


def serve(load: Callable[[], Runner]) -> NoReturn:
    """Be the fork server that `launch` has started, with what it gave as arguments."""
    _serve(int(sys.argv[1]), int(sys.argv[2]), load)


def _serve(requests: int, parent_pid: int, load: Callable[[], Runner]) -> NoReturn:
    try:
        # A supervisor that stops a service signals all its processes; the parent still needs its own to end in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.getsid(0) != os.getpid():
            os.setsid()
        if not die_with(parent_pid):
            os._exit(_FAILED)
        name_process(SERVER_NAME)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        _close_all_but([requests])
        run = load()
        gc.collect()
        gc.freeze()  # the collector would write to pages that all processes share
        while _answer(requests, run):
            pass
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the root of a process
        traceback.print_exc()
        os._exit(_FAILED)


def _answer(requests: int, run: Runner) -> bool:
    """Wait for a request and do as it says; False if there will be no more."""
    with socket.socket(fileno=os.dup(requests)) as asked:
        message, fds, _, _ = socket.recv_fds(asked, _MAX_REQUEST_NBYTES, _MAX_FDS)
    if not message:
        return False
    said, saying = os.pipe()
    # A process whose parent ends becomes the child of the next ancestor that adopts orphans: the one who asks.
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            _become(message.decode(), fds, run)
        os.write(saying, str(pid).encode())
        os._exit(0)
    os.close(saying)
    with open(said, "rb") as reader:
        pid_text = reader.read()
    os.waitpid(between, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(fds[0], pid_text)
    for fd in fds:
        os.close(fd)
    return True


def _become(message: str, fds: Sequence[int], run: Runner) -> NoReturn:
    code = _FAILED
    try:
        os.setsid()
        parent, _, text = message.partition("\n")
        for number, fd in enumerate(fds[1 : 1 + _NUM_STDIO]):
            os.dup2(fd, number)
        own = fds[1 + _NUM_STDIO :]
        _close_all_but(own)
        if _is_adopted(int(parent)) and die_with(int(parent)):
            run(text, own)
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else _FAILED
    except BaseException:  # noqa: BLE001 - the root of a process
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _is_adopted(parent_pid: int) -> bool:
    """Wait until this process is the child of that one; False if it will not be."""
    deadline = time.monotonic() + _ADOPTION_TIMEOUT_S
    while os.getppid() != parent_pid:
        if time.monotonic() > deadline:
            return False
        time.sleep(_ADOPTION_LOOK_S)
    return True


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor but stdin, stdout, stderr and these."""
    first = _NUM_STDIO
    for fd in sorted(kept):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
