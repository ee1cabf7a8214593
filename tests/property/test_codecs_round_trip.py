# SPDX-License-Identifier: Apache-2.0
"""Codecs keep their documented bounds on any finite input, and give the same bits by every path."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.collective.codec import bf16, blocks, codec_named, codec_names, topk

LARGEST = torch.finfo(torch.float32).max
TINY = 2.0**-100
SLACK = 1.002
SIZES = st.sampled_from([0, 1, 2, 255, 256, 257, 511, 600, 4095, 4096, 4097, 8192, 8700])
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NAMES = [*codec_names(), "topk:1", "topk:7", "topk:4096"]


@st.composite
def tensors(draw):
    """Gaussian values of any magnitude among which some chosen ones are strewn, in blocks that may be empty."""
    numel = draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(numel, generator=generator) * 2.0 ** draw(st.integers(-149, 120))
    chosen = torch.tensor(draw(st.lists(FINITE, min_size=1, max_size=8)), dtype=torch.float32)
    strewn = torch.rand(numel, generator=generator) < draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    picks = torch.randint(len(chosen), (numel,), generator=generator)
    values = torch.where(strewn, chosen[picks], values)
    if draw(st.booleans()):
        values[numel // 3 : numel // 2] = draw(st.sampled_from([0.0, -0.0, 1e-45]))
    return values


def wire_of(codec, values):
    return codec.encode(values, torch.full((codec.wire_nbytes(values.numel()),), 0xA5, dtype=torch.uint8))


def decoded(codec, wire, numel):
    out = torch.full((numel,), math.nan)
    codec.decode(wire, out)
    return out


def parts(values, out, numel):
    """Blocks or chunks of both in fp64; of nothing there are none."""
    return zip(values.double().split(numel), out.double().split(numel), strict=True) if len(values) else ()


def bits(values):
    return values.view(torch.int32)


def bound_int8(x):
    largest = x.abs().max()
    if largest / 127 <= TINY:
        return x.abs()
    shrunk = x.abs() / 127 if largest > LARGEST * 127 / 128 else 0.0
    return 0.51 * largest / 127 + shrunk


def bound_e3m0(x):
    largest = x.abs().max()
    return x.abs() if largest <= TINY else SLACK * torch.maximum(x.abs() / 3, largest / 128)


def bound_twobit(x):
    scale = x.abs().mean()
    if scale <= TINY * SLACK:
        return torch.maximum(x.abs(), TINY * torch.ones(()).double())
    scale = scale.clamp(max=LARGEST / 1.893)
    return 1.001 * torch.maximum(0.67 * scale, x.abs() - 1.89 * scale)


BOUNDS = {"int8": bound_int8, "e3m0": bound_e3m0, "twobit": bound_twobit}


@pytest.mark.parametrize("name", BOUNDS)
@given(values=tensors())
@settings(max_examples=60, deadline=None)
def test_every_element_of_a_block_is_within_the_documented_bound(name, values):
    codec = codec_named(name)
    wire = wire_of(codec, values)
    codec.check(wire, values.numel())
    out = decoded(codec, wire, values.numel())
    assert torch.isfinite(out).all()
    for x, y in parts(values, out, 256):
        assert ((x - y).abs() <= BOUNDS[name](x)).all()
        if x.abs().max() > 0.0:  # so error feedback converges
            assert (x - y).norm() <= x.norm() * (1 + 1e-6)
        else:
            assert (bits(y.float()) == 0).all()


@given(values=tensors())
@settings(max_examples=60, deadline=None)
def test_bf16_is_within_half_a_step(values):
    codec = codec_named("bf16")
    out = decoded(codec, wire_of(codec, values), values.numel())
    x, y = values.double(), out.double()
    assert ((x - y).abs() <= (x.abs() / 256).clamp(min=2.0**-134)).all()


@pytest.mark.parametrize("kept", [1, 7, 64, 4096])
@given(values=tensors())
@settings(max_examples=30, deadline=None)
def test_topk_keeps_the_largest_and_its_error_is_the_norm_less_what_it_sends(kept, values):
    codec = codec_named(f"topk:{kept}")
    wire = wire_of(codec, values)
    codec.check(wire, values.numel())
    out = decoded(codec, wire, values.numel())
    for x, y in parts(values, out, 4096):
        sent = y != 0.0
        num_kept = math.ceil(kept * len(x) / 4096)
        assert int(sent.sum()) <= num_kept
        assert (x[sent] * y[sent] >= 0.0).all()
        smallest_kept = x.abs().sort(descending=True).values[num_kept - 1]
        assert (x[sent].abs() >= smallest_kept).all()
        # where a level vanished or stopped at the largest number, the rest of the identity is still a bound
        error, norm = (x - y).norm(), x.norm()
        assert error <= norm * (1 + 1e-6)
        if norm > 1e-20 and x.abs().max() < LARGEST / 2:
            assert math.isclose(error**2, norm**2 - y.norm() ** 2, rel_tol=1e-5, abs_tol=1e-5 * norm**2)


@pytest.mark.parametrize("name", NAMES)
@given(values=tensors(), odd=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_decoding_gives_the_same_bits_by_every_path(name, values, odd):
    numel = values.numel()
    codec = codec_named(name)
    wire = wire_of(codec, values)
    out = decoded(codec, wire, numel)
    again = torch.full((numel + odd,), math.nan)[odd:]
    codec.decode(wire, again)
    assert torch.equal(bits(out), bits(again))
    total = torch.zeros(numel)
    codec.accumulate(wire, 1.0, total, 1.0, total)
    assert torch.equal(bits(out + 0.0), bits(total))  # 0.0 + -0.0 is 0.0
    weighted = torch.zeros(numel)
    codec.accumulate(wire, 1.0, torch.zeros(numel), 0.5, weighted)
    assert torch.equal(bits(total), bits(weighted))


@pytest.mark.parametrize("name", NAMES)
@given(values=tensors(), tile=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_tiles_change_no_bit(name, values, tile):
    numel = values.numel()
    whole = codec_named(name)
    wire = wire_of(whole, values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_TILE_BLOCKS", tile)
        patch.setattr(topk, "_TILE_CHUNKS", 1)
        patch.setattr(bf16, "_TILE_NUMEL", 100 * tile)
        tiled = codec_named(name)
        assert torch.equal(wire_of(tiled, values), wire)
        assert torch.equal(bits(decoded(tiled, wire, numel)), bits(decoded(whole, wire, numel)))
        by_tiles, at_once = torch.ones(numel), torch.ones(numel)
        tiled.accumulate(wire, 0.5, by_tiles, 1.0, by_tiles)
        whole.accumulate(wire, 0.5, at_once, 1.0, at_once)
        assert torch.equal(bits(by_tiles), bits(at_once))


@pytest.mark.parametrize("name", codec_names())
@given(values=tensors(), chunks=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_a_border_between_chunks_changes_no_bit(name, values, chunks):
    border = chunks * (4096 if name == "topk" else 256)
    codec = codec_named(name)
    whole = decoded(codec, wire_of(codec, values), values.numel())
    apart = [decoded(codec, wire_of(codec, part), part.numel()) for part in (values[:border], values[border:])]
    assert torch.equal(bits(torch.cat(apart)), bits(whole))


@pytest.mark.parametrize("name", NAMES)
@given(values=tensors())
@settings(max_examples=25, deadline=None)
def test_what_was_decoded_once_encodes_to_finite_values_again(name, values):
    """The root decodes parts, adds them and encodes the sum: whatever a codec gives it must take."""
    codec = codec_named(name)
    once = decoded(codec, wire_of(codec, values), values.numel())
    twice = decoded(codec, wire_of(codec, once), values.numel())
    assert torch.isfinite(twice).all()
    if name in ("raw", "bf16", "e3m0"):
        assert torch.equal(once, twice)
