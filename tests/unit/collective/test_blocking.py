# SPDX-License-Identifier: Apache-2.0
"""Futures for ordinary scripts."""

import threading

import numpy as np
import pytest
import torch

from isthmus.collective import AddressInUse, BlockingCommunicator, OperationAborted, view_of


@pytest.fixture
def pair():
    with BlockingCommunicator(0) as first, BlockingCommunicator(1) as second:
        view = view_of(0, [first.address, second.address])
        for communicator in (first, second):
            communicator.install(view)
        yield first, second


def test_operations_run_while_the_script_goes_on_and_give_their_result(pair):
    tensors = [torch.full((1000,), float(rank)) for rank in range(2)]
    works = [one.all_reduce(one.key(0), tensor) for one, tensor in zip(pair, tensors, strict=True)]
    stats = [work.result(20) for work in works]
    assert all(torch.equal(tensor, torch.full((1000,), 0.5)) for tensor in tensors)
    assert stats[0].weight_sum == 2.0


def test_every_operation_has_its_future(pair):
    first, _ = pair
    ids = [member.peer_id for member in first.view.members]
    arrays = [np.full(4, rank, np.int32) for rank in range(2)]
    gathered = [one.all_gather(one.key(1), array) for one, array in zip(pair, arrays, strict=True)]
    assert [part.tolist() for part in gathered[0].result(20)[0]] == [[0] * 4, [1] * 4]
    gathered[1].result(20)
    outs = [np.zeros(4, np.int32) for _ in pair]
    swaps = [
        one.exchange(one.key(2), array, out=out, partner=ids[1 - rank])
        for rank, (one, array, out) in enumerate(zip(pair, arrays, outs, strict=True))
    ]
    for work in swaps:
        work.result(20)
    assert [out.tolist() for out in outs] == [[1] * 4, [0] * 4]
    given = [one.broadcast(one.key(3), array, root=ids[1]) for one, array in zip(pair, arrays, strict=True)]
    for work in [*given, *(one.barrier(one.key(4)) for one in pair)]:
        work.result(20)
    assert arrays[0].tolist() == [1] * 4
    for one in pair:
        one.look_ahead()
    tables = [one.survey(one.key(5)) for one in pair]
    assert tables[0].result(20) == tables[1].result(20)
    assert [report.peer_id for report in first.links()] == [ids[1]]


def test_a_cancelled_future_ends_the_operation_for_all(pair):
    waiting = pair[0].all_reduce(pair[0].key(7), torch.ones(4_000_000))
    while not pair[1].links()[0].bytes_received:  # it has begun
        assert not waiting.done()
    waiting.cancel()
    with pytest.raises(OperationAborted, match="gave up"):
        pair[1].all_reduce(pair[1].key(7), torch.ones(4_000_000)).result(20)


def test_the_thread_ends_with_the_context_and_then_nothing_is_accepted():
    before = threading.active_count()
    with BlockingCommunicator(0) as communicator:
        communicator.install(view_of(0, [communicator.address]))
    assert threading.active_count() == before
    communicator.close()
    with pytest.raises(RuntimeError, match="closed"):
        communicator.barrier(communicator.key(0))


def test_an_address_in_use_is_an_error_at_once():
    with BlockingCommunicator(0) as communicator, pytest.raises(AddressInUse):
        BlockingCommunicator(1, communicator.address)
