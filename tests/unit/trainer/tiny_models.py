# SPDX-License-Identifier: Apache-2.0
"""Folders of tiny Hugging Face models, made from configs with random weights. Not a test."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": _SMALL | {"tie_word_embeddings": False},
    "qwen3": _SMALL | {"head_dim": 16, "tie_word_embeddings": True},
    "gemma": _SMALL | {"head_dim": 8},
    "gemma2": _SMALL | {"head_dim": 8, "sliding_window": 16},
    "qwen3_moe": _SMALL
    | {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256, "bos_token_id": None,
        "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def tiny_model(kind: str, folder: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A model of this kind with random weights, saved in the folder, in evaluation mode."""
    set_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SHAPES[kind] | changes))
    with torch.no_grad():
        for parameter in model.parameters():  # wide apart, so that a mistake shows
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model.eval()
