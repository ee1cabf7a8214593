# SPDX-License-Identifier: Apache-2.0
"""The tensors of one model and its inner optimizer, seen as fragments: flat, fp32, on the CPU.

Parameters may live on any device and in any floating dtype; what is exchanged is fp32. Frozen parameters take no part.
The table follows the order of `model.named_parameters()`, which is therefore the same on all peers.

It must not know rounds, states or the network.
"""

import hashlib

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isthmus.optim.flat import blend
from isthmus.optim.fragments import Fragment, FragmentTable
from isthmus.optim.outer import GRAD, PARAM


class LocalValues:
    """See the module.

    Args:
        model: whole, on this peer: not sharded over several processes.
        optimizer: trains its parameters; kinds of fragments other than "param" and "grad" are names of its states.

    Raises:
        ValueError: nothing is trainable, a parameter is sharded, or the optimizer trains none of them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._optimizer = optimizer
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not any(id(param) in trained for param in self._params.values()):
            raise ValueError("the optimizer trains no parameter of this model; build it after the model, from its own")
        for name, param in self._params.items():
            if hasattr(param, "placements"):
                raise ValueError(f"{name!r} is sharded; the drop-in loop is for whole models, one process a peer")
        self.table = FragmentTable.from_named_shapes((name, tuple(p.shape)) for name, p in self._params.items())

    @torch.no_grad()
    def gather(self, fragment: Fragment) -> Tensor:
        """[fragment.numel] fp32, new memory. What does not exist is zero: gradients and states before the first step.

        Raises:
            ValueError: the optimizer has stepped and has no state of this name.
        """
        flat = torch.zeros(fragment.numel)
        is_found = False
        for name, part in fragment.views(flat).items():
            tensor = self._tensor(fragment.kind, name)
            if tensor is not None:
                part.copy_(tensor)
                is_found = True
        if not is_found and fragment.kind not in (PARAM, GRAD) and self._optimizer.state:
            held = sorted({name for state in self._optimizer.state.values() for name in state})
            kept = f"; it keeps {', '.join(held)}" if held else ""
            raise ValueError(f"{type(self._optimizer).__name__} keeps no {fragment.kind!r}{kept}")
        return flat

    @torch.no_grad()
    def move(self, fragment: Fragment, target: Tensor, keep: float) -> None:
        """value <- keep * value + (1 - keep) * target, where the values live. `target` [fragment.numel] is read."""
        for name, part in fragment.views(target).items():
            tensor = self._tensor(fragment.kind, name)
            if tensor is None and fragment.kind == GRAD:  # unused on this peer, used on another
                tensor = self._params[name].grad = torch.zeros_like(self._params[name])
            if tensor is not None:
                blend(tensor, part, keep)

    def digest(self) -> str:
        """BLAKE2b of the bits of all trainable parameters."""
        digest = hashlib.blake2b(digest_size=32)
        for param in self._params.values():
            digest.update(bytes_of(param.detach()).numpy().data)
        return digest.hexdigest()

    def everything(self) -> list[Tensor]:
        """The parameters, and whatever tensors the optimizer keeps for them; live."""
        tensors = [param.detach() for param in self._params.values()]
        for param in self._params.values():
            state = self._optimizer.state.get(param, {})
            tensors.extend(tensor for _, tensor in sorted(state.items()) if isinstance(tensor, Tensor))
        return tensors

    def _tensor(self, kind: str, name: str) -> Tensor | None:
        param = self._params[name]
        if kind == PARAM:
            return param.detach()
        if kind == GRAD:
            return param.grad
        state: dict[str, Tensor] = self._optimizer.state.get(param, {})
        return state.get(kind)


def bytes_of(tensor: Tensor) -> Tensor:
    """[nbytes] uint8 on the CPU; shares memory if it can."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def take_bytes(tensors: list[Tensor], packed: Tensor) -> None:
    """Overwrite the tensors, one after another, with what `bytes_of` gave of such tensors."""
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        tensor.copy_(packed[start:stop].clone().view(tensor.dtype).view(tensor.shape))
        start = stop
