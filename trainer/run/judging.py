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
from itertools import chain, islice
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from isthmus.trainer.checkpoint.checkpoint import Checkpoint
from isthmus.trainer.checkpoint.export import restore
from isthmus.trainer.config.job import Device
from isthmus.trainer.config.outer_method import tokens_per_sample
from isthmus.trainer.config.settings import Config
from isthmus.trainer.data.corpus import Corpus, TokenArray, load_corpus
from isthmus.trainer.data.samples import validation_batches
from isthmus.trainer.data.text import text_of_run
from isthmus.trainer.errors import ConfigError
from isthmus.trainer.model.decoder import Decoder
from isthmus.trainer.model.evaluate import bits_per_byte, evaluate
from isthmus.trainer.model.generate import CONFIG_NAME, load_model
from isthmus.trainer.run.founding import recall_text
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
    """What is judged. Checkpoint and configuration are known where it comes from a run."""

    model: Decoder
    seq_len: int
    checkpoint: Checkpoint | None = None
    config: Config | None = None


def judge_model(source: Path, *, data: Path | None, num_tokens: int | None, device: Device) -> JudgedModel:
    """Judge the model in a folder.

    Args:
        source: a peer's folder, its checkpoints' folder, one checkpoint, or what `isthmus export` has written.
        data: another text than the run's; a file or folder as for `load_corpus`.
        num_tokens: judge about so many, spread evenly over the text; None: all.
        device: where.

    Raises:
        ConfigError: see the module; likewise the others.
    """
    subject = _find(source)
    text, sides, is_held_out = _text_of(subject, data)
    place = torch.device(choose_device(device, 1))
    batch_size = max(1, _TOKENS_AT_ONCE // subject.seq_len)
    num_batches = None if num_tokens is None else max(1, num_tokens // (batch_size * subject.seq_len))
    counted = _Counted()
    batches = chain.from_iterable(validation_batches(side, subject.seq_len, batch_size, num_batches) for side in sides)
    began = time.monotonic()
    loss = evaluate(subject.model.to(place), counted.all_of(islice(batches, num_batches)))
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
        is_held_out=is_held_out,
        device=str(place),
        seconds=time.monotonic() - began,
    )


def _find(source: Path) -> _Subject:
    if (source / CONFIG_NAME).is_file():
        model = load_model(source)
        return _Subject(model=model, seq_len=model.config.max_seq_len)
    restored = restore(source)
    config = restored.config
    if config.is_loops:
        raise ConfigError(
            f"{source} is of a run of loops of their own, and only they can build its model",
            cure="export its parameters with isthmus export, and judge them in the loop",
        )
    decoder = config.model.decoder_config()
    with torch.device("meta"):
        model = Decoder(decoder)
    model.load_state_dict(dict(restored.parameters), assign=True)
    seq_len = tokens_per_sample(config.model)
    return _Subject(model=model.eval(), seq_len=seq_len, checkpoint=restored.checkpoint, config=config)


def _text_of(subject: _Subject, data: Path | None) -> tuple[Corpus, tuple[TokenArray, ...], bool]:
    """The text, what of it is judged, and whether that is what the run holds out."""
    checkpoint, config = subject.checkpoint, subject.config
    digest = None
    if checkpoint is not None and config is not None:
        folder = checkpoint.path.parent.parent
        digest = recall_text(folder, config, is_resumed=True)
        if data is None:
            corpus = text_of_run(folder, config, digest)
            return corpus, (corpus.validation,), True
    if data is None:
        raise ConfigError("an exported model does not say which text its run held out", cure="name a text with --data")
    fraction = None if config is None else config.data.validation_fraction
    limit = None if config is None else config.data.limit_nbytes
    if digest is not None:
        corpus = load_corpus(data, seq_len=subject.seq_len, validation_fraction=fraction, limit_nbytes=limit)
        if corpus.digest == digest:  # the run has trained on the rest of it
            return corpus, (corpus.validation,), True
    corpus = load_corpus(data, seq_len=subject.seq_len)
    return corpus, (corpus.train, corpus.validation), False


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
