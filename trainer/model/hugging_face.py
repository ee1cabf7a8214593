# SPDX-License-Identifier: Apache-2.0
"""Any causal language model of transformers as a `LanguageModel`: fine-tuned whole, in part, or by adapters (lora.py).

Owns what is trained of it, and what its loss is. Rules: parameters are called as transformers calls them; a tied weight
appears once, under its first name; what is frozen never leaves a machine, so each peer reads it from a folder of its
own. Losses that a model adds by itself, such as the balance of experts, are left out. Must not know sharding or files
(model_folder.py).

Shape suffixes: B batch, L sequence length, V vocab_size, D width.
"""

import copy
import fnmatch
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from isthmus.trainer.errors import ConfigError
from isthmus.trainer.model.language_model import LanguageModel, NamedShapes
from isthmus.trainer.model.lora import Lora, add_adapters, draw_adapter, is_adapter
from isthmus.trainer.model.loss import token_loss
from isthmus.trainer.model.model_folder import config_of, read_weights, transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

USUAL_SEQ_LEN: Final = 1024
"""Tokens of a sample where nobody says a number: what models could read is far more than fine-tuning needs."""

_PLAIN_HEADS: Final = frozenset(
    {
        "gemma", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen2_moe",
        "qwen3", "qwen3_moe", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Kinds whose scores are a matrix times the last hidden state and nothing else: the loss needs no logits of all
positions at once."""


class HuggingFaceModelConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="hf"
):
    """A model of transformers and what is trained of it; equal on all peers but for `folder`.

    Attributes:
        architecture: see `model_folder.read_architecture`.
        seq_len: tokens of a sample; None: the model's longest, at most `USUAL_SEQ_LEN`.
        freeze: patterns of the names of parameters that are not trained.
        lora: adapters; then nothing else is trained.
        folder: of the model on this machine, with its weights.
    """

    architecture: str
    seq_len: int | None = None
    freeze: tuple[str, ...] = ()
    lora: Lora | None = None
    folder: str | None = None

    @property
    def config(self) -> "PretrainedConfig":
        """As transformers knows it. Not to be changed."""
        return config_of(self.architecture)

    @property
    def vocab_size(self) -> int:
        """See `ModelDescription`; likewise below."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_seq_len(self) -> int:
        """Tokens of a sample, which may be fewer than the model could read."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None) or math.inf
        if self.seq_len is not None and self.seq_len > longest:
            raise ConfigError(f"model.seq_len is {self.seq_len}, the model reads {longest} tokens", key="model.seq_len")
        return self.seq_len or int(min(longest, USUAL_SEQ_LEN))

    def build(self) -> "HuggingFaceModel":
        """With `freeze` or `lora` done.

        Raises:
            ConfigError: the model cannot be trained here, or a pattern names nothing.
        """
        with torch.device("meta"):
            network = transformers().AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config), dtype=torch.float32, trust_remote_code=False
            )
        model = HuggingFaceModel(network, max_seq_len=self.max_seq_len, description=self)
        if self.lora is not None:
            try:
                add_adapters(network, model.blocks, self.lora)
            except ValueError as error:
                raise ConfigError(f"model.{error}", key="model.lora.targets") from error
        for pattern in self.freeze:
            frozen = [one for name, one in network.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
            if not frozen:
                first, *_, last = (name for name, _ in network.named_parameters())
                raise ConfigError(
                    f"model.freeze has {pattern!r}, and no parameter is called so",
                    cure=f"names are such as {first} and {last}, and * stands for anything",
                    key="model.freeze",
                )
            for parameter in frozen:
                parameter.requires_grad_(False)
        if not model.trained_parameters():
            raise ConfigError("model.freeze freezes everything", cure="leave something to train", key="model.freeze")
        return model

    def named_shapes(self) -> NamedShapes:
        """What is trained."""
        return list(_facts(self.anywhere()).trained)

    @property
    def needs_folder(self) -> bool:
        """Whether a peer must have the weights on its own disk: some of them never come from the run."""
        return bool(_facts(self.anywhere()).frozen)

    def frozen_shapes(self) -> NamedShapes:
        """Parameters that are not trained, and buffers that are kept with the weights."""
        return list(_facts(self.anywhere()).frozen)

    def initial_parameters(self, seed: int) -> Tensor:
        """From the folder; adapters are drawn by the seed.

        Raises:
            ConfigError: the folder does not hold the weights.
        """
        shapes = self.named_shapes()
        flat = torch.empty(sum(math.prod(shape) for _, shape in shapes), dtype=torch.float32, device="cpu")
        generator = torch.Generator(device="cpu").manual_seed(seed)
        places: dict[str, Tensor] = {}
        offset = 0
        for name, shape in shapes:
            places[name] = flat[offset : offset + math.prod(shape)].view(shape)
            offset += math.prod(shape)
            if is_adapter(name):
                draw_adapter(name, places[name], generator)
        wanted = {name: tuple(place.shape) for name, place in places.items() if not is_adapter(name)}
        if wanted:
            for name, tensor in read_weights(self.weights_folder, self.architecture, wanted):
                places[name].copy_(tensor)
        return flat

    def num_flops_per_token(self, seq_len: int) -> int:
        """6 for each trained weight of a product and 4 for each frozen one; 12 · layers · heads · head_dim · seq_len.

        Of a mixture of experts those count that a token goes through.
        """
        facts, config = _facts(self.anywhere()), self.config.get_text_config()
        share = (getattr(config, "num_experts_per_tok", None) or 1) / (getattr(config, "num_local_experts", None) or 1)
        products = 0.0
        for factor, shapes in ((6, facts.trained), (4, facts.frozen)):
            for name, shape in shapes:
                if name not in facts.tables and len(shape) > 1:
                    products += factor * math.prod(shape) * (share if ".experts." in name else 1.0)
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return int(round(products) + 12 * config.num_hidden_layers * width * seq_len)

    @property
    def weights_folder(self) -> Path:
        """The folder.

        Raises:
            ConfigError: nobody has named one.
        """
        if self.folder is None:
            raise ConfigError(
                "nobody has said where the base model is on this machine", cure="name its folder with --node.model"
            )
        return Path(self.folder)

    def anywhere(self) -> "HuggingFaceModelConfig":
        """Without the folder: what is equal on all peers."""
        return msgspec.structs.replace(self, folder=None)


class _Facts(msgspec.Struct, frozen=True):
    """What the built model says. `tables`: names of look-ups that are no products."""

    trained: tuple[tuple[str, tuple[int, ...]], ...]
    frozen: tuple[tuple[str, tuple[int, ...]], ...]
    tables: frozenset[str]


@functools.lru_cache(maxsize=8)
def _facts(config: HuggingFaceModelConfig) -> _Facts:
    model = config.build()
    head = model.network.get_output_embeddings()
    heads = set() if head is None else {id(head.weight)}
    named = [(model.canonical(name), one) for name, one in model.named_parameters()]
    looked_up = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)} - heads
    return _Facts(
        tuple((name, tuple(one.shape)) for name, one in model.trained_parameters()),
        tuple((name, tuple(one.shape)) for name, one in model.frozen()),
        frozenset(name for name, one in named if id(one) in looked_up),
    )


class HuggingFaceModel(LanguageModel):
    """A model of transformers.

    Args:
        network: an `AutoModelForCausalLM`, on the meta device.
        max_seq_len: longest sequence.
        description: of it.
    """

    def __init__(self, network: Any, *, max_seq_len: int, description: HuggingFaceModelConfig) -> None:  # noqa: ANN401
        super().__init__()
        self.network = network
        self.max_seq_len = max_seq_len
        self._description = description
        # Not registered once more: every parameter has one name.
        self.__dict__["blocks"] = _blocks(network)
        self._has_plain_head = (
            network.config.model_type in _PLAIN_HEADS and getattr(network.get_output_embeddings(), "bias", 0) is None
        )

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor | None = None) -> Tensor:
        """See `LanguageModel`."""
        if tokens_BL.shape[1] > self.max_seq_len:
            raise ValueError(f"sequence of {tokens_BL.shape[1]} tokens, but max_seq_len is {self.max_seq_len}")
        if targets_BL is not None and self._has_plain_head:
            hidden_BLD = self.network.base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state
            return token_loss(hidden_BLD, self.network.get_output_embeddings().weight, targets_BL)
        logits_BLV: Tensor = self.network(input_ids=tokens_BL, use_cache=False).logits
        if targets_BL is None:
            return logits_BLV
        return F.cross_entropy(logits_BLV.float().flatten(0, 1), targets_BL.flatten())

    @torch.no_grad()
    def init_buffers(self, device: torch.device) -> None:
        """By transformers' own rule for models whose weights are loaded. What `to_empty` has parted is tied again."""
        del device  # they are where `to_empty` has put them
        self.network.tie_weights()
        for module in self.network.modules():
            if module._non_persistent_buffers_set:
                for parameter in module.parameters():
                    parameter._is_hf_initialized = True  # no business of this call
                self.network._init_weights(module)

    def load_frozen(self, fill: Callable[[Tensor, Tensor], None]) -> None:
        """From the folder.

        Raises:
            ConfigError: it does not hold the weights.
        """
        places = dict(self.frozen())
        if not places:
            return
        shapes = {name: tuple(place.shape) for name, place in places.items()}
        folder, architecture = self._description.weights_folder, self._description.architecture
        for name, tensor in read_weights(folder, architecture, shapes):
            fill(places[name], tensor)

    def trained_parameters(self) -> list[tuple[str, Parameter]]:
        """See `LanguageModel`; by transformers' names."""
        return [(self.canonical(name), parameter) for name, parameter in super().trained_parameters()]

    def frozen(self) -> list[tuple[str, Tensor]]:
        """Parameters that are not trained, and buffers that are kept with the weights."""
        kept = self.network.state_dict(keep_vars=True)
        buffers = [(name, one) for name, one in self.network.named_buffers() if name in kept]
        return [(name, one) for name, one in self.network.named_parameters() if not one.requires_grad] + buffers

    @staticmethod
    def canonical(name: str) -> str:
        """What transformers calls a parameter of this model."""
        return name.removeprefix("network.")


def _blocks(network: Any) -> nn.ModuleList:  # noqa: ANN401
    """The list of its layers."""
    count = network.config.get_text_config().num_hidden_layers
    for module in network.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"a model of the kind {network.config.model_type} has no list of layers that could be cut",
        cure="train it in a loop of your own with isthmus.attach",
        key="model.path",
    )
