# SPDX-License-Identifier: Apache-2.0
"""A fleet: M workers' small decoders, trained by one forward and one backward pass over a leading dimension of workers.

The architecture is the trainer's (trainer/model/decoder.py), in its canonical order of parameters. A row of the
fleet is that model's flat vector. Products become batched products; queries, keys and values, which lie end to end,
are one product, and so are both inputs of SwiGLU. The inner optimizers are those of optim.inner, on whole rows; their
states are kinds of fragments like the parameters, for methods that exchange them.

Each worker clips its own gradient (after a round of gradients has replaced it, where there is one). The learning rate
follows the global inner step; a worker that joins late warms up by its own.

Shape suffixes::

    R rows (workers)   B batch   L length   T = B L tokens   D dim   F hidden   N heads   H head_dim   V vocabulary
    X flat parameters
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, assert_never

import torch
import torch.nn.functional as F

from isthmus.optim.fragments import FragmentTable
from isthmus.optim.outer import GRAD, PARAM
from isthmus.optim.schedule import cosine
from isthmus.trainer.model.layers import RotaryTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from isthmus.trainer.model.decoder import ModelConfig

    Batches: TypeAlias = Callable[[Sequence[str], int], Tensor]
    """(workers, global inner step from 1) -> tokens [R, B, L + 1] int64."""

InnerType: TypeAlias = Literal["adamw", "adopt", "sgd"]

EXP_AVG: Final = "exp_avg"
EXP_AVG_SQ: Final = "exp_avg_sq"
_EPS: Final = {"adamw": 1e-8, "adopt": 1e-6}
"""Defaults of optim.inner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerSettings:
    """The inner optimizer of all workers."""

    total_steps: int
    type: InnerType = "adamw"
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.99)
    omega: float = 1.0
    """ADOPT only: weight of the first moment in the step; the rest is the fresh gradient's."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate."""
    clip: float | None = 1.0
    """Largest L2 norm of a worker's gradient; None: as it is."""
    warmup_steps: int = 0
    min_ratio: float = 0.1


# --------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    attention_norm_RD: Tensor
    query_key_value_R3DD: Tensor
    output_RDD: Tensor
    feed_forward_norm_RD: Tensor
    gate_up_R2FD: Tensor
    down_RDF: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """All rows' parameters, as views of their flat vectors. Build it with `Architecture.weights`."""

    embedding_RVD: Tensor
    blocks: tuple[_Block, ...]
    norm_RD: Tensor

    def tensors(self) -> list[Tensor]:
        """Every one of them once."""
        return [
            self.embedding_RVD,
            self.norm_RD,
            *(getattr(block, name) for block in self.blocks for name in _Block.__slots__),
        ]


class Architecture:
    """The forward pass of many decoders of one shape.

    Args:
        config: with as many key-value heads as heads, and tied embeddings.

    Raises:
        ValueError: for another config.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.num_kv_heads != config.num_heads or not config.tie_embeddings:
            raise ValueError("a fleet has one key and value a head, and tied embeddings")
        self.config = config
        self.table = FragmentTable.from_named_shapes(config.named_shapes())
        self._rotary = RotaryTable(head_dim=config.head_dim, max_seq_len=config.max_seq_len, theta=config.rope_theta)
        self._places = {spec.name: slice(spec.offset, spec.stop) for spec in self.table.specs}

    def weights(self, flat_RX: Tensor) -> Weights:
        """Views of flat vectors."""
        dim, hidden = self.config.dim, self.config.hidden_dim

        def view(first: str, last: str, *shape: int) -> Tensor:
            span = slice(self._places[first].start, self._places[last].stop)
            return flat_RX[:, span].view(len(flat_RX), *shape)

        blocks = []
        for index in range(self.config.num_layers):
            name = f"blocks.{index}."
            attention, feed_forward = f"{name}attention.", f"{name}feed_forward."
            blocks.append(
                _Block(
                    attention_norm_RD=view(f"{name}attention_norm.weight", f"{name}attention_norm.weight", dim),
                    query_key_value_R3DD=view(f"{attention}query.weight", f"{attention}value.weight", 3 * dim, dim),
                    output_RDD=view(f"{attention}output.weight", f"{attention}output.weight", dim, dim),
                    feed_forward_norm_RD=view(
                        f"{name}feed_forward_norm.weight", f"{name}feed_forward_norm.weight", dim
                    ),
                    gate_up_R2FD=view(f"{feed_forward}gate.weight", f"{feed_forward}up.weight", 2 * hidden, dim),
                    down_RDF=view(f"{feed_forward}down.weight", f"{feed_forward}down.weight", dim, hidden),
                )
            )
        return Weights(
            embedding_RVD=view("embedding.weight", "embedding.weight", self.config.vocab_size, dim),
            blocks=tuple(blocks),
            norm_RD=view("norm.weight", "norm.weight", dim),
        )

    def losses(self, weights: Weights, tokens_RBL1: Tensor) -> Tensor:
        """Mean cross-entropy of each row's next tokens, nats, [R].

        Args:
            weights: of R rows.
            tokens_RBL1: int64, L + 1 tokens a sample.
        """
        rows, batch, _ = tokens_RBL1.shape
        inputs_RBL, targets_RBL = tokens_RBL1[..., :-1], tokens_RBL1[..., 1:]
        first_R11 = (torch.arange(rows) * self.config.vocab_size).view(rows, 1, 1)
        # One table of all rows' tables; an embedding's backward pass is fast, a batched gather's is not.
        table = weights.embedding_RVD.reshape(-1, self.config.dim)
        x_RTD = F.embedding(inputs_RBL + first_R11, table).view(rows, -1, self.config.dim)
        for block in weights.blocks:
            x_RTD = x_RTD + self._attention(block, self._norm(x_RTD, block.attention_norm_RD), batch)
            x_RTD = x_RTD + self._feed_forward(block, self._norm(x_RTD, block.feed_forward_norm_RD))
        logits_RTV = _linear(self._norm(x_RTD, weights.norm_RD), weights.embedding_RVD)
        losses = F.cross_entropy(logits_RTV.flatten(0, 1), targets_RBL.flatten(), reduction="none")
        return losses.view(rows, -1).mean(1)

    def _norm(self, x_RTD: Tensor, gain_RD: Tensor) -> Tensor:
        scale_RT1 = torch.rsqrt(x_RTD.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return x_RTD * scale_RT1 * gain_RD.unsqueeze(1)

    def _attention(self, block: _Block, x_RTD: Tensor, batch: int) -> Tensor:
        rows, _, dim = x_RTD.shape
        heads, head_dim = self.config.num_heads, self.config.head_dim
        projected = _linear(x_RTD, block.query_key_value_R3DD).view(rows * batch, -1, 3, heads, head_dim)
        cos_LP, sin_LP = self._rotary.on(x_RTD.device)
        rotated = _rotate(projected[:, :, :2], cos_LP.to(x_RTD.dtype), sin_LP.to(x_RTD.dtype))
        query, key, value = (part.transpose(1, 2) for part in (*rotated.unbind(2), projected[:, :, 2]))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return _linear(mixed.transpose(1, 2).reshape(rows, -1, dim), block.output_RDD)

    def _feed_forward(self, block: _Block, x_RTD: Tensor) -> Tensor:
        gate_RTF, up_RTF = _linear(x_RTD, block.gate_up_R2FD).chunk(2, dim=-1)
        return _linear(F.silu(gate_RTF) * up_RTF, block.down_RDF)


def _linear(x_RTI: Tensor, weight_ROI: Tensor) -> Tensor:
    return torch.bmm(x_RTI, weight_ROI.transpose(1, 2))


def _rotate(x: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
    """Rotary positions, as trainer.model.layers.rotate: [.., L, 2, N, H]."""
    length = x.shape[1]
    cos, sin = cos_LP[:length, None, None], sin_LP[:length, None, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# --------------------------------------------------------------------------------------------------------- the fleet


class Fleet:
    """A Workload (optim/workload.py): rows of workers, of which only those asked for are computed.

    Args:
        architecture: of every worker.
        rows: how many workers there may be at once.
        inner: their optimizer.
        batches: their data.
    """

    def __init__(self, architecture: Architecture, *, rows: int, inner: InnerSettings, batches: Batches) -> None:
        self._architecture, self._inner, self._batches = architecture, inner, batches
        self._schedule = cosine(
            total_steps=inner.total_steps, warmup_steps=inner.warmup_steps, min_ratio=inner.min_ratio
        )
        kinds = (PARAM, GRAD) if inner.type == "sgd" else (PARAM, GRAD, EXP_AVG, EXP_AVG_SQ)
        self.tensors = {kind: torch.zeros(rows, architecture.table.numel) for kind in kinds}
        self._workers: dict[int, str] = {}
        self._global_step = 0
        self.num_tokens = 0
        """Read by all workers so far."""
        self._decays = torch.zeros(architecture.table.numel)
        """Weight decay of each parameter: only tensors of two dimensions decay."""
        for spec in architecture.table.specs:
            if len(spec.shape) >= 2:
                self._decays[spec.offset : spec.stop] = inner.weight_decay

    def begin(self, row: int, worker: str) -> None:
        """See Workload."""
        self._workers[row] = worker
        for kind, tensor in self.tensors.items():
            if kind != PARAM:
                tensor[row] = 0.0

    def backward(self, rows: Sequence[int], inner_steps: Sequence[int]) -> None:
        """See Workload."""
        del inner_steps  # the data follow the global step: who comes back does not see the same again
        self._global_step += 1
        if not rows:
            return
        tokens = self._batches([self._workers[row] for row in rows], self._global_step)
        self.num_tokens += tokens[..., 1:].numel()
        first, last = min(rows), max(rows)
        grads = self.tensors[GRAD]
        if list(rows) == list(range(first, last + 1)):
            span = slice(first, last + 1)
            self._differentiate(self.tensors[PARAM][span], tokens, out_RX=grads[span])
        else:
            index = torch.tensor(list(rows))
            compact_RX = torch.empty(len(rows), grads.shape[1])
            grads[index] = self._differentiate(self.tensors[PARAM][index], tokens, out_RX=compact_RX)

    def _differentiate(self, params_RX: Tensor, tokens_RBL1: Tensor, *, out_RX: Tensor) -> Tensor:
        weights = self._architecture.weights(params_RX)
        leaves = [leaf.requires_grad_() for leaf in weights.tensors()]
        # Rows do not know of each other, so the gradient of the sum holds each row's own.
        grads = torch.autograd.grad(self._architecture.losses(weights, tokens_RBL1).sum(), leaves)
        for place, grad in zip(self._architecture.weights(out_RX).tensors(), grads, strict=True):
            place.copy_(grad)
        return out_RX

    @torch.no_grad()
    def update(self, rows: Sequence[int], inner_steps: Sequence[int]) -> None:
        """See Workload."""
        for row, inner_step in zip(rows, inner_steps, strict=True):
            self._update(row, inner_step)

    def _update(self, row: int, inner_step: int) -> None:
        inner = self._inner
        param, grad = self.tensors[PARAM][row], self.tensors[GRAD][row]
        if inner.clip is not None:
            # As torch.nn.utils.clip_grad_norm_.
            grad.mul_((inner.clip / (grad.norm() + 1e-6)).clamp(max=1.0))
        warm_up = inner_step / (inner.warmup_steps + 1)
        lr = inner.lr * min(self._schedule(self._global_step - 1), warm_up)
        if inner.type == "sgd":
            param.addcmul_(param, self._decays, value=-lr)
            param.add_(grad, alpha=-lr)
            return
        beta1, beta2 = inner.betas
        exp_avg, exp_avg_sq = self.tensors[EXP_AVG][row], self.tensors[EXP_AVG_SQ][row]
        match inner.type:
            case "adamw":
                param.addcmul_(param, self._decays, value=-lr)
                exp_avg.lerp_(grad, 1.0 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                bias1, bias2 = 1.0 - beta1**inner_step, 1.0 - beta2**inner_step
                denominator = exp_avg_sq.sqrt().div_(bias2**0.5).add_(_EPS[inner.type])
                param.addcdiv_(exp_avg, denominator, value=-lr / bias1)
            case "adopt":
                if inner_step > 1:  # the first step only measures
                    bound = (inner_step - 1) ** 0.25
                    fresh = (grad / exp_avg_sq.sqrt().clamp_(min=_EPS[inner.type])).clamp_(-bound, bound)
                    exp_avg.lerp_(fresh, 1.0 - beta1)
                    param.addcmul_(param, self._decays, value=-lr)
                    param.add_(fresh.lerp_(exp_avg, inner.omega), alpha=-lr)
                kept = beta2 if inner_step > 1 else 0.0
                exp_avg_sq.mul_(kept).addcmul_(grad, grad, value=1.0 - kept)
            case _:
                assert_never(inner.type)
