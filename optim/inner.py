"""The inner optimizer: what a worker runs between outer steps, on its own shards and its own device.

Its state is private: it is never averaged, and its bits matter to nobody else. So torch's own optimizers, fused
arithmetic and all, are right here and wrong in the outer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, assert_never

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Parameter

InnerType: TypeAlias = Literal["adamw", "sgd"]


def build_inner_optimizer(
    named_params: Iterable[tuple[str, Parameter]],
    *,
    type: InnerType = "adamw",
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """Build the inner optimizer; only tensors of two or more dimensions decay.

    Biases, gains and other vectors set a scale that has no reason to be small, so they are left alone. Frozen
    parameters are left out. Names are kept in the optimizer's state, which lets a checkpoint be read by name.

    Args:
        named_params: `model.named_parameters()`; DTensors of FSDP2 are welcome.
        type: "adamw", or "sgd" (plain: no momentum), under which H = 1 is data parallelism and which DeMo wants.
        lr: peak learning rate; `set_lr` moves it.
        betas: AdamW's decay rates. 0.99 for the second: arXiv:2503.09799.
        eps: AdamW's.
        weight_decay: decoupled for AdamW, added to the gradient for SGD.

    Raises:
        ValueError: if no parameter is trainable, or a setting is out of its range.
    """
    trainable = [(name, param) for name, param in named_params if param.requires_grad]
    if not trainable:
        raise ValueError("no parameter is trainable")
    if not lr >= 0.0 or not weight_decay >= 0.0:
        raise ValueError(f"lr and weight_decay must not be negative, got {lr} and {weight_decay}")
    split = (
        {"params": [(n, p) for n, p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in trainable if p.ndim < 2], "weight_decay": 0.0},
    )
    groups = [group for group in split if group["params"]]
    match type:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=lr)
        case _:
            assert_never(type)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all groups this learning rate, before a step: peak rate times `schedule(inner_step)`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
