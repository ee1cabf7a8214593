# SPDX-License-Identifier: Apache-2.0
import hashlib

import numpy as np
import pytest
import torch

from isthmus.trainer.data.corpus import DataError
from isthmus.trainer.data.samples import SampleSource, validation_batches


def numbered_tokens(count):
    """Tokens whose neighbours tell where in the text they stand (two bytes of the position, alternating)."""
    return np.array([(i // 2 >> 8 * (i % 2)) & 255 for i in range(count)], dtype=np.uint8)


# ---------------------------------------------------------------------------------------------------------- samples


def test_sample_is_the_text_at_its_offset():
    tokens = numbered_tokens(10_000)
    source = SampleSource(tokens, 32, seed=7)
    for index in (0, 1, source.num_samples, 12_345):
        sample = source.sample(index)
        assert sample.dtype == torch.int64
        assert sample.tolist() == tokens[source.offset(index) : source.offset(index) + 33].tolist()


def test_batch_gives_every_token_the_next_one_as_target():
    source = SampleSource(numbered_tokens(10_000), 32, seed=7)
    inputs, targets = source.batch(range(5, 9))
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    for row, index in enumerate(range(5, 9)):
        assert inputs[row].tolist() == source.sample(index)[:-1].tolist()
        assert targets[row].tolist() == source.sample(index)[1:].tolist()


def test_order_is_the_same_on_every_peer():
    """Golden offsets: two versions that disagree about them would train a lease twice."""
    source = SampleSource(numbered_tokens(100_000), 64, seed=2024)
    assert source.num_samples == 1561
    offsets = [source.offset(index) for index in (0, 1, 2, 1560, 1561, 1_000_000)]
    assert offsets == [4976, 70704, 26352, 48304, 81874, 2601]
    digest = hashlib.blake2b(str([source.offset(index) for index in range(5000)]).encode(), digest_size=8)
    assert digest.hexdigest() == "4f0ddbd292eab146"


def test_seed_and_epoch_change_order_and_cut():
    source = SampleSource(numbered_tokens(100_000), 64, seed=1)
    other = SampleSource(numbered_tokens(100_000), 64, seed=2)
    size = source.num_samples
    first, second = ([source.offset(epoch * size + i) for i in range(size)] for epoch in (0, 1))
    elsewhere = [other.offset(i) for i in range(size)]
    assert len({tuple(offsets) for offsets in (first, second, elsewhere)}) == 3
    assert len({min(offsets) % 64 for offsets in (first, second, elsewhere)}) == 3


def test_order_is_scattered_over_the_text():
    source = SampleSource(numbered_tokens(100_000), 64, seed=1)
    places = torch.tensor([source.offset(i) for i in range(source.num_samples)], dtype=torch.float64)
    steps = places.diff().abs()
    assert float(steps.mean()) == pytest.approx(100_000 / 3, rel=0.1)
    correlation = torch.corrcoef(torch.stack((places[:-1], places[1:])))[0, 1]
    assert abs(float(correlation)) < 0.1


def test_shortest_text_has_one_sample_for_ever():
    tokens = numbered_tokens(33)
    source = SampleSource(tokens, 32, seed=0)
    assert source.num_samples == 1
    assert {source.offset(index) for index in range(10)} == {0}


def test_text_below_one_sample_is_refused():
    with pytest.raises(DataError, match="32 training tokens, too few for one sample of 33"):
        SampleSource(numbered_tokens(32), 32, seed=0)


@pytest.mark.parametrize(("seq_len", "seed"), [(0, 0), (8, -1), (8, 1 << 64)])
def test_source_out_of_range_is_refused(seq_len, seed):
    with pytest.raises(ValueError, match="must"):
        SampleSource(numbered_tokens(100), seq_len, seed)


def test_negative_index_is_refused():
    with pytest.raises(IndexError, match="-1 is negative"):
        SampleSource(numbered_tokens(100), 8, 0).sample(-1)


def test_reading_samples_touches_no_global_random_state():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    SampleSource(numbered_tokens(1000), 8, 3).batch(range(20))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


# ------------------------------------------------------------------------------------------------------- validation


def test_validation_windows_are_spread_from_the_first_token_to_the_last():
    tokens = numbered_tokens(5_000)
    batches = list(validation_batches(tokens, 32, batch_size=4, num_batches=3))
    assert [inputs.shape for inputs, _ in batches] == [(4, 32)] * 3
    assert batches[0][0][0].tolist() == tokens[:32].tolist()
    assert batches[-1][1][-1].tolist() == tokens[-32:].tolist()
    again = list(validation_batches(tokens, 32, batch_size=4, num_batches=3))
    assert all(
        torch.equal(a, b) for one, two in zip(batches, again, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_short_validation_text_gives_fewer_samples_without_overlap():
    tokens = np.arange(101, dtype=np.uint8)
    batches = list(validation_batches(tokens, 10, batch_size=4, num_batches=100))
    assert [len(inputs) for inputs, _ in batches] == [4, 4, 2]
    targets = torch.cat([targets.flatten() for _, targets in batches]).tolist()
    assert sorted(targets) == list(range(1, 101))


def test_one_validation_window_is_enough():
    assert len(list(validation_batches(numbered_tokens(33), 32, 8, 8))) == 1
    with pytest.raises(DataError, match="held-out"):
        validation_batches(numbered_tokens(32), 32, 8, 8)
