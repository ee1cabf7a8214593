# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.trainer.data.samples import Permutation, SampleSource, validation_batches

seeds = st.integers(0, 2**64 - 1)


@given(size=st.integers(1, 600), key=st.binary(max_size=64))
def test_permutation_reaches_every_position_once(size, key):
    permutation = Permutation.from_key(size, key)
    assert sorted(map(permutation, range(size))) == list(range(size))


@given(size=st.integers(1, 2**40), key=st.binary(max_size=16), data=st.data())
def test_permutation_of_a_huge_range_stays_inside_and_keeps_positions_apart(size, key, data):
    permutation = Permutation.from_key(size, key)
    positions = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=50))
    images = {permutation(position) for position in positions}
    assert len(images) == len(positions)
    assert all(0 <= image < size for image in images)


@given(num_tokens=st.integers(2, 900), seq_len=st.integers(1, 40), seed=seeds, epoch=st.integers(0, 2**70))
def test_no_target_occurs_twice_in_a_data_epoch(num_tokens, seq_len, seed, epoch):
    num_tokens = max(num_tokens, seq_len + 1)
    source = SampleSource(np.zeros(num_tokens, dtype=np.uint8), seq_len, seed)
    first = epoch * source.num_samples
    offsets = sorted(source.offset(index) for index in range(first, first + source.num_samples))
    assert offsets[0] >= 0
    assert offsets[-1] + seq_len + 1 <= num_tokens
    assert all(later - earlier == seq_len for earlier, later in pairwise(offsets))
    # What an epoch leaves out is bounded: less than two samples' worth of tokens.
    assert num_tokens - 1 - len(offsets) * seq_len < 2 * seq_len


@given(seed=seeds, epoch=st.integers(0, 1000), seq_len=st.integers(1, 32), split=st.integers(0, 100))
def test_leases_resolve_the_same_however_a_range_is_cut(seed, epoch, seq_len, split):
    tokens = np.arange(2000, dtype=np.uint16).astype(np.uint8)
    whole, parts = SampleSource(tokens, seq_len, seed), SampleSource(tokens.copy(), seq_len, seed)
    start = epoch * whole.num_samples + split
    inputs, targets = whole.batch(range(start, start + 10))
    cut = start + split % 10 + 1
    rows = [parts.batch([index]) for index in [*range(cut, start + 10), *range(start, cut)]]
    rows = rows[start + 10 - cut :] + rows[: start + 10 - cut]
    assert [row.tolist() for row in inputs] == [row[0][0].tolist() for row in rows]
    assert [row.tolist() for row in targets] == [row[1][0].tolist() for row in rows]


@given(
    num_tokens=st.integers(2, 900),
    seq_len=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    num_batches=st.integers(1, 9),
)
def test_validation_windows_never_overlap(num_tokens, seq_len, batch_size, num_batches):
    num_tokens = max(num_tokens, seq_len + 1)
    tokens = np.arange(num_tokens, dtype=np.int64)  # positions stand for tokens, so that an overlap shows
    batches = list(validation_batches(tokens, seq_len, batch_size, num_batches))
    targets = [target for _, rows in batches for target in rows.flatten().tolist()]
    assert len(targets) == len(set(targets))
    assert len(targets) == seq_len * min(batch_size * num_batches, (num_tokens - 1) // seq_len)
    assert all(len(inputs) == batch_size for inputs, _ in batches[:-1])
