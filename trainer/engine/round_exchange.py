# SPDX-License-Identifier: Apache-2.0
"""The rounds of one outer step on the network: payloads in, results and their records out.

    words      if a round `is_told`: one small gather of every member's weight, factors and notes
    MEAN       all_reduce, weighed as all have been told
    GATHER     all_gather of the codec's bytes; who weighs nothing sends nothing
    PAIR       exchange with a partner that all draw alike

Rules: payloads are only read. Results have the same bits on all members, but for PAIR. What one member says or sends
that cannot be counted weighs nothing, for all alike, or breaks the attempt with its name. Operations of round r use the
fragment numbers 2 + r, the words 1.

It must not know states, workers or votes.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor

from isthmus.collective import Communicator, RoundStats
from isthmus.collective.codec import Codec, codec_named
from isthmus.collective.codec.base import first_non_finite
from isthmus.collective.core.types import HUGE, PeerId, RoundKey, View
from isthmus.collective.rounds.sizes import Measure, Seen, with_further
from isthmus.collective.transport.wire import MAX_WEIGHT
from isthmus.elastic.state.digest import digest_of
from isthmus.elastic.state.replica import ResultChunk, RoundRecord
from isthmus.optim.outer import Emitted, Op, Result, Round, Weigh
from isthmus.optim.workload import draw_pairs
from isthmus.trainer.engine.round_records import result_of
from isthmus.trainer.threads import in_thread

_WORDS: Final = 1
_FIRST_ROUND: Final = 2
_MARK_NBYTES: Final = 16
_WIRE_ALIGNMENT: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payload:
    """What this peer gives to one round."""

    round_: Round
    emitted: Emitted


@dataclass(slots=True, kw_only=True, eq=False)
class RoundResults:
    """What the rounds of one outer step returned."""

    results: list[tuple[Result | None, RoundRecord]] = field(default_factory=list)
    """By round."""
    own_weights: list[float] = field(default_factory=list)
    """By round: ours, the emitted factor included."""
    weights: tuple[float, ...] = ()
    """By rank: what each member's work weighs, before any factor."""
    sizes: tuple[float, ...] = ()
    """By rank: how large its numbers were; 0: not seen."""
    sums: tuple[float, ...] = ()
    """By rank: how large the sum was that it gave to all, where no part seen was so large; else 0."""
    markers: list[Callable[[], list[bytes]]] = field(default_factory=list)
    """By round: see `marks`."""
    stats: list[RoundStats] = field(default_factory=list)
    """Of the payloads' operations."""

    def saw(self, sizes: Sequence[float], sums: Sequence[float] = ()) -> None:
        """How large the members' numbers were in a round, and sums beyond all of them, by rank."""
        seen = Seen(sizes, sums or [0.0] * len(sizes))
        if self.sizes:
            seen = with_further(Seen(self.sizes, self.sums), seen)
        self.sizes, self.sums = tuple(seen.sizes), tuple(seen.sums)

    def marks(self) -> tuple[bytes, ...]:
        """By rank: a mark of what each has given to all others; empty where that went through third hands. Slow."""
        marks = [marker() for marker in self.markers]
        if not all(marks):
            return ()
        return tuple(hashlib.sha256(b"".join(parts)).digest()[:_MARK_NBYTES] for parts in zip(*marks, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """What a member says before the payloads."""

    weight: float
    factors: tuple[float, ...]
    notes: tuple[tuple[float, ...], ...]
    """By round."""


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """One round in one view."""

    view: View
    key: RoundKey
    payload: Payload
    weight: float
    by_rank: tuple[float, ...]
    """Weights of all; empty: each says its own with its payload."""
    notes: list[tuple[float, ...]]
    """By rank, if members have told each other."""

    def record(self, codec: str, weights: Sequence[float], chunks: tuple[ResultChunk, ...]) -> RoundRecord:
        """What is kept of it."""
        given = [rank for rank, weight in enumerate(weights) if weight > 0.0]
        return RoundRecord(
            codec,
            tuple((self.view.members[rank].peer_id, weights[rank]) for rank in given),
            tuple(self.notes[rank] for rank in given) if self.payload.round_.num_notes else (),
            chunks,
        )


class RoundExchange:
    """See the module.

    Args:
        communicator: the collective layer.
        codec: of rounds that name none.
    """

    def __init__(self, communicator: Communicator, *, codec: str) -> None:
        self._communicator = communicator
        self._default_codec = codec
        self._codecs: dict[str, Codec] = {}
        self._coded: dict[Round, tuple[tuple[int, int], ...]] = {}  # by mean, see RoundStats

    def codec_of(self, round_: Round) -> str:
        """How its payloads travel."""
        return round_.codec or self._default_codec

    async def run(
        self,
        view: View,
        key: RoundKey,
        payloads: Sequence[Payload],
        *,
        weight: float,
        told: tuple[float, ...],
        mean_buffer: Callable[[Round], Tensor],
    ) -> RoundResults:
        """Exchange what is given with the members of the view.

        Args:
            view: the installed one.
            key: of the outer step.
            payloads: ours, by round.
            weight: of our work.
            told: what the work of all members weighs, by rank, if that is agreed on already; else empty.
            mean_buffer: where the mean of a round goes.

        Raises:
            CollectiveError: it cannot finish in this view; the payloads are unchanged.
        """
        exchanged = RoundResults()
        words: list[_Word] | None = None
        if any(payload.round_.is_told for payload in payloads):
            words = await self._tell(key, payloads, weight)
            told = told or tuple(word.weight for word in words)
        for number, payload in enumerate(payloads):
            place = RoundKey(key.epoch, key.outer_step, _FIRST_ROUND + number)
            by_rank = told
            if words is not None:
                by_rank = tuple(
                    word.factors[number] * (base if payload.round_.weigh is Weigh.SAMPLES else float(base > 0.0))
                    for base, word in zip(told, words, strict=True)
                )
            own = by_rank[self._rank(view)] if by_rank else weight
            notes = [] if words is None else [word.notes[number] for word in words]
            attempt = _Attempt(view, place, payload, own, by_rank, notes)
            exchanged.markers.append(await self._exchange(attempt, exchanged, mean_buffer))
            if payload.round_.num_notes:
                given = zip(notes, by_rank, strict=True)
                exchanged.saw([max(map(abs, theirs)) if weighs > 0.0 else 0.0 for theirs, weighs in given])
        exchanged.weights = told or exchanged.stats[0].weights
        return exchanged

    def read_delivered(self, round_: Round, payload: Tensor, out: Tensor) -> None:
        """Write what arrived of a payload of ours, [numel]: what was encoded of it by itself is encoded once more."""
        codec = self._codec(self.codec_of(round_))
        out.copy_(payload)
        if codec.is_identity:
            return
        for start, stop in self._coded.get(round_, ((0, payload.numel()),)):
            wire = torch.empty(codec.wire_nbytes(stop - start), dtype=torch.uint8)
            codec.decode(codec.encode(payload[start:stop], wire), out[start:stop])

    # -------------------------------------------------------------------------------- words

    async def _tell(self, key: RoundKey, payloads: Sequence[Payload], weight: float) -> list[_Word]:
        """Everybody's word, by rank. One that makes no sense is that of somebody who gives nothing."""
        row = [weight]
        for payload in payloads:
            emitted = payload.emitted
            if len(emitted.notes) != payload.round_.num_notes:
                raise ValueError(f"{payload.round_}: emitted with the notes {emitted.notes}")
            is_sound = first_non_finite(emitted.payload) is None
            row += [emitted.weight if is_sound else 0.0, *emitted.notes]
        place = RoundKey(key.epoch, key.outer_step, _WORDS)
        rows, _ = await self._communicator.all_gather(place, torch.tensor(row, dtype=torch.float64))
        return [_read_word(theirs.tolist(), [payload.round_ for payload in payloads]) for theirs in rows]

    # -------------------------------------------------------------------------------- one round

    async def _exchange(
        self, attempt: _Attempt, exchanged: RoundResults, mean_buffer: Callable[[Round], Tensor]
    ) -> Callable[[], list[bytes]]:
        """Run one round; returns what makes a mark by rank, or none where there are none."""
        round_ = attempt.payload.round_
        exchanged.own_weights.append(attempt.weight)
        if attempt.by_rank and not any(attempt.by_rank):
            exchanged.results.append((None, RoundRecord(self.codec_of(round_), ())))
            return _unmarked(attempt)
        match round_.op:
            case Op.MEAN:
                return await self._mean(attempt, exchanged, mean_buffer(round_))
            case Op.GATHER:
                return await self._gather(attempt, exchanged)
            case Op.PAIR:
                return await self._pair(attempt, exchanged)

    async def _mean(self, attempt: _Attempt, exchanged: RoundResults, out: Tensor) -> Callable[[], list[bytes]]:
        chunks: list[ResultChunk] = []
        codec = self.codec_of(attempt.payload.round_)
        stats = await self._communicator.all_reduce(
            attempt.key,
            attempt.payload.emitted.payload,
            out=out,
            weight=attempt.weight,
            told=attempt.by_rank or None,
            codec=codec,
            record=lambda start_numel, _numel, wire: chunks.append(ResultChunk(start_numel, bytes(wire))),
            is_tolerant=True,  # the coordinator sees by the sizes whose numbers they are
        )
        self._remember_coded(attempt.payload.round_, stats)
        exchanged.stats.append(stats)
        exchanged.saw(stats.sizes, stats.sums)
        chunks.sort(key=lambda chunk: chunk.start_numel)
        record = attempt.record(codec, stats.weights, tuple(chunks))
        exchanged.results.append((result_of(record, out), record))
        return partial(_marks_of, stats, chunks)

    def _remember_coded(self, round_: Round, stats: RoundStats) -> None:
        """Until its payload is settled: before the fragment's next one, or just after that was emitted."""
        for old in [old for old in self._coded if old.fragment == round_.fragment and old.due_step < round_.inner_step]:
            del self._coded[old]
        self._coded[round_] = stats.coded

    async def _gather(self, attempt: _Attempt, exchanged: RoundResults) -> Callable[[], list[bytes]]:
        payload, name = attempt.payload.emitted.payload, self.codec_of(attempt.payload.round_)
        codec = self._codec(name)
        nbytes = codec.wire_nbytes(payload.numel())
        padded = -(-nbytes // _WIRE_ALIGNMENT) * _WIRE_ALIGNMENT
        wire = torch.zeros(padded if attempt.weight > 0.0 else 0, dtype=torch.uint8)
        if attempt.weight > 0.0:
            await in_thread(_encode, codec, payload, wire[:nbytes])
        sizes = [padded if weight > 0.0 else 0 for weight in attempt.by_rank]
        parts, stats = await self._communicator.all_gather(attempt.key, wire, sizes=sizes)
        exchanged.stats.append(stats)
        givers = [rank for rank, weight in enumerate(attempt.by_rank) if weight > 0.0]
        rows = torch.empty(len(givers), payload.numel())
        seen: dict[int, float] = {}
        for row, rank in zip(rows, givers, strict=True):
            seen[rank] = await in_thread(_decode, codec, parts[rank][:nbytes], row)
        chunks = [
            ResultChunk(number * payload.numel(), parts[rank][:nbytes].numpy().tobytes())
            for number, rank in enumerate(givers)
        ]
        record = attempt.record(name, attempt.by_rank, tuple(chunks))
        exchanged.results.append((result_of(record, rows), record))
        exchanged.saw([seen.get(rank, 0.0) for rank in range(attempt.view.world_size)])
        data = {rank: chunk.data for rank, chunk in zip(givers, chunks, strict=True)}
        return lambda: [digest_of(data.get(rank, b"")) for rank in range(attempt.view.world_size)]

    async def _pair(self, attempt: _Attempt, exchanged: RoundResults) -> Callable[[], list[bytes]]:
        view, payload, round_ = attempt.view, attempt.payload.emitted.payload, attempt.payload.round_
        members = [str(member.peer_id) for member in view.members]
        givers = [peer for peer, weight in zip(members, attempt.by_rank, strict=True) if weight > 0.0]
        apart = {frozenset((members[one], members[other])) for one, other in view.apart}
        pairs = draw_pairs(round_, givers, apart=apart)
        name = self.codec_of(round_)
        record = attempt.record(name, attempt.by_rank, ())
        me = members[self._rank(view)]
        partner = pairs.get(me)
        if partner is None:
            exchanged.results.append((None, record))
            return _unmarked(attempt)
        codec = self._codec(name)
        wire, theirs = (torch.empty(codec.wire_nbytes(payload.numel()), dtype=torch.uint8) for _ in range(2))
        await in_thread(_encode, codec, payload, wire)
        stats = await self._communicator.exchange(attempt.key, wire, out=theirs, partner=PeerId(partner))
        exchanged.stats.append(stats)
        value = torch.empty_like(payload)
        ranks = [members.index(peer) for peer in (me, partner)]
        seen = {ranks[0]: _size(payload), ranks[1]: await in_thread(_decode, codec, theirs, value)}
        exchanged.saw([seen.get(rank, 0.0) for rank in range(view.world_size)])
        weights = tuple(attempt.by_rank[members.index(peer)] for peer in (me, partner))
        notes = tuple(attempt.notes[members.index(peer)] for peer in (me, partner)) if round_.num_notes else ()
        result = Result(value=value, members=(me, partner), weight_sum=math.fsum(weights), weights=weights, notes=notes)
        exchanged.results.append((result, record))
        return _unmarked(attempt)

    def _codec(self, name: str) -> Codec:
        if name not in self._codecs:
            self._codecs[name] = codec_named(name)
        return self._codecs[name]

    def _rank(self, view: View) -> int:
        rank = view.rank_of(self._communicator.me.peer_id)
        assert rank is not None, "a member runs it"
        return rank


def _read_word(row: list[float], rounds: Sequence[Round]) -> _Word:
    weight, *rest = row
    factors, notes = [], []
    for round_ in rounds:
        factor, *own = rest[: 1 + round_.num_notes]
        rest = rest[1 + round_.num_notes :]
        is_sound = 0.0 <= factor * max(weight, 1.0) <= MAX_WEIGHT and all(map(math.isfinite, own))
        factors.append(factor if is_sound else 0.0)
        notes.append(tuple(own))
    return _Word(weight=weight if 0.0 <= weight <= MAX_WEIGHT else 0.0, factors=tuple(factors), notes=tuple(notes))


def _encode(codec: Codec, payload: Tensor, wire: Tensor) -> None:
    encoded = codec.encode(payload, wire)
    if encoded.data_ptr() != wire.data_ptr():
        wire.copy_(encoded)


def _decode(codec: Codec, wire: Tensor, out: Tensor) -> float:
    """A member's payload; returns how large its numbers are. What cannot be read is zeros, and HUGE."""
    try:
        codec.check(wire, out.numel())
        codec.decode(wire, out)
    except ValueError:
        out.zero_()
        return HUGE
    return _size(out)


def _size(row: Tensor) -> float:
    """Root mean square, as the collective layer measures parts."""
    measure = Measure()
    measure.take(row)
    return measure.size


def _unmarked(attempt: _Attempt) -> Callable[[], list[bytes]]:
    """Nobody has given anything to all others."""
    return lambda: [b""] * attempt.view.world_size


def _marks_of(stats: RoundStats, chunks: Sequence[ResultChunk]) -> list[bytes]:
    """A mark of what each member has added up, by rank, of its wire form; empty where others pass it on."""
    if not stats.roots:
        return []
    hashes = [blake3() for _ in stats.members]
    for chunk in chunks:
        for rank, start, stop in stats.roots:
            if start <= chunk.start_numel < stop:
                hashes[rank].update(chunk.data)
    return [made.digest() for made in hashes]
