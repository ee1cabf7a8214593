# SPDX-License-Identifier: Apache-2.0
"""The order of the blocks: a permutation whose runs of 4096 elements are blocks of 64 x 64."""

import pytest
import torch

from isthmus.optim.blocks import RUN_NUMEL, block_order, shapes_of, topk_codec
from isthmus.optim.fragments import FragmentTable

SHAPES = {
    "norm": (96,),
    "up": (128, 192),
    "odd": (10, 7),
    "embedding": (65, 128),
    "scale": (),
    "convolution": (8, 4, 3),
    "none": (0, 5),
    "down": (192, 64),
}
TABLE = FragmentTable.from_named_shapes(SHAPES.items())
ORDER = block_order(shapes_of(TABLE.whole()))
PLACES = torch.arange(float(TABLE.numel))


def to_blocks(buffer, order=ORDER):
    return order.to_blocks(buffer, out=torch.full_like(buffer, torch.nan))


def test_back_and_forth_is_the_same_vector():
    there = to_blocks(PLACES)
    assert not torch.equal(there, PLACES)
    assert torch.equal(ORDER.from_blocks(there, out=torch.full_like(there, torch.nan)), PLACES)
    back = ORDER.from_blocks(PLACES, out=torch.full_like(PLACES, torch.nan))
    assert torch.equal(to_blocks(back), PLACES)


def test_every_element_has_one_place():
    assert torch.equal(to_blocks(PLACES).sort().values, PLACES)


def test_each_run_of_4096_is_a_block_of_a_matrix_row_by_row():
    blocks = to_blocks(PLACES)
    expected = [
        TABLE.view(PLACES, name)[top : top + 64, left : left + 64].reshape(-1)
        for name in ("up", "down")
        for top in range(0, SHAPES[name][0], 64)
        for left in range(0, SHAPES[name][1], 64)
    ]
    assert len(expected) == 9
    for run, block in zip(blocks.split(RUN_NUMEL), expected, strict=False):
        assert torch.equal(run, block)


def test_smaller_blocks_have_the_largest_divisors_up_to_64_as_sides():
    sizes = [tuple(batch.shape) for batch in ORDER.batches(PLACES)]
    # 65 = 5 · 13, 96 = 2 · 48, and the convolution is the matrix [8, 12].
    assert sizes == [(9, 64, 64), (10, 13, 64), (1, 8, 12), (1, 10, 7), (2, 1, 48), (1, 1, 1)]
    embedding = TABLE.view(PLACES, "embedding")
    start = 9 * RUN_NUMEL
    assert torch.equal(to_blocks(PLACES)[start : start + 13 * 64].view(13, 64), embedding[:13, :64])


def test_a_vector_keeps_its_order():
    table = FragmentTable.from_named_shapes([("bias", (1000,))])
    places = torch.arange(1000.0)
    assert torch.equal(to_blocks(places, block_order(shapes_of(table.whole()))), places)


def test_batches_are_views_that_cover_everything():
    buffer = torch.zeros(TABLE.numel)
    for batch in ORDER.batches(buffer):
        batch += 1.0
    assert bool((buffer == 1.0).all())


def test_a_fragment_of_some_tensors_has_an_order_of_its_own():
    fragment = TABLE.fragment(1, ["down", "norm"])
    order = block_order(shapes_of(fragment))
    buffer = fragment.gather(PLACES, out=torch.empty(fragment.numel))
    assert order.numel == fragment.numel
    block = TABLE.view(PLACES, "down")[:64].reshape(-1)
    assert torch.equal(to_blocks(buffer, order)[:RUN_NUMEL], block)


def test_equal_shapes_give_the_same_order_and_others_another():
    assert block_order(shapes_of(TABLE.whole())) is ORDER
    assert block_order(torch.tensor([2.0, 3.0])) != block_order(torch.tensor([3.0, 2.0]))


def test_wrong_buffers_are_refused():
    for buffer, out in ((PLACES[1:], PLACES.clone()), (PLACES, PLACES[1:].clone()), (PLACES, PLACES.double())):
        with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
            ORDER.to_blocks(buffer, out=out)
    with pytest.raises(ValueError, match="separate memory"):
        ORDER.from_blocks(PLACES, out=PLACES)


def test_a_dimension_that_fp32_cannot_hold_is_refused():
    table = FragmentTable.from_named_shapes([("long", ((1 << 24) + 1,))])
    with pytest.raises(ValueError, match="16777217"):
        shapes_of(table.whole())


def test_the_codec_keeps_so_many_of_a_run_or_all_of_it():
    assert [topk_codec(kept) for kept in (1, 64, 4095, 4096)] == ["topk:1", "topk:64", "topk:4095", "raw"]
    for kept in (0, 4097):
        with pytest.raises(ValueError, match="topk must be from 1 to 4096"):
            topk_codec(kept)
