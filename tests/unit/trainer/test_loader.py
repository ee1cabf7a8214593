# SPDX-License-Identifier: Apache-2.0
"""Batches that a thread makes ready, and who takes which samples."""

import threading

import numpy as np
import pytest
import torch

from isthmus.trainer.data.samples import SampleSource
from isthmus.trainer.workers.loader import Loader, micro_batches

TOKENS = np.arange(2000, dtype=np.int64).astype(np.uint8)


class Source(SampleSource):
    """Notes which thread makes what."""

    def __init__(self):
        super().__init__(TOKENS, 8, 1)
        self.made = []

    def batch(self, indices):
        self.made.append((tuple(indices), threading.current_thread() is threading.main_thread()))
        return super().batch(indices)


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def loader(source):
    loader = Loader(source, torch.device("cpu"))
    yield loader
    loader.close()


def test_a_batch_that_was_asked_for_is_made_by_the_thread_and_the_same(source, loader):
    loader.prefetch([(1, 2), (5,)])
    for batch in ((1, 2), (5,)):
        for ours, theirs in zip(loader.take(batch), SampleSource(TOKENS, 8, 1).batch(batch), strict=True):
            assert torch.equal(ours, theirs)
    assert source.made == [((1, 2), False), ((5,), False)]


def test_a_batch_that_nobody_has_asked_for_is_made_when_it_is_taken(source, loader):
    loader.prefetch([(1, 2)])
    loader.prefetch([(3,)])  # the step before was given up
    inputs, _ = loader.take((7, 8))
    assert inputs.shape == (2, 8)
    assert ((7, 8), True) in source.made
    loader.take((3,))
    loader.take((1, 2))
    assert ((1, 2), True) in source.made, "what was forgotten is made again"


def test_what_the_thread_cannot_make_is_told_to_whoever_takes_it(loader):
    loader.prefetch([(-1,)])
    with pytest.raises(IndexError, match="negative"):
        loader.take((-1,))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_micro_batches_of_all_workers_are_the_batch_and_equally_many(num_workers, size):
    indices = range(10, 17)
    parts = [micro_batches(indices, rank=rank, num_workers=num_workers, size=size) for rank in range(num_workers)]
    assert [index for part in parts for batch in part for index in batch] == list(indices)
    assert len({len(part) for part in parts}) == 1
    assert all(len(batch) <= size for part in parts for batch in part)
