# SPDX-License-Identifier: Apache-2.0
"""A trained Hugging Face model as a folder again: whole, adapters merged; or the adapters alone, for PEFT.

Rules: weights are laid out as transformers itself saves this architecture, and in the dtype that the base model's
config names. All of them are in memory meanwhile. Must not know runs or checkpoints.

Errors: `ConfigError` (2): what is frozen is not where the description says; `EnvironmentFault` (3).
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus.trainer.model.exported import write_config
from isthmus.trainer.model.hugging_face import HuggingFaceModelConfig
from isthmus.trainer.model.lora import as_peft, is_adapter, merged
from isthmus.trainer.model.model_files import finish_weights, replacing, write_json
from isthmus.trainer.model.model_folder import CONFIG_NAME, GENERATION_NAME, INDEX_NAME, read_weights, weight_files

ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
ADAPTER_WEIGHTS_NAME: Final = "adapter_model.safetensors"


@torch.no_grad()
def save_hugging_face(
    directory: Path, description: HuggingFaceModelConfig, parameters: Mapping[str, Tensor], *, has_bytes: bool
) -> None:
    """Write the folder of the trained model, without a tokenizer.

    Args:
        directory: created if missing; files of an older export are replaced.
        description: of what was trained, with the folder of the base model where something is frozen.
        parameters: what was trained, by name, fp32.
        has_bytes: whether its tokens are bytes.

    Raises:
        OSError: the disk refuses.
    """
    plain = msgspec.structs.replace(description, lora=None, freeze=())
    network = plain.build().network
    dtype = _dtype_of(plain)
    adapters = {name: tensor for name, tensor in parameters.items() if is_adapter(name)}
    tensors = {name: tensor.to(dtype) for name, tensor in parameters.items() if name not in adapters}
    if frozen := dict(description.frozen_shapes()):
        for name, tensor in read_weights(description.weights_folder, description.architecture, frozen):
            whole = tensor if description.lora is None else merged(name, tensor, adapters, description.lora)
            tensors[name] = whole.to(dtype) if whole.is_floating_point() else whole
    network.load_state_dict(tensors, strict=False, assign=True)
    network.tie_weights()
    network.config.dtype = dtype
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".partial-") as name:
        made = Path(name)
        network.save_pretrained(made, max_shard_size="5GB")
        names = [path.name for path in weight_files(made)]
        for path in (*(made / name for name in names), made / INDEX_NAME, made / GENERATION_NAME):
            if path.exists():
                with replacing(directory / path.name) as temporary:
                    path.replace(temporary)
        digest = finish_weights(directory, names)
        write_config(directory, json.loads((made / CONFIG_NAME).read_bytes()), digest, has_bytes=has_bytes)
    if description.folder is not None and (known := Path(description.folder) / GENERATION_NAME).is_file():
        with replacing(directory / GENERATION_NAME) as temporary:
            shutil.copyfile(known, temporary)


def save_adapters(directory: Path, description: HuggingFaceModelConfig, parameters: Mapping[str, Tensor]) -> None:
    """Write the adapters alone, as PEFT has them.

    Args:
        directory: created if missing.
        description: with `lora`.
        parameters: the adapters by name.

    Raises:
        OSError: the disk refuses.
    """
    assert description.lora is not None, "there are adapters"
    config, tensors = as_peft(parameters, description.lora, description.folder or "")
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / ADAPTER_WEIGHTS_NAME) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata={"format": "pt"})
    write_json(directory / ADAPTER_CONFIG_NAME, config)


def _dtype_of(description: HuggingFaceModelConfig) -> torch.dtype:
    named = description.config.dtype
    found = getattr(torch, named, None) if isinstance(named, str) else named
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32
