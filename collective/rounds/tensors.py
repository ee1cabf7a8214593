# SPDX-License-Identifier: Apache-2.0
"""What a caller may hand in, seen as a flat tensor on the CPU.

Torch tensors and numpy arrays are seen without a copy. A CUDA tensor passes through pinned memory: one copy down,
one copy up. Anything else is an error that names the cure.

Rules: the caller's memory is only borrowed. Nothing here knows rounds or sockets.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.collective.rounds.buffers import DTYPES
from isthmus.collective.transport.wire import MAX_WEIGHT

Array = Tensor | np.ndarray[Any, Any]
"""What operations take: contiguous, of one of the dtypes of `buffers.DTYPES`, on the CPU or on CUDA."""


def flat(name: str, value: Array) -> Tensor:
    """`value` as a flat tensor that shares its memory.

    Raises:
        ValueError: not contiguous, or of a dtype or device that cannot travel; says what to do.
    """
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            raise ValueError(f"{name} is a read-only array; pass {name}.copy()")
        if not value.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous; pass np.ascontiguousarray({name})")
        try:
            value = torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name}: arrays of {value.dtype} cannot travel; convert it to one of {names()}"
            ) from error
    if value.dtype not in DTYPES:
        raise ValueError(f"{name} is {str(value.dtype).removeprefix('torch.')}; convert it to one of {names()}")
    if value.layout is not torch.strided or not value.is_contiguous():
        raise ValueError(f"{name} is not contiguous; pass {name}.contiguous()")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {value.device.type}; pass {name}.cpu()")
    if not value.numel():
        return value.new_empty(0)  # there may be no stride either, which would make it a special case everywhere
    if value.requires_grad:
        value = value.detach()
    return value if value.dim() == 1 else value.view(-1)


def names() -> str:
    """The dtypes that can travel."""
    return ", ".join(DTYPES.values())


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two flat tensors share memory."""
    start, other = first.data_ptr(), second.data_ptr()
    nbytes, other_nbytes = first.nbytes, second.nbytes
    return nbytes > 0 and other_nbytes > 0 and start < other + other_nbytes and other < start + nbytes


def check_out(source: Tensor, out: Tensor, numel: int) -> None:
    """Raise ValueError unless results of `numel` elements can go to `out`."""
    if out.dtype != source.dtype or out.device != source.device:
        raise ValueError(
            f"out is {out.dtype} on {out.device}, the tensor {source.dtype} on {source.device}; make it alike"
        )
    if out.numel() != numel:
        raise ValueError(f"out has {out.numel()} elements; it needs {numel}")


def check_weight(weight: float, dtype: torch.dtype, op: str) -> None:
    """Raise ValueError unless parts of this dtype can have this weight."""
    if not 0.0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight must be a number from 0 to 2**64, not {weight}")
    if weight != 1.0 and (op not in ("mean", "sum") or not dtype.is_floating_point):
        raise ValueError(f"a weight has no meaning for the {op} of {DTYPES[dtype]}; leave it at 1")


def on_host(tensor: Tensor) -> Tensor:
    """`tensor` itself, or for CUDA a pinned copy of it."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)
