# SPDX-License-Identifier: Apache-2.0
"""Samples of a text in shards: each once an epoch, few shards at a time, the same on every machine."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.trainer.data.corpus import DataError
from isthmus.trainer.data.samples import (
    MAX_HELD_OUT_SHARDS,
    SampleOrder,
    SampleSource,
    Shards,
    held_out_shards,
    validation_batches,
)

LENGTHS = (700, 90, 8, 333, 9, 400, 250)
SEQ_LEN = 8


def shards_of(lengths: tuple[int, ...], pool: int = 1) -> Shards:
    """Each token says its shard and its place."""
    return Shards(lengths, lambda shard: np.arange(lengths[shard], dtype=np.uint32) + 10_000 * shard, pool)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    seq_len=st.integers(1, 20),
    pool=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_sample_once_and_no_target_twice(
    lengths: list[int], seq_len: int, pool: int, epoch: int
) -> None:
    if max(lengths) <= seq_len:
        return
    order = SampleOrder(lengths, seq_len, 7, pool=pool)
    places = [order.place(epoch * order.num_samples + position) for position in range(order.num_samples)]
    targets = Counter((shard, offset + 1 + at) for shard, offset in places for at in range(seq_len))
    assert set(targets.values()) == {1}
    assert all(place < lengths[shard] for shard, place in targets)
    assert {shard for shard, _ in places} == {shard for shard, length in enumerate(lengths) if length > seq_len}


def test_a_range_of_samples_lies_in_the_shards_that_are_named_for_it() -> None:
    order = SampleOrder(LENGTHS, SEQ_LEN, 3, pool=2)
    for start in range(0, 3 * order.num_samples, 5):
        named = order.shards_in(start, start + 5)
        assert {order.place(index)[0] for index in range(start, start + 5)} <= set(named)
        assert len(named) <= 4 if start % order.num_samples < order.num_samples - 5 else len(named) <= 6
    assert set(order.shards_in(0, order.num_samples)) == {0, 1, 3, 4, 5, 6}, "one is too short for a sample"


def test_a_source_of_shards_gives_windows_of_one_shard_and_opens_no_other() -> None:
    opened: list[int] = []
    shards = shards_of(LENGTHS, pool=2)
    noted = Shards(shards.lengths, lambda shard: (opened.append(shard), shards.open(shard))[1], 2)
    source = SampleSource(noted, SEQ_LEN, 0)
    for index in range(40):
        sample = source.sample(index)
        assert (sample.diff() == 1).all()
        assert len({int(token) // 10_000 for token in sample}) == 1
    assert set(opened) <= set(SampleOrder(LENGTHS, SEQ_LEN, 0, pool=2).shards_in(0, 40))


def test_the_order_differs_from_epoch_to_epoch_and_is_that_of_the_seed() -> None:
    orders = [
        [SampleOrder(LENGTHS, SEQ_LEN, seed, pool=2).place(index) for index in range(start, start + 50)]
        for seed, start in ((1, 0), (1, 0), (2, 0), (1, SampleOrder(LENGTHS, SEQ_LEN, 1, pool=2).num_samples))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]


def test_held_out_samples_come_from_a_few_shards_evenly_spread() -> None:
    lengths = tuple(100 + number for number in range(50))
    chosen = held_out_shards(lengths, SEQ_LEN)
    assert len(chosen) == MAX_HELD_OUT_SHARDS
    tokens = first_tokens(lengths, num_batches=8)
    assert len(tokens) == 32
    assert sorted({token // 10_000 for token in tokens}) == chosen
    assert held_out_shards((3, 500, 4), SEQ_LEN) == [1]


def test_without_a_number_of_batches_every_shard_gives_all_that_it_holds() -> None:
    lengths = (*(100 + number for number in range(50)), SEQ_LEN)
    counts = Counter(token // 10_000 for token in first_tokens(lengths, num_batches=None))
    assert counts == {number: (length - 1) // SEQ_LEN for number, length in enumerate(lengths) if length > SEQ_LEN}


def first_tokens(lengths: tuple[int, ...], *, num_batches: int | None) -> list[int]:
    """Of each held-out sample."""
    batches = validation_batches(shards_of(lengths), SEQ_LEN, 4, num_batches)
    return [int(inputs[0]) for inputs_BL, _ in batches for inputs in inputs_BL]


def test_shards_that_are_all_too_short_are_refused() -> None:
    with pytest.raises(DataError, match="too few for one sample"):
        SampleOrder((8, 3), SEQ_LEN, 0)
    with pytest.raises(ValueError, match="pool"):
        SampleOrder(LENGTHS, SEQ_LEN, 0, pool=0)
