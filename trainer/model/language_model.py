# SPDX-License-Identifier: Apache-2.0
"""What a worker trains, whatever its architecture: a `LanguageModel`; and what describes one: a `ModelDescription`.

A description is settings only, and equal on all peers but for the place of a folder. Everything that asks for shapes,
sizes or first values asks the description; only a worker builds the model. Rules: `named_shapes` lists what is trained,
in the order in which it is cut into fragments and sent, so it depends on the description alone. Must not know an
architecture, data, optimizers or process groups.

Shape suffixes: B batch, L sequence length, V vocab_size.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

NamedShapes = list[tuple[str, tuple[int, ...]]]
"""(name, shape) of each parameter that is trained, in canonical order; a tied weight appears once."""


class LanguageModel(nn.Module):
    """Scores of the next token, or how wrong they are.

    Built on the meta device by its description. Then, in this order: shard each of `blocks` and the model itself,
    `to_empty`, `init_buffers`, `load_frozen`. What is trained has no values until somebody loads them.
    """

    blocks: nn.ModuleList
    """The unit of sharding, of activation checkpointing and of compilation."""

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor | None = None) -> Tensor:
        """Scores of the next token at every position; with targets the mean loss instead.

        Args:
            tokens_BL: int64 tokens in [0, vocab_size), at most `max_seq_len` long.
            targets_BL: int64, the tokens that come next.

        Returns:
            logits_BLV in the dtype of the computation; or the loss in nats per token, a scalar in fp32.

        Raises:
            ValueError: the sequence is longer than `max_seq_len`.
        """
        raise NotImplementedError

    def init_buffers(self, device: torch.device) -> None:
        """Give everything that is no parameter its value, on `device`: `to_empty` has left garbage in it."""
        raise NotImplementedError

    def load_frozen(self, fill: Callable[[Tensor, Tensor], None]) -> None:
        """Give what is not trained its values.

        Args:
            fill: puts a whole tensor (the second) into a parameter or buffer of the model, of which this worker may
                have a shard (the first).
        """

    def trained_parameters(self) -> list[tuple[str, Parameter]]:
        """What is trained, by its canonical name and in canonical order."""
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]


class ModelDescription(Protocol):
    """The settings of one model."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens that it knows."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, in tokens."""

    def build(self) -> LanguageModel:
        """The model on the meta device: shapes without memory."""

    def named_shapes(self) -> NamedShapes:
        """What is trained; allocates no weights."""

    def initial_parameters(self, seed: int) -> Tensor:
        """The founder's first values of what is trained: one flat fp32 CPU tensor, in canonical order without gaps."""

    def num_flops_per_token(self, seq_len: int) -> int:
        """Floating point operations of one forward and backward, per token of a sequence of this length."""
