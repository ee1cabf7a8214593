# SPDX-License-Identifier: Apache-2.0
"""The folder that a trained model is kept in: one that transformers loads, `AutoTokenizer` and all.

    model.safetensors       the weights; several files and an index where they are larger (model_files.py)
    config.json             the architecture; under "isthmus" the digest of the weights, so that files which do not
                            belong together, or a damaged one, are noticed, and whether tokens are bytes
    tokenizer.json          with tokenizer_config.json, where tokens are known

A decoder of ours is a `LlamaForCausalLM` there: its tensors have other names and the same values. Rules: each file is
replaced atomically, `config.json` last. Must not know runs, checkpoints or peers.

Errors, all the operator's, each with the path, what is wrong and the cure: `ModelNotFound` (a `ConfigError`),
`ModelCorrupted` (an `IntegrityError`), and `EnvironmentFault` where the disk refuses to read.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from isthmus.optim.fragments import FragmentTable
from isthmus.trainer.errors import ConfigError, EnvironmentFault, IntegrityError
from isthmus.trainer.model.decoder import ModelConfig
from isthmus.trainer.model.hugging_face import HuggingFaceModelConfig
from isthmus.trainer.model.language_model import LanguageModel, whole_model
from isthmus.trainer.model.llama import as_llama_config, from_llama_config, llama_name
from isthmus.trainer.model.model_files import digest_of, replacing, save_weights, write_json
from isthmus.trainer.model.model_folder import (
    CONFIG_NAME,
    GENERATION_NAME,
    TOKENIZER_NAME,
    TOKENIZER_NAMES,
    WEIGHTS_NAME,
    read_architecture,
    weight_files,
)

MARK: Final = "isthmus"
"""Our key in `config.json`."""
TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"


class ModelNotFound(ConfigError):
    """There is no model in this directory.

    Attributes:
        path: the file that is missing.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} does not exist", cure="name a directory written by isthmus export")
        self.path = path


class ModelCorrupted(IntegrityError):
    """A model file is not what was written.

    Attributes:
        path: the file at fault.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}", cure="export the model again")
        self.path = path
        self.reason = reason


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What stands under `MARK`."""

    weights_blake2b: str
    has_bytes: bool
    """Whether tokens are bytes."""
    is_decoder: bool = False
    """Whether it is a decoder of ours."""


class _Marked(msgspec.Struct, frozen=True, kw_only=True):
    """As much of `config.json` as is looked at here."""

    isthmus: _Mark | None = None


# ----------------------------------------------------------------------------------------------------------- writing


def save_decoder(directory: Path, config: ModelConfig, parameters: Mapping[str, Tensor], *, has_bytes: bool) -> None:
    """Write a decoder's folder, without a tokenizer; a crash leaves each file either old or new, never half.

    Args:
        directory: created if missing.
        config: the decoder's shape.
        parameters: whole (unsharded) parameters by their canonical names, of any dtype and device.
        has_bytes: whether its tokens are bytes.

    Raises:
        ValueError: the tensors are not the parameters of `config`.
        OSError: the disk refuses.
    """
    mismatch = _mismatch(config, parameters)
    if mismatch is not None:
        raise ValueError(f"the state {mismatch}")
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    digest = save_weights(directory, {llama_name(name): tensor for name, tensor in parameters.items()})
    write_config(directory, as_llama_config(config, dtype), digest, has_bytes=has_bytes, is_decoder=True)
    (directory / GENERATION_NAME).unlink(missing_ok=True)  # an older export's


def write_config(
    directory: Path, config: Mapping[str, object], weights_blake2b: str, *, has_bytes: bool, is_decoder: bool = False
) -> None:
    """Write `config.json`, with the mark that tells of the other files.

    Args:
        directory: of the model.
        config: for transformers.
        weights_blake2b: see `save_weights`.
        has_bytes: whether its tokens are bytes.
        is_decoder: whether it is a decoder of ours.

    Raises:
        OSError: the disk refuses.
    """
    mark = _Mark(weights_blake2b=weights_blake2b, has_bytes=has_bytes, is_decoder=is_decoder)
    write_json(directory / CONFIG_NAME, {**config, MARK: msgspec.to_builtins(mark)})


def save_tokenizer(directory: Path, files: Sequence[Path], *, max_seq_len: int) -> None:
    """Put a tokenizer into a model's folder.

    Args:
        directory: of the model.
        files: what it consists of; none: tokens are bytes.
        max_seq_len: how much the model reads.

    Raises:
        OSError: the disk refuses.
    """
    for name in {*TOKENIZER_NAMES} - {path.name for path in files}:
        (directory / name).unlink(missing_ok=True)  # an older export's
    if not files:
        write_json(directory / TOKENIZER_NAME, _byte_tokenizer())
    for path in files:
        with replacing(directory / path.name) as temporary:
            shutil.copyfile(path, temporary)
    if not any(path.name == TOKENIZER_CONFIG_NAME for path in files):
        told = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_seq_len,
            "clean_up_tokenization_spaces": False,
        }
        write_json(directory / TOKENIZER_CONFIG_NAME, told)


def _byte_tokenizer() -> dict[str, object]:
    """Of the tokenizers library: each byte of the UTF-8 text is a token, and its number is its value.

    The library spells bytes as letters that can be seen (GPT-2's table): those that can be seen stay, the others follow
    from U+0100 on.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    vocab = {chr(byte): byte for byte in seen} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False, "fuse_unk": False}
    absent = ("truncation", "padding", "normalizer", "post_processor")
    return {
        "version": "1.0", **dict.fromkeys(absent), "added_tokens": [], "pre_tokenizer": level, "decoder": level,
        "model": model,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- reading


def load_model(directory: Path) -> LanguageModel:
    """Read a model's folder, of ours or another one for transformers, on the CPU and in evaluation mode.

    A decoder of ours has the dtype of the file, others fp32.

    Raises:
        ModelNotFound: a file is missing.
        ModelCorrupted: a file is damaged, or they do not belong together.
        ConfigError: it is no model for transformers.
        EnvironmentFault: a file is there but cannot be read, or transformers is missing.
    """
    mark = _mark_of(directory)
    if mark is not None and mark.is_decoder:
        return _load_decoder(directory)
    described = HuggingFaceModelConfig(architecture=read_architecture(directory), folder=str(directory))
    table = FragmentTable.from_named_shapes(described.named_shapes())
    return whole_model(described, table.whole().views(described.initial_parameters(0))).eval()


def has_bytes(directory: Path) -> bool:
    """Whether the tokens of a model that was exported here are bytes.

    Raises:
        ModelNotFound, ModelCorrupted, EnvironmentFault: as `load_model`.
    """
    mark = _mark_of(directory)
    return mark is not None and mark.has_bytes


def _mark_of(directory: Path) -> _Mark | None:
    with _readable(directory):
        mark = msgspec.json.decode((directory / CONFIG_NAME).read_bytes(), type=_Marked).isthmus
        if mark is not None:
            try:
                files = weight_files(directory)
            except ConfigError as error:
                raise ModelNotFound(directory / WEIGHTS_NAME) from error
            if digest_of(files) != mark.weights_blake2b:
                raise ModelCorrupted(files[0], f"is damaged or does not belong to its {CONFIG_NAME}")
        return mark


def _load_decoder(directory: Path) -> LanguageModel:
    with _readable(directory):
        tensors: dict[str, Tensor] = {}
        for path in weight_files(directory):
            tensors |= load_file(path)
        config = from_llama_config(json.loads((directory / CONFIG_NAME).read_bytes()))
    found = {name: tensors.pop(llama_name(name)) for name, _ in config.named_shapes() if llama_name(name) in tensors}
    mismatch = _mismatch(config, found | tensors)
    if mismatch is not None:
        raise ModelCorrupted(directory / WEIGHTS_NAME, mismatch)
    model = config.build()
    model.load_state_dict(found, assign=True)
    return model.eval()


@contextlib.contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ModelNotFound(Path(error.filename)) from error
    except OSError as error:
        raise EnvironmentFault(
            f"{directory} cannot be read: {error.strerror}", cure="check its permissions and its disk"
        ) from error
    except (msgspec.MsgspecError, UnicodeError, ValueError, KeyError, TypeError) as error:
        raise ModelCorrupted(directory / CONFIG_NAME, f"is not a model's config: {error}") from error
    except SafetensorError as error:
        raise ModelCorrupted(directory / WEIGHTS_NAME, f"is not a safetensors file: {error}") from error


def _mismatch(config: ModelConfig, tensors: Mapping[str, Tensor]) -> str | None:
    """How the tensors differ from the parameters of `config`; None if they do not."""
    expected = dict(config.named_shapes())
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing:
        return f"lacks {min(missing)}"
    if unknown:
        return f"holds {min(unknown)}, which the model does not have"
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            return f"holds {name} in shape {tuple(tensors[name].shape)} instead of {shape}"
    return None
