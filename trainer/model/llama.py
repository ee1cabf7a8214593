# SPDX-License-Identifier: Apache-2.0
"""Our decoder as the `LlamaForCausalLM` of transformers: the same function under other names.

Must not know files.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from isthmus.trainer.model.decoder import ModelConfig

_WHOLE: Final = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_OF_BLOCKS: Final = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_BLOCK: Final = re.compile(r"blocks\.([0-9]+)\.(.+)\.weight")
_FIELDS: Final = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
}


def llama_name(name: str) -> str:
    """What transformers calls a parameter of our decoder."""
    block = _BLOCK.fullmatch(name)
    return _WHOLE[name] if block is None else f"model.layers.{block[1]}.{_OF_BLOCKS[block[2]]}.weight"


def as_llama_config(config: ModelConfig, dtype: str) -> dict[str, object]:
    """What `config.json` says of this shape.

    Args:
        config: of the decoder.
        dtype: of its weights, such as "float32".
    """
    shape = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "head_dim": config.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
    }


def from_llama_config(told: Mapping[str, Any]) -> ModelConfig:
    """The shape that `as_llama_config` has written down.

    Raises:
        KeyError: something is missing.
        TypeError, ValueError: a value that cannot be.
    """
    return ModelConfig(**{ours: told[theirs] for ours, theirs in _FIELDS.items()})
