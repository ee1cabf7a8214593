# SPDX-License-Identifier: Apache-2.0
"""Which tokens a sample number stands for.

Owns the rule that makes an integer the name of a sample (`SampleOrder`, `SampleSource`), so that a range of integers is
a lease which every peer resolves to the same text, and the fixed batches of held-out text. Rules: everything follows
from (tokens, seq_len, seed, index); nothing draws from a random state; the order needs memory for shards, not for
samples. Must not know where the tokens come from (`trainer.data.corpus`, `trainer.data.prepared`), who holds which
lease, or the model.

Shape suffixes: B samples in a batch, L seq_len, W = L + 1.
"""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from isthmus.trainer.data.corpus import TokenArray, require_one_sample

MAX_HELD_OUT_SHARDS = 8
"""Shards of held-out text that every peer has, however many there are."""
_MOST_EPOCHS = 2
"""Whose order is kept: leases may reach from one into the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Permutation:
    """A keyed bijection of range(size) in O(1) memory: every position can be asked for alone, on any machine.

    A balanced Feistel network permutes the next power of four; positions that leave the range are fed in again until
    they fall into it (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, §4), under
    four times on average. It shuffles; it does not encrypt.
    """

    size: int
    round_keys: tuple[int, ...]

    @classmethod
    def from_key(cls, size: int, key: bytes) -> "Permutation":
        """The bijection of range(size) that `key` (up to 64 bytes) names."""
        digest = hashlib.blake2b(key, digest_size=48, person=b"permutation").digest()
        return cls(size, tuple(int.from_bytes(digest[at : at + 8], "big") for at in range(0, 48, 8)))

    def __call__(self, position: int) -> int:
        """Where `position` goes.

        Raises:
            IndexError: the position is outside of range(size).
        """
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} is outside of range({self.size})")
        half_bits = ((self.size - 1).bit_length() + 1) // 2
        mask = (1 << half_bits) - 1
        while True:
            left, right = position >> half_bits, position & mask
            for key in self.round_keys:
                left, right = right, left ^ (_mix(right ^ key) & mask)
            position = left << half_bits | right
            if position < self.size:
                return position


def _mix(value: int) -> int:
    """A 64-bit finalizer (SplitMix64; Steele, Lea and Flood, "Fast Splittable Pseudorandom Generators", 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def samples_per_data_epoch(num_tokens: int, seq_len: int) -> int:
    """How many samples one pass over tokens in one piece has; 0 where they are too few for one."""
    return max(1, (num_tokens - 1) // seq_len - 1) if num_tokens > seq_len else 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Tokens in pieces that are opened one by one: a prepared text, or a text in one piece.

    Attributes:
        lengths: tokens of every shard.
        open: maps a shard, [lengths[shard]] uint8, uint16 or uint32; called again for the same one.
        pool: so many shards are mixed with each other at a time (see `SampleOrder`).
    """

    lengths: tuple[int, ...]
    open: Callable[[int], TokenArray]
    pool: int = 1

    @classmethod
    def of(cls, tokens: "TokenArray | Shards") -> "Shards":
        """A text in one piece is one shard."""
        return tokens if isinstance(tokens, Shards) else cls((len(tokens),), lambda _: tokens)

    def require_one_sample(self, seq_len: int, side: str) -> None:
        """Demand that the longest shard holds a sample.

        Raises:
            DataError: it does not.
        """
        require_one_sample(max(self.lengths, default=0), seq_len, None, side)


class SampleOrder:
    """Where the sample of each number lies: a shard, and a place in it. Knows lengths alone, no tokens.

    An epoch takes the shards in an order of its own, `pool` of them at a time, and mixes the samples of these. So
    whoever trains on a range of numbers needs a few shards, not all. No sample crosses the end of a shard. Within a
    shard samples follow each other without a gap and share only the token that is the last target of one and the first
    input of the next, so no target occurs twice in an epoch. Every epoch begins at its own place in a shard, so that
    epochs cut it differently; for that freedom an epoch leaves out up to two samples' worth of tokens of each shard.
    """

    def __init__(self, lengths: Sequence[int], seq_len: int, seed: int, *, pool: int = 1) -> None:
        """Args: lengths, tokens of every shard; seed, equal on all peers, in [0, 2⁶⁴); pool, shards that are mixed.

        Raises:
            DataError: no shard has seq_len + 1 tokens.
        """
        require_one_sample(max(lengths, default=0), seq_len, None, "training")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must lie in [0, 2**64), not {seed}")
        if pool < 1:
            raise ValueError(f"pool must be at least 1, not {pool}")
        counts = [samples_per_data_epoch(length, seq_len) for length in lengths]
        self._lengths = lengths
        self._counts = counts
        self._shards = [shard for shard, count in enumerate(counts) if count]
        self._seq_len = seq_len
        self._seed = seed
        self._pool = pool
        self._epochs: dict[int, _Epoch] = {}
        self.num_samples = sum(counts)
        """Samples in one data epoch."""

    def place(self, index: int) -> tuple[int, int]:
        """Shard and offset of the sample's first token.

        Raises:
            IndexError: a negative index.
        """
        epoch, position = self._split(index)
        pool = bisect.bisect_right(epoch.pool_ends, position)
        first, stop = (epoch.pool_ends[pool - 1] if pool else 0), epoch.pool_ends[pool]
        mixed = first + Permutation.from_key(stop - first, epoch.key + _suffix(pool))(position - first)
        slot = bisect.bisect_right(epoch.ends, mixed, self._pool * pool)
        shard = epoch.shards[slot]
        number = mixed - (epoch.ends[slot - 1] if slot else 0)
        num_free_tokens = self._lengths[shard] - 1 - self._counts[shard] * self._seq_len
        phase_hash = hashlib.blake2b(epoch.key + _suffix(shard), digest_size=8, person=b"phase").digest()
        phase = int.from_bytes(phase_hash, "big") % (num_free_tokens + 1)
        return shard, phase + number * self._seq_len

    def shards_in(self, start: int, stop: int) -> list[int]:
        """All shards that samples of range(start, stop) may lie in, in the order in which they are needed."""
        found: dict[int, None] = {}
        while start < stop:
            epoch, position = self._split(start)
            pool = bisect.bisect_right(epoch.pool_ends, position)
            found |= dict.fromkeys(epoch.shards[self._pool * pool : self._pool * (pool + 1)])
            start += epoch.pool_ends[pool] - position
        return list(found)

    def _split(self, index: int) -> tuple["_Epoch", int]:
        if index < 0:
            raise IndexError(f"sample index {index} is negative")
        number, position = divmod(index, self.num_samples)
        if number not in self._epochs:
            while len(self._epochs) >= _MOST_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[number] = self._make_epoch(number)
        return self._epochs[number], position

    def _make_epoch(self, number: int) -> "_Epoch":
        key = self._seed.to_bytes(8, "big") + number.to_bytes(16, "big")
        order = Permutation.from_key(len(self._shards), key + b"shards")
        shards = [self._shards[order(slot)] for slot in range(len(self._shards))]
        ends = list(itertools.accumulate(self._counts[shard] for shard in shards))
        pool_ends = ends[self._pool - 1 :: self._pool]
        if not pool_ends or pool_ends[-1] != ends[-1]:
            pool_ends.append(ends[-1])
        return _Epoch(key, shards, ends, pool_ends)


@dataclasses.dataclass(frozen=True, slots=True)
class _Epoch:
    """One order of the shards. `ends`: samples up to each of them; `pool_ends`: up to the last one of each pool."""

    key: bytes
    shards: list[int]
    ends: list[int]
    pool_ends: list[int]


def _suffix(number: int) -> bytes:
    """What tells shards and pools apart; none for the first, so that a text in one piece has the key itself."""
    return number.to_bytes(8, "big") if number else b""


class SampleSource:
    """Names every sample of an endless training run by an integer 0, 1, 2, …

    A sample is `seq_len + 1` successive tokens: `seq_len` inputs and, one further, as many targets. Index i belongs to
    data epoch i // num_samples; `SampleOrder` says which sample of it.
    """

    def __init__(self, tokens: TokenArray | Shards, seq_len: int, seed: int) -> None:
        """Args: tokens, [num_tokens] in one piece, kept, not copied, or in shards; seed, see `SampleOrder`.

        Raises:
            DataError: fewer than seq_len + 1 tokens.
        """
        self._shards = shards = Shards.of(tokens)
        self._order = SampleOrder(shards.lengths, seq_len, seed, pool=shards.pool)
        self._seq_len = seq_len

    @property
    def num_samples(self) -> int:
        """Samples in one data epoch."""
        return self._order.num_samples

    def offset(self, index: int) -> int:
        """Where the sample begins in its shard.

        Raises:
            IndexError: a negative index.
        """
        return self._order.place(index)[1]

    def sample(self, index: int) -> Tensor:
        """The sample's tokens: int64 [seq_len + 1], a new tensor."""
        shard, offset = self._order.place(index)
        return _window(self._shards.open(shard), offset, self._seq_len)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(inputs_BL, targets_BL), int64 [len(indices), seq_len] each; row b is the sample `indices[b]`."""
        return _stack([self.sample(index) for index in indices])


def held_out_shards(lengths: Sequence[int], seq_len: int) -> list[int]:
    """The shards that held-out samples are taken from: a few that hold one, evenly spread."""
    able = [shard for shard, length in enumerate(lengths) if length > seq_len]
    count = min(MAX_HELD_OUT_SHARDS, len(able))
    return [able[number * len(able) // count] for number in range(count)]


def validation_batches(
    tokens: TokenArray | Shards, seq_len: int, batch_size: int, num_batches: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fixed (inputs_BL, targets_BL) batches, int64, whose samples lie evenly spread over the text.

    A text too short for that many samples without overlap gives fewer of them: fewer batches, the last one smaller.
    Of a text in many shards a few give samples (`held_out_shards`), each its share. With None for their number all do,
    and give as many as they have.

    Raises:
        DataError: not enough tokens for one sample.
    """
    shards = Shards.of(tokens)
    shards.require_one_sample(seq_len, "held-out")
    if batch_size < 1 or (num_batches is not None and num_batches < 1):
        raise ValueError(f"batch_size {batch_size} and num_batches {num_batches} must be at least 1")
    able = [shard for shard, length in enumerate(shards.lengths) if length > seq_len]
    chosen = able if num_batches is None else held_out_shards(shards.lengths, seq_len)
    rest = None if num_batches is None else batch_size * num_batches
    counts: list[int] = []
    for number, shard in enumerate(chosen):
        count = (shards.lengths[shard] - 1) // seq_len
        if rest is not None:
            count = min(-(-rest // (len(chosen) - number)), count)
            rest -= count
        counts.append(count)

    def windows() -> Iterator[Tensor]:
        for shard, count in zip(chosen, counts, strict=True):
            last_offset = shards.lengths[shard] - 1 - seq_len
            held_out = shards.open(shard) if count else None
            for number in range(count):
                assert held_out is not None, "it was opened"
                yield _window(held_out, number * last_offset // max(1, count - 1), seq_len)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        made = windows()
        while batch := list(itertools.islice(made, batch_size)):
            yield _stack(batch)

    return batches()  # made one by one: all of a large text would not fit into memory as int64


def _window(tokens: TokenArray, offset: int, seq_len: int) -> Tensor:
    return torch.from_numpy(tokens[offset : offset + seq_len + 1].astype(np.int64))


def _stack(windows: list[Tensor]) -> tuple[Tensor, Tensor]:
    window_BW = torch.stack(windows)
    return window_BW[:, :-1].contiguous(), window_BW[:, 1:].contiguous()
