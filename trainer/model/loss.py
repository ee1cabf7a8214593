# SPDX-License-Identifier: Apache-2.0
"""The loss of a language model, in slices: scores of the whole vocabulary are never there for all positions at once.

Scores (logits) are B · L · V numbers, with a large vocabulary many times the rest of the model's activations. Here they
are computed for some positions at a time, in fp32, turned into their part of the loss and of the gradients at once, and
forgotten: the backward pass only scales what is there (as in Liger, arXiv:2410.10989, §3.2). The products are the same
as without slices, and so is the loss but for the order of sums.

Must not know a model's layers, nor who calls it. Shape suffixes are those of layers.py; S positions of one slice,
T = B · L.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_SLICE_NUMEL = 1 << 22
"""Scores that are there at once: 16 MiB in fp32."""
_MIN_SLICE = 256
"""Positions of a slice, at least: products of fewer rows leave a GPU idle."""


def slice_size(vocab_size: int) -> int:
    """Positions whose scores are there at once."""
    return max(_MIN_SLICE, _SLICE_NUMEL // vocab_size)


def token_loss(hidden_BLD: Tensor, head_VD: Tensor, targets_BL: Tensor) -> Tensor:
    """Mean cross-entropy of softmax(hidden · headᵀ) in nats per token, a scalar in fp32.

    Scores are computed in the dtype of `hidden` and everything after them in fp32. Gradients go to `hidden` and `head`
    in their own dtypes; that of the head is summed up in fp32.

    Args:
        hidden_BLD: what the last norm gives, floating.
        head_VD: the output layer's weight, in the dtype of `hidden`. Sharded models call this inside their forward,
            where it is whole.
        targets_BL: int64 in [0, V).
    """
    # Inside the function gradients are off in any case, and what needs them does not say whether they are wanted.
    is_trained = torch.is_grad_enabled()
    loss: Tensor = _SlicedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_BLD.flatten(0, -2), head_VD, targets_BL.flatten(), is_trained
    )
    return loss


class _Context(Protocol):
    """What torch keeps between the passes."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor | None, ...]
    head_dtype: torch.dtype

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _SlicedLoss(torch.autograd.Function):
    """hidden_TD, head_VD, targets_T -> the loss. Gradients are made in the forward pass, where scores are at hand."""

    @staticmethod
    def forward(ctx: _Context, hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, is_trained: bool) -> Tensor:
        wants_hidden, wants_head = (is_trained and needed for needed in ctx.needs_input_grad[:2])
        count = hidden_TD.shape[0]
        size = slice_size(head_VD.shape[0])
        loss = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32) if wants_head else None
        for start in range(0, count, size):
            rows = slice(start, start + size)
            scores_SV = (hidden_TD[rows] @ head_VD.T).float()
            if not (wants_hidden or wants_head):
                loss += F.cross_entropy(scores_SV, targets_T[rows], reduction="sum")
                continue
            log_p_SV = torch.log_softmax(scores_SV, dim=-1)
            del scores_SV
            loss += F.nll_loss(log_p_SV, targets_T[rows], reduction="sum")
            # d loss / d scores = (softmax - one-hot) / T
            grad_SV = log_p_SV.exp_()
            grad_SV.scatter_add_(1, targets_T[rows, None], grad_SV.new_full((grad_SV.shape[0], 1), -1.0))
            grad_SV = grad_SV.div_(count).to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                grad_hidden_TD[rows] = grad_SV @ head_VD
            if grad_head_VD is not None:
                _add_product(grad_head_VD, grad_SV, hidden_TD[rows])
        ctx.save_for_backward(grad_hidden_TD, grad_head_VD)
        ctx.head_dtype = head_VD.dtype
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden_TD, grad_head_VD = ctx.saved_tensors
        return (
            None if grad_hidden_TD is None else (grad_hidden_TD * grad).to(grad_hidden_TD.dtype),
            None if grad_head_VD is None else (grad_head_VD * grad).to(ctx.head_dtype),
            None,
            None,
        )


def _add_product(total_VD: Tensor, grad_SV: Tensor, hidden_SD: Tensor) -> None:
    """total += gradᵀ · hidden, in fp32."""
    if hidden_SD.dtype == torch.float32:
        total_VD.addmm_(grad_SV.T, hidden_SD)
    else:
        total_VD += grad_SV.T @ hidden_SD
