# SPDX-License-Identifier: Apache-2.0
"""The layers of a Llama-style decoder, every formula written out.

Rules: modules compute and nothing else. The names of their parameters, and the order in which they are registered, are
part of what peers agree on (see decoder.py): a change of either is a change of the wire. Must not know the decoder,
its settings or its initial values; a layer is told the numbers that it needs.

Shape suffixes of tensors::

    B batch          L sequence length   V vocab_size   D dim
    N query heads    K key-value heads   H head_dim     P = H / 2 rotated pairs    F hidden_dim
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in fp32 (arXiv:1910.07467, eq. 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Same shape and dtype as its input."""
        x32_BLD = x_BLD.float()
        scale_BL1 = torch.rsqrt(x32_BLD.square().mean(-1, keepdim=True) + self.eps)
        return (x32_BLD * scale_BL1 * self.weight.float()).to(x_BLD.dtype)


class RotaryTable:
    """cos and sin of position × frequency, fp32; one table shared by all the layers of a decoder.

    Deliberately neither parameter nor buffer: it follows from these numbers alone, so there is nothing to send, to
    shard or to save; `to_empty` cannot leave garbage in it and `.bfloat16()` cannot round it. The first use on a device
    builds it there.
    """

    def __init__(self, *, head_dim: int, max_seq_len: int, theta: float) -> None:
        self._head_dim = head_dim
        self._max_seq_len = max_seq_len
        self._theta = theta
        self._cos_LP: Tensor | None = None
        self._sin_LP: Tensor | None = None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos_LP, sin_LP) on `device`; angle[l, p] = l * theta ** (-2 p / H) (arXiv:2104.09864, eq. 15)."""
        if self._cos_LP is None or self._sin_LP is None or self._cos_LP.device != device:
            # Without this a table first built by an evaluation in inference mode would break the next backward.
            with torch.inference_mode(False):
                exponent_P = torch.arange(0, self._head_dim, 2, dtype=torch.float64, device="cpu") / self._head_dim
                position_L = torch.arange(self._max_seq_len, dtype=torch.float64, device="cpu")
                angle_LP = torch.outer(position_L, self._theta**-exponent_P)
                self._cos_LP = angle_LP.cos().float().to(device)
                self._sin_LP = angle_LP.sin().float().to(device)
        return self._cos_LP, self._sin_LP


def rotate(x_BLNH: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
    """Rotate the pairs (x[p], x[p + H/2]) of every head by their position's angle, in fp32.

    Pairs are halves apart, not neighbours (the arrangement of Hugging Face's Llama weights), so that an export only
    renames tensors.
    """
    length = x_BLNH.shape[1]
    cos_L1P, sin_L1P = cos_LP[:length, None], sin_LP[:length, None]
    first_BLNP, second_BLNP = x_BLNH.float().chunk(2, dim=-1)
    rotated_BLNH = torch.cat(
        (first_BLNP * cos_L1P - second_BLNP * sin_L1P, second_BLNP * cos_L1P + first_BLNP * sin_L1P), dim=-1
    )
    return rotated_BLNH.to(x_BLNH.dtype)


class Attention(nn.Module):
    """Causal softmax(QKᵀ / sqrt(H)) V with rotary positions; every key-value head serves N / K query heads."""

    def __init__(self, *, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, rotary: RotaryTable) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.is_grouped = num_kv_heads != num_heads
        self.rotary = rotary
        self.query = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.key = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, dim, bias=False)

    def forward(self, x_BLD: Tensor, mask_B1LL: Tensor | None = None) -> Tensor:
        """Mixes positions; the value at position l depends on positions 0..l only, of them on the mask's."""
        cos_LP, sin_LP = self.rotary.on(x_BLD.device)
        heads = (-1, self.head_dim)
        q_BLNH = rotate(self.query(x_BLD).unflatten(-1, heads), cos_LP, sin_LP)
        k_BLKH = rotate(self.key(x_BLD).unflatten(-1, heads), cos_LP, sin_LP)
        v_BLKH = self.value(x_BLD).unflatten(-1, heads)
        mixed_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLKH.transpose(1, 2),
            v_BLKH.transpose(1, 2),
            attn_mask=mask_B1LL,
            is_causal=mask_B1LL is None,
            enable_gqa=self.is_grouped,
        )
        projected_BLD: Tensor = self.output(mixed_BNLH.transpose(1, 2).flatten(2))
        return projected_BLD


def document_mask(tokens_BL: Tensor, document_end: int) -> Tensor:
    """What attention may look at where it stays within documents: bool [B, 1, L, L], [l, m] for position m from l.

    A document's end belongs to it. Positions are relative (rotary), so they need not begin anew with a document.
    """
    ends_BL = (tokens_BL == document_end).int()
    document_BL = ends_BL.cumsum(-1) - ends_BL
    same_BLL = document_BL[:, :, None] == document_BL[:, None, :]
    return same_BLL.tril()[:, None]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv:2002.05202, eq. 6)."""

    def __init__(self, *, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transforms every position alone."""
        hidden_BLF = F.silu(self.gate(x_BLD)) * self.up(x_BLD)
        projected_BLD: Tensor = self.down(hidden_BLF)
        return projected_BLD


class Block(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the residual stream after.

    The unit of sharding, of activation checkpointing and of compilation.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        hidden_dim: int,
        norm_eps: float,
        rotary: RotaryTable,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = Attention(
            dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rotary=rotary
        )
        self.feed_forward_norm = RMSNorm(dim, norm_eps)
        self.feed_forward = FeedForward(dim=dim, hidden_dim=hidden_dim)

    def forward(self, x_BLD: Tensor, mask_B1LL: Tensor | None = None) -> Tensor:
        """The residual stream after this block; the mask is `Attention`'s."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), mask_B1LL)
        residual_BLD: Tensor = x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD))
        return residual_BLD
