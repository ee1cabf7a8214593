# SPDX-License-Identifier: Apache-2.0
"""Bytes from a peer that lies: a codec refuses them or decodes them to finite numbers inside the tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.collective.codec import NotFinite, codec_named, codec_names

NAMES = [*codec_names(), "topk:3", "topk:4096"]
GUARD = 64
"""Elements on both sides of the output, which nothing may touch."""


@st.composite
def hostile_wires(draw, name):
    """An honest wire form with some bytes changed, or any bytes of that length."""
    codec = codec_named(name)
    numel = draw(st.sampled_from([1, 2, 255, 257, 700, 4096, 4100]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    wire = torch.empty(codec.wire_nbytes(numel), dtype=torch.uint8)
    if draw(st.integers(0, 3)) == 0:
        wire.random_(0, 256, generator=generator)
    else:
        wire.copy_(codec.encode(torch.randn(numel, generator=generator), wire))
    for place, byte in draw(st.lists(st.tuples(st.integers(0, len(wire) - 1), st.integers(0, 255)), max_size=8)):
        wire[place] = byte
    return numel, wire


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_not_refused_is_finite_and_stays_inside(name, data):
    numel, wire = data.draw(hostile_wires(name))
    codec = codec_named(name)
    before = wire.clone()
    try:
        codec.check(wire, numel)
    except NotFinite:
        return
    memory = torch.full((numel + 2 * GUARD,), 7.0)
    out = memory[GUARD : GUARD + numel]
    codec.decode(wire, out)
    assert torch.isfinite(out).all()
    assert (memory[:GUARD] == 7.0).all()
    assert (memory[GUARD + numel :] == 7.0).all()
    total = torch.zeros(numel)
    codec.accumulate(wire, 1.0, total, 1.0, total)
    assert torch.equal(total, out)
    assert torch.equal(wire, before)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_unchecked_topk_bytes_never_reach_outside_the_tensor(data):
    numel, wire = data.draw(hostile_wires("topk:4096"))
    codec = codec_named("topk:4096")
    memory = torch.full((numel + 2 * GUARD,), 7.0)
    try:
        codec.decode(wire, memory[GUARD : GUARD + numel])
    except NotFinite:
        assert (memory == 7.0).all()
    assert (memory[:GUARD] == 7.0).all()
    assert (memory[GUARD + numel :] == 7.0).all()
