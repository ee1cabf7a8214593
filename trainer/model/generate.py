# SPDX-License-Identifier: Apache-2.0
"""Text out of a trained model, and the two files that a trained model is kept in.

A model directory holds `model.safetensors` (the parameters by their canonical names) and `config.json` (the shape of
the decoder and the digest of the weights file, so that a pair of files that do not belong together, or a damaged
one, is noticed). Both are replaced atomically, the config last. Must not know runs, checkpoints or peers.

Errors, all the operator's, each with the path, what is wrong and the cure: `ModelNotFound` (a `ConfigError`),
`ModelCorrupted` (an `IntegrityError`), and `EnvironmentFault` where the disk refuses to read.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.trainer.errors import ConfigError, EnvironmentFault, IntegrityError
from isthmus.trainer.model.decoder import Decoder, ModelConfig, named_shapes

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


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


class _ConfigFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in `config.json`."""

    format: Literal["isthmus-decoder"] = "isthmus-decoder"
    version: Literal[1] = 1
    model: ModelConfig
    weights_blake2b: str


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: bytes,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> bytes:
    """Continue a text, one byte at a time.

    The model sees the last `max_seq_len` bytes, so an output may be of any length. Draws happen on the CPU in fp32:
    the same logits and seed give the same bytes wherever the model runs.

    Args:
        model: a decoder over bytes; its training mode is restored.
        prompt: the text before; an empty one stands for a line break.
        max_new_tokens: how many bytes to add.
        temperature: divides the logits; 0 takes the likeliest byte every time.
        top_k: draw only among the k likeliest bytes; None draws among all.
        seed: of the draws.

    Returns:
        The new bytes without the prompt; they may end inside a UTF-8 character.

    Raises:
        ValueError: an argument out of range, or a model whose tokens are not bytes.
    """
    if model.config.vocab_size != 256:
        raise ValueError(f"tokens are bytes only with a vocab_size of 256, not {model.config.vocab_size}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, it is {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, it is {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")

    device = next(model.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    text = bytearray(prompt or b"\n")
    num_prompt_bytes = len(text)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context_1L = torch.tensor([list(text[-model.config.max_seq_len :])], device=device)
            logits_V = model(context_1L)[0, -1].float().cpu()
            text.append(_draw_token(logits_V, temperature, top_k, generator))
    finally:
        model.train(was_training)
    return bytes(text[num_prompt_bytes:])


def _draw_token(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        threshold = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, float("-inf"))
    # Subtracting the maximum first keeps a very low temperature from dividing its way to inf - inf.
    probabilities_V = torch.softmax((logits_V - logits_V.max()) / temperature, dim=-1)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def save_model(directory: Path, config: ModelConfig, state_dict: Mapping[str, Tensor]) -> None:
    """Write a model directory; a crash leaves each file either old or new, never half.

    Args:
        directory: created if missing.
        config: the decoder's shape.
        state_dict: whole (unsharded) parameters by their canonical names, of any dtype and device.

    Raises:
        ValueError: the tensors are not the parameters of `config`.
        OSError: the disk refuses.
    """
    mismatch = _mismatch(config, state_dict)
    if mismatch is not None:
        raise ValueError(f"the state {mismatch}")
    weights_blake2b = save_weights(directory, state_dict)
    content = _ConfigFile(model=config, weights_blake2b=weights_blake2b)
    with _replacing(directory / CONFIG_NAME) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def save_weights(directory: Path, state_dict: Mapping[str, Tensor]) -> str:
    """Write the parameters alone; returns the BLAKE2b of their file.

    Raises:
        OSError: the disk refuses.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items()}
    with _replacing(directory / WEIGHTS_NAME) as temporary:
        save_file(tensors, temporary)
        return _file_digest(temporary)


def load_model(directory: Path) -> Decoder:
    """Read a model directory into a decoder on the CPU, in evaluation mode, parameters in the dtype of the file.

    Raises:
        ModelNotFound: a file is missing.
        ModelCorrupted: a file is damaged, or the two do not belong together.
        EnvironmentFault: a file is there but cannot be read.
    """
    config_path, weights_path = directory / CONFIG_NAME, directory / WEIGHTS_NAME
    try:
        content = msgspec.json.decode(config_path.read_bytes(), type=_ConfigFile)
        if _file_digest(weights_path) != content.weights_blake2b:
            raise ModelCorrupted(weights_path, f"is damaged or does not belong to its {CONFIG_NAME}")
        state_dict = load_file(weights_path)
    except FileNotFoundError as error:
        raise ModelNotFound(Path(error.filename)) from error
    except OSError as error:
        raise EnvironmentFault(
            f"{directory} cannot be read: {error.strerror}", cure="check its permissions and its disk"
        ) from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ModelCorrupted(config_path, f"is not a decoder's config: {error}") from error
    except SafetensorError as error:
        raise ModelCorrupted(weights_path, f"is not a safetensors file: {error}") from error
    mismatch = _mismatch(content.model, state_dict)
    if mismatch is not None:
        raise ModelCorrupted(weights_path, mismatch)
    with torch.device("meta"):
        model = Decoder(content.model)
    model.load_state_dict(state_dict, assign=True)
    return model.eval()


def _mismatch(config: ModelConfig, state_dict: Mapping[str, Tensor]) -> str | None:
    """How the tensors differ from the parameters of `config`; None if they do not."""
    expected = dict(named_shapes(config))
    missing, unknown = expected.keys() - state_dict.keys(), state_dict.keys() - expected.keys()
    if missing:
        return f"lacks {min(missing)}"
    if unknown:
        return f"holds {min(unknown)}, which the model does not have"
    for name, shape in expected.items():
        if tuple(state_dict[name].shape) != shape:
            return f"holds {name} in shape {tuple(state_dict[name].shape)} instead of {shape}"
    return None


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place, flushed to the disk, if the body succeeds."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    mode = temporary.stat().st_mode
    try:
        yield temporary
        # safetensors makes files that only their owner can read; a model follows the umask like other files.
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # The new name itself is only safe once the folder is on the disk.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
