# SPDX-License-Identifier: Apache-2.0
"""The package without the rest: scripts that say themselves who takes part."""

import asyncio
import contextlib

import pytest
import torch

from isthmus.collective import AddressInUse, BulkOptions, NonFiniteInput, OperationAborted, RoundRefused
from isthmus.collective.api.standalone import open_communicator, peer_id_of, view_of
from isthmus.collective.core.progress import StallLimits
from isthmus.collective.rounds.supervision import Patience
from isthmus.collective.transport import Mode, Security

QUICK = BulkOptions(
    patience=Patience(stall=StallLimits(floor_s=1.5), redial_s=0.2, first_contact_s=0.5, round_s=20.0),
    install_grace_s=0.5,
)


@contextlib.asynccontextmanager
async def opened(count, **more):
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(open_communicator(number, **({"options": QUICK} | more)))
            for number in range(count)
        ]


async def install(communicators, epoch, numbers=None):
    chosen = range(len(communicators)) if numbers is None else numbers
    view = view_of(epoch, {number: communicators[number].address for number in chosen})
    await asyncio.gather(*(communicators[number].install(view) for number in chosen))


async def sums(communicators, step=0, **more):
    tensors = [torch.full((1000,), 2.0**n) for n in range(len(communicators))]
    work = (
        communicator.all_reduce(communicator.key(step), tensor, op="sum", **more)
        for communicator, tensor in zip(communicators, tensors, strict=True)
    )
    await asyncio.gather(*work)
    return [tensor.unique().tolist() for tensor in tensors]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
async def test_peers_that_know_each_others_addresses_can_reduce(world_size):
    async with opened(world_size) as communicators:
        await install(communicators, 0)
        assert await sums(communicators) == [[2.0**world_size - 1]] * world_size


async def test_who_takes_part_is_the_callers_to_say_and_may_change():
    async with opened(3) as communicators:
        await install(communicators, 0)
        assert await sums(communicators) == [[7.0]] * 3
        await install(communicators, 1, [0, 2])
        assert await sums([communicators[0], communicators[2]]) == [[3.0]] * 2
        with pytest.raises(RoundRefused, match="the installed view is 0"):
            await communicators[1].barrier(communicators[0].key(1))
        await install(communicators, 2)
        assert await sums(communicators) == [[7.0]] * 3


async def test_every_operation_works_between_peers_alone():
    async with opened(2) as communicators:
        await install(communicators, 0)
        first, second = communicators

        async def run(own, other, number):
            parts, _ = await own.all_gather(own.key(0), torch.tensor([float(number)]))
            given = torch.tensor([5.0 + number])
            await own.broadcast(own.key(1), given, root=first.me.peer_id)
            got = torch.empty(1)
            await own.exchange(own.key(2), torch.tensor([float(number)]), out=got, partner=other.me.peer_id)
            await own.barrier(own.key(3))
            return [part.item() for part in parts], given.item(), got.item()

        results = await asyncio.gather(run(first, second, 0), run(second, first, 1))
    assert results == [([0.0, 1.0], 5.0, 1.0), ([0.0, 1.0], 5.0, 0.0)]


async def test_peers_with_the_same_secret_work_together_and_one_with_another_stays_outside():
    async with opened(2, secret=b"ours") as communicators:
        await install(communicators, 0)
        assert await sums(communicators) == [[3.0]] * 2
        async with open_communicator(2, secret=b"theirs", options=QUICK) as stranger:
            everybody = [*communicators, stranger]
            await install(everybody, 1)
            results = await asyncio.gather(
                *(communicator.barrier(communicator.key(0)) for communicator in everybody), return_exceptions=True
            )
        assert all(isinstance(result, OperationAborted) for result in results)
        assert stranger.me.peer_id in results[0].suspects


async def test_without_a_view_there_are_no_keys():
    async with open_communicator(0) as communicator:
        with pytest.raises(RuntimeError, match=r"await install\(view\) first"):
            communicator.key(0)
        assert communicator.view is None


async def test_an_address_in_use_is_named():
    async with open_communicator(0) as first:
        with pytest.raises(AddressInUse) as taken:
            async with open_communicator(1, first.address):
                pass
    assert taken.value.address == first.address


async def test_the_address_is_free_again_when_the_context_has_ended_and_rounds_end_with_it():
    async with open_communicator(0, options=QUICK) as first:
        address = first.address
        async with open_communicator(1, options=QUICK) as second:
            view = view_of(0, [first.address, second.address])
            await asyncio.gather(first.install(view), second.install(view))
            running = asyncio.ensure_future(second.barrier(second.key(0)))
            await asyncio.sleep(0)
        with pytest.raises(OperationAborted, match="the communicator was closed"):
            await running
    async with open_communicator(0, address) as again:
        assert again.address == address


async def test_numbers_that_are_not_finite_are_an_error_here_too():
    async with opened(1) as communicators:
        await install(communicators, 0)
        with pytest.raises(NonFiniteInput):
            await communicators[0].all_reduce(communicators[0].key(0), torch.tensor([1.0, float("nan")]))


def test_a_view_names_peers_in_the_order_of_their_numbers():
    view = view_of(3, {7: "h:7", 2: "h:2"})
    assert [(member.peer_id, member.address) for member in view.members] == [
        (peer_id_of(2), "h:2"),
        (peer_id_of(7), "h:7"),
    ]
    assert view.epoch == 3
    assert view_of(3, ["h:0", "h:1"]) == view_of(3, {1: "h:1", 0: "h:0"})
    assert peer_id_of(255) == "00000000000000ff"


@pytest.mark.parametrize("mode", list(Mode))
async def test_peers_with_a_security_reduce_and_who_has_another_secret_is_a_stranger(mode):
    async with contextlib.AsyncExitStack() as stack:
        secrets = (b"o" * 32, b"o" * 32, b"t" * 32)
        communicators = [
            await stack.enter_async_context(
                open_communicator(
                    number, options=QUICK, security=Security.shared(peer_id_of(number), secret, mode=mode)
                )
            )
            for number, secret in enumerate(secrets)
        ]
        await install(communicators[:2], 0)
        assert await sums(communicators[:2]) == [[3.0]] * 2
        await install(communicators, 1)
        with pytest.raises(OperationAborted):
            await communicators[0].barrier(communicators[0].key(1))


async def test_to_a_round_a_peer_that_was_put_out_is_one_whose_line_broke():
    """That it does not come back is for the security to see to; here it may, and the next round finds it again."""
    async with opened(3) as communicators:
        await install(communicators, 0)
        assert await sums(communicators) == [[7.0]] * 3
        for number in (0, 2):
            communicators[number].put_out(peer_id_of(1))
            communicators[number].put_out(peer_id_of(9))  # who was never there
        assert await sums(communicators, 1) == [[7.0]] * 3
