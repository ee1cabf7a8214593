# SPDX-License-Identifier: Apache-2.0
"""LoRA (arXiv:2106.09685): a frozen layer with a trained correction of low rank, W x + (alpha / rank) · B A x.

A begins Gaussian and B zero, so that training begins at the base model. Rules: the layer's own weight keeps its name;
A and B stand beside it as `lora_A` [rank, inputs] and `lora_B` [outputs, rank]. Must not know where weights come from.

Shape suffixes: R rank, I inputs, O outputs of a layer.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Final, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

A_NAME: Final = "lora_A"
B_NAME: Final = "lora_B"


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of adapters.

    Attributes:
        rank: of the correction.
        alpha: the correction is multiplied by alpha / rank.
        targets: patterns of the names of linear layers in the blocks, whole or from a dot on.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Takes over the parameters of another one; only the adapter is trained."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale = lora.scale
        for name, shape in ((A_NAME, (lora.rank, base.in_features)), (B_NAME, (base.out_features, lora.rank))):
            values = torch.empty(shape, device=base.weight.device, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`, with the correction."""
        lowered = F.linear(input, cast(Tensor, self.lora_A))
        return super().forward(input) + self.scale * F.linear(lowered, cast(Tensor, self.lora_B))


def add_adapters(network: nn.Module, blocks: nn.ModuleList, lora: Lora) -> None:
    """Freeze the network, and put an adapter into each linear layer of the blocks that `lora.targets` names.

    Raises:
        ValueError: a pattern names none.
    """
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    prefix = next(name for name, module in network.named_modules() if module is blocks)
    layers = {f"{prefix}.{name}": one for name, one in blocks.named_modules() if isinstance(one, nn.Linear)}
    for pattern in lora.targets:
        if not any(_is_named(name, pattern) for name in layers):
            kinds = sorted({name.rpartition(".")[2] for name in layers})
            raise ValueError(
                f"lora.targets has {pattern!r}, and no linear layer is called so; there are {', '.join(kinds)}"
            )
    for name, layer in layers.items():
        if any(_is_named(name, pattern) for pattern in lora.targets):
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, LoraLinear(layer, lora))


def _is_named(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return name.endswith((f".{A_NAME}", f".{B_NAME}"))


def draw_adapter(name: str, values: Tensor, generator: torch.Generator) -> None:
    """First values: A from N(0, 1 / inputs), so that A x is as large as x; B zero."""
    if name.endswith(B_NAME):
        values.zero_()
    else:
        values.normal_(0.0, 1.0 / math.sqrt(values.shape[1]), generator=generator)


def merged(name: str, weight: Tensor, adapters: Mapping[str, Tensor], lora: Lora) -> Tensor:
    """The weight of this name with its correction in it, in the weight's dtype; itself where it has none.

    Args:
        name: "….weight" of a layer.
        weight: [O, I].
        adapters: all, by name; fp32.
        lora: their settings.
    """
    layer = name.removesuffix(".weight")
    if f"{layer}.{A_NAME}" not in adapters:
        return weight
    correction_OI = adapters[f"{layer}.{B_NAME}"] @ adapters[f"{layer}.{A_NAME}"]
    return (weight.float() + lora.scale * correction_OI).to(weight.dtype)


def as_peft(adapters: Mapping[str, Tensor], lora: Lora, base: str) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Config and tensors of `adapter_config.json` and `adapter_model.safetensors`, as PEFT has them.

    Args:
        adapters: all, by name.
        lora: their settings.
        base: where the base model is.
    """
    layers: Sequence[str] = sorted({name.rpartition(".")[0] for name in adapters})
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(layers),
    }
    tensors = {f"base_model.model.{name}.weight": tensor for name, tensor in adapters.items()}
    return config, tensors
