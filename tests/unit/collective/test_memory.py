# SPDX-License-Identifier: Apache-2.0
"""Large buffers are used again, and no more are kept than were out at once."""

import torch

from isthmus.collective.transport.memory import BufferPool


def kept(pool):
    return sum(buffer.numel() for buffer in pool._free)


def test_what_is_given_back_is_taken_again():
    pool = BufferPool()
    first = pool.take(1000)
    assert (first.dtype, first.shape) == (torch.uint8, (1000,))
    place = first.data_ptr()
    pool.give_back(first)
    assert pool.take(1000).data_ptr() == place


def test_what_is_out_is_nobody_elses():
    pool = BufferPool()
    first, second = pool.take(1000), pool.take(1000)
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())
    pool.give_back(first)
    third = pool.take(1000)
    third.fill_(3)
    assert bool((second == 2).all())


def test_a_shorter_buffer_comes_from_a_longer_one_but_not_from_one_many_times_too_long():
    pool = BufferPool()
    longer = pool.take(1000)
    place = longer.data_ptr()
    pool.give_back(longer)
    shorter = pool.take(125)
    assert shorter.shape == (125,)
    assert shorter.data_ptr() == place
    pool.give_back(shorter)
    assert pool.take(124).data_ptr() != place
    assert pool.take(1000).data_ptr() == place


def test_the_shortest_that_fits_is_chosen():
    pool = BufferPool()
    buffers = [pool.take(nbytes) for nbytes in (1600, 1000, 1200)]
    place = buffers[1].data_ptr()
    for buffer in buffers:
        pool.give_back(buffer)
    assert pool.take(900).data_ptr() == place


def test_no_more_is_kept_than_was_out_at_once():
    pool = BufferPool()
    for nbytes in (1000, 3000, 7000, 15_000):  # one after another
        pool.give_back(pool.take(nbytes))
        assert kept(pool) <= nbytes
    several = [pool.take(5000) for _ in range(4)]
    for buffer in several:
        pool.give_back(buffer)
    assert kept(pool) <= 20_000
    assert kept(pool) >= 15_000


def test_lengths_that_take_turns_share_one_buffer():
    pool = BufferPool()
    places = set()
    for nbytes in (30_000, 10_000, 20_000) * 3:
        buffer = pool.take(nbytes)
        places.add(buffer.data_ptr())
        pool.give_back(buffer)
    assert len(places) == 1
    assert kept(pool) == 30_000


def test_a_buffer_may_be_given_back_by_a_view_of_it_seen_as_another_dtype():
    pool = BufferPool()
    buffer = pool.take(1024)
    place = buffer.data_ptr()
    pool.give_back(buffer.view(torch.float32).view(torch.uint8))
    assert kept(pool) == 1024
    assert pool.take(1024).data_ptr() == place


def test_nothing_is_a_buffer_too():
    pool = BufferPool()
    nothing = pool.take(0)
    assert nothing.numel() == 0
    pool.give_back(nothing)
    assert pool.take(0).numel() == 0
    assert pool.take(8).numel() == 8
