# SPDX-License-Identifier: Apache-2.0
"""A training loop without us: the same decoder, plain cross-entropy, fused AdamW, clipping, nothing else.

What a worker's speed is measured against.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.optim.inner import build_inner_optimizer
from isthmus.trainer.model.decoder import Decoder, ModelConfig

_GRAD_CLIP = 1.0


class BareTraining:
    """Nobody looks whether its numbers are finite, and nothing waits for the device.

    Args:
        config: shape of the decoder.
        device: where it is trained.
        precision: "fp32", or "bf16": autocast over fp32 parameters.
        lr: of AdamW.
        seed: of the first values.
    """

    def __init__(
        self, config: ModelConfig, *, device: torch.device, precision: str = "fp32", lr: float = 1e-4, seed: int = 0
    ) -> None:
        self._device = device
        self._is_bf16 = precision == "bf16"
        self._model = Decoder(config)
        torch.nn.utils.vector_to_parameters(config.initial_parameters(seed), self._model.parameters())
        self._model.to(device)
        self._optimizer = build_inner_optimizer(self._model, lr=lr)

    def step(self, inputs_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """One step on int64 tokens; returns the loss, on the device."""
        inputs_BL, targets_BL = (tokens.to(self._device, non_blocking=True) for tokens in (inputs_BL, targets_BL))
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_bf16):
            logits_BLV = self._model(inputs_BL)
            loss = F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _GRAD_CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def batch_of(tokens: npt.NDArray[np.uint8], indices: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) int64 [B, L]: the samples that lie there, one after the other in the text."""
    rows = [tokens[index * seq_len : (index + 1) * seq_len + 1] for index in indices]
    batch = torch.from_numpy(np.stack(rows).astype(np.int64))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
