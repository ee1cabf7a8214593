# SPDX-License-Identifier: Apache-2.0
"""Small rules about flat tensors that every outer optimizer needs.

It must not know rounds, states or methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def blend(value: Tensor, target: Tensor, keep: float) -> int:
    """value <- keep * value + (1 - keep) * target, in place, on any device; each product is rounded before the sum.

    What is not finite mends by no blend: where such a value would be kept in part, the target's is taken whole.

    Args:
        value: of any shape and floating dtype.
        target: of the same shape, perhaps on the CPU or in another dtype.
        keep: in [0, 1]; 0 takes the target's bits, 1 leaves everything as it is.

    Returns:
        How many elements were not finite and are the target's now; 0 where `keep` is 0 or 1.
    """
    if keep == 0.0:
        value.copy_(target)
    if keep in (0.0, 1.0):
        return 0
    theirs = target.to(value)
    is_broken = value.isfinite().logical_not_()
    value.mul_(keep).add_(theirs * (1.0 - keep))
    num_broken = int(is_broken.sum())
    if num_broken:
        torch.where(is_broken, theirs, value, out=value)
    return num_broken


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
