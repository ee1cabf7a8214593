# SPDX-License-Identifier: Apache-2.0
"""Top-k: of every 4096 elements the k largest magnitudes, the rest is zero. k = 64: 0.0293 bytes an element.

SparseLoCo's wire form (arXiv 2508.15706) with a symmetric value: sign, and one of two levels of the chunk:

    kept = the k largest |x|        upper = those not below their mean        decoded = ± mean of the upper or the lower

Wire form of C chunks that keep K elements: levels [C, 2] fp32 (lower, upper); K values of 2 bits (negative, upper),
four in a byte; K indices of 12 bits, two in 3 bytes, little-endian, rising in each chunk; zeros up to a multiple of 4.
A last chunk of r < 4096 elements keeps ceil(k · r / 4096) of them.

Error: with m elements decoded to level l, the squared L2 error of a chunk is ‖x‖² - Σ m · l², so it is always below
‖x‖² and error feedback converges. 94 % in L2 on Gaussian data with k = 64: most of it is what was not kept.

Edges: among equal magnitudes those with the lower index are kept. A level up to 2^-100 is sent as zero and decodes to
+0.0. Zeros are kept only where a chunk has less than k other elements; they count in the mean of the lower level and
decode to it. A level is a mean of what exists, so nothing overflows. NaN and infinity are refused.

A wire form is checked wherever it is read: indices that do not rise or lie outside the tensor, and levels that are not
finite, are a BadWire.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from isthmus.collective.codec.base import (
    TINY,
    BadWire,
    NotFinite,
    Scratch,
    check_scales,
    divisor,
    first_non_finite,
    sum_of_rows,
)
from isthmus.collective.codec.twobit import pack_quads

CHUNK_NUMEL = 4096
_TILE_CHUNKS = 128
"""2 MiB of fp32 at a time: a tile costs twenty calls, and half of one is a tenth slower."""
_TILE_CHUNKS_ACCELERATOR = 2048
"""32 MiB: an accelerator wants few launches, and a sort that keeps places takes ten times a tile."""
_SIEVED_ON = ("cpu",)
"""Devices on which numpy selects; on others a stable sort does, to the same places."""
_INDEX_BITS = 12
_INDEX_MASK = CHUNK_NUMEL - 1
_ALIGNMENT = 4
_GROUPS_PER_KEPT = 4
"""Groups of elements for each one that is kept: enough that few besides the k largest pass the first sieve."""


_Array = npt.NDArray[Any]


class TopKCodec:
    """See the module. Holds 2.6 MiB of scratch.

    Args:
        kept_per_chunk: k, from 1 to 4096.
    """

    is_identity = False

    def __init__(self, kept_per_chunk: int = 64) -> None:
        if not 1 <= kept_per_chunk <= CHUNK_NUMEL:
            raise ValueError(f"top-k keeps 1 to {CHUNK_NUMEL} of a chunk, not {kept_per_chunk}")
        self.name = f"topk:{kept_per_chunk}"
        self.kept_per_chunk = kept_per_chunk
        self._scratch = Scratch()

    def num_kept(self, numel: int) -> int:
        """How many of `numel` elements are sent."""
        whole, rest = divmod(numel, CHUNK_NUMEL)
        return whole * self.kept_per_chunk + -(-self.kept_per_chunk * rest // CHUNK_NUMEL)

    def wire_nbytes(self, numel: int) -> int:
        """Two levels a chunk, 14 bits a kept element."""
        return self._bounds(numel)[3]

    def encode(self, source: Tensor, wire: Tensor) -> Tensor:
        """Select, quantise, pack to the front of `wire`. Raises NotFinite."""
        numel = source.numel()
        levels_end, codes_end, indices_end, end = self._bounds(numel)
        kept = self._kept(source)
        values = source.index_select(0, kept)
        levels = self._levels(wire, numel)
        codes = torch.empty(len(kept), dtype=torch.uint8, device=source.device)
        for chunks, elements, width in self._parts(numel):
            levels[chunks], part_codes = _quantise(values[elements].view(-1, width))
            codes[elements] = part_codes.view(-1)
        _pack_codes(codes, wire[levels_end:codes_end])
        _pack_indices(kept.bitwise_and_(_INDEX_MASK), wire[codes_end:indices_end])
        wire[indices_end:end] = 0
        return wire[:end]

    def scales(self, wire: Tensor, numel: int) -> Tensor:
        """The levels of every chunk, lower and upper."""
        return wire[: self._bounds(numel)[0]].view(torch.float32)

    def check(self, wire: Tensor, numel: int) -> None:
        """Levels and indices. Raises BadWire."""
        check_scales(self.scales(wire, numel), torch.finfo(torch.float32).max)
        self._places(wire, numel)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Zeros, then the kept elements. Raises BadWire before `out` is touched."""
        places = self._places(wire, out.numel())
        values = self._values(wire, out.numel())
        out.zero_().index_copy_(0, places, values)

    def accumulate(self, wire: Tensor, weight: float, base: Tensor, base_weight: float, total: Tensor) -> None:
        """Touches the kept elements only if `base` is `total` and its weight is 1. Raises BadWire before that."""
        places = self._places(wire, total.numel())
        values = self._values(wire, total.numel())
        if base_weight != 1.0:
            torch.mul(base, base_weight, out=total)
        elif base.data_ptr() != total.data_ptr():
            total.copy_(base)
        total.index_add_(0, places, values, alpha=weight)  # no place twice, so no order matters

    # ------------------------------------------------------------------------------------------ layout

    def _bounds(self, numel: int) -> tuple[int, int, int, int]:
        """Where the levels, the codes, the indices and the wire form end."""
        kept = self.num_kept(numel)
        levels = -(-numel // CHUNK_NUMEL) * 8
        codes = levels + -(-kept // 4)
        indices = codes + -(-kept // 2) * 3
        return levels, codes, indices, -(-indices // _ALIGNMENT) * _ALIGNMENT

    def _parts(self, numel: int) -> list[tuple[slice, slice, int]]:
        """Chunks, kept elements, and kept elements a chunk: of the whole chunks, then of the short one."""
        whole = numel // CHUNK_NUMEL
        border, kept = whole * self.kept_per_chunk, self.num_kept(numel)
        parts = [(slice(0, whole), slice(0, border), self.kept_per_chunk)] if whole else []
        if kept > border:
            parts.append((slice(whole, whole + 1), slice(border, kept), kept - border))
        return parts

    # ------------------------------------------------------------------------------------------ there

    def _kept(self, source: Tensor) -> Tensor:
        """Places [K] int64 of what is kept, rising. Raises NotFinite."""
        whole = source.numel() // CHUNK_NUMEL
        tile_chunks = _TILE_CHUNKS if source.device.type == "cpu" else _TILE_CHUNKS_ACCELERATOR
        work = self._scratch.rows("work", source.device, torch.float32, tile_chunks, CHUNK_NUMEL)
        kept = []
        for first in range(0, whole, tile_chunks):
            last = min(first + tile_chunks, whole)
            tile = source[first * CHUNK_NUMEL : last * CHUNK_NUMEL].view(-1, CHUNK_NUMEL)
            magnitudes = torch.abs(tile, out=work[: last - first])
            kept.append(self._largest(magnitudes, self.kept_per_chunk).add_(first * CHUNK_NUMEL))
        rest = source.numel() - whole * CHUNK_NUMEL
        if rest:
            magnitudes = work[:1].zero_()
            torch.abs(source[whole * CHUNK_NUMEL :], out=magnitudes[0, :rest])
            # The zeros that fill the chunk come last among equals, so none of them is kept.
            width = self.num_kept(source.numel()) - whole * self.kept_per_chunk
            kept.append(self._largest(magnitudes, width).add_(whole * CHUNK_NUMEL))
        if len(kept) == 1:
            return kept[0]
        return torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64, device=source.device)

    def _largest(self, magnitudes: Tensor, kept: int) -> Tensor:
        """Places [chunks · kept] int64 in the tile [chunks, 4096], rising."""
        num_groups = min(CHUNK_NUMEL, 1 << (_GROUPS_PER_KEPT * kept - 1).bit_length())
        maxima = magnitudes.view(len(magnitudes), -1, num_groups).amax(1)
        if first_non_finite(maxima.view(-1)) is not None:
            raise NotFinite("a chunk holds NaN or infinity")
        if magnitudes.device.type in _SIEVED_ON:
            passes = self._scratch.rows("passes", magnitudes.device, torch.bool, _TILE_CHUNKS, CHUNK_NUMEL)
            return torch.from_numpy(_sieve(magnitudes.numpy(), maxima.numpy(), passes.numpy(), kept))
        order = magnitudes.argsort(dim=1, descending=True, stable=True)[:, :kept].sort(dim=1).values
        rows = torch.arange(len(magnitudes), device=magnitudes.device).unsqueeze(1)
        return (order + rows * CHUNK_NUMEL).view(-1)

    # ------------------------------------------------------------------------------------------ and back

    def _levels(self, wire: Tensor, numel: int) -> Tensor:
        return self.scales(wire, numel).view(-(-numel // CHUNK_NUMEL), 2)

    def _places(self, wire: Tensor, numel: int) -> Tensor:
        """Places [K] int64, rising and below `numel`. Raises BadWire."""
        _, start, end, _ = self._bounds(numel)
        places = _unpack_indices(wire[start:end], self.num_kept(numel))
        for chunks, elements, width in self._parts(numel):
            first = torch.arange(chunks.start, chunks.stop, device=wire.device).unsqueeze(1) * CHUNK_NUMEL
            places[elements].view(-1, width).add_(first)
        if not len(places):
            return places
        if bool((places[1:] <= places[:-1]).any()) or int(places[-1]) >= numel:
            raise BadWire("an index is out of range or does not rise")
        return places

    def _values(self, wire: Tensor, numel: int) -> Tensor:
        start, end, _, _ = self._bounds(numel)
        codes = _unpack_codes(wire[start:end], self.num_kept(numel))
        levels = self._levels(wire, numel)
        values = torch.empty(len(codes), device=wire.device)
        for chunks, elements, width in self._parts(numel):
            part = codes[elements].view(-1, width)
            torch.gather(levels[chunks], 1, part >> 1, out=values[elements].view(-1, width))
        sign = (codes & 1).mul_(-2).add_(1)
        return values.mul_(sign).add_(0.0)  # -0.0 + 0.0 is +0.0


def _sieve(magnitudes: _Array, maxima: _Array, passes: _Array, kept: int) -> _Array:
    """Places of the `kept` largest of each row, rising; among equals the first ones.

    Selecting among all elements is slow. But `kept` of the groups have a maximum that reaches the kept-th largest of
    all maxima, hence so many elements reach it too, and few others do: one comparison leaves a handful.

    Args:
        magnitudes: [rows, 4096] fp32.
        maxima: [rows, groups] fp32, the largest of each group of elements.
        passes: [at least rows, 4096] bool, work memory.
        kept: how many of each row.
    """
    num_rows = len(maxima)
    floor = np.sort(maxima, axis=1)[:, -kept].reshape(-1, 1)  # twice as fast as a partition of so few
    passes = passes[:num_rows]
    np.greater_equal(magnitudes, np.maximum(floor, np.float32(1e-45)), out=passes)
    # Where the floor is 0 every element would pass; the first ones are enough, and those above 0 that passed.
    passes[:, :kept] |= floor == 0.0
    candidates = np.flatnonzero(passes)
    borders = np.searchsorted(candidates, np.arange(num_rows + 1) * CHUNK_NUMEL)
    counts = np.diff(borders)
    filled = np.arange(counts.max()) < counts.reshape(-1, 1)
    table: _Array = np.full(filled.shape, -1.0, dtype=np.float32)
    table[filled] = magnitudes.reshape(-1)[candidates]
    least = np.sort(table, axis=1)[:, -kept].reshape(-1, 1)
    chosen = table >= least
    if np.count_nonzero(chosen) > num_rows * kept:  # equals of the smallest that is kept: the first ones
        above, equal = table > least, table == least
        chosen = above | equal & (np.cumsum(equal, axis=1) <= kept - above.sum(1, keepdims=True))
    return candidates[chosen[filled]]


def _quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [chunks, 2] fp32 and codes [chunks, kept] uint8 of finite values [chunks, kept]."""
    magnitudes = values.abs()
    means = sum_of_rows(magnitudes.clone()) / divisor(values.shape[1], values.device)
    is_upper = magnitudes >= means.unsqueeze(1)
    weights = is_upper.float()  # mixed dtypes would be converted again and again
    upper, num_upper = magnitudes * weights, weights.sum(1)
    parts = torch.stack((magnitudes.sub_(upper), upper), 1)  # a value minus itself or minus 0 is exact
    sums = sum_of_rows(parts.view(-1, values.shape[1])).view(-1, 2)
    levels = sums.div_(torch.stack((values.shape[1] - num_upper, num_upper), 1).clamp_(min=1.0))
    negative = (values < 0.0).view(torch.uint8)
    codes = torch.add(negative, is_upper.view(torch.uint8), alpha=2)
    if not math.isfinite(levels.amax().item()):  # a sum overflowed
        smaller, codes = _quantise(values * (1.0 / CHUNK_NUMEL))
        codes.bitwise_or_(negative)  # a value that underflowed lost its sign
        levels = smaller.mul_(CHUNK_NUMEL).clamp_(max=torch.finfo(torch.float32).max)
    return torch.threshold_(levels, TINY, 0.0), codes


def _pack_codes(codes: Tensor, wire: Tensor) -> None:
    """[K] codes of 2 bits, which are spoilt, to ceil(K / 4) bytes."""
    padded = codes if len(codes) % 4 == 0 else pad(codes, (0, -len(codes) % 4))
    wire.copy_(pack_quads(padded.view(torch.int32)))


def _unpack_codes(wire: Tensor, num_codes: int) -> Tensor:
    """Invert _pack_codes; int64, as a gather wants it."""
    shifts = torch.tensor([0, 2, 4, 6], device=wire.device)
    return (wire.long().unsqueeze(1) >> shifts & 3).view(-1)[:num_codes]


def _pack_indices(indices: Tensor, wire: Tensor) -> None:
    """[K] indices of 12 bits to 3 · ceil(K / 2) bytes: two are 24 bits, the first in the low ones."""
    padded = indices if len(indices) % 2 == 0 else pad(indices, (0, 1))
    pairs = torch.add(padded[0::2], padded[1::2], alpha=1 << _INDEX_BITS)
    wire.view(-1, 3).copy_(pairs.view(torch.uint8).view(-1, 8)[:, :3])


def _unpack_indices(wire: Tensor, num_indices: int) -> Tensor:
    """Invert _pack_indices; int64 as places are."""
    words = torch.zeros(len(wire) // 3, 4, dtype=torch.uint8, device=wire.device)
    words[:, :3] = wire.view(-1, 3)
    pairs = words.view(torch.int32).view(-1).long()
    return torch.stack((pairs & _INDEX_MASK, pairs >> _INDEX_BITS), 1).view(-1)[:num_indices]
