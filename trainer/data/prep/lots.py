# SPDX-License-Identifier: Apache-2.0
"""One lot: the pieces that a process turns into shards of their own, alone and in bounded memory.

A lot's outcome follows from the lot and the `Task` alone, whoever prepares it and beside whom. Rules: files of a lot
that was cut short are written again; what was finished is told by its record (`preparing.py`). At most one shard a side
is in memory, and a few hundred documents.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from isthmus.trainer.data.corpus import TokenArray
from isthmus.trainer.data.prep.documents import Piece, documents_in, share_of
from isthmus.trainer.data.prepared import TOKENIZER_NAME, ShardEntry, describe_part, dtype_of
from isthmus.trainer.data.tokenizer import Bytes, FileTokenizer, Tokenizer

_BATCH_LENGTH: Final = 256 << 10
"""Letters that are encoded at once; a longer document is cut at a line end near it, and its tokens put together."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is equal for all lots."""

    out: str
    has_tokenizer: bool
    end_of_document: str | None
    field: str
    weights: tuple[float, ...]
    """Of the sources."""
    threshold: float
    """A document whose share is smaller is held out."""
    shard_nbytes: int


class Lot(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces that are prepared together."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """About, of what is read."""
        return sum(piece.nbytes for piece in self.pieces)


class LotRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a lot. `documents` and `tokens` by source; shares: the smallest and largest of a document.

    Bytes: of UTF-8, that the tokens of a side stand for.
    """

    number: int
    train: tuple[ShardEntry, ...]
    held_out: tuple[ShardEntry, ...]
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    train_text_nbytes: int
    held_out_text_nbytes: int
    threshold: float
    """Of the task."""
    least_share: float
    largest_share: float


def tokenizer_of(task: Task) -> Tokenizer:
    """The task's tokenizer.

    Raises:
        DataError: see `FileTokenizer`; also EnvironmentFault.
    """
    return FileTokenizer(Path(task.out) / TOKENIZER_NAME, task.end_of_document) if task.has_tokenizer else Bytes()


def prepare_lot(task: Task, lot: Lot, tokenizer: Tokenizer, advanced: Callable[[int], None]) -> LotRecord:
    """Write a lot's shards. `advanced` is told of every piece that is done, with its bytes.

    Raises:
        DataError: a document cannot be read.
        OSError: the disk refuses.
    """
    train = _ShardWriter(task, tokenizer, f"train-{lot.number:06d}")
    held_out = _ShardWriter(task, tokenizer, f"held-{lot.number:06d}")
    documents, tokens = [0] * len(task.weights), [0] * len(task.weights)
    train_nbytes = held_out_nbytes = 0
    shares = [1.0, 0.0]
    for piece in lot.pieces:
        for texts in _batches(documents_in(piece, task.field)):
            for text, tokens_of_text in zip(texts, encoded(texts, tokenizer), strict=True):
                share = share_of(text, b"split")
                shares = [min(shares[0], share), max(shares[1], share)]
                is_held_out = share < task.threshold
                copies = 1 if is_held_out else _copies(text, task.weights[piece.source])
                documents[piece.source] += 1
                nbytes = tokenizer.text_nbytes(text)
                if is_held_out:
                    held_out_nbytes += nbytes
                else:
                    train_nbytes += copies * nbytes
                for _ in range(copies):
                    tokens[piece.source] += (held_out if is_held_out else train).add(tokens_of_text)
        advanced(piece.nbytes)
    return LotRecord(
        number=lot.number,
        train=train.finish(),
        held_out=held_out.finish(),
        documents=tuple(documents),
        tokens=tuple(tokens),
        train_text_nbytes=train_nbytes,
        held_out_text_nbytes=held_out_nbytes,
        threshold=task.threshold,
        least_share=shares[0],
        largest_share=shares[1],
    )


def _copies(text: str, weight: float) -> int:
    """How often a document is taken: the whole part of the weight, and once more for its fraction of all documents."""
    whole = int(weight)
    return whole + (share_of(text, b"weight") < weight - whole)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch, length = list[str](), 0
    for document in documents:
        if batch and length + len(document) > _BATCH_LENGTH:
            yield batch
            batch, length = [], 0
        batch.append(document)
        length += len(document)
    if batch:
        yield batch


def encoded(texts: list[str], tokenizer: Tokenizer) -> Iterator[TokenArray]:
    """The tokens of each text; of a long one in bounded memory, put together of parts that end with a line."""
    if len(texts) > 1 or len(texts[0]) <= _BATCH_LENGTH:
        yield from tokenizer.encode(texts)
        return
    # To bytes a line break would be added behind each part.
    parts = (texts[0],) if isinstance(tokenizer, Bytes) else _parts_of(texts[0])
    yield np.concatenate([tokens for part in parts for tokens in tokenizer.encode([part])])


def _parts_of(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = text.find("\n", start + _BATCH_LENGTH, start + 2 * _BATCH_LENGTH) + 1
        stop = stop or min(len(text), start + 2 * _BATCH_LENGTH)
        yield text[start:stop]
        start = stop


@dataclass(slots=True, eq=False)
class _ShardWriter:
    """The shards of one side of a lot, one after the other. A document longer than a shard goes on in the next one."""

    task: Task
    tokenizer: Tokenizer
    stem: str
    _entries: list[ShardEntry] = field(default_factory=list)
    _tokens: TokenArray = field(init=False)
    _starts: list[int] = field(default_factory=list)
    _length: int = 0

    def __post_init__(self) -> None:
        dtype = np.dtype(dtype_of(self.tokenizer.vocab_size))
        self._tokens = np.empty(max(1, self.task.shard_nbytes // dtype.itemsize), dtype=dtype)

    def add(self, tokens: TokenArray) -> int:
        """Returns how many tokens it has become, with that at its end."""
        end = self.tokenizer.end_of_document
        whole = tokens if end is None else np.append(tokens, np.uint32(end))
        done = 0
        while done < len(whole):
            if self._length == len(self._tokens):
                self._write()
            taken = min(len(whole) - done, len(self._tokens) - self._length)
            self._starts.append(self._length)
            self._tokens[self._length : self._length + taken] = whole[done : done + taken]
            self._length += taken
            done += taken
        return len(whole)

    def finish(self) -> tuple[ShardEntry, ...]:
        """Write the last one; what there is now."""
        if self._length:
            self._write()
        return tuple(self._entries)

    def _write(self) -> None:
        """On the disk before anybody is told of it."""
        path = Path(self.task.out) / f"{self.stem}-{len(self._entries):03d}.bin"
        tokens = self._tokens[: self._length]
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            file.write(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
            file.write(bytes(-tokens.nbytes % 4))
            file.write(np.array(self._starts, dtype="<u4").data)
            file.flush()
            os.fsync(file.fileno())
        digest = describe_part(partial).digest.hex()
        partial.replace(path)
        self._entries.append(
            ShardEntry(name=path.name, num_tokens=self._length, num_documents=len(self._starts), digest=digest)
        )
        self._starts, self._length = [], 0
