# SPDX-License-Identifier: Apache-2.0
"""What a worker is told when it is started: one JSON text.

Owns the words of that text. Rules: no secrets, and nothing that a worker needs to know about the other peers, because
there is nothing. Must not know how it is done.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal, get_args

import msgspec

from isthmus.optim.inner import InnerType, state_names
from isthmus.optim.outer import GRAD, PARAM
from isthmus.optim.schedule import ScheduleType
from isthmus.trainer.errors import ConfigError
from isthmus.trainer.model.decoder import ModelConfig
from isthmus.trainer.model.hugging_face import HuggingFaceModelConfig

Device = Literal["auto", "cpu", "cuda"]
"""Where workers compute; "auto": on CUDA devices if there are any."""

Precision = Literal["auto", "fp32", "bf16"]
"""What forward and backward compute in; "auto": bf16 on CUDA, fp32 elsewhere. Parameters, gradients' sums and the
optimizer are fp32 always."""

RealPrecision = Literal["fp32", "bf16"]
"""What "auto" comes to."""

ActivationCheckpointing = Literal["none", "selective", "full"]
"""What is computed again in the backward pass, to have memory: see `trainer.workers.blocks`."""

_FIRST_MOMENT: Final = re.compile(r"exp_avg(_\d+)?")
"""See `optim.adopt.momentum_names`."""


def choose_precision(wanted: Precision, device_type: str) -> RealPrecision:
    """bf16 on CUDA and fp32 elsewhere, unless something else is wanted."""
    if wanted != "auto":
        return wanted
    return "bf16" if device_type == "cuda" else "fp32"


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class OptimizerJob(_Section, frozen=True, kw_only=True):
    """The arguments of `optim.inner.build_inner_optimizer`."""

    type: InnerType = "adamw"
    lr: float
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    weight_decay: float = 0.1
    omegas: tuple[float, ...] | None = None
    momentum: float = 0.95

    def require_kinds(self, kinds: Iterable[str]) -> None:
        """Demand that workers with this inner optimizer have values of all these kinds, as `Fragment.kind` has them.

        Raises:
            ConfigError: one is neither "param" nor "grad", nor kept by the inner optimizer.
        """
        kept = state_names(self.type, self.betas)
        for kind in kinds:
            if kind in (PARAM, GRAD, *kept):
                continue
            others = [type_ for type_ in get_args(InnerType) if _may_keep(type_, kind)]
            cure = "take another outer" + (f", or inner.type {' or '.join(others)}" if others else "")
            if self.type in others:
                cure = "give inner.betas a rate for each first moment that outer exchanges, then that of the second"
            raise ConfigError(
                f"outer exchanges {kind!r}, which inner.type = {self.type!r} does not keep"
                + (f" (it keeps {', '.join(kept)})" if kept else ""),
                cure=cure,
                key="outer",
            )


def _may_keep(type_: InnerType, kind: str) -> bool:
    """Whether an inner optimizer of this type keeps it, with the betas for it."""
    return kind in state_names(type_) or (type_ == "adopt" and _FIRST_MOMENT.fullmatch(kind) is not None)


class ScheduleJob(_Section, frozen=True, kw_only=True):
    """The arguments of `optim.schedule.build_schedule`."""

    type: ScheduleType = "constant"
    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.1
    decay_steps: int | None = None


class TrainingJob(_Section, frozen=True, kw_only=True):
    """What is trained and how; the same for every number of workers."""

    model: ModelConfig | HuggingFaceModelConfig
    seq_len: int
    """Tokens a sample."""
    data_seed: int
    """Of `trainer.data.samples.SampleSource`, equal on all peers."""
    optimizer: OptimizerJob
    schedule: ScheduleJob
    micro_batch: int
    """Samples that one worker computes at a time. It changes memory and speed, not the gradient."""
    halves_micro_batch: bool = False
    """Whether it may be halved when it does not fit into memory."""
    grad_clip: float | None = 1.0
    """Largest norm of the whole gradient; None: any."""
    precision: Precision = "auto"
    has_tf32: bool = True
    """Whether CUDA devices multiply fp32 matrices in TF32."""
    activation_checkpointing: ActivationCheckpointing = "none"
    is_compiled: bool = False
    """Whether the model's blocks are compiled."""
    eval_batch: int = 8
    """Samples a batch of held-out text."""
    num_eval_batches: int = 16

    def __post_init__(self) -> None:
        for name in ("seq_len", "micro_batch", "eval_batch", "num_eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.grad_clip is not None and not self.grad_clip > 0.0:
            raise ValueError(f"grad_clip must be positive, not {self.grad_clip}")


class FilePart(_Section, frozen=True, kw_only=True):
    """A part of an inherited file: the fields of `trainer.workers.shared_buffer.SharedTokens`."""

    fd: int
    offset: int
    numel: int


class TextInMemory(_Section, frozen=True, kw_only=True, tag="memory"):
    """A text in one piece; the worker inherits it."""

    train: FilePart
    validation: FilePart


class TextInShards(_Section, frozen=True, kw_only=True, tag="shards"):
    """A prepared text. Its shards are opened when they are needed; the daemon sees that they are there by then."""

    index: FilePart
    """The bytes of its index."""
    folder: str | None
    """Its owner's."""
    cache: str
    """Where copies lie, by their digests."""
    pool: int
    """Shards that are mixed at a time."""


class WorkerJob(_Section, frozen=True, kw_only=True):
    """Everything a worker knows."""

    training: TrainingJob
    device: Device
    num_threads: int
    """CPU threads of one worker."""
    divides_processors: bool
    """Whether it has fewer beside workers of other peers on this machine."""
    parent_pid: int
    """The daemon. When it is gone, so is the worker."""
    socket_path: str
    """Where the daemon listens."""
    store_path: str
    """File by which the workers of this peer find each other."""
    collective_timeout_s: float
    """How long a worker waits for the others of its peer inside a collective of the site."""
    environment: dict[str, str] = {}
    """Variables that it has beside the daemon's: its place among the peer's workers, as torchrun gives it."""
    mailbox_fd: int
    text: TextInMemory | TextInShards

    @property
    def fds(self) -> tuple[int, ...]:
        """What is inherited: the mailbox, then the text's."""
        return (self.mailbox_fd, *(part.fd for part in _parts(self.text)))

    def renumbered(self, fds: Sequence[int]) -> "WorkerJob":
        """The job of the process that has inherited them under these numbers, in the same order."""
        mailbox_fd, *rest = fds
        parts = [msgspec.structs.replace(part, fd=fd) for part, fd in zip(_parts(self.text), rest, strict=True)]
        text: TextInMemory | TextInShards
        if isinstance(self.text, TextInShards):
            text = msgspec.structs.replace(self.text, index=parts[0])
        else:
            text = TextInMemory(train=parts[0], validation=parts[1])
        return msgspec.structs.replace(self, mailbox_fd=mailbox_fd, text=text)


def _parts(text: TextInMemory | TextInShards) -> tuple[FilePart, ...]:
    return (text.index,) if isinstance(text, TextInShards) else (text.train, text.validation)
