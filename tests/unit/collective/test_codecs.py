"""What chunks become on the wire, and what they must never become."""

import math

import pytest
import torch

from collective.codec import NotFinite, codec_named, codec_names
from collective.codec.base import first_non_finite
from collective.communicator import decode_result

SIZES = [1, 2, 255, 256, 257, 1000, 262_144, 300_001]


def wire_of(codec, values):
    return codec.encode(values, torch.empty(codec.wire_nbytes(values.numel()), dtype=torch.uint8))


def decoded(codec, wire):
    out = torch.full((codec.numel(wire.numel()),), math.nan)
    codec.decode(wire, out)
    return out


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("numel", SIZES)
def test_length_on_the_wire_tells_the_number_of_elements(name, numel):
    codec = codec_named(name)
    assert codec.numel(codec.wire_nbytes(numel)) == numel


@pytest.mark.parametrize(("name", "nbytes"), [("raw", 5), ("int8", 4), ("int8", 262)])
def test_an_impossible_length_is_refused(name, nbytes):
    if name == "int8" and nbytes == 262:
        nbytes = 264  # 260 for a whole block, then 4 bytes of scale without a code
    with pytest.raises(ValueError, match="no whole number"):
        codec_named(name).numel(nbytes)


def test_raw_is_exact_and_copies_nothing():
    values = torch.randn(1000)
    wire = codec_named("raw").encode(values, torch.empty(0, dtype=torch.uint8))
    assert wire.data_ptr() == values.data_ptr()
    assert torch.equal(decoded(codec_named("raw"), wire), values)


@pytest.mark.parametrize("numel", SIZES)
def test_int8_stays_within_half_a_step(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    codec = codec_named("int8")
    error = (decoded(codec, wire_of(codec, values)) - values).abs()
    for start in range(0, numel, 256):
        block = slice(start, start + 256)
        assert error[block].max() <= 0.51 * values[block].abs().max() / 127


def test_int8_of_zeros_is_positive_zero():
    codec = codec_named("int8")
    out = decoded(codec, wire_of(codec, torch.full((300,), -0.0)))
    assert torch.equal(out.view(torch.int32), torch.zeros(300, dtype=torch.int32))


def test_int8_of_subnormal_values_is_zero_and_finite():
    codec = codec_named("int8")
    assert torch.equal(decoded(codec, wire_of(codec, torch.full((256,), 1e-40))), torch.zeros(256))


def test_int8_of_the_largest_numbers_stays_finite():
    codec = codec_named("int8")
    wire = wire_of(codec, torch.full((256,), torch.finfo(torch.float32).max))
    codec.check(wire)
    assert torch.isfinite(decoded(codec, wire)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [3, 256, 700])
def test_int8_refuses_to_encode_what_is_not_finite(bad, numel):
    values = torch.ones(numel)
    values[numel - 1] = bad
    with pytest.raises(NotFinite):
        wire_of(codec_named("int8"), values)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 3e38])
def test_int8_refuses_scales_that_no_encoder_makes(scale):
    codec = codec_named("int8")
    wire = wire_of(codec, torch.ones(600))
    wire[4:8].view(torch.float32).fill_(scale)
    with pytest.raises(NotFinite):
        codec.check(wire)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_raw_refuses_values_that_are_not_finite(bad):
    values = torch.ones(500)
    values[123] = bad
    with pytest.raises(NotFinite, match="123"):
        codec_named("raw").check(values.view(torch.uint8))


def test_a_sum_that_overflows_is_still_finite_input():
    assert first_non_finite(torch.full((1000,), 3e38)) is None


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("numel", [1, 257, 300_001])
@pytest.mark.parametrize("base_weight", [1.0, 0.25])
def test_accumulate_is_decode_then_add(name, numel, base_weight):
    codec = codec_named(name)
    generator = torch.Generator().manual_seed(numel)
    base = torch.randn(numel, generator=generator)
    wire = wire_of(codec, torch.randn(numel, generator=generator))
    total = torch.empty(numel)
    codec.accumulate(wire, 3.0, base, base_weight, total)
    torch.testing.assert_close(total, base_weight * base + 3.0 * decoded(codec, wire))


def test_a_recorded_chunk_is_decoded_into_its_place():
    codec = codec_named("int8")
    wire = wire_of(codec, torch.randn(300))
    out = torch.zeros(1000)
    decode_result("int8", 512, wire.numpy().tobytes(), out)
    assert torch.equal(out[512:812], decoded(codec, wire))
    assert not out[:512].any()
    with pytest.raises(ValueError, match="does not fit"):
        decode_result("int8", 701, wire.numpy().tobytes(), out)
