# SPDX-License-Identifier: Apache-2.0
"""Which tokens a sample number stands for.

Owns the rule that makes an integer the name of a sample (`SampleSource`), so that a range of integers is a lease
which every peer resolves to the same text, and the fixed batches of held-out text. Rules: everything follows from
(tokens, seq_len, seed, index); nothing draws from a random state; the order needs no memory. Must not know where the
tokens come from (`trainer.data.corpus`), who holds which lease, or the model.

Shape suffixes: B samples in a batch, L seq_len, W = L + 1.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from isthmus.trainer.data.corpus import TokenArray, require_one_sample


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
    """How many samples one pass over a text of at least `seq_len + 1` tokens has."""
    return max(1, (num_tokens - 1) // seq_len - 1)


class SampleSource:
    """Names every sample of an endless training run by an integer 0, 1, 2, …

    A sample is `seq_len + 1` successive tokens: `seq_len` inputs and, one further, as many targets. Within one data
    epoch (`num_samples` successive indices) samples follow each other through the text without a gap and share only
    the token that is the last target of one and the first input of the next, so no target occurs twice. Index
    i belongs to data epoch i // num_samples; the epoch's permutation decides which sample it is. Every epoch begins
    at its own offset in the text, so that epochs cut it at different places; for that freedom an epoch leaves out up
    to two samples' worth of tokens at the ends of the text.
    """

    def __init__(self, tokens: TokenArray, seq_len: int, seed: int) -> None:
        """Args: tokens, uint8 [num_tokens], kept, not copied; seed, equal on all peers, in [0, 2⁶⁴).

        Raises:
            DataError: fewer than seq_len + 1 tokens.
        """
        require_one_sample(tokens, seq_len, None, "training")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must lie in [0, 2**64), not {seed}")
        self._tokens = tokens
        self._seq_len = seq_len
        self._seed = seed
        self._num_samples = samples_per_data_epoch(len(tokens), seq_len)

    @property
    def num_samples(self) -> int:
        """Samples in one data epoch."""
        return self._num_samples

    def offset(self, index: int) -> int:
        """Where the sample begins in the text.

        Raises:
            IndexError: a negative index.
        """
        if index < 0:
            raise IndexError(f"sample index {index} is negative")
        epoch, position = divmod(index, self._num_samples)
        key = self._seed.to_bytes(8, "big") + epoch.to_bytes(16, "big")
        num_free_tokens = len(self._tokens) - 1 - self._num_samples * self._seq_len
        phase_hash = hashlib.blake2b(key, digest_size=8, person=b"phase").digest()
        phase = int.from_bytes(phase_hash, "big") % (num_free_tokens + 1)
        return phase + Permutation.from_key(self._num_samples, key)(position) * self._seq_len

    def sample(self, index: int) -> Tensor:
        """The sample's tokens: int64 [seq_len + 1], a new tensor."""
        return _window(self._tokens, self.offset(index), self._seq_len)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(inputs_BL, targets_BL), int64 [len(indices), seq_len] each; row b is the sample `indices[b]`."""
        return _stack([self.sample(index) for index in indices])


def validation_batches(
    tokens: TokenArray, seq_len: int, batch_size: int, num_batches: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fixed (inputs_BL, targets_BL) batches, int64, whose samples lie evenly spread over the text.

    A text too short for that many samples without overlap gives fewer of them: fewer batches, the last one smaller.
    None: as many as it gives.

    Raises:
        DataError: not enough tokens for one sample.
    """
    require_one_sample(tokens, seq_len, None, "held-out")
    if batch_size < 1 or (num_batches is not None and num_batches < 1):
        raise ValueError(f"batch_size {batch_size} and num_batches {num_batches} must be at least 1")
    last_offset = len(tokens) - 1 - seq_len
    count = (len(tokens) - 1) // seq_len
    if num_batches is not None:
        count = min(batch_size * num_batches, count)

    def window(number: int) -> Tensor:
        return _window(tokens, number * last_offset // max(1, count - 1), seq_len)

    # Made one by one: all of a large text would not fit into memory as int64.
    starts = range(0, count, batch_size)
    return (_stack([window(number) for number in range(at, min(at + batch_size, count))]) for at in starts)


def _window(tokens: TokenArray, offset: int, seq_len: int) -> Tensor:
    return torch.from_numpy(tokens[offset : offset + seq_len + 1].astype(np.int64))


def _stack(windows: list[Tensor]) -> tuple[Tensor, Tensor]:
    window_BW = torch.stack(windows)
    return window_BW[:, :-1].contiguous(), window_BW[:, 1:].contiguous()
