# SPDX-License-Identifier: Apache-2.0
"""What chunks become on the wire, and what they must never become: one case each."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from isthmus.collective.codec import BLOCK_NUMEL, BadWire, NotFinite, codec_named, codec_names
from isthmus.collective.codec.base import first_non_finite
from isthmus.collective.codec.topk import TopKCodec

SIZES = [0, 1, 2, 255, 256, 257, 1000, 4096, 4097, 262_144, 300_001]
LOSSY = [name for name in codec_names() if name != "raw"]
SCALED = ["int8", "e3m0", "twobit"]
LARGEST = torch.finfo(torch.float32).max


def wire_of(codec, values):
    return codec.encode(values, torch.full((codec.wire_nbytes(values.numel()),), 0xA5, dtype=torch.uint8))


def decoded(codec, wire, numel):
    out = torch.full((numel,), math.nan)
    codec.decode(wire, out)
    return out


def round_trip(name, values):
    codec = codec_named(name)
    wire = wire_of(codec, values)
    codec.check(wire, values.numel())
    return decoded(codec, wire, values.numel())


def gaussian(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def relative_error(name, values):
    return float((round_trip(name, values) - values).norm() / values.norm())


# ---------------------------------------------------------------------------------------------- names and lengths


def test_a_name_may_carry_a_parameter_and_is_given_back_in_full():
    assert codec_named("topk").name == "topk:64"
    assert codec_named("topk:32").name == "topk:32"
    assert [codec_named(name).name for name in SCALED] == SCALED


@pytest.mark.parametrize(
    "name", ["", "int9", "int8:4", "topk:", "topk:0", "topk:4097", "topk:-1", "topk:6٤", "topk:1e3"]
)
def test_a_name_that_no_codec_has_is_refused(name):
    with pytest.raises(ValueError, match=r"no codec|top-k keeps"):
        codec_named(name)


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("numel", SIZES)
def test_the_wire_form_has_the_length_that_follows_from_the_number_of_elements(name, numel):
    codec = codec_named(name)
    assert wire_of(codec, gaussian(numel)).numel() == codec.wire_nbytes(numel)


@pytest.mark.parametrize("name", codec_names())
def test_wire_forms_of_whole_blocks_can_lie_end_to_end(name):
    codec = codec_named(name)
    assert all(codec.wire_nbytes(blocks * BLOCK_NUMEL) % 4 == 0 for blocks in range(70))


@pytest.mark.parametrize(
    ("name", "bytes_per_element"),
    [("raw", 4), ("bf16", 2), ("int8", 1.015625), ("e3m0", 0.515625), ("twobit", 0.265625), ("topk", 0.029296875)],
)
def test_bytes_an_element_are_as_documented(name, bytes_per_element):
    assert codec_named(name).wire_nbytes(1 << 20) == bytes_per_element * (1 << 20)


@pytest.mark.parametrize(
    ("name", "at_most"),
    [("raw", 0), ("bf16", 0.0018), ("int8", 0.0072), ("e3m0", 0.2), ("twobit", 0.35), ("topk", 0.95)],
)
def test_error_on_gaussian_data_is_as_documented(name, at_most):
    assert relative_error(name, gaussian(1 << 20)) <= at_most


# ---------------------------------------------------------------------------------------------- what is finite


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [3, 256, 700, 5000])
@pytest.mark.parametrize("at_end", [True, False])
def test_a_lossy_codec_refuses_to_encode_what_is_not_finite(name, bad, numel, at_end):
    values = torch.ones(numel)
    values[numel - 1 if at_end else 0] = bad
    with pytest.raises(NotFinite):
        wire_of(codec_named(name), values)


@pytest.mark.parametrize("name", ["raw", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(name, bad):
    values = torch.ones(500, dtype=torch.float32 if name == "raw" else torch.bfloat16)
    values[123] = bad
    with pytest.raises(NotFinite, match="123"):
        codec_named(name).check(values.view(torch.uint8), 500)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, -0.0, 1e-45, 2.0**-101])
def test_scales_that_no_encoder_makes_are_refused(name, scale):
    codec = codec_named(name)
    wire = wire_of(codec, torch.ones(600))
    wire[4:8].view(torch.float32).fill_(scale)
    with pytest.raises(BadWire, match="scale"):
        codec.check(wire, 600)


@pytest.mark.parametrize("name", ["int8", "twobit"])
def test_a_scale_with_which_a_code_would_overflow_is_refused(name):
    codec = codec_named(name)
    wire = wire_of(codec, torch.ones(600))
    wire[4:8].view(torch.float32).fill_(3.4e38)
    with pytest.raises(BadWire, match="too large"):
        codec.check(wire, 600)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("numel", [1, 256, 300, 5000])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_numbers_stay_finite(name, numel, sign):
    values = torch.full((numel,), sign * LARGEST)
    out = round_trip(name, values)
    assert torch.isfinite(out).all()
    assert (out * sign >= 0.0).all()


def test_a_sum_that_overflows_is_still_finite_input():
    assert first_non_finite(torch.full((1000,), 3e38)) is None


# ---------------------------------------------------------------------------------------------- zeros and tiny numbers


@pytest.mark.parametrize("name", ["int8", "e3m0", "twobit", "topk"])
@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, -1e-40, -(2.0**-110)])
@pytest.mark.parametrize("numel", [1, 300, 9000])
def test_blocks_of_nothing_are_positive_zero(name, tiny, numel):
    out = round_trip(name, torch.full((numel,), tiny))
    assert torch.equal(out.view(torch.int32), torch.zeros(numel, dtype=torch.int32))


@pytest.mark.parametrize("name", SCALED)
def test_a_block_of_nothing_does_not_disturb_its_neighbours(name):
    values = gaussian(1024)
    values[256:512] = -0.0
    out = round_trip(name, values)
    assert not out[256:512].any()
    assert torch.equal(out[:256], round_trip(name, values[:256]))
    assert torch.equal(out[512:], round_trip(name, values[512:]))


@pytest.mark.parametrize("name", ["raw", "bf16"])
def test_signs_of_zeros_and_subnormal_numbers_are_kept(name):
    values = torch.tensor([-0.0, 0.0, 2.0**-130, -(2.0**-130)])
    assert torch.equal(round_trip(name, values).view(torch.int32), values.view(torch.int32))


# ---------------------------------------------------------------------------------------------- each codec's own


def test_raw_is_exact_and_copies_nothing():
    values = gaussian(1000)
    wire = codec_named("raw").encode(values, torch.empty(0, dtype=torch.uint8))
    assert wire.data_ptr() == values.data_ptr()
    assert torch.equal(decoded(codec_named("raw"), wire, 1000), values)


def test_bf16_rounds_half_to_even_and_stops_at_its_largest_number():
    values = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, LARGEST, -LARGEST])
    largest = torch.finfo(torch.bfloat16).max
    assert round_trip("bf16", values).tolist() == [1.0, 1.0 + 2.0**-6, largest, -largest]


def test_int8_is_exact_on_whole_multiples_of_its_scale():
    values = torch.arange(-127.0, 128.0)
    assert torch.equal(round_trip("int8", values), values)


def test_e3m0_has_these_levels_and_these_borders_between_them():
    levels = [2.0**-exponent for exponent in range(7)]
    assert round_trip("e3m0", torch.tensor(levels + [-level for level in levels])).tolist() == levels + [
        -x for x in levels
    ]
    below, above = [1.0], [1.0]
    for level in levels[1:]:
        below.append(level * 1.499)
        above.append(level * 1.501)
    assert round_trip("e3m0", torch.tensor([*below, 0.0078, 0.0079])).tolist() == [*levels, 0.0, 2.0**-6]
    assert round_trip("e3m0", torch.tensor(above)).tolist() == [1.0] + [2 * level for level in levels[1:]]


def test_e3m0_packs_two_elements_to_a_byte_in_order():
    values = torch.tensor([1.0, -0.5, 0.25, 0.0, -0.015625])
    wire = wire_of(codec_named("e3m0"), values)
    # sign of the first, sign of the second, three bits of the second's level, three of the first's
    assert wire[4:].tolist() == [0b01_110_111, 0b00_000_101, 0b10_000_001]


def test_twobit_has_four_levels_by_the_mean_magnitude():
    values = torch.tensor([0.1, -0.1, 3.0, -0.8])
    assert round_trip("twobit", values).tolist() == pytest.approx([0.5674, -0.5674, 1.8929, -0.5674])
    assert wire_of(codec_named("twobit"), values)[4:].tolist() == [0b10_01_10_00]


def test_twobit_of_a_short_block_is_not_diluted_by_what_is_missing():
    assert round_trip("twobit", torch.full((7,), 2.0)).tolist() == pytest.approx([2.0 * 0.5674] * 7)


def test_twobit_scales_survive_a_sum_that_overflows():
    values = torch.full((512,), 2e38)
    values[256:] = 1e-20
    out = round_trip("twobit", values)
    assert out[:256].tolist() == pytest.approx([0.5674 * LARGEST / 1.893] * 256, rel=1e-3)
    assert out[256:].tolist() == pytest.approx([0.5674e-20] * 256)


def test_topk_keeps_the_largest_and_sends_two_levels():
    values = torch.zeros(4096)
    values[[5, 70, 4095, 9]] = torch.tensor([3.0, -1.0, 1.0, -5.0])
    wire = wire_of(TopKCodec(4), values)
    assert wire[:8].view(torch.float32).tolist() == [1.0, 4.0]
    assert wire[8:9].tolist() == [0b00_01_11_10]  # by index: 3, -5, -1, 1; bit 1 says upper, bit 0 negative
    assert wire[9:15].tolist() == [5, 9 << 4, 0, 70, 0xF0, 0xFF]
    out = decoded(TopKCodec(4), wire, 4096)
    assert out[[5, 9, 70, 4095]].tolist() == [4.0, -4.0, -1.0, 1.0]
    assert out.count_nonzero() == 4


def test_topk_of_equals_keeps_the_first_ones():
    out = decoded(TopKCodec(3), wire_of(TopKCodec(3), torch.full((8192,), -2.0)), 8192)
    assert out.nonzero().view(-1).tolist() == [0, 1, 2, 4096, 4097, 4098]
    values = torch.zeros(4096)
    values[[100, 50]] = 1.0
    assert decoded(TopKCodec(3), wire_of(TopKCodec(3), values), 4096).nonzero().view(-1).tolist() == [50, 100]


def test_topk_keeps_the_sign_of_the_smallest_number_beside_the_largest():
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -1e-45, largest, -1.0])
    out = round_trip("topk:4096", values)
    assert (out.signbit() == values.signbit()).all()


def test_topk_of_everything_loses_only_precision():
    values = gaussian(5000)
    assert decoded(TopKCodec(4096), wire_of(TopKCodec(4096), values), 5000).sign().equal(values.sign())


@pytest.mark.parametrize("indices", [[3, 3], [9, 3], [0, 300], [0, 4095]])
def test_topk_refuses_indices_that_do_not_rise_or_lie_outside(indices):
    codec = TopKCodec(20)
    wire = wire_of(codec, gaussian(300))  # keeps 2
    first, second = indices
    start = 8 + 1
    wire[start : start + 3] = torch.tensor(
        [first & 255, first >> 8 | (second & 15) << 4, second >> 4], dtype=torch.uint8
    )
    out = torch.full((300,), 7.0)
    with pytest.raises(BadWire, match="index"):
        codec.check(wire, 300)
    with pytest.raises(BadWire, match="index"):
        codec.decode(wire, out)
    with pytest.raises(BadWire, match="index"):
        codec.accumulate(wire, 1.0, out, 0.5, out)
    assert (out == 7.0).all()


# ---------------------------------------------------------------------------------------------- adding up


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("numel", [0, 1, 257, 300_001])
@pytest.mark.parametrize("base_weight", [1.0, 0.25])
@pytest.mark.parametrize("in_place", [True, False])
def test_accumulate_is_decode_then_add(name, numel, base_weight, in_place):
    codec = codec_named(name)
    base = gaussian(numel, 1)
    wire = wire_of(codec, gaussian(numel, 2))
    expected = base_weight * base + 3.0 * decoded(codec, wire, numel)
    total = base if in_place else torch.full((numel,), math.nan)
    codec.accumulate(wire, 3.0, base, base_weight, total)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("name", [name for name in codec_names() if name not in ("raw", "bf16")])
@pytest.mark.parametrize("numel", [0, 1, 257, 300_001])
def test_what_is_decoded_is_in_proportion_to_the_scales(name, numel):
    codec = codec_named(name)
    wire = wire_of(codec, gaussian(numel))
    expected = 0.25 * decoded(codec, wire, numel)
    codec.scales(wire, numel).div_(4.0)
    codec.check(wire, numel)
    assert torch.equal(decoded(codec, wire, numel), expected)


@pytest.mark.parametrize("name", ["raw", "bf16"])
def test_numbers_that_travel_as_numbers_have_no_scales(name):
    codec = codec_named(name)
    assert codec.scales(wire_of(codec, gaussian(300)), 300) is None


@pytest.mark.parametrize("name", codec_names())
def test_memory_that_is_longer_than_the_wire_form_is_left_alone(name):
    codec = codec_named(name)
    memory = torch.full((20_000,), 0x5A, dtype=torch.uint8)
    wire = codec.encode(gaussian(4100), memory)
    assert wire.numel() == codec.wire_nbytes(4100)
    assert (memory[wire.numel() :] == 0x5A).all()


# ---------------------------------------------------------------------------------------------- the benchmark


def test_the_benchmark_prints_a_table_and_writes_its_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    import bench_codecs

    monkeypatch.setattr(bench_codecs, "CHUNK_NBYTES", (1 << 12,))
    threads = torch.get_num_threads()
    try:
        assert bench_codecs.main(["--calls", "15", "--codec", "int8", "--json", str(tmp_path / "figures.json")]) == 0
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("bench_codecs")
    assert "int8" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert row["chunk_nbytes"] == 4096
    assert row["bytes_per_element"] == 1.015625
    assert 0.0 < row["relative_l2_error"] < 0.01
    assert row["encode"]["slow"] <= row["encode"]["median"] <= row["encode"]["fast"]
