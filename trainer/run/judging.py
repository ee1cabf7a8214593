# SPDX-License-Identifier: Apache-2.0
"""A model on held-out text without a run: of a peer's newest checkpoint, of one checkpoint, or of an exported folder.

The text is the run's own held-out side, of which every token is judged once, or another one, of which all of it is.
Must not know workers or the network.

Errors: `ConfigError` (2): no such model, or no text; `CheckpointCorrupted` and `ModelCorrupted` (9);
`EnvironmentFault` (3).
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from isthmus.trainer.checkpoint.checkpoint import Checkpoint
from isthmus.trainer.checkpoint.export import restore
from isthmus.trainer.config.base_model import model_of, require_base_model
from isthmus.trainer.config.job import Device
from isthmus.trainer.config.outer_method import tokens_per_sample
from isthmus.trainer.config.settings import Config
from isthmus.trainer.data.samples import validation_batches
from isthmus.trainer.errors import ConfigError
from isthmus.trainer.model.evaluate import bits_per_byte, evaluate
from isthmus.trainer.model.exported import has_bytes, load_model
from isthmus.trainer.model.language_model import LanguageModel, whole_model
from isthmus.trainer.model.model_folder import CONFIG_NAME, TOKENIZER_NAME
from isthmus.trainer.run.judged_text import JudgedText, held_out_text, text_at
from isthmus.trainer.workers.devices import choose_device

_TOKENS_AT_ONCE: Final = 1 << 14
"""Of one forward."""


class JudgedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What `isthmus eval` tells: schema `isthmus.eval/1`.

    Attributes:
        source: the folder.
        run_id, outer_step: of the checkpoint; null for an exported model.
        tokens_trained: that the run had trained on by then; likewise.
        loss: mean, nats a token.
        bits_per_byte: the same, whatever a token is.
        perplexity: its exponential, a token.
        num_tokens: that were judged.
        text: which one, for people.
        is_held_out: whether it is what the run holds out; else another text, all of it.
        device, seconds: where, and for how long.
    """

    schema: str = "isthmus.eval/1"
    source: str
    run_id: str | None
    outer_step: int | None
    tokens_trained: int | None
    loss: float
    bits_per_byte: float
    perplexity: float
    num_tokens: int
    text: str
    is_held_out: bool
    device: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Subject:
    """What is judged. Checkpoint and configuration are known where it comes from a run. No tokenizer: bytes."""

    model: LanguageModel
    seq_len: int
    tokenizer: Path | None
    checkpoint: Checkpoint | None = None
    config: Config | None = None


def judge_model(
    source: Path, *, data: Path | None, num_tokens: int | None, device: Device, base: Path | None = None
) -> JudgedModel:
    """Judge the model in a folder.

    Args:
        source: a peer's folder, its checkpoints' folder, one checkpoint, or a model's folder, such as `isthmus export`
            has written.
        data: another text than the run's: one that is prepared, or a file or folder as for `load_corpus`.
        num_tokens: judge about so many, spread evenly over the text; None: all.
        device: where.
        base: where the Hugging Face model is that the run began with; None: where its founder had it.

    Raises:
        ConfigError: see the module; likewise the others.
    """
    subject = _find(source, base)
    text = _text_of(subject, data)
    place = torch.device(choose_device(device, 1))
    batch_size, num_batches = _batches_of(num_tokens, subject.seq_len)
    counted = _Counted()
    batches = validation_batches(text.tokens, subject.seq_len, batch_size, num_batches)
    began = time.monotonic()
    loss = evaluate(subject.model.to(place), counted.all_of(batches))
    meta, config = None if subject.checkpoint is None else subject.checkpoint.meta, subject.config
    trained = None
    if meta is not None and config is not None:
        trained = (meta.next_index - sum(map(len, meta.returned))) * tokens_per_sample(config.model)
    return JudgedModel(
        source=str(source),
        run_id=None if meta is None else meta.run_id,
        outer_step=None if meta is None else meta.outer_step,
        tokens_trained=trained,
        loss=loss,
        bits_per_byte=bits_per_byte(loss, text.bytes_per_token),
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        num_tokens=counted.num_tokens,
        text=text.description,
        is_held_out=text.is_held_out,
        device=str(place),
        seconds=time.monotonic() - began,
    )


def _batches_of(num_tokens: int | None, seq_len: int) -> tuple[int, int | None]:
    """How many samples a batch has, and how many batches there are, for about so many tokens; None: for all."""
    batch_size = max(1, _TOKENS_AT_ONCE // seq_len)
    if num_tokens is None:
        return batch_size, None
    num_samples = max(1, round(num_tokens / seq_len))
    num_batches = -(-num_samples // batch_size)
    return -(-num_samples // num_batches), num_batches


def _find(source: Path, base: Path | None) -> _Subject:
    if (source / CONFIG_NAME).is_file():
        model = load_model(source)
        tokenizer = None if has_bytes(source) else source / TOKENIZER_NAME
        return _Subject(model=model, seq_len=model.max_seq_len, tokenizer=tokenizer)
    restored = restore(source)
    checkpoint, config = restored.checkpoint, restored.config
    if config.is_loops:
        raise ConfigError(
            f"{source} is of a run of loops of their own, and only they can build its model",
            cure="export its parameters with isthmus export, and judge them in the loop",
        )
    if base is not None:
        config = config.model_copy(update={"node": config.node.model_copy(update={"model": base})})
    require_base_model(config, flag="--base")
    return _Subject(
        model=whole_model(model_of(config), restored.parameters).eval(),
        seq_len=tokens_per_sample(config.model),
        tokenizer=checkpoint.tokenizer,
        checkpoint=checkpoint,
        config=config,
    )


def _folder_of(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.parent.parent


def _text_of(subject: _Subject, data: Path | None) -> JudgedText:
    checkpoint, config = subject.checkpoint, subject.config
    folder = None if checkpoint is None else _folder_of(checkpoint)
    if data is not None:
        return text_at(data, subject.seq_len, tokenizer=subject.tokenizer, folder=folder, config=config)
    if folder is None or config is None:
        raise ConfigError("an exported model does not say which text its run held out", cure="name a text with --data")
    return held_out_text(folder, config)


class _Counted:
    """Counts the tokens that pass."""

    num_tokens = 0

    def all_of(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs_BL, targets_BL in batches:
            self.num_tokens += targets_BL.numel()
            yield inputs_BL, targets_BL


def render_judged(judged: JudgedModel) -> str:
    """For people, two lines."""
    of_run = "" if judged.run_id is None else f"run {judged.run_id}, outer step {judged.outer_step}, "
    trained = "" if judged.tokens_trained is None else f"trained on {judged.tokens_trained:,} tokens, "
    which = "held out of " if judged.is_held_out else ""
    return (
        f"loss {judged.loss:.4f} nats a token, {judged.bits_per_byte:.4f} bits a byte, "
        f"perplexity {judged.perplexity:.4g}\n"
        f"{of_run}{trained}judged on {judged.num_tokens:,} tokens {which}{judged.text}"
    )
