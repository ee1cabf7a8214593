# SPDX-License-Identifier: Apache-2.0
"""What a model is judged on: what its run holds out, or all of another text, in the model's own tokens.

Of a prepared text a peer may have a few held-out shards only; then those are judged, and that is told. A text that is
not prepared is put into the model's tokens here. Must not know models or checkpoints.

Errors: `DataError` and `ConfigError` (2): no such text, or one in other tokens; `IntegrityError` (9) for a damaged
shard; `EnvironmentFault` (3).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from isthmus.trainer.config.settings import Config
from isthmus.trainer.data.corpus import Corpus, DataError, TokenArray, load_corpus
from isthmus.trainer.data.places import ShardPlaces
from isthmus.trainer.data.prep.lots import encoded
from isthmus.trainer.data.prepared import (
    TOKENIZER_NAME,
    PreparedText,
    ShardEntry,
    bytes_per_token,
    is_prepared,
    load_prepared,
    require_part,
    tokens_of,
)
from isthmus.trainer.data.samples import Shards
from isthmus.trainer.data.text import Text, text_of_run
from isthmus.trainer.data.tokenizer import FileTokenizer
from isthmus.trainer.errors import ConfigError, EnvironmentFault
from isthmus.trainer.run.founding import recall_text

_BLOCK_NBYTES: Final = 1 << 20
"""Of a text that is put into tokens at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgedText:
    """What a model is judged on.

    Attributes:
        tokens: all of it.
        description: which text, for people.
        bytes_per_token: on average.
        is_held_out: whether a run holds it out; else it is another text, all of it.
    """

    tokens: Shards
    description: str
    bytes_per_token: float
    is_held_out: bool


def held_out_text(folder: Path, config: Config) -> JudgedText:
    """What the run of this peer's folder holds out, as far as it is on this machine.

    Raises:
        DataError: see the module; likewise the others.
    """
    digest = recall_text(folder, config, is_resumed=True)
    return _held_out(text_of_run(folder, config, digest), folder)


def text_at(
    path: Path, seq_len: int, *, tokenizer: Path | None, folder: Path | None = None, config: Config | None = None
) -> JudgedText:
    """Another text; but of the run's own one what it holds out, since the run has trained on the rest.

    Args:
        path: a prepared text, or a file or folder as for `load_corpus`.
        seq_len: tokens of a sample.
        tokenizer: the model's `tokenizer.json`; None: its tokens are bytes.
        folder: of a peer of the model's run, if it has one; likewise `config`.
        config: of the run.

    Raises:
        DataError: see the module; likewise the others.
    """
    digest = None if folder is None or config is None else recall_text(folder, config, is_resumed=True)
    if is_prepared(path):
        prepared = load_prepared(path)
        if prepared.digest == digest:
            return _held_out(prepared, path)
        _require_same_tokens(prepared, path, tokenizer)
        return _whole(prepared, path)
    if digest is not None and config is not None:
        fraction, limit = config.data.validation_fraction, config.data.limit_nbytes
        corpus = load_corpus(path, seq_len=seq_len, validation_fraction=fraction, limit_nbytes=limit)
        if corpus.digest == digest:
            return _held_out(corpus, path)
    corpus = load_corpus(path, seq_len=seq_len)
    text = tokens = np.concatenate((corpus.train, corpus.validation))
    if tokenizer is not None:
        tokens = np.concatenate(list(_in_tokens(text, FileTokenizer(tokenizer, needs_end=False))))
    return JudgedText(
        tokens=Shards.of(tokens),
        description=corpus.description,
        bytes_per_token=len(text) / max(1, len(tokens)),
        is_held_out=False,
    )


def _held_out(text: Text, folder: Path) -> JudgedText:
    if isinstance(text, Corpus):
        tokens, description = Shards.of(text.validation), text.description
    else:
        places, entries = ShardPlaces(text, folder), text.index.held_out
        here = [entry for entry in entries if places.find(entry.digest) is not None]
        if not here:
            raise DataError(folder, "has nothing of what the run holds out", cure="name its prepared text with --data")
        tokens, description = _shards(text, places, here), text.description
        if len(here) < len(entries):
            description += f", {len(here)} of {len(entries)} shards"
    return JudgedText(tokens=tokens, description=description, bytes_per_token=text.bytes_per_token, is_held_out=True)


def _whole(text: PreparedText, folder: Path) -> JudgedText:
    index, entries = text.index, list(text.index.shards)
    return JudgedText(
        tokens=_shards(text, ShardPlaces(text, folder), entries),
        description=text.description,
        bytes_per_token=bytes_per_token(index.train_text_nbytes + index.held_out_text_nbytes, entries),
        is_held_out=False,
    )


def _shards(text: PreparedText, places: ShardPlaces, entries: Sequence[ShardEntry]) -> Shards:
    def opened(shard: int) -> TokenArray:
        entry = entries[shard]
        path = places.find(entry.digest)
        if path is None:
            raise DataError(text.folder, f"has no shard {entry.name}", cure="prepare the text again")
        try:
            require_part(path, entry.digest)
            return tokens_of(path, text.index, entry)
        except OSError as error:
            raise EnvironmentFault(
                f"{path} cannot be read: {error.strerror}", cure="check its permissions and its disk"
            ) from error

    return Shards(tuple(entry.num_tokens for entry in entries), opened)


def _in_tokens(text: TokenArray, tokenizer: FileTokenizer) -> Iterator[TokenArray]:
    """A text of bytes in the tokens of another tokenizer, block by block; a block ends with a line if it can."""
    start = 0
    while start < len(text):
        block = text[start : start + _BLOCK_NBYTES].tobytes()
        if start + len(block) < len(text):
            block = block[: block.rfind(b"\n") + 1] or block
        yield from encoded([block.decode(errors="replace")], tokenizer)
        start += len(block)


def _require_same_tokens(text: PreparedText, folder: Path, tokenizer: Path | None) -> None:
    own = None if text.index.tokenizer is None else folder / TOKENIZER_NAME
    if _words(own) != _words(tokenizer):
        raise DataError(
            folder,
            "was prepared with another tokenizer than the model's",
            cure="prepare the text with the model's (--tokenizer), or name the text itself",
        )


def _words(tokenizer: Path | None) -> object:
    """What a `tokenizer.json` says, in whatever spelling."""
    if tokenizer is None:
        return None
    try:
        return json.loads(tokenizer.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tokenizer} is no tokenizer.json: {error}", cure="copy it anew") from error
