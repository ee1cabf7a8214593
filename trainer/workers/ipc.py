# SPDX-License-Identifier: Apache-2.0
"""What the daemon and its workers say to each other, and how it is written down.

Owns the messages, their wire form and the two ends of the socket's settings. Rules: every reply names the serial of
the request it answers; workers answer in the order in which they were asked; a message that is not one of these is
refused, and no bytes ever become code. Must not know tensors: no torch here, so that it is cheap to import.

Bulk data never passes here. Whoever is told to `Load` or `Store` finds it in the mailbox (`shared_buffer.py`):
between a `Store` and its `Stored` the mailbox is the workers', likewise for `Load` and `Keep`; else the daemon's. An
anchor beside it is the daemon's; nobody writes to it between a `Load` or `Keep` that names it and its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

import msgspec
import zmq
from msgspec import Meta

if TYPE_CHECKING:
    from zmq.asyncio import Socket as AsyncSocket

_MessageT = TypeVar("_MessageT")

MAX_MESSAGE_NBYTES = 1 << 20
"""Longest message. A step of 65536 samples fits."""

MAX_STEP_SAMPLES = 1 << 16

_QUEUE_LENGTH = 64

Natural = Annotated[int, Meta(ge=0)]
Position = Annotated[float, Meta(ge=0.0)]
Text = Annotated[str, Meta(max_length=8192)]
Kind = Annotated[str, Meta(min_length=1, max_length=64)]
"""What is moved: "param", "grad", or what the inner optimizer keeps for each parameter, by its own name ("exp_avg")."""
Span = tuple[Natural, Natural]
"""Half-open range of the flat vector of parameters: (start, stop)."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    serial: Natural
    """Number of the request; a reply carries its request's."""


# ------------------------------------------------------------------------------------------------- daemon to worker


class Load(_Message, frozen=True, kw_only=True):
    """Take values from the mailbox: value <- keep * value + (1 - keep) * mailbox."""

    kind: Kind = "param"
    place: Annotated[int, Meta(ge=0, le=2)] = 0
    """Of the shared buffer: the mailbox, or an anchor that stands in for it."""
    spans: tuple[Span, ...] = ()
    """What to take; empty: everything."""
    keep: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    own_steps: Natural | None = None
    """How many inner steps the inner optimizer's states are the outcome of from now on; None: as before."""


class _Batch(_Message, frozen=True, kw_only=True):
    inner_step: Annotated[int, Meta(ge=1)]
    """Number of this step in the run's global count, from 1."""
    position: Position
    """Where the run is before this step, in planned inner steps, by the tokens it has committed: what the learning rate
    follows (engine/progress.py)."""
    indices: Annotated[tuple[Natural, ...], Meta(min_length=1, max_length=MAX_STEP_SAMPLES)]
    """The peer's whole batch; every worker picks its share."""


class Step(_Batch, frozen=True, kw_only=True):
    """Train one inner step."""


class Backward(_Batch, frozen=True, kw_only=True):
    """The first half of a step: compute the clipped gradient and leave it there."""


class Update(_Message, frozen=True, kw_only=True):
    """The second half: let the inner optimizer use the gradient that is there."""

    inner_step: Annotated[int, Meta(ge=1)]
    """Of the backward before."""
    position: Position
    """As for the backward; others may have committed meanwhile."""


class Store(_Message, frozen=True, kw_only=True):
    """Write values into the mailbox, zeros for parameters that have none of this kind."""

    kind: Kind = "param"
    spans: tuple[Span, ...] = ()
    """What to write; empty: everything."""


class Keep(_Message, frozen=True, kw_only=True):
    """Keep a copy of the parameters beside them, for `Evaluate`."""

    place: Annotated[int, Meta(ge=0, le=2)] | None = None
    """Of the shared buffer, where their values are, as for `Load`; None: those that the workers have now."""


class Evaluate(_Message, frozen=True, kw_only=True):
    """Judge parameters on held-out text: the present ones, or those that were kept."""

    batches: Span | None = None
    """Which ones; None: all. With the last one the copy that was kept is let go of."""
    is_kept: bool = False


class Stop(_Message, frozen=True, kw_only=True):
    """Exit. There is no reply but the end of the process."""


Question: TypeAlias = Load | Step | Backward | Update | Store | Keep | Evaluate
"""What a worker answers."""
Request: TypeAlias = Question | Stop


# ------------------------------------------------------------------------------------------------- worker to daemon


class Ready(_Message, frozen=True, kw_only=True):
    """Started, and waiting for its first `Load`. Its serial is 0, which no request has."""

    local_rank: Natural
    device: Text
    """As torch writes it, with the device's name for people: "cuda:0 (NVIDIA H100)"."""
    seconds: float
    """From the process's first line to here."""
    precision: Text | None = None
    """What it computes in; None: nobody said."""
    peak_flops: float | None = None
    """What its device can do at most in that, FLOP/s; None: that is not known."""


class Loaded(_Message, frozen=True, kw_only=True):
    """The mailbox has been read."""

    num_broken: Natural = 0
    """Elements of this worker that were not finite, and have taken the mailbox's value instead of a blend."""


class BackwardDone(_Message, frozen=True, kw_only=True):
    """The gradient is there. The loss is the peer's, equal on all its workers; None: nobody said."""

    loss: float | None
    num_tokens: Natural


class StepParts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the seconds of a step went into. All of it is the device's time but `data_s`, the host's wait for text."""

    data_s: float = 0.0
    passes_s: float = 0.0
    """Forward and backward."""
    clip_s: float = 0.0
    """The gradient's norm, over all workers, and its scaling."""
    update_s: float = 0.0
    """The inner optimizer."""


class StepDone(_Message, frozen=True, kw_only=True):
    """One inner step is done, its update too. Loss and norm are the peer's, equal on all its workers.

    What is None nobody has said.
    """

    inner_step: Natural
    loss: float | None
    num_tokens: Natural
    grad_norm: float | None
    lr: float | None
    seconds: float
    parts: StepParts | None = None


class Stored(_Message, frozen=True, kw_only=True):
    """The mailbox has been written."""

    own_steps: Natural = 0
    """Inner steps since the inner optimizer began."""


class Kept(_Message, frozen=True, kw_only=True):
    """There is a copy, or on one of the peer's devices no room for it. Equal on all workers."""

    has_room: bool
    num_batches: Natural
    """Of held-out text."""


class Evaluated(_Message, frozen=True, kw_only=True):
    """The held-out loss in nats per token, and of how many tokens it is the mean. Equal on all workers."""

    loss: float
    num_tokens: Natural


class WorkerFailed(_Message, frozen=True, kw_only=True):
    """The operator must act, and this worker exits. What is our bug is in its log, and its exit code is 1.

    Or somebody's own loop has ended in order, before its run ("loop_left").
    """

    kind: Literal["training_fault", "environment", "config", "out_of_memory", "loop_left"]
    problem: Text
    cure: Text = ""


Answer: TypeAlias = Loaded | BackwardDone | StepDone | Stored | Kept | Evaluated
"""To a question, one kind for each."""
Reply: TypeAlias = Ready | Answer | WorkerFailed


# ------------------------------------------------------------------------------------------------------- wire form


class MalformedMessage(Exception):
    """Bytes that are none of our messages. Both ends are ours: this is a bug, or two versions that met."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"malformed message between daemon and worker: {reason}")


_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The wire form.

    Raises:
        ValueError: longer than `MAX_MESSAGE_NBYTES`.
    """
    wire = _encoder.encode(message)
    if len(wire) > MAX_MESSAGE_NBYTES:
        raise ValueError(f"{type(message).__name__} of {len(wire)} bytes is over the limit of {MAX_MESSAGE_NBYTES}")
    return wire


def decode_request(wire: bytes) -> Request:
    """A message to a worker.

    Raises:
        MalformedMessage: too long, not msgpack, an unknown kind or field, a value of the wrong type or size.
    """
    return _decode(_request_decoder, wire)


def decode_reply(wire: bytes) -> Reply:
    """A message to the daemon.

    Raises:
        MalformedMessage: see `decode_request`.
    """
    return _decode(_reply_decoder, wire)


def _decode(decoder: msgspec.msgpack.Decoder[_MessageT], wire: bytes) -> _MessageT:
    if len(wire) > MAX_MESSAGE_NBYTES:
        raise MalformedMessage(f"{len(wire)} bytes")
    try:
        return decoder.decode(wire)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(str(error)) from error


# ---------------------------------------------------------------------------------------------------------- sockets


def worker_identity(local_rank: int) -> bytes:
    """Routing id of a worker's socket."""
    return b"worker-%d" % local_rank


def configure(socket: zmq.Socket[bytes] | AsyncSocket, *, linger_s: float) -> None:
    """Bound what a socket holds: messages queued, bytes a message, seconds it lingers when it is closed."""
    socket.setsockopt(zmq.SNDHWM, _QUEUE_LENGTH)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_LENGTH)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
    socket.setsockopt(zmq.LINGER, round(1000 * linger_s))
