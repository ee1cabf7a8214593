# SPDX-License-Identifier: Apache-2.0
"""A folder with a Hugging Face model: its architecture, its weights by name, the digest of its weights.

Rules: nothing in it is executed, so weights are safetensors and code of its own (`auto_map`) is refused; nobody asks a
hub. transformers is imported here when it is needed, and nowhere else in this room.

Errors: `ConfigError` (2) for a folder that holds no such model, `EnvironmentFault` (3) where transformers is missing or
the disk refuses.
"""

import contextlib
import copy
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.trainer.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_NAME: Final = "config.json"
WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
GENERATION_NAME: Final = "generation_config.json"
TOKENIZER_NAME: Final = "tokenizer.json"
TOKENIZER_NAMES: Final = (
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""What a tokenizer may consist of."""

MAX_ARCHITECTURE_NBYTES: Final = 16_384
"""Of a `config.json` in its shortest spelling: it travels in the run's manifest."""
_MAX_LAYERS: Final = 4096
_LOCAL_KEYS: Final = (
    "_name_or_path", "_attn_implementation", "_attn_implementation_internal", "_experts_implementation", "torch_dtype",
    "transformers_version", "use_cache",
)  # fmt: skip
"""What a folder says beside the architecture: where it is from, how it was computed."""


def transformers() -> ModuleType:
    """The library.

    Raises:
        EnvironmentFault: it is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFault(
            'model.type = "hf" needs transformers, which is not installed here', cure="pip install transformers"
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is for those who call it
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


# ------------------------------------------------------------------------------------------------------ architecture


def read_architecture(folder: Path) -> str:
    """What `config.json` says of the architecture, in one spelling: equal for equal models.

    Raises:
        ConfigError: the folder holds no model that can be trained here.
        EnvironmentFault: it cannot be read.
    """
    path = folder / CONFIG_NAME
    with _readable(folder):
        try:
            told = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            missing = f"{folder} has no {CONFIG_NAME}" if folder.is_dir() else f"there is no folder {folder}"
            raise ConfigError(
                missing, cure="name the folder of a Hugging Face model with model.path", key="model.path"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON", cure="copy the model anew", key="model.path") from error
    if not isinstance(told, dict):
        raise ConfigError(f"{path} is not a model's config", cure="copy the model anew", key="model.path")
    kept = {key: value for key, value in told.items() if key not in _LOCAL_KEYS}
    if "dtype" not in kept and "torch_dtype" in told:
        kept["dtype"] = told["torch_dtype"]
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    if len(text) > MAX_ARCHITECTURE_NBYTES:
        raise ConfigError(
            f"{path} has {len(text)} bytes, more than {MAX_ARCHITECTURE_NBYTES}",
            cure="take what is not of the architecture out of it",
            key="model.path",
        )
    config_of(text)
    return text


@functools.lru_cache(maxsize=8)
def config_of(architecture: str) -> "PretrainedConfig":
    """As transformers knows it. Not to be changed.

    Args:
        architecture: of `read_architecture`, maybe of another machine.

    Raises:
        ConfigError: transformers does not know it, or it is not for training.
    """
    mapping = transformers().CONFIG_MAPPING

    def unfit(problem: str, cure: str) -> ConfigError:
        return ConfigError(f"the model {problem}", cure=cure, key="model.path")

    try:
        told: dict[str, Any] = json.loads(architecture)
        kind = told["model_type"]
    except (ValueError, TypeError, KeyError) as error:
        raise unfit(f"says no model_type in its {CONFIG_NAME}", "copy the model anew") from error
    if not isinstance(kind, str) or kind not in mapping:
        raise unfit(
            f"is of a kind ({kind}) that transformers {transformers().__version__} has no code for",
            "upgrade transformers; code from a model's folder is not run",
        )
    if "quantization_config" in told:
        raise unfit("is quantized, and its weights cannot be trained", "take the original one")
    told = {key: value for key, value in told.items() if key not in (*_LOCAL_KEYS, "auto_map")}
    try:
        config: PretrainedConfig = mapping[kind].from_dict(told)
        num_layers = config.get_text_config().num_hidden_layers
    except Exception as error:
        raise unfit(f"has a {CONFIG_NAME} that transformers does not understand: {error}", "copy it anew") from error
    if not isinstance(num_layers, int) or not 1 <= num_layers <= _MAX_LAYERS:
        raise unfit(f"has {num_layers} layers", "take another one")
    return config


# ----------------------------------------------------------------------------------------------------------- weights


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files with its weights, in order.

    Raises:
        ConfigError: there is none, or one is missing.
        EnvironmentFault: the folder cannot be read.
    """
    with _readable(folder):
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}", cure="copy the model there, or name its folder")
        try:
            index = json.loads((folder / INDEX_NAME).read_bytes())
            names = sorted(set(index["weight_map"].values()))
        except FileNotFoundError:
            names = [WEIGHTS_NAME]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{folder / INDEX_NAME} is no index of weights", cure="copy the model anew") from error
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                cure = "copy the model anew; weights must be safetensors, since other formats can execute code"
                raise ConfigError(f"{folder} has no {name}", cure=cure)
    return tuple(folder / name for name in names)


def weights_digest(folder: Path) -> str:
    """64 hexadecimal digits that name the weights: of the content of all their files, in order.

    Raises:
        ConfigError, EnvironmentFault: see `weight_files`.
    """
    total = hashlib.sha256()
    for path in weight_files(folder):
        with _readable(folder):
            total.update(blake3(max_threads=blake3.AUTO).update_mmap(path).digest())
    return total.hexdigest()


def read_weights(
    folder: Path, architecture: str, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Some of its weights by their names in the model, one after the other: what is in memory is one of them.

    Where the files keep weights in another layout than the model does, as of some mixtures of experts, transformers
    reads all of them at once.

    Args:
        folder: of the model.
        architecture: of `read_architecture`.
        shapes: names and shapes of what is wanted.

    Raises:
        ConfigError: the files do not hold the weights of this architecture.
        EnvironmentFault: the disk refuses.
    """
    places = _places(folder)
    if not shapes.keys() <= places.keys():
        whole = _all_weights(folder, architecture)
        for name, shape in shapes.items():
            yield name, _checked(whole.get(name), name, shape, folder)
        return
    for path in dict.fromkeys(places[name] for name in shapes):
        with _open(path) as file:
            for name, shape in shapes.items():
                if places[name] == path:
                    yield name, _checked(file.get_tensor(name), name, shape, folder)


def _checked(tensor: Tensor | None, name: str, shape: tuple[int, ...], folder: Path) -> Tensor:
    if tensor is not None and tuple(tensor.shape) == shape:
        return tensor
    found = "nothing" if tensor is None else f"the shape {tuple(tensor.shape)}"
    raise ConfigError(
        f"the weights in {folder} are not of its {CONFIG_NAME}: {name} has {found}, not {shape}",
        cure="copy the model anew",
        key="model.path",
    )


def _places(folder: Path) -> dict[str, Path]:
    places: dict[str, Path] = {}
    for path in weight_files(folder):
        with _open(path) as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    with _readable(path.parent), safe_open(path, framework="pt") as file:
        yield file


def _all_weights(folder: Path, architecture: str) -> dict[str, Tensor]:
    """All of them by their names in the model, as transformers reads them."""
    weight_files(folder)
    with _readable(folder):
        model, told = transformers().AutoModelForCausalLM.from_pretrained(
            folder, config=copy.deepcopy(config_of(architecture)), dtype="auto", local_files_only=True,
            use_safetensors=True, trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    if missing := sorted({*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])}):
        raise ConfigError(
            f"the weights in {folder} are not of its {CONFIG_NAME}: {missing[0]} is missing or has another shape",
            cure="copy the model anew",
            key="model.path",
        )
    return {name: one.detach() for name, one in (*model.named_parameters(), *model.named_buffers())}


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EnvironmentFault(
            f"the model in {folder} cannot be read: {error.strerror or error}",
            cure="check its permissions and its disk",
        ) from error
    except SafetensorError as error:
        raise ConfigError(
            f"{folder} holds a file that is not safetensors: {error}", cure="copy the model anew"
        ) from error


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """What there is of its tokenizer."""
    return tuple(path for name in TOKENIZER_NAMES if (path := folder / name).is_file())
