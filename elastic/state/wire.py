# SPDX-License-Identifier: Apache-2.0
"""What learner and donor say to each other on a STATE connection, and how long each may take.

The learner asks, the donor answers in the order of the questions. Requests and headers are msgpack; chunks are raw
bytes in pieces of at most PIECE_NBYTES, whose frames carry the number that was asked for. Rules: nobody allocates what
the other side announced without a bound of its own, and the deadline is one for every piece, never a fixed total: a
donor that hangs is noticed after one piece's time, however large the state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.collective.core.types import OuterStep, PeerId
from isthmus.collective.errors import RemoteProtocolError
from isthmus.elastic.core.messages import Digest, Natural, Reason
from isthmus.elastic.state.digest import StateManifest, count_chunks
from isthmus.elastic.state.replica import CommitEntry, CountedWeight, ResultChunk, RoundRecord

PIECE_NBYTES = 256 << 10
"""Bytes of one STATE_CHUNK frame; a chunk is sent as several."""


MAX_STOCK = 4096
"""Commits that a Stock tells of. Nobody replays more."""
MAX_DESCRIPTION = 200
"""Characters of a text's name for people."""
MAX_ROUNDS = 4096
"""Of one outer step."""
MAX_NOTES = 64
"""Numbers that go with one payload."""
_SLACK = 16
"""How many times slower than before a donor may become: its line is shared, and its exchanges come first."""


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of what a learner asks for."""


class ManifestRequest(_Request, frozen=True):
    """Pin the state you hold and describe it. Answered by a StateManifest; replaces an earlier pin."""


class PrivateRequest(_Request, frozen=True):
    """Copy the state that is yours alone and describe it. Answered, pinned and read like the shared one."""


class TextRequest(_Request, frozen=True):
    """Describe the text with this digest: the run's, or a part of it. Answered by a TextOffer.

    Its chunks are read like those of a state.
    """

    digest: Digest


class ChunkRequest(_Request, frozen=True):
    """Chunk number `index` of what was described last, counted through all tensors. Answered by its bytes."""

    index: Natural


class CommitRequest(_Request, frozen=True):
    """The commit that made this step. Answered by a CommitHeader and then its result chunks."""

    outer_step: OuterStep


class StockRequest(_Request, frozen=True):
    """How large are the commits that made `first` and the steps after it? Answered by a Stock."""

    first: OuterStep


StateRequest = ManifestRequest | PrivateRequest | TextRequest | ChunkRequest | CommitRequest | StockRequest


class TextOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a text, or a part of one, consists of: its manifest, whose root is its digest, and its name for people."""

    manifest: StateManifest
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]


class Stock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of the results that are kept, step by step from the one that was asked for; none if that is gone.

    It only helps to choose between replaying and fetching: a false one costs bytes, never bits.
    """

    nbytes: Annotated[tuple[Natural, ...], Meta(max_length=MAX_STOCK)]


class RoundHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A RoundRecord without its bytes; `chunks` has (start_numel, nbytes) of every chunk that follows."""

    codec: Annotated[str, Meta(max_length=32)]
    weights: Annotated[tuple[tuple[PeerId, CountedWeight], ...], Meta(max_length=1024)]
    notes: Annotated[tuple[Annotated[tuple[float, ...], Meta(max_length=MAX_NOTES)], ...], Meta(max_length=1024)]
    chunks: tuple[tuple[Natural, Natural], ...]


class CommitHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CommitEntry without its bytes, which follow round by round, chunk by chunk."""

    outer_step: OuterStep
    digest: Digest
    rounds: Annotated[tuple[RoundHeader, ...], Meta(max_length=MAX_ROUNDS)]

    @classmethod
    def of(cls, entry: CommitEntry) -> "CommitHeader":
        """What goes before the bytes of these results."""
        rounds = tuple(
            RoundHeader(
                record.codec,
                record.weights,
                record.notes,
                tuple((chunk.start_numel, len(chunk.data)) for chunk in record.chunks),
            )
            for record in entry.rounds
        )
        return cls(entry.outer_step, entry.digest, rounds)

    @property
    def chunks(self) -> tuple[tuple[Natural, Natural], ...]:
        """Those of all rounds, in the order of their bytes."""
        return tuple(chunk for header in self.rounds for chunk in header.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes that follow."""
        return sum(nbytes for _, nbytes in self.chunks)

    def with_chunks(self, chunks: Sequence[ResultChunk]) -> CommitEntry:
        """The entry, once its bytes are here, in the order of `chunks`."""
        rest = iter(chunks)
        rounds = tuple(
            RoundRecord(header.codec, header.weights, header.notes, tuple(next(rest) for _ in header.chunks))
            for header in self.rounds
        )
        return CommitEntry(self.outer_step, self.digest, rounds)


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Why the donor cannot answer, and whether that may pass. It stays ready for other questions."""

    reason: Reason
    is_busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a transfer must be, and how much of it is under way at once."""

    patience_s: float = 10.0
    """Time an answer may take on top of its bytes."""
    floor_bytes_per_s: float = 16 << 10
    """A side that takes longer than this for a piece is given up: it holds a pin, or a transfer, for nothing."""
    window: int = 4
    """Chunks asked for and not yet here, from each donor. More than the bandwidth-delay product of a long path."""
    max_donors: int = 3
    """Donors that are read from at the same time."""
    word_s: float = 2.0
    """A donor may hear of a commit so much earlier than a learner: both hear it from the coordinator."""

    def measured(self, bytes_per_s: float) -> "Pace":
        """For a donor that has been so fast: it may become sixteen times slower, not as slow as the floor."""
        return replace(self, floor_bytes_per_s=max(self.floor_bytes_per_s, bytes_per_s / _SLACK))

    def allowance_s(self, nbytes: int) -> float:
        """Time within which the next `nbytes` bytes must have passed."""
        return self.patience_s + nbytes / self.floor_bytes_per_s


class ChunkMap:
    """Numbers the chunks of a manifest through all its tensors."""

    def __init__(self, manifest: StateManifest) -> None:
        self._manifest = manifest
        self._places = [
            (tensor, chunk)
            for tensor, part in enumerate(manifest.tensors)
            for chunk in range(count_chunks(part.nbytes, manifest.chunk_nbytes))
        ]

    def __len__(self) -> int:
        return len(self._places)

    def place(self, index: int) -> tuple[int, int]:
        """Indices (tensor, chunk) of chunk number `index`. Raises RemoteProtocolError beyond the last."""
        if not 0 <= index < len(self._places):
            raise RemoteProtocolError("no such chunk")
        return self._places[index]

    def nbytes(self, index: int) -> int:
        """Length of chunk number `index`; the last one of a tensor may be shorter."""
        tensor, chunk = self.place(index)
        size = self._manifest.chunk_nbytes
        return min(size, self._manifest.tensors[tensor].nbytes - chunk * size)


REQUESTS: msgspec.msgpack.Decoder[StateRequest] = msgspec.msgpack.Decoder(StateRequest)
MANIFESTS: msgspec.msgpack.Decoder[StateManifest] = msgspec.msgpack.Decoder(StateManifest)
COMMIT_HEADERS: msgspec.msgpack.Decoder[CommitHeader] = msgspec.msgpack.Decoder(CommitHeader)
TEXT_OFFERS: msgspec.msgpack.Decoder[TextOffer] = msgspec.msgpack.Decoder(TextOffer)
STOCKS: msgspec.msgpack.Decoder[Stock] = msgspec.msgpack.Decoder(Stock)
REFUSALS: msgspec.msgpack.Decoder[Refusal] = msgspec.msgpack.Decoder(Refusal)
