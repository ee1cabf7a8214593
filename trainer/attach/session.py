# SPDX-License-Identifier: Apache-2.0
"""`isthmus.attach`: somebody's own training loop as a full member of a run.

    with isthmus.attach(model, optimizer, "up --peers 2") as session:     # elsewhere: "join TICKET"
        for indices in session:                                           # until the run is over
            optimizer.zero_grad()
            loss = loss_of(model, data[indices])
            loss.backward()
            session.report(loss)
            optimizer.step()

A daemon beside the loop does everything that has to do with other machines. It asks for one inner step after the other;
two hooks of `optimizer.step` answer, and while they do they put values into the mailbox or take some from it:

    the daemon    Load, Store, …   Step ──────────────────────────► StepDone ─► Store, Load, …  Step ─► …
    the loop                          forward, backward, optimizer.step() │ stands still         │

Where a gradient is exchanged the step comes in two halves, `Backward` and `Update`, with the exchange between them.

Rules: values change inside `attach` and `optimizer.step()` only; every process of the loop gets the same requests in
the same order. Must not know the network, nor what an outer step is.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from isthmus.trainer.attach.daemon import Daemon, RunEnded
from isthmus.trainer.attach.tensors import LoopTensors
from isthmus.trainer.config.values import shaped
from isthmus.trainer.errors import IsthmusError
from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.channel import DaemonChannel, DaemonGone
from isthmus.trainer.workers.loader import shares
from isthmus.trainer.workers.loop import LoopFacts, end_of
from isthmus.trainer.workers.shared_buffer import SharedBuffer


class _Place(msgspec.Struct, frozen=True):
    """Where the first process has started the daemon, for the others."""

    socket_path: str
    pid: int
    daemon_pid: int
    mailbox_fd: int
    command: str


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    command: str | Sequence[str] | None = None,
    *,
    tokens_per_sample: int = 1,
) -> "Session":
    """Take part in a run with this loop, from now on. Returns when the first inner step is to be trained.

    The trained parameters are the run's then: those of the founder's loop, or what the run has come to. All peers build
    the same model and train the same of its parameters; frozen ones and buffers are not exchanged. The inner optimizer
    and its learning rate stay the loop's: `session.position` says where the run is.

    In a loop of several processes (torchrun) all of them call this, on one machine, after the process group is there.

    Args:
        model: as the loop trains it: plain, in DistributedDataParallel, compiled, or cut by FSDP2.
        optimizer: the inner one. Each call of its `step` is an inner step, whatever was accumulated before it.
        command: what stands behind `isthmus` on a command line, in one string or word by word: "up --peers 2
            --outer-steps 40" founds a run, "join TICKET" joins one. None: what ISTHMUS_COMMAND says. Every flag of
            these commands is known; --inner.batch-size is the samples of one inner step of one peer.
        tokens_per_sample: how many tokens a sample counts for, the same on all peers of a run. What a peer gives to an
            exchange weighs as many tokens as it has trained, and so do figures. It is a fixed number: where samples
            differ in length, leave it at 1 on all peers, and a peer's work weighs its samples.

    Raises:
        ValueError: the command is neither, or model and optimizer do not go together.
        RunEnded: the daemon has given up; it has said why.
        EnvironmentFault: this machine has not the memory for a copy of the parameters.
    """
    rank, size = _place_here()
    tensors = LoopTensors(model, optimizer, rank)
    daemon, problem = None, None
    place: _Place | None = None
    mailbox: SharedBuffer | None = None
    if rank == 0:
        try:
            mailbox = SharedBuffer.create(tensors.numel)
            facts = LoopFacts(
                parameters=tuple(shaped(name, shape) for name, shape in tensors.shapes.items()),
                states=tensors.states,
                num_processes=size,
                pid=os.getpid(),
                tokens_per_sample=tokens_per_sample,
                mailbox_fd=mailbox.fd,
                program=("python", *sys.orig_argv[1:]),
            )
            daemon = Daemon(command, facts, mailbox)
            place = _Place(daemon.socket_path, os.getpid(), daemon.pid, mailbox.fd, daemon.command)
        except (ValueError, OSError, IsthmusError) as error:  # the other processes wait for it
            problem = error
    place = _told_by_first(place, problem, size)
    if mailbox is None:
        mailbox = SharedBuffer(os.open(f"/proc/{place.pid}/fd/{place.mailbox_fd}", os.O_RDWR), tensors.numel)
    session = Session(tensors, mailbox, place, daemon, rank=rank, size=size, tokens_per_sample=tokens_per_sample)
    try:
        session._begin()
    except BaseException:
        session.close(now=True)
        raise
    return session


class Session:
    """One process's part in a run; `attach` makes it. End it by `with`, or by `close`.

    When the run is over, so is the session (`is_over`), and the loop is on its own: its parameters are what its peer
    had last. If the block is left before, the peer leaves at once, and what it trained since the last commit is lost;
    `isthmus leave` hands it in first. A founder's daemon coordinates on for the others; after an exception it ends too.
    """

    def __init__(
        self,
        tensors: LoopTensors,
        mailbox: SharedBuffer,
        place: _Place,
        daemon: Daemon | None,
        *,
        rank: int,
        size: int,
        tokens_per_sample: int,
    ) -> None:
        self._tensors, self._mailbox = tensors, mailbox
        self._place, self._daemon = place, daemon
        self._rank, self._size = rank, size
        self._tokens_per_sample = tokens_per_sample
        self._channel = DaemonChannel(place.socket_path, local_rank=rank, is_there=self._daemon_is_there)
        self._task: ipc.Step | ipc.Backward | ipc.Update | None = None
        self._indices: tuple[int, ...] = ()
        self._inner_step = 0
        self._position = 0.0
        self._own_steps = 0
        self._loss: Tensor | float | None = None
        self._lr: float | None = None
        self._began_s = time.perf_counter()
        self._is_over = self._is_closed = self._is_given_up = False
        self._is_void = False
        """Whether what `optimizer.step()` is about to do is nobody's any more."""
        optimizer = tensors.optimizer
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    # -------------------------------------------------------------------------------- for the loop

    @property
    def is_over(self) -> bool:
        """Whether the run is done, or this peer has left it: no inner step is wanted any more."""
        return self._is_over

    @property
    def inner_step(self) -> int:
        """Number of the inner step that is to be trained, in the run's global count, from 1."""
        return self._inner_step

    @property
    def position(self) -> float:
        """Where the run is before this inner step, for a schedule: so many inner steps are its committed tokens worth.

        From 0 to the inner steps of the whole run. With equal peers it is `inner_step - 1`; a peer that leaves inner
        steps out, because it is slower than others, is where the others are.
        """
        return self._position

    def indices(self) -> list[int]:
        """The samples of this inner step that are this process's share, as indices that no other peer has.

        They count up without end: a data set of n samples takes each modulo n. A loop that has its data in another way
        need not ask.
        """
        share = shares(len(self._indices), self._size)[self._rank]
        return [self._indices[place] for place in share]

    def __iter__(self) -> Iterator[list[int]]:
        """`indices` of one inner step after the other, until `is_over`; `optimizer.step()` comes between."""
        while not self._is_over:
            yield self.indices()

    def report(self, loss: Tensor | float) -> None:
        """The loss of this inner step, for events and figures; a mean over the processes if there are several."""
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss

    def close(self, *, now: bool = False) -> None:
        """End the session; idempotent. Unless the run is over, the peer leaves at once.

        A founder's daemon lives on for the others, unless `now`, and a line on stderr says so. One that lives on
        already, as RunEnded has said, is left alone.

        Raises:
            RunEnded: the run was over, and not in a good way.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        daemon = None if self._is_given_up else self._daemon
        leaves = daemon is not None and daemon.coordinates and not (self._is_over or now)
        if leaves:
            self._channel.send(ipc.WorkerFailed(serial=0, kind="loop_left", problem="the loop has ended early"))
        self._channel.close()
        try:
            if daemon is not None and leaves:
                daemon.wait_for_leave()
            elif daemon is not None and self._is_over and not now:
                daemon.wait()
            elif daemon is not None:
                daemon.stop()
        finally:
            self._is_over = True
            if self._daemon is not None:
                self._daemon.close()
            self._mailbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(now=error is not None)

    # -------------------------------------------------------------------------------- between two steps

    def _begin(self) -> None:
        device = next(iter(self._tensors.optimizer.param_groups[0]["params"])).device
        name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        seconds = time.perf_counter() - self._began_s
        self._channel.send(ipc.Ready(serial=0, local_rank=self._rank, device=f"{device}{name}", seconds=seconds))
        self._serve()

    def _before_step(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(self._task, ipc.Backward):
            return
        if any(map(callable, args[1:])) or kwargs.get("closure") is not None:
            raise ValueError("the run exchanges gradients: call optimizer.step() without a closure")
        self._channel.send(
            ipc.BackwardDone(serial=self._task.serial, loss=self._loss_now(), num_tokens=self._num_tokens)
        )
        self._serve()
        if not isinstance(self._task, ipc.Update):
            self._void_step()

    def _void_step(self) -> None:
        """The gradient was given and none came back: the peer has left, or lost its membership and begins anew.

        An optimizer leaves out what has no gradient. Found before: it took the old one to the parameters that had just
        been loaded, and that was told as the answer to what was asked for next.
        """
        self._is_void = True
        for group in self._tensors.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _after_step(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        task = self._task
        if self._is_void or task is None:
            self._is_void, self._loss = False, None
            return
        self._own_steps += 1
        self._channel.send(
            ipc.StepDone(
                serial=task.serial,
                inner_step=self._inner_step,
                loss=self._loss_now(),
                num_tokens=self._num_tokens,
                grad_norm=None,
                lr=float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else None,
                seconds=time.perf_counter() - self._began_s,
            )
        )
        self._loss = None
        self._serve()

    @property
    def _num_tokens(self) -> int:
        return len(self._indices) * self._tokens_per_sample

    def _loss_now(self) -> float | None:
        return None if self._loss is None else float(self._loss)

    def _serve(self) -> None:
        """Answer the daemon until the loop has something to do.

        Raises:
            RunEnded: it has ended instead.
        """
        self._task = None
        while self._task is None and not self._is_over:
            self._answer(self._next_request())
        self._began_s = time.perf_counter()

    def _next_request(self) -> ipc.Request:
        with contextlib.suppress(DaemonGone):
            return self._channel.receive()
        self._is_over = True
        if (end := end_of(self._folder)) is not None:
            self._is_given_up = True
            raise RunEnded(self._place.command, end.exit_code, cause=end.cause)
        if self._daemon is not None:
            self._daemon.raise_if_bad()
        raise RunEnded(self._place.command, None)

    def _answer(self, request: ipc.Request) -> None:
        match request:
            case ipc.Step() | ipc.Backward():
                self._task, self._indices, self._inner_step = request, request.indices, request.inner_step
                self._position = request.position
            case ipc.Update():
                self._task = request
            case ipc.Load():
                self._channel.send(ipc.Loaded(serial=request.serial, num_broken=self._load(request)))
            case ipc.Store():
                self._tensors.write(request.kind, self._mailbox.tensor, _ranges(request.spans))
                self._channel.send(ipc.Stored(serial=request.serial, own_steps=self._own_steps))
            case ipc.Stop():
                self._is_over = True
            case ipc.Keep() | ipc.Evaluate():
                raise ipc.MalformedMessage("a loop of one's own judges its model itself")

    def _load(self, request: ipc.Load) -> int:
        values = self._mailbox.at(request.place)
        num_broken = self._tensors.read(request.kind, values, _ranges(request.spans), keep=request.keep)
        if request.own_steps is not None:
            self._tensors.set_steps(request.own_steps)
            self._own_steps = request.own_steps
        return num_broken

    @property
    def _folder(self) -> Path:
        return Path(self._place.socket_path).parent

    def _daemon_is_there(self) -> bool:
        """Whether it will ask for something: it lives, and has neither given the loop up nor been tidied up after."""
        if end_of(self._folder) is not None or not self._folder.exists():
            return False
        if self._daemon is not None:
            return self._daemon.is_running()
        try:
            os.kill(self._place.daemon_pid, 0)
        except ProcessLookupError:
            return False
        return True


def _ranges(spans: tuple[ipc.Span, ...]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in spans)


def _place_here() -> tuple[int, int]:
    """Rank and number of the loop's processes.

    Raises:
        ValueError: they are on several machines.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return 0, 1
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) > 1:
        raise ValueError("the processes of one loop are on one machine; machines are peers of their own")
    return dist.get_rank(), dist.get_world_size()


def _told_by_first(place: _Place | None, problem: Exception | None, size: int) -> _Place:
    """What the first process says, on all of them; its problem is everybody's."""
    if size > 1:
        told: list[Any] = [None if place is None else msgspec.msgpack.encode(place), problem]
        dist.broadcast_object_list(told, src=0)
        place = None if told[0] is None else msgspec.msgpack.decode(told[0], type=_Place)
        problem = told[1]
    if problem is not None:
        raise problem
    assert place is not None, "the first process has started a daemon, or said why not"
    return place
