# SPDX-License-Identifier: Apache-2.0
"""What one worker exposes of its training, by kind: parameters, gradients, and what the inner optimizer keeps.

All of them have the shapes of the parameters, so that they share places in the flat vector (shards.py). Rule:
a parameter without a tensor of a kind counts as zero when it is written, and is left alone when others' values come.
Must not know steps, messages or other workers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from isthmus.optim.fragments import FragmentTable
from isthmus.optim.inner import begin_states
from isthmus.optim.outer import GRAD, PARAM
from isthmus.trainer.model.language_model import LanguageModel
from isthmus.trainer.workers.shards import ShardMap


class WorkerTensors:
    """See the module.

    Args:
        model: sharded, with memory.
        optimizer: `optim.inner.build_inner_optimizer` of it.
        table: the canonical layout of what is trained.

    Raises:
        ValueError: see `ShardMap.build`.
    """

    def __init__(self, model: LanguageModel, optimizer: Optimizer, table: FragmentTable) -> None:
        # Kept by hand: between a forward and a backward FSDP2 shows unsharded parameters under the same names.
        self._params = dict(model.trained_parameters())
        self._optimizer = optimizer
        self._shards = ShardMap.build(self._params.items(), table)

    @property
    def numel(self) -> int:
        """Elements of the whole flat vector."""
        return self._shards.numel

    def write(self, kind: str, mailbox: Tensor, ranges: Sequence[range]) -> None:
        """Into the mailbox; see `ShardMap.write`."""
        self._map(kind).write(mailbox, ranges)

    def read(self, kind: str, mailbox: Tensor, ranges: Sequence[range], *, keep: float) -> int:
        """From the mailbox; see `ShardMap.read`. What is made at the first step only is made now: as zeros."""
        if kind == GRAD:
            for param in self._params.values():
                if param.grad is None:  # unused on this peer, used on another
                    param.grad = torch.zeros_like(param)
        elif kind != PARAM:
            begin_states(self._optimizer)
        return self._map(kind).read(mailbox, ranges, keep=keep)

    def set_steps(self, own_steps: int) -> None:
        """The optimizer's states are the outcome of so many steps."""
        begin_states(self._optimizer)
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(own_steps)

    def _map(self, kind: str) -> ShardMap:
        if kind == PARAM:
            return self._shards
        kept: dict[str, Tensor | None]
        if kind == GRAD:
            kept = {name: param.grad for name, param in self._params.items()}
        else:
            states = self._optimizer.state
            kept = {name: states.get(param, {}).get(kind) for name, param in self._params.items()}
        return self._shards.of({name: tensor for name, tensor in kept.items() if tensor is not None})
