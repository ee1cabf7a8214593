# SPDX-License-Identifier: Apache-2.0
"""What a loop's model and optimizer have, by name and by kind, in the places of the run's flat vector (shards.py).

What is trained are the parameters that want a gradient, in the order of `model.named_parameters()`. What wrappers put
in front of a name (DistributedDataParallel, torch.compile) is left out, so that all peers have the same names. Each may
be whole on every process or cut by FSDP2, on any device, in any floating dtype; what is exchanged is fp32.

Must not know messages or other peers.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from isthmus.optim.fragments import FragmentTable
from isthmus.optim.outer import GRAD, PARAM
from isthmus.trainer.workers.shards import ShardMap


class LoopTensors:
    """See the module.

    Args:
        model: whose parameters are trained; sharded before, if at all.
        optimizer: of these parameters, as the loop has it: it may be wrapped (accelerate).
        rank: of this process. The first one writes what all have.

    Raises:
        ValueError: nothing is trained, or a parameter is placed in a way that is not known here.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
        self.optimizer = bare_optimizer(optimizer)
        self._params = trained_parameters(model)
        if not list(self._optimized()):
            raise ValueError("the optimizer trains no parameter of this model; build it after the model, from its own")
        self.shapes = {name: tuple(param.shape) for name, param in self._params.items()}
        self._shards = ShardMap.build(self._params.items(), FragmentTable.from_named_shapes(self.shapes.items()))
        self._is_first = rank == 0
        self._prototype = _prototype_state(self.optimizer)

    @property
    def numel(self) -> int:
        """Elements of the whole flat vector."""
        return self._shards.numel

    @property
    def states(self) -> tuple[str, ...]:
        """What the optimizer keeps in the shape of each parameter, by name."""
        return tuple(sorted(name for name, tensor in self._prototype.items() if tensor.shape == _PROBE_SHAPE))

    def write(self, kind: str, mailbox: Tensor, ranges: Sequence[range]) -> None:
        """Into the mailbox: this process's part; see `ShardMap.write`."""
        whole = self._map(kind)
        own = [shard for shard in whole.shards if self._is_first or isinstance(self._params[shard.name], DTensor)]
        replace(whole, shards=tuple(own)).write(mailbox, ranges)

    def read(self, kind: str, mailbox: Tensor, ranges: Sequence[range], *, keep: float) -> int:
        """From the mailbox; see `ShardMap.read`. What is made at the first step only is made now: as zeros."""
        if kind == GRAD:
            for param in self._params.values():
                if param.grad is None:  # unused on this peer, used on another
                    param.grad = torch.zeros_like(param)
        elif kind != PARAM:
            self._begin_states()
        return self._map(kind).read(mailbox, ranges, keep=keep)

    def set_steps(self, own_steps: int) -> None:
        """The optimizer's states are the outcome of so many steps."""
        self._begin_states()
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(own_steps)

    @torch.no_grad()
    def _begin_states(self) -> None:
        for param, group in self._optimized():
            state: dict[str, Any] = self.optimizer.state[param]
            if state:
                continue
            counts_there = group.get("capturable") or group.get("fused")
            for name, tensor in self._prototype.items():
                if tensor.shape == _PROBE_SHAPE:
                    state[name] = torch.zeros_like(param)
                else:
                    state[name] = torch.zeros_like(tensor, device=param.device if counts_there else None)

    def _optimized(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """What is trained, by the optimizer's groups. What none of them has is exchanged, and has no state."""
        trained = {id(param) for param in self._params.values()}
        for group in self.optimizer.param_groups:
            yield from ((param, group) for param in group["params"] if id(param) in trained)

    def _map(self, kind: str) -> ShardMap:
        if kind == PARAM:
            return self._shards
        kept: Mapping[str, Tensor | None]
        if kind == GRAD:
            kept = {name: param.grad for name, param in self._params.items()}
        else:
            kept = {name: self.optimizer.state.get(param, {}).get(kind) for name, param in self._params.items()}
        return self._shards.of({name: tensor for name, tensor in kept.items() if tensor is not None})


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that want a gradient, by name without the wrappers'.

    Raises:
        ValueError: there are none.
    """
    named = _bare_model(model).named_parameters()
    found = {name.replace("._orig_mod.", "."): param for name, param in named if param.requires_grad}
    if not found:
        raise ValueError("this model has no parameter that wants a gradient")
    return found


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose `step` is called in the end: hooks of a wrapper would never run."""
    inner = getattr(optimizer, "optimizer", None)
    return bare_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def _bare_model(model: nn.Module) -> nn.Module:
    """Without what wrappers put around it, as their names begin with theirs."""
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        return _bare_model(model.module)
    inner = getattr(model, "_orig_mod", None)  # of torch.compile
    return _bare_model(inner) if isinstance(inner, nn.Module) else model


_PROBE_SHAPE = torch.Size((3, 5))


def _prototype_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """What an optimizer of this kind keeps for one parameter after a step, if it can be made like others of torch."""
    param = nn.Parameter(torch.zeros(_PROBE_SHAPE))
    param.grad = torch.zeros_like(param)
    known = inspect.signature(type(optimizer)).parameters
    try:
        like = type(optimizer)([param], **{name: value for name, value in optimizer.defaults.items() if name in known})
        like.step()
    except Exception:  # noqa: BLE001 - of somebody else's; then nothing is known of it
        return {}
    return {name: tensor for name, tensor in like.state[param].items() if isinstance(tensor, Tensor)}
