# SPDX-License-Identifier: Apache-2.0
"""The model that the trainer trains by default: a Llama-style decoder, every formula written out.

Owns the architecture (`ModelConfig`, `Decoder`), the presets, the canonical order of the parameters and their
initial values. Rules: modules compute and nothing else; the order of `named_shapes` is the order in which parameters
are cut into fragments and sent, so it never depends on the device, on sharding or on the process. Must not know
data, optimizers, process groups or files.

Sharding: call `fully_shard` on every element of `Decoder.blocks`, then on the decoder itself. The embedding belongs
to the root's group because a tied head reads its weight inside `Decoder.forward`.

Shape suffixes of tensors::

    B batch          L sequence length   V vocab_size   D dim
    N query heads    K key-value heads   H head_dim     P = H / 2 rotated pairs    F hidden_dim
"""

import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.trainer.model.language_model import LanguageModel, NamedShapes
from isthmus.trainer.model.loss import token_loss

_INIT_STD = 0.02


class ModelConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="decoder"
):
    """The shape of one decoder; equal on all peers.

    Attributes:
        dim: width of the residual stream; a multiple of `num_heads`.
        num_layers: number of blocks.
        num_heads: query heads of an attention layer.
        num_kv_heads: key and value heads; divides `num_heads` (grouped-query attention, arXiv:2305.13245).
        hidden_dim: inner width of the SwiGLU layer.
        vocab_size: number of tokens; 256 when bytes are tokens.
        document_end: the token behind every document, which attention does not cross; None: it crosses everything.
        max_seq_len: longest sequence in tokens.
        rope_theta: base of the rotary wavelengths (arXiv:2104.09864, §3.2.2).
        norm_eps: added to the mean square before its root is taken.
        tie_embeddings: whether the output head is the embedding's own weight.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    max_seq_len: int
    vocab_size: int = 256
    document_end: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        counts = ("dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim", "max_seq_len", "vocab_size")
        for name in counts:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value}")
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"dim / num_heads is {self.head_dim}: rotary positions need an even number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, not {value}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    def build(self) -> "Decoder":
        """See `ModelDescription`; likewise below."""
        with torch.device("meta"):
            return Decoder(self)

    def named_shapes(self) -> NamedShapes:
        """What is trained: all of it."""
        return named_shapes(self)

    def initial_parameters(self, seed: int) -> Tensor:
        """Drawn by the seed."""
        return initial_parameters(self, seed)

    def num_flops_per_token(self, seq_len: int) -> int:
        """As counted for model FLOPs utilisation."""
        return num_flops_per_token(self, seq_len)


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        # The names say the number of parameters at a vocabulary of 256; `nano` is the shape of nanoGPT's CPU example.
        "tiny": ModelConfig(dim=128, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=512, max_seq_len=128),
        "nano": ModelConfig(dim=128, num_layers=4, num_heads=4, num_kv_heads=4, hidden_dim=344, max_seq_len=64),
        "10m": ModelConfig(dim=384, num_layers=6, num_heads=6, num_kv_heads=6, hidden_dim=1024, max_seq_len=256),
        "50m": ModelConfig(dim=640, num_layers=10, num_heads=10, num_kv_heads=10, hidden_dim=1728, max_seq_len=512),
        "150m": ModelConfig(dim=1024, num_layers=12, num_heads=16, num_kv_heads=16, hidden_dim=2816, max_seq_len=1024),
        "500m": ModelConfig(dim=1536, num_layers=20, num_heads=12, num_kv_heads=4, hidden_dim=4096, max_seq_len=2048),
        "1b": ModelConfig(dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, hidden_dim=8192, max_seq_len=2048),
    }
)


def preset(name: str, **overrides: float) -> ModelConfig:
    """The named shape, with single fields replaced.

    Raises:
        ValueError: an unknown preset or field (the closest name is suggested), or a value that cannot be.
    """
    if name not in PRESETS:
        raise ValueError(_unknown("model preset", name, list(PRESETS)))
    fields = msgspec.structs.asdict(PRESETS[name])
    for field in overrides:
        if field not in fields:
            raise ValueError(_unknown("model field", field, list(fields)))
    return ModelConfig(**(fields | overrides))


def _unknown(kind: str, name: str, known: list[str]) -> str:
    closest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {closest[0]!r}? " if closest else ""
    return f"no {kind} is called {name!r}: {hint}Known are {', '.join(known)}."


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

    Deliberately neither parameter nor buffer: it follows from the config alone, so there is nothing to send, to shard
    or to save; `to_empty` cannot leave garbage in it and `.bfloat16()` cannot round it. The first use on a device
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

    def __init__(self, config: ModelConfig, rotary: RotaryTable) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_grouped = config.num_kv_heads != config.num_heads
        self.rotary = rotary
        self.query = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

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

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transforms every position alone."""
        hidden_BLF = F.silu(self.gate(x_BLD)) * self.up(x_BLD)
        projected_BLD: Tensor = self.down(hidden_BLF)
        return projected_BLD


class Block(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the residual stream after.

    The unit of sharding, of activation checkpointing and of compilation.
    """

    def __init__(self, config: ModelConfig, rotary: RotaryTable) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rotary)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BLD: Tensor, mask_B1LL: Tensor | None = None) -> Tensor:
        """The residual stream after this block; the mask is `Attention`'s."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), mask_B1LL)
        residual_BLD: Tensor = x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD))
        return residual_BLD


class Decoder(LanguageModel):
    """Embedding, blocks, norm, head.

    May be built under `torch.device("meta")` and materialised by `to_empty`. The parameters then have no values until
    `init_weights` or `load_state_dict` gives them some; a decoder that is built on a real device holds PyTorch's
    default values until then, and zeros in its embedding.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = config.max_seq_len
        self.rotary = RotaryTable(head_dim=config.head_dim, max_seq_len=config.max_seq_len, theta=config.rope_theta)
        # Not drawn here: on the meta device that alone imports torch's compiler, more than a second of a peer's start.
        nothing_VD = torch.zeros(config.vocab_size, config.dim)
        self.embedding = nn.Embedding.from_pretrained(nothing_VD, freeze=False)  # type: ignore[no-untyped-call]
        self.blocks = nn.ModuleList(Block(config, self.rotary) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # A tied head is no module: one parameter, one name, one place in the canonical order.
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor | None = None) -> Tensor:
        """See `LanguageModel`. The logits are in the dtype of the parameters."""
        if tokens_BL.shape[1] > self.config.max_seq_len:
            raise ValueError(f"sequence of {tokens_BL.shape[1]} tokens, but max_seq_len is {self.config.max_seq_len}")
        x_BLD = self.embedding(tokens_BL)
        mask_B1LL = None if self.config.document_end is None else document_mask(tokens_BL, self.config.document_end)
        for block in self.blocks:
            x_BLD = block(x_BLD) if mask_B1LL is None else block(x_BLD, mask_B1LL)
        x_BLD = self.norm(x_BLD)
        head_VD = self.embedding.weight if self.head is None else self.head.weight
        if targets_BL is not None:
            return token_loss(x_BLD, head_VD, targets_BL)
        return F.linear(x_BLD, head_VD)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw all parameters, in canonical order, from `generator`, which lives on the parameters' device.

        Call it before sharding. Only the peer that founds a run needs it: the same seed gives other bits on another
        processor, so weights are sent and never drawn again.
        """
        for name, parameter in self.named_parameters():
            _draw(name, parameter, self.config, generator)

    def init_buffers(self, device: torch.device) -> None:
        """Build the rotary table on `device` now instead of in the first forward (wanted before compilation)."""
        self.rotary.on(device)


def _draw(name: str, values: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Norms 1, matrices N(0, 0.02²); what writes into the residual stream is divided by sqrt(2 · num_layers).

    So the stream's variance does not grow with depth (GPT-2, §2.3).
    """
    if name.endswith("norm.weight"):
        values.fill_(1.0)
        return
    writes_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
    std = _INIT_STD / math.sqrt(2 * config.num_layers) if writes_residual else _INIT_STD
    values.normal_(0.0, std, generator=generator)


def named_shapes(config: ModelConfig) -> NamedShapes:
    """Name and shape of every parameter in canonical order; allocates no weights. A tied weight appears once."""
    return [(name, tuple(parameter.shape)) for name, parameter in config.build().trained_parameters()]


def num_parameters(config: ModelConfig) -> int:
    """Number of trained values; a tied weight counts once."""
    return sum(math.prod(shape) for _, shape in named_shapes(config))


def initial_parameters(config: ModelConfig, seed: int) -> Tensor:
    """The founder's first weights: one flat fp32 CPU tensor, parameters in canonical order without gaps.

    The same seed gives the same bits on one machine only; see `Decoder.init_weights`.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    flat = torch.empty(num_parameters(config), dtype=torch.float32, device="cpu")
    offset = 0
    for name, shape in named_shapes(config):
        numel = math.prod(shape)
        _draw(name, flat[offset : offset + numel].view(shape), config, generator)
        offset += numel
    return flat


def num_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Floating point operations of one forward and backward, per token: 6 N + 12 · layers · dim · seq_len.

    N counts the weights that take part in a matrix product: the head does, an untied embedding does not (it is a
    look-up). The attention term is the full square, as is usual for model FLOPs utilisation (PaLM, arXiv:2204.02311,
    appendix B).
    """
    lookup_only = 0 if config.tie_embeddings else config.vocab_size * config.dim
    matmul_weights = num_parameters(config) - lookup_only
    return 6 * matmul_weights + 12 * config.num_layers * config.dim * seq_len
