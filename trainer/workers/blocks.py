# SPDX-License-Identifier: Apache-2.0
"""How a model's blocks are computed: what of their activations is kept for the backward pass, and whether compiled.

Rules: a block keeps its class, its parameters and their names; only its `forward` is another. So hooks, those of FSDP2
among them, run outside of what is recomputed or compiled. Must not know the architecture.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from isthmus.trainer.config.job import ActivationCheckpointing

_OPS = torch.ops.aten
_KEPT = frozenset(
    {
        _OPS.mm.default,
        _OPS.addmm.default,
        _OPS.bmm.default,
        _OPS._scaled_dot_product_flash_attention.default,
        _OPS._scaled_dot_product_efficient_attention.default,
        _OPS._scaled_dot_product_cudnn_attention.default,
        _OPS._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What `selective` does not compute twice: it takes nearly all of the time."""

_Forward = Callable[..., Tensor]


def prepare_blocks(blocks: nn.ModuleList, *, keep: ActivationCheckpointing, is_compiled: bool) -> None:
    """Let all blocks of a model be computed so, before it is sharded.

    Args:
        blocks: alike, or torch compiles each kind of them.
        keep: "none": all activations are kept; "full": a block's input alone; "selective": the outcomes of matrix
            products and of attention.
        is_compiled: whether torch.compile makes kernels for them, at the first step.
    """
    if is_compiled:
        from torch._inductor import config  # seconds to load, and few compile

        config.compile_threads = 1  # blocks are alike: there is too little to compile for a pool of processes
    for block in blocks:
        forward: _Forward = block.forward
        if keep != "none":
            forward = _checkpointed(forward, is_selective=keep == "selective")
        if is_compiled:
            forward = torch.compile(forward)
        block.forward = forward


def _checkpointed(forward: _Forward, *, is_selective: bool) -> _Forward:
    if not is_selective:
        return partial(checkpoint, forward, use_reentrant=False)
    return partial(
        checkpoint,
        forward,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, _policy),
    )


def _policy(_context: object, op: object, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:  # noqa: ANN401 - any op's
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
