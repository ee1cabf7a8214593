# SPDX-License-Identifier: Apache-2.0
"""The same values become the same bytes on every device: what the codecs' files say, computed anew with numpy."""

import math

import numpy as np
import pytest
import torch

from isthmus.collective.codec import BLOCK_NUMEL, NotFinite, blocks, codec_named, topk
from isthmus.collective.codec.base import TINY

NAMES = ["bf16", "int8", "e3m0", "twobit", "topk", "topk:5"]
SIZES = [1, 2, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 700, 300_001]
LARGEST = np.float32(np.finfo(np.float32).max)


def gaussian(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def magnitudes_of_all_sizes(numel):
    """From subnormal to the largest, one block after the other, -0.0 and ties among them."""
    exponents = torch.linspace(-149, 127, -(-numel // 64)).repeat_interleave(64)[:numel]
    values = torch.ldexp(gaussian(numel, 1).clamp(-1.9, 1.9), exponents)
    values[3::7] = -0.0
    values[5::11] = values[4::11][: len(values[5::11])]
    return values


SHUFFLED = torch.randperm(50_003, generator=torch.Generator().manual_seed(2))
EDGES = {
    "zeros": torch.zeros(5000),
    "negative zeros": torch.full((5000,), -0.0),
    "smallest subnormal": torch.full((300,), 1e-45),
    "all sizes": magnitudes_of_all_sizes(50_003),
    "all sizes, shuffled": magnitudes_of_all_sizes(50_003)[SHUFFLED],
    "around the limit of a scale": torch.ldexp(gaussian(9000, 3), torch.tensor(-100)),
    "largest": torch.full((4500,), float(LARGEST)) * gaussian(4500, 4).sign(),
    "largest beside small": torch.where(gaussian(9000, 5) > 1.5, float(LARGEST), 1e-20),
    "ties": torch.tensor([1.0, -1.0, 2.0, -0.5]).repeat(2500),
    "halves of a step": torch.arange(-254.0, 255.0) / 2,
}


def wire_on(device, name, values):
    codec = codec_named(name)
    memory = torch.full((codec.wire_nbytes(values.numel()),), 0xA5, dtype=torch.uint8, device=device)
    return codec.encode(values.to(device), memory)


def decoded_on(device, name, wire, numel):
    out = torch.full((numel,), math.nan, device=device)
    codec = codec_named(name)
    codec.check(wire, numel)
    codec.decode(wire, out)
    return out.cpu()


# ------------------------------------------------------------------------------------------------- with numpy


def sum_by_halves(rows):
    """fp32 sums of rows, in the order that codecs add in."""
    rows = rows.copy()
    while (width := rows.shape[1]) > 1:
        half = width // 2
        rows = np.concatenate((rows[:, :half] + rows[:, width - half :], rows[:, half : width - half]), 1)
    return rows[:, 0]


def whole_blocks(x):
    padded = np.zeros(-(-len(x) // BLOCK_NUMEL) * BLOCK_NUMEL, dtype=np.float32)
    padded[: len(x)] = x
    return padded.reshape(-1, BLOCK_NUMEL)


def scaled(rows, scales, numerator):
    """Scales as they are sent, and rows times numerator / scale."""
    scales = np.where(scales <= np.float32(TINY), np.float32(0.0), scales)
    inverse = np.divide(np.float32(numerator), scales, out=np.zeros_like(scales), where=scales != 0)
    return scales, rows * inverse[:, None]


def numpy_bf16(x):
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    too_large = (rounded & 0x7FFF) == 0x7F80
    return np.where(too_large, rounded - 1, rounded).astype(np.uint16).tobytes()


def numpy_int8(x):
    rows = whole_blocks(x)
    scales, codes = scaled(rows, np.abs(rows).max(1) / np.float32(127), 1.0)
    scales = np.minimum(scales, LARGEST / np.float32(128))
    return scales.tobytes() + np.rint(codes).astype(np.int8).tobytes()[: len(x)]


def numpy_e3m0(x):
    rows = whole_blocks(x)
    scales, parts = scaled(rows, np.abs(rows).max(1), 2.0**-8)
    bits = parts.astype(np.float16).view(np.uint16)
    level, sign = (bits + 0x200 >> 10) & 7, bits >> 15
    level, sign = level.reshape(-1, 2), sign.reshape(-1, 2)
    packed = sign[:, 0] << 7 | sign[:, 1] << 6 | level[:, 1] << 3 | level[:, 0]
    return scales.tobytes() + packed.astype(np.uint8).tobytes()[: -(-len(x) // 2)]


def numpy_twobit(x):
    rows = whole_blocks(x)
    numel = np.full(len(rows), BLOCK_NUMEL, dtype=np.float32)
    numel[-1] = len(x) - (len(rows) - 1) * BLOCK_NUMEL
    with np.errstate(over="ignore"):
        means = sum_by_halves(np.abs(rows)) / numel
        smaller = sum_by_halves(np.abs(rows / np.float32(256))) * np.float32(256 / numel)
        means = np.where(np.isfinite(means), means, smaller)
        means = np.minimum(means, np.float32(float(LARGEST) / 1.893))
        scales, parts = scaled(rows, means, 2.0 / 1.2297)
        codes = parts.astype(np.float16).view(np.uint16) >> 14
    codes[scales == 0] = 0
    codes = codes.reshape(-1, 4) << np.array([0, 2, 4, 6], dtype=np.uint16)
    return scales.tobytes() + codes.sum(1).astype(np.uint8).tobytes()[: -(-len(x) // 4)]


def numpy_topk(x, kept_per_chunk):
    levels, codes, places = [], [], []
    for start in range(0, len(x), topk.CHUNK_NUMEL):
        chunk = x[start : start + topk.CHUNK_NUMEL]
        kept = -(-kept_per_chunk * len(chunk) // topk.CHUNK_NUMEL)
        places.append(np.sort(np.argsort(-np.abs(chunk), kind="stable")[:kept]))
        part_levels, part_codes = two_levels(chunk[places[-1]], chunk[places[-1]] < 0)
        levels.append(part_levels)
        codes.append(part_codes)
    codes, places = np.concatenate(codes), np.concatenate(places)
    codes = np.pad(codes, (0, -len(codes) % 4)).reshape(-1, 4) << np.array([0, 2, 4, 6], dtype=np.uint8)
    pairs = np.pad(places, (0, len(places) % 2)).reshape(-1, 2)
    indices = (pairs[:, 0] | pairs[:, 1] << 12).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]
    wire = np.concatenate(levels).tobytes() + codes.sum(1).astype(np.uint8).tobytes() + indices.tobytes()
    return wire + bytes(-len(wire) % 4)


def two_levels(values, negative):
    magnitudes = np.abs(values)
    with np.errstate(over="ignore"):
        mean = sum_by_halves(magnitudes[None]) / np.float32(len(values))
        upper = magnitudes >= mean
        sums = sum_by_halves(np.stack((np.where(upper, 0, magnitudes), np.where(upper, magnitudes, 0))))
        counts = np.maximum(np.array([(~upper).sum(), upper.sum()], dtype=np.float32), np.float32(1))
        levels = sums / counts
    if not np.isfinite(levels).all():
        smaller, codes = two_levels(values * np.float32(1 / topk.CHUNK_NUMEL), negative)
        return np.minimum(smaller * np.float32(topk.CHUNK_NUMEL), LARGEST), codes
    return np.where(levels <= np.float32(TINY), np.float32(0), levels), (negative | upper << 1).astype(np.uint8)


def numpy_wire(name, values):
    """What the documentation of the codec says."""
    x = values.numpy()
    kind, _, kept = name.partition(":")
    if kind == "topk":
        return numpy_topk(x, int(kept or 64))
    return {"bf16": numpy_bf16, "int8": numpy_int8, "e3m0": numpy_e3m0, "twobit": numpy_twobit}[kind](x)


# ------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", SIZES)
def test_a_device_writes_the_bytes_that_the_codec_documents(device, name, numel):
    values = gaussian(numel, numel)
    assert bytes(wire_on(device, name, values).cpu().numpy()) == numpy_wire(name, values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("edge", EDGES)
def test_a_device_writes_them_at_the_edges_too(device, name, edge):
    assert bytes(wire_on(device, name, EDGES[edge]).cpu().numpy()) == numpy_wire(name, EDGES[edge])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("edge", EDGES)
def test_a_device_writes_and_reads_the_bits_of_the_cpu(device, name, edge):
    values = EDGES[edge]
    wire = wire_on(torch.device("cpu"), name, values)
    there = wire_on(device, name, values)
    assert torch.equal(there.cpu(), wire)
    expected = decoded_on(torch.device("cpu"), name, wire, values.numel())
    assert torch.equal(decoded_on(device, name, there, values.numel()).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4096, 4999])
def test_a_device_refuses_what_is_not_finite(device, name, bad, place):
    values = gaussian(5000)
    values[place] = bad
    with pytest.raises(NotFinite):
        wire_on(device, name, values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("edge", EDGES)
def test_the_tiles_and_the_selection_of_an_accelerator_change_no_bit(device, name, edge, monkeypatch):
    values = EDGES[edge]
    expected = wire_on(device, name, values)
    monkeypatch.setattr(topk, "_SIEVED_ON", ())
    monkeypatch.setattr(topk, "_TILE_CHUNKS", 3)
    monkeypatch.setattr(topk, "_TILE_CHUNKS_ACCELERATOR", 3)
    monkeypatch.setattr(blocks, "_tile_blocks", lambda _device: 7)
    assert torch.equal(wire_on(device, name, values), expected)
