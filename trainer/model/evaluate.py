# SPDX-License-Identifier: Apache-2.0
"""How good the model is on held-out text: one number.

Knows a model only as something that tells the loss of tokens and targets, so one sharded by `fully_shard` is evaluated
by the same lines. Must not know where the batches come from or who is told the result.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, device: torch.device | None = None
) -> float:
    """Mean loss in nats per token over all tokens of `batches`; the model's training mode is restored.

    On a sharded model every local rank must bring the same number of batches, because each forward is a collective
    of the site; the result is the mean over this rank's own batches.

    Args:
        model: maps tokens_BL and targets_BL (int64) to the mean loss.
        batches: (inputs_BL, targets_BL) on any device; batches may differ in size, tokens weigh the same.
        device: where the forward runs; by default where the parameters are.

    Raises:
        ValueError: there is no batch.
    """
    target_device = device if device is not None else next(model.parameters()).device
    was_training = model.training
    # Summed on the device: reading every batch's loss would make the host wait for each forward.
    loss_sum = torch.zeros((), dtype=torch.float64, device=target_device)
    num_tokens = 0
    model.eval()
    try:
        with torch.no_grad():
            for inputs_BL, targets_BL in batches:
                loss = model(inputs_BL.to(target_device), targets_BL.to(target_device))
                loss_sum += loss.double() * targets_BL.numel()
                num_tokens += targets_BL.numel()
    finally:
        model.train(was_training)
    if num_tokens == 0:
        raise ValueError("evaluate needs at least one batch")
    return float(loss_sum.item() / num_tokens)
