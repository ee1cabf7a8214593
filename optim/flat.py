# SPDX-License-Identifier: Apache-2.0
"""Small rules about flat tensors that every outer optimizer needs.

It must not know rounds, states or methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def blend(value: Tensor, target: Tensor, keep: float) -> None:
    """value <- keep * value + (1 - keep) * target, in place, on any device.

    Local values are private, so this needs no rounding discipline. `target` may be on the CPU or in another dtype.
    """
    if keep == 0.0:
        value.copy_(target)
    elif keep < 1.0:
        value.mul_(keep).add_(target.to(value), alpha=1.0 - keep)


def require_flat(tensor: Tensor, numel: int, what: str) -> None:
    """Demand a flat, contiguous fp32 CPU tensor of `numel` elements. One on the meta device stands for any.

    Raises:
        ValueError: says what `what` is instead.
    """
    flat = tensor.ndim == 1 and tensor.is_contiguous() and tensor.numel() == numel
    if not flat or tensor.dtype != torch.float32 or tensor.device.type not in ("cpu", "meta"):
        raise ValueError(
            f"{what} must be a contiguous fp32 CPU tensor of shape ({numel},), got {tensor.dtype} "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share any byte of memory."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return a_start < b_start + b.nbytes and b_start < a_start + a.nbytes
