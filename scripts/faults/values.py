# SPDX-License-Identifier: Apache-2.0
"""Inputs whose mean over any subset of peers is exact, and the check of a result against its members.

Peer p's input at a step is 840 · 2^p times a pattern of the integers −127 to 127 that repeats every 255 elements; the
step and the fragment shift it. 840 divides by every number of members up to 8, so every mean holds integers, small
enough for fp32 to add in any order without rounding; the factor names the subset. Whatever comes from another step,
another place, or twice, shows. Every block of 256 elements holds both −127 and 127, so int8 loses nothing either.

Rules: peers are numbered from 0 to 7. Nothing of a tensor's size is allocated.
"""

from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

MAX_PEERS = 8
_UNIT = 840
_PERIOD = 255
_TILE_NUMEL = _PERIOD * 1024
_PATTERN = (torch.arange(_TILE_NUMEL + _PERIOD) % _PERIOD - 127).float()


def fill(tensor: Tensor, *, number: int, step: int, fragment: int) -> None:
    """Write peer `number`'s input, flat fp32."""
    for tile, pattern in _tiles(tensor, step, fragment):
        torch.mul(pattern, float(_UNIT << number), out=tile)


def is_mean(tensor: Tensor, numbers: Iterable[int], *, step: int, fragment: int) -> bool:
    """Whether `tensor` is exactly the mean of these peers' inputs, each counted once."""
    peers = list(numbers)
    factor = sum(_UNIT << number for number in peers) / len(peers)
    return all(torch.equal(tile, pattern * factor) for tile, pattern in _tiles(tensor, step, fragment))


def bits(tensor: Tensor) -> str:
    """A digest of the tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(memoryview(tensor.numpy()))  # type: ignore[arg-type] # numpy's stub lacks the buffer


def _tiles(tensor: Tensor, step: int, fragment: int) -> Iterator[tuple[Tensor, Tensor]]:
    shift = (37 * step + 101 * fragment) % _PERIOD
    for start in range(0, tensor.numel(), _TILE_NUMEL):
        tile = tensor[start : start + _TILE_NUMEL]
        yield tile, _PATTERN[shift : shift + tile.numel()]
