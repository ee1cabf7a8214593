# SPDX-License-Identifier: Apache-2.0
"""What a peer has for itself, and gets back from its disk: the method's private state, and the inner optimizer's.

    workers ─► mailbox ─► a copy in memory (`copy_inner_state`) ─► the disk (checkpoint/private_files.py)
    the disk ─► `OwnState` ─► mailbox ─► workers (`give_inner_state`)

Both are in the canonical order of the flat vector (workers/shards.py), so any number of workers may take what others
have written. Must not know files, or when a copy is due.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from isthmus.collective.core.types import OuterStep
from isthmus.optim.outer import Tensors
from isthmus.trainer.threads import in_thread
from isthmus.trainer.workers.pool import WorkerPool

_NOTHING: Final = (slice(0, 0),)
"""Moves no element."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InnerState:
    """What the workers' inner optimizer keeps, after some inner step.

    Attributes:
        own_steps: how many inner steps it is the outcome of.
        tensors: by kind ("exp_avg"): [numel] fp32, zeros where a parameter has none. None at all for plain SGD.
    """

    own_steps: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnState:
    """What the disk knows.

    Attributes:
        outer_step: of the shared state that this peer held then.
        is_exact: whether that is the very state that was asked for. What is older is good enough for moments alone.
        private: the method's, by place of the fragment; see `WorkerValues.private`.
        inner: the inner optimizer's, if it was kept.
    """

    outer_step: OuterStep
    is_exact: bool
    private: Mapping[int, Tensors]
    inner: InnerState | None


async def copy_inner_state(pool: WorkerPool, mailbox: Tensor, kinds: Sequence[str]) -> InnerState:
    """A copy of what the workers have now. They stand still for it: two passes over memory for each kind.

    Args:
        pool: nothing else is asked of it meanwhile.
        mailbox: [numel] fp32, shared with the workers; overwritten.
        kinds: what the inner optimizer keeps.

    Raises:
        WorkerCrashed: the workers are gone.
    """
    tensors: dict[str, Tensor] = {}
    own_steps = await pool.store(_NOTHING) if not kinds else 0
    for kind in kinds:
        own_steps = await pool.store(kind=kind)
        tensors[kind] = await in_thread(mailbox.clone)
    return InnerState(own_steps=own_steps, tensors=tensors)


async def give_inner_state(pool: WorkerPool, mailbox: Tensor, state: InnerState) -> None:
    """Let the workers go on from this state. Arguments and errors as for `copy_inner_state`."""
    for kind, tensor in state.tensors.items():
        await in_thread(mailbox.copy_, tensor)
        await pool.load(kind=kind, own_steps=state.own_steps)
    if not state.tensors:
        await pool.load(_NOTHING, own_steps=state.own_steps)


def is_of_size(state: InnerState, kinds: Sequence[str], numel: int) -> bool:
    """Whether it is of such an inner optimizer and model: [numel] fp32 of each kind."""
    sizes = {kind: (tensor.numel(), tensor.dtype) for kind, tensor in state.tensors.items()}
    return sizes == dict.fromkeys(kinds, (numel, torch.float32))
