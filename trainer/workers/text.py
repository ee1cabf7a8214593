# SPDX-License-Identifier: Apache-2.0
"""The run's text from the daemon to its workers: one in one piece by descriptors, a prepared one by its index.

Rules: nothing is copied that is a file. A worker opens a shard when it first needs a sample of it, and keeps the maps
that it used last. Must not know where a text is from.

Errors: `DataError`, `IntegrityError`, `EnvironmentFault`, for what is not as the daemon has said.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from isthmus.trainer.config.job import FilePart, TextInMemory, TextInShards
from isthmus.trainer.data.corpus import Corpus, TokenArray
from isthmus.trainer.data.prepared import Index, PreparedText, ShardEntry, tokens_of
from isthmus.trainer.data.samples import Shards
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.workers.shared_buffer import SharedTokens

_MOST_MAPS: Final = 64
"""Shards that one side keeps mapped."""


@contextlib.asynccontextmanager
async def text_for_workers(
    text: Corpus | PreparedText, *, cache: Path, pool: int
) -> AsyncIterator[TextInMemory | TextInShards]:
    """What a worker is told of the text. The descriptors in it are open in the body.

    Args:
        text: the run's.
        cache: where copies of shards lie.
        pool: shards that are mixed at a time.
    """
    if isinstance(text, PreparedText):
        index = np.frombuffer(text.index_bytes, dtype=np.uint8)
        with contextlib.closing(await asyncio.to_thread(SharedTokens.share, index)) as shared:
            yield _in_shards(text, shared, cache, pool)
        return
    with (
        contextlib.closing(await asyncio.to_thread(SharedTokens.share, text.train)) as train,
        contextlib.closing(await asyncio.to_thread(SharedTokens.share, text.validation)) as validation,
    ):
        yield TextInMemory(train=_part(train), validation=_part(validation))


def _in_shards(text: PreparedText, index: SharedTokens, cache: Path, pool: int) -> TextInShards:
    """By absolute paths: a worker may have another working directory."""
    folder = None if text.folder is None else str(text.folder.absolute())
    return TextInShards(index=_part(index), folder=folder, cache=str(cache.absolute()), pool=pool)


def _part(tokens: SharedTokens) -> FilePart:
    return FilePart(fd=tokens.fd, offset=tokens.offset, numel=tokens.numel)


def sides_of(text: TextInMemory | TextInShards) -> tuple[TokenArray | Shards, TokenArray | Shards]:
    """In a worker: what is trained on and what is held out."""
    if isinstance(text, TextInMemory):
        return _inherited(text.train), _inherited(text.validation)
    prepared = PreparedText.of(_inherited(text.index).tobytes(), folder=None, description="", where=None)
    index = prepared.index
    return _shards(text, index, index.train, text.pool), _shards(text, index, index.held_out, 1)


def _inherited(part: FilePart) -> TokenArray:
    return SharedTokens(part.fd, part.offset, part.numel).tokens()


def _shards(text: TextInShards, index: Index, entries: Sequence[ShardEntry], pool: int) -> Shards:
    lengths = tuple(entry.num_tokens for entry in entries)
    return Shards(lengths, functools.lru_cache(maxsize=_MOST_MAPS)(_opener(text, index, entries)), pool)


def _opener(text: TextInShards, index: Index, entries: Sequence[ShardEntry]) -> Callable[[int], TokenArray]:
    def open_shard(shard: int) -> TokenArray:
        entry = entries[shard]
        owned = None if text.folder is None else Path(text.folder) / entry.name
        path = owned if owned is not None and owned.is_file() else Path(text.cache) / entry.digest
        try:
            return tokens_of(path, index, entry)
        except OSError as error:
            raise EnvironmentFault(
                f"a shard of the run's text cannot be read: {path}: {error.strerror}",
                cure="leave it while a run uses it",
            ) from error

    return open_shard
