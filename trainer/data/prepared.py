# SPDX-License-Identifier: Apache-2.0
"""A prepared text: what `isthmus data prep` writes, and what it is made of.

    index.json          what there is: type of the tokens, vocabulary, all parts with sizes and digests
    tokenizer.json      of the tokens, if they are not bytes
    train-00000-00.bin  one shard: its tokens, little-endian, filled up to four bytes; then where its documents begin
    held-00000-00.bin   likewise, of documents that are held out

The index names every other part by its digest, so the digest of the index is that of the text: who knows it can check
each part, whoever sent it, and a peer needs only those parts that it trains on. A part is described as a text is:
chunks of a MiB, a BLAKE3 of each, and a root over them.

Rules: an index may come from the network, so nothing in it is a path outside of the folder, and no number is believed
that does not fit the others. A shard is mapped, never read as a whole.

Errors: `DataError` (2); `IntegrityError` (9) for a part that is not what the index says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from isthmus.elastic.state.digest import StateManifest, TensorManifest, describe_state, digest_of
from isthmus.trainer.data.corpus import CHUNK_NBYTES, DataError, TokenArray
from isthmus.trainer.errors import IntegrityError

INDEX_NAME: Final = "index.json"
TOKENIZER_NAME: Final = "tokenizer.json"
INDEX_PART: Final = "index"
"""Name of an index in its manifest."""
PART: Final = "part"
"""Likewise of a shard and of a tokenizer."""
MAX_VOCAB_SIZE: Final = 1 << 24

TokenType = Literal["uint8", "uint16", "uint32"]
_NBYTES: Final = {"uint8": 1, "uint16": 2, "uint32": 4}
_START_NBYTES: Final = 4

PartDigest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}\Z")]
_Count = Annotated[int, Meta(ge=0, le=1 << 48)]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ShardEntry(_Struct, frozen=True, kw_only=True):
    """One shard."""

    name: _Name
    """Of its file."""
    num_tokens: Annotated[int, Meta(ge=1, le=1 << 32)]
    num_documents: Annotated[int, Meta(ge=1, le=1 << 32)]
    digest: PartDigest


class SourceEntry(_Struct, frozen=True, kw_only=True):
    """Where documents came from, for people."""

    name: Annotated[str, Meta(max_length=256)]
    weight: Annotated[float, Meta(gt=0)]
    """How often each of its documents is in the training shards, on average."""
    num_documents: _Count
    """That were read."""
    num_tokens: _Count
    """In all shards."""


class Index(_Struct, frozen=True, kw_only=True):
    """What a prepared text consists of. `end_of_document`: the token behind every document; None with bytes."""

    format: Literal[1] = 1
    dtype: TokenType
    vocab_size: Annotated[int, Meta(ge=1, le=MAX_VOCAB_SIZE)]
    end_of_document: _Count | None
    tokenizer: PartDigest | None
    """Of `tokenizer.json`; None: tokens are bytes."""
    validation_fraction: Annotated[float, Meta(gt=0, lt=1)]
    sources: Annotated[tuple[SourceEntry, ...], Meta(max_length=4096)]
    train: Annotated[tuple[ShardEntry, ...], Meta(min_length=1, max_length=1 << 22)]
    held_out: Annotated[tuple[ShardEntry, ...], Meta(min_length=1, max_length=1 << 22)]
    train_text_nbytes: _Count
    """Of UTF-8, that the tokens of these shards stand for; the ends of documents stand for none."""
    held_out_text_nbytes: _Count

    def nbytes(self, shard: ShardEntry) -> int:
        """Bytes of a shard's file."""
        return self.starts_offset(shard) + _START_NBYTES * shard.num_documents

    def starts_offset(self, shard: ShardEntry) -> int:
        """Where in a shard's file the beginnings of its documents stand."""
        nbytes = shard.num_tokens * _NBYTES[self.dtype]
        return -(-nbytes // _START_NBYTES) * _START_NBYTES

    @property
    def shards(self) -> Iterator[ShardEntry]:
        """All of them."""
        yield from self.train
        yield from self.held_out


_INDICES: msgspec.json.Decoder[Index] = msgspec.json.Decoder(Index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedText:
    """A prepared text as a run knows it. Its parts may be anywhere (`trainer.data.shard_supply`).

    Attributes:
        index: what it consists of.
        index_bytes: its file.
        manifest: of that file; its root is the text's digest.
        folder: where its owner keeps all of it; None: parts come from elsewhere.
        description: one line for people.
    """

    index: Index
    index_bytes: bytes
    manifest: StateManifest
    folder: Path | None
    description: str

    @classmethod
    def of(cls, index_bytes: bytes, *, folder: Path | None, description: str, where: Path | None) -> "PreparedText":
        """From the bytes of an index.

        Raises:
            DataError: they are none; names `where`.
        """
        try:
            index = _INDICES.decode(index_bytes)
            _require_sound(index)
        except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
            raise DataError(
                where,
                f"is no index of a prepared text that this version knows: {error}",
                cure="prepare the text again with isthmus data prep",
            ) from error
        manifest = describe_bytes(INDEX_PART, index_bytes)
        return cls(index=index, index_bytes=index_bytes, manifest=manifest, folder=folder, description=description)

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that name this text; peers compare them before they train together."""
        return self.manifest.digest.hex()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(map(self.index.nbytes, self.index.shards))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return self.index.vocab_size

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text, on average."""
        return bytes_per_token(self.index.held_out_text_nbytes, self.index.held_out)

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Tokens of every shard that is trained on."""
        return tuple(shard.num_tokens for shard in self.index.train)


def bytes_per_token(text_nbytes: int, shards: Sequence[ShardEntry]) -> float:
    """How many bytes of text a token stands for in all these shards, on average; a text has one at least."""
    return max(1, text_nbytes) / sum(shard.num_tokens for shard in shards)


def _require_sound(index: Index) -> None:
    """What the types cannot say.

    Raises:
        ValueError: the vocabulary does not fit the tokens, or two parts have one name.
    """
    if index.vocab_size > 1 << 8 * _NBYTES[index.dtype]:
        raise ValueError(f"{index.vocab_size} tokens do not fit into {index.dtype}")
    names = [shard.name for shard in index.shards]
    if len(set(names)) < len(names):
        raise ValueError("two shards have the same name")


def is_prepared(path: Path) -> bool:
    """Whether a folder is a prepared text, whole or not."""
    return (path / INDEX_NAME).is_file()


def load_prepared(folder: Path) -> PreparedText:
    """The prepared text in a folder. Reads its index alone.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    path = folder / INDEX_NAME
    try:
        index_bytes = path.read_bytes()
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", cure="check its permissions and its disk") from error
    return PreparedText.of(index_bytes, folder=folder, description=folder.resolve().name, where=path)


# -------------------------------------------------------------------------------------------------------------- parts


def describe_bytes(name: str, data: bytes | memoryview) -> StateManifest:
    """Sizes and chunk digests of one part."""
    view = memoryview(data).cast("B")
    digests = tuple(digest_of(view[at : at + CHUNK_NBYTES]) for at in range(0, len(view), CHUNK_NBYTES))
    return describe_state(0, (TensorManifest(name, len(view), digests),), chunk_nbytes=CHUNK_NBYTES)


def describe_part(path: Path) -> StateManifest:
    """Likewise of a file, which is mapped.

    Raises:
        OSError: it cannot be read.
    """
    if path.stat().st_size == 0:
        return describe_bytes(PART, b"")
    return describe_bytes(PART, np.memmap(path, dtype=np.uint8, mode="r").data)


def require_part(path: Path, digest: str) -> None:
    """Check a part's bytes. Blocks while it is read.

    Raises:
        IntegrityError: they are not what the digest says.
        OSError: it cannot be read.
    """
    if describe_part(path).digest.hex() != digest:
        raise IntegrityError(f"{path} is damaged or of another text", cure="prepare the text again, or delete the file")


def tokens_of(path: Path, index: Index, shard: ShardEntry) -> TokenArray:
    """A shard's tokens, [num_tokens], read-only: a map of its file.

    Raises:
        IntegrityError: the file has another size.
        OSError: it cannot be read.
    """
    _require_size(path, index, shard)
    tokens: TokenArray = np.memmap(path, dtype=np.dtype(index.dtype), mode="r", shape=(shard.num_tokens,))
    return tokens


def starts_of(path: Path, index: Index, shard: ShardEntry) -> npt.NDArray[np.uint32]:
    """Where a shard's documents begin, [num_documents] uint32, ascending from 0; otherwise as `tokens_of`."""
    _require_size(path, index, shard)
    offset = index.starts_offset(shard)
    return np.memmap(path, dtype=np.uint32, mode="r", offset=offset, shape=(shard.num_documents,))


def _require_size(path: Path, index: Index, shard: ShardEntry) -> None:
    if path.stat().st_size != index.nbytes(shard):
        raise IntegrityError(f"{path} has another size than its index says", cure="prepare the text again")


def dtype_of(vocab_size: int) -> TokenType:
    """The smallest type that holds all tokens."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"
