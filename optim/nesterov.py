# SPDX-License-Identifier: Apache-2.0
"""Nesterov's momentum on an averaged pseudo-gradient, with the same bits on every machine.

    momentum <- mu * momentum + delta
    anchor   <- anchor - lr * (delta + mu * momentum)        (with the new momentum)

Rules:
    * Each product is rounded to fp32 before it is added. A fused multiply-add rounds once where this rounds twice, and
      whether `add_(alpha=...)`, `lerp_`, `addcmul_` or `torch.optim.SGD` fuse depends on the CPU: measured, SGD's
      Nesterov gives other bits under AVX2 than without it. Two peers that differ in one bit never agree again.
      Hence only `mul`, `add` and `sub` here, none with `alpha`.
    * No value depends on the number of threads or on the tile size: every operation is elementwise.
    * It runs tile by tile, so that the formula's passes over memory stay in the cache and nothing of full size is
      allocated.

It holds as long as no process asks for denormals to be flushed (`torch.set_flush_denormal`).
It must not know fragments, rounds or states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.flat import overlap, require_flat

if TYPE_CHECKING:
    from torch import Tensor

TILE_NUMEL: Final = 512 * 1024
"""Elements a tile. Measured on a server CPU: 0.5 to 1 Mi is fastest, an untiled pass takes 1.7 times as long."""


def nesterov_step(
    *,
    anchor: Tensor,
    momentum: Tensor,
    delta: Tensor,
    lr: float,
    mu: float,
    anchor_out: Tensor,
    momentum_out: Tensor,
) -> None:
    """One Nesterov step, out of place unless told otherwise.

    The gain on a first delta is lr * (1 + mu); on a constant one it tends to lr / (1 - mu).

    An output may be the very same tensor as any input (so `momentum_out=delta` saves a buffer, and `anchor_out=anchor`
    steps in place). It may not overlap one in part, and the two outputs must be distinct memory.

    Args:
        anchor: [n] fp32 CPU, the shared parameters.
        momentum: [n] fp32 CPU, zeros before the first step.
        delta: [n] fp32 CPU, the averaged pseudo-gradient (anchor - local: a descent direction).
        lr: outer learning rate.
        mu: outer momentum.
        anchor_out: [n] fp32 CPU, receives the new anchor.
        momentum_out: [n] fp32 CPU, receives the new momentum.

    Raises:
        ValueError: on another shape, dtype, device or an overlap that is not allowed.

    Source: DiLoCo (arXiv:2311.08105), the outer optimizer; the recurrence is that of `torch.optim.SGD(nesterov=True)`.
    """
    _check_memory((anchor, momentum, delta), (anchor_out, momentum_out))
    numel = anchor.numel()
    tile_numel = min(TILE_NUMEL, numel)
    step = torch.empty(tile_numel)
    # Its own place, unless that holds what is read once more after it: a pass over memory less.
    is_direct = not overlap(momentum_out, delta) and not overlap(momentum_out, anchor)
    new_momentum = step if is_direct else torch.empty(tile_numel)
    tensors = (anchor, momentum, delta, anchor_out, momentum_out)
    for start in range(0, numel, TILE_NUMEL):
        stop = min(start + TILE_NUMEL, numel)
        a, m, d, a_out, m_out = (tensor[start:stop] for tensor in tensors)
        u, s = m_out if is_direct else new_momentum[: stop - start], step[: stop - start]
        torch.mul(m, mu, out=u)
        torch.add(u, d, out=u)
        torch.mul(u, mu, out=s)
        torch.add(s, d, out=s)
        torch.mul(s, lr, out=s)
        torch.sub(a, s, out=a_out)
        if not is_direct:
            m_out.copy_(u)


def _check_memory(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor]) -> None:
    numel = inputs[0].numel()
    for tensor in (*inputs, *outputs):
        require_flat(tensor, numel, "each tensor of a Nesterov step")
    if overlap(*outputs):
        raise ValueError("anchor_out and momentum_out share memory")
    for output in outputs:
        for tensor in inputs:
            if overlap(output, tensor) and output.data_ptr() != tensor.data_ptr():
                raise ValueError("an output overlaps an input in part; it may be the same tensor or a separate one")
