# SPDX-License-Identifier: Apache-2.0
"""How long chunks are, by codec and plan."""

import pytest
import torch

from isthmus.collective.codec import codec_named, codec_names
from isthmus.collective.core.link_table import LinkTable
from isthmus.collective.rounds.plan import FAR_CHUNK_NBYTES
from isthmus.collective.rounds.workplace import Workplace
from isthmus.collective.transport.memory import BufferPool

CHUNK_NBYTES = 1 << 20
TENSOR = torch.empty(24 << 20)


def longest_of(codec, plan="butterfly", table=None):
    """Bytes in memory and on the wire of the longest chunk."""
    workplace = Workplace(chunk_nbytes=CHUNK_NBYTES, pool=BufferPool())
    workplace.learn(table)
    _, cut = workplace.choose(plan, 3, TENSOR, codec)
    return 4 * cut.longest, codec_named(codec).wire_nbytes(cut.longest)


@pytest.mark.parametrize("codec", codec_names())
def test_no_chunk_is_longer_on_the_wire_than_asked_nor_four_times_that_in_memory(codec):
    in_memory, on_wire = longest_of(codec)
    assert on_wire <= CHUNK_NBYTES
    assert in_memory <= 4 * CHUNK_NBYTES


@pytest.mark.parametrize(("codec", "times"), [("raw", 1.0), ("bf16", 2.0), ("int8", 3.9), ("e3m0", 4.0), ("topk", 4.0)])
def test_a_chunk_is_as_much_longer_as_its_codec_makes_it_shorter(codec, times):
    assert longest_of(codec)[0] > 0.85 * times * CHUNK_NBYTES


@pytest.mark.parametrize("codec", codec_names())
def test_where_sums_travel_as_they_are_no_chunk_is_longer_in_memory(codec):
    assert longest_of(codec, plan="ring")[0] <= CHUNK_NBYTES


@pytest.mark.parametrize("codec", codec_names())
def test_on_a_long_path_chunks_stay_short(codec):
    rates = (1e8,) * 3
    far = LinkTable(latency_s=((0.05,) * 3,) * 3, rate=(rates,) * 3, upload=rates, download=rates)
    assert longest_of(codec, table=far)[0] <= FAR_CHUNK_NBYTES
