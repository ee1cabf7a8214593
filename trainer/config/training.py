# SPDX-License-Identifier: Apache-2.0
"""What is trained, on which text and by which steps: `[run]`, `[model]`, `[data]` and `[inner]`.

Rules: all of it is part of the run manifest. Must not know torch, nor what else a run is told (settings.py).

Errors: `ConfigError` (2) for a model that cannot be.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from isthmus.trainer.config.quantities import Count, Nbytes
from isthmus.trainer.config.values import Fraction, Maybe, Portion, Positive, RunName, Section, Shaped, named_shape
from isthmus.trainer.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.trainer.model.decoder import ModelConfig
    from isthmus.trainer.model.hugging_face import HuggingFaceModelConfig


class RunSection(Section):
    """`[run]`: what the run is called and how long it lasts."""

    name: RunName = "run"
    """What the run and its folders are called."""
    outer_steps: Annotated[Count, Field(ge=1, le=2**40)] = 100
    """Outer steps after which the run is done: so often is something exchanged, the model or what has its turn."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Of the first weights and of the order of the data."""


class DecoderSection(Section):
    """`[model]` with `type = "decoder"`: a preset of trainer/model/decoder.py, whose values other keys replace."""

    type: Literal["decoder"] = "decoder"
    preset: str = "tiny"
    """A size of the decoder: tiny, nano, 10m, 50m, 150m, 500m or 1b."""
    seq_len: Maybe[Annotated[Count, Field(ge=1)]] = None
    """Tokens in a sample; none: the preset's longest."""
    tie_embeddings: Maybe[bool] = None
    """Whether the output layer has the embedding's weights."""
    dim: Maybe[Annotated[int, Field(ge=1)]] = None
    """Width of the residual stream."""
    num_layers: Maybe[Annotated[int, Field(ge=1)]] = None
    """Transformer blocks."""
    num_heads: Maybe[Annotated[int, Field(ge=1)]] = None
    """Attention heads of a layer."""
    num_kv_heads: Maybe[Annotated[int, Field(ge=1)]] = None
    """Key and value heads, which several attention heads share."""
    hidden_dim: Maybe[Annotated[int, Field(ge=1)]] = None
    """Width of the feed-forward layer."""
    rope_theta: Maybe[Positive] = None
    """Base of the rotary position embedding."""
    vocab_size: Maybe[Annotated[Count, Field(ge=1)]] = None
    """How many tokens there are; none: as many as the text has, 256 where tokens are bytes."""
    document_end: Maybe[Annotated[int, Field(ge=0)]] = None
    """The token that attention does not cross; none: the text's end of a document with `data.document_masks`."""
    norm_eps: Maybe[Positive] = None
    """Added under the root in normalisation."""

    def description(self) -> "ModelConfig":
        """The shape of the decoder.

        Raises:
            ConfigError: there is no such preset, or the values do not fit each other.
        """
        from isthmus.trainer.model.decoder import preset

        overrides = self.model_dump(exclude={"type", "preset", "seq_len"}, exclude_none=True)
        if self.seq_len is not None:
            overrides["max_seq_len"] = self.seq_len
        try:
            return preset(self.preset, **overrides)
        except ValueError as error:
            raise ConfigError(f"[model] cannot be built: {str(error).rstrip('.')}", key="model") from error


class LoraSection(Section):
    """`[model.lora]`: train adapters of low rank instead of the model (arXiv:2106.09685), and exchange nothing else."""

    rank: Annotated[int, Field(ge=0, le=65536)] = 0
    """Of the adapters, such as 16; 0: there are none."""
    alpha: Maybe[Positive] = None
    """What an adapter makes is multiplied by alpha / rank; none: alpha is twice the rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Which linear layers of the blocks have one: patterns of their names, such as "q_proj"; "*": all of them."""


class HuggingFaceSection(Section):
    """`[model]` with `type = "hf"`: a causal language model of transformers, from a folder."""

    type: Literal["hf"] = "hf"
    path: Path
    """The model's folder: config.json and safetensors. A peer may keep it elsewhere: `node.model`."""
    seq_len: Maybe[Annotated[Count, Field(ge=1)]] = None
    """Tokens in a sample; none: as many as the model reads, at most 1024."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as "model.embed_tokens.*"; nor are they exchanged."""
    lora: LoraSection = Field(default_factory=LoraSection)
    """Adapters."""
    architecture: Maybe[Annotated[str, Field(max_length=16_384)]] = None
    """What the folder's config.json says. The founder writes it down; nobody need give it."""
    weights_digest: Maybe[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = None
    """Of the folder's weights, where some of them are frozen. The founder writes it down too."""

    @model_validator(mode="after")
    def _adapters_freeze_all_else(self) -> Self:
        if self.lora.rank and self.freeze:
            raise ValueError(
                "freeze is given, and with lora.rank nothing but the adapters is trained; leave freeze out"
            )
        return self

    def description(self) -> "HuggingFaceModelConfig":
        """The model, without a folder for its weights.

        Raises:
            ConfigError: the folder does not hold such a model.
            EnvironmentFault: transformers is not installed, or the folder cannot be read.
        """
        from isthmus.trainer.model.hugging_face import HuggingFaceModelConfig
        from isthmus.trainer.model.lora import Lora
        from isthmus.trainer.model.model_folder import read_architecture

        lora = self.lora
        alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
        return HuggingFaceModelConfig(
            architecture=read_architecture(self.path) if self.architecture is None else self.architecture,
            seq_len=self.seq_len,
            freeze=self.freeze,
            lora=Lora(rank=lora.rank, alpha=alpha, targets=lora.targets) if lora.rank else None,
        )


class LoopModelSection(Section):
    """`[model]` with `type = "loop"`: a loop of one's own, which says these things itself (`isthmus.attach`)."""

    type: Literal["loop"] = "loop"
    parameters: Annotated[tuple[Shaped, ...], Field(min_length=1)]
    """Names and shapes of what is trained, in their order: "head.weight 256x64"."""
    seq_len: Annotated[Count, Field(ge=1)] = 1
    """Tokens that a sample counts for, on all peers: the weight of a peer's work in an exchange, and in figures."""

    def named_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What `parameters` says."""
        return tuple(named_shape(text) for text in self.parameters)

    def description(self) -> "ModelConfig":
        """There is none.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "this run trains the model of loops of their own, which only they can build",
            cure="isthmus export writes its parameters, by name",
            key="model",
        )


ModelSection = Annotated[DecoderSection | HuggingFaceSection | LoopModelSection, Field(discriminator="type")]


class DataSection(Section):
    """`[data]`: the text to train on; a loop of one's own has its own data."""

    path: Maybe[Path] = None
    """A file or folder, or what `isthmus data prep` has made of one; none: the Python standard library's own sources. A
    peer may have it elsewhere: `node.data`."""
    validation_fraction: Maybe[Fraction] = None
    """Share that is held out; none: 0.02 of the standard library, 0.1 of other text. Of a prepared text
    `isthmus data prep` has said it."""
    limit_nbytes: Maybe[Annotated[Nbytes, Field(ge=1)]] = None
    """Read at most so much of it. A prepared text is taken as it is."""
    shuffle_shards: Annotated[int, Field(ge=1, le=4096)] = 4
    """Shards of a prepared text whose samples are mixed with each other at a time; a peer needs so many at once."""
    document_masks: bool = False
    """Whether attention stays within a document; a sample may hold several. It needs the model of type decoder and a
    text with a tokenizer, and takes longer."""


class _Schedule(Section):
    warmup_steps: Maybe[Annotated[Count, Field(ge=0)]] = None
    """Inner steps over which the rate rises linearly; none: a twentieth of the run's, at most 100. A peer that comes
    later begins without the inner optimizer's moments, and rises over as many of its own."""


class CosineSchedule(_Schedule):
    """Warm up, then fall along half a cosine until the run's last inner step."""

    type: Literal["cosine"] = "cosine"
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The last learning rate, as a fraction of `lr`."""


class WsdSchedule(_Schedule):
    """Warm up, stay, decay linearly over the last steps."""

    type: Literal["wsd"] = "wsd"
    decay_steps: Maybe[Annotated[Count, Field(ge=0)]] = None
    """Inner steps of the decay; none: a fifth of the run's."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The last learning rate, as a fraction of `lr`."""


class ConstantSchedule(_Schedule):
    """Warm up, then stay."""

    type: Literal["constant"] = "constant"


Schedule = Annotated[CosineSchedule | WsdSchedule | ConstantSchedule, Field(discriminator="type")]


class _Paced(Section):
    lr: Positive = 1e-3
    """Peak learning rate."""
    batch_size: Annotated[int, Field(ge=1, le=2**31 - 1)] = 16
    """Samples of one inner step of one peer, over all its workers."""
    schedule: Schedule = Field(default_factory=CosineSchedule)
    """How the learning rate moves."""


class _Inner(_Paced):
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Of matrices; decoupled from the gradient."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient; 0: no limit."""


class AdamW(_Inner):
    """`[inner]` with `type = "adamw"`: what a peer does between exchanges."""

    type: Literal["adamw"] = "adamw"
    betas: tuple[Portion, Portion] = (0.9, 0.99)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    moments: Literal["fresh", "donor"] = "fresh"
    """What a peer that comes later begins with: none and a warm-up of its own, or a copy of a donor's, which is twice
    the parameters to send, and for which the donor's workers stop after an inner step."""


class Sgd(_Inner):
    """`[inner]` with `type = "sgd"`: plain, without momentum."""

    type: Literal["sgd"] = "sgd"


class Adopt(_Inner):
    """`[inner]` with `type = "adopt"`: Adam that converges with any second decay rate (arXiv:2411.02853)."""

    type: Literal["adopt"] = "adopt"
    betas: Annotated[tuple[Portion, ...], Field(min_length=2)] = (0.9, 0.9999)
    """Decay rates of the first moments, one or more, then that of the second."""
    omegas: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (1.0,)
    """Weight of each first moment in the step, of which betas has all but its last; at most 1 in sum, the rest is the
    fresh gradient's."""
    eps: Positive = 1e-6
    """Least root of the second moment."""

    @model_validator(mode="after")
    def _every_first_moment_has_a_weight(self) -> Self:
        num_moments, total = len(self.betas) - 1, sum(self.omegas)
        if len(self.omegas) != num_moments:
            raise ValueError(
                f"betas are of {num_moments} first and one second moment, omegas of {len(self.omegas)} first; give "
                "omegas a weight for each first moment"
            )
        if total > 1.0 + 1e-9:
            raise ValueError(f"omegas are {total:g} in sum; give weights of at most 1")
        return self


class Muon(_Inner):
    """`[inner]` with `type = "muon"`: orthogonal steps for hidden matrices, AdamW for the rest, one learning rate."""

    type: Literal["muon"] = "muon"
    momentum: Portion = 0.95
    """Nesterov's, of the hidden matrices."""
    betas: tuple[Portion, Portion] = (0.9, 0.99)
    """Decay rates of the two moments, of the rest."""
    eps: Positive = 1e-8
    """Added to the root of the second moment, of the rest."""


class LoopInner(_Paced):
    """`[inner]` with `type = "loop"`: a loop of one's own, whose optimizer and learning rate are its own affair. `lr`
    and `schedule` are what methods are told that ask for them; they change nothing else."""

    type: Literal["loop"] = "loop"
    states: tuple[str, ...] = ()
    """What its optimizer keeps for each parameter, by name; the loop says it itself."""


InnerSection = Annotated[AdamW | Sgd | Adopt | Muon | LoopInner, Field(discriminator="type")]
