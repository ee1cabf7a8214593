# SPDX-License-Identifier: Apache-2.0
"""The model that the trainer trains by default: a Llama-style decoder; its layers are in layers.py.

Owns the architecture (`ModelConfig`, `Decoder`), the presets, the canonical order of the parameters and their
initial values. Rules: the order of `named_shapes` is the order in which parameters are cut into fragments and sent, so
it never depends on the device, on sharding or on the process. Must not know data, optimizers, process groups or files.

Sharding: call `fully_shard` on every element of `Decoder.blocks`, then on the decoder itself. The embedding belongs
to the root's group because a tied head reads its weight inside `Decoder.forward`.

Shape suffixes of tensors are those of layers.py.
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
from isthmus.trainer.model.layers import Block, RMSNorm, RotaryTable, document_mask
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
        """See `ModelDescription`."""
        with torch.device("meta"):
            return Decoder(self)

    def named_shapes(self) -> NamedShapes:
        """Name and shape of every parameter in canonical order; allocates no weights. A tied weight appears once."""
        return [(name, tuple(parameter.shape)) for name, parameter in self.build().trained_parameters()]

    def num_parameters(self) -> int:
        """Number of trained values; a tied weight counts once."""
        return sum(math.prod(shape) for _, shape in self.named_shapes())

    def initial_parameters(self, seed: int) -> Tensor:
        """The founder's first weights: one flat fp32 CPU tensor, parameters in canonical order without gaps.

        The same seed gives the same bits on one machine only; see `Decoder.init_weights`.
        """
        generator = torch.Generator(device="cpu").manual_seed(seed)
        flat = torch.empty(self.num_parameters(), dtype=torch.float32, device="cpu")
        offset = 0
        for name, shape in self.named_shapes():
            numel = math.prod(shape)
            _draw(name, flat[offset : offset + numel].view(shape), self, generator)
            offset += numel
        return flat

    def num_flops_per_token(self, seq_len: int) -> int:
        """Floating point operations of one forward and backward, per token: 6 N + 12 · layers · dim · seq_len.

        N counts the weights that take part in a matrix product: the head does, an untied embedding does not (it is a
        look-up). The attention term is the full square, as is usual for model FLOPs utilisation (PaLM,
        arXiv:2204.02311, appendix B).
        """
        lookup_only = 0 if self.tie_embeddings else self.vocab_size * self.dim
        matmul_weights = self.num_parameters() - lookup_only
        return 6 * matmul_weights + 12 * self.num_layers * self.dim * seq_len


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
        self.blocks = nn.ModuleList(
            Block(
                dim=config.dim,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                hidden_dim=config.hidden_dim,
                norm_eps=config.norm_eps,
                rotary=self.rotary,
            )
            for _ in range(config.num_layers)
        )
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
