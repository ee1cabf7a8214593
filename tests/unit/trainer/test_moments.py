# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer's moments between peers; over real connections in tests/unit/elastic/test_loan.py."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.elastic.errors import StateMismatch
from isthmus.elastic.state.digest import Hasher, StateManifest
from isthmus.trainer.engine import moments as module
from isthmus.trainer.engine.moments import MOMENTS, Moments

NUMEL = 1000


class Pool:
    """Workers that hold moments, and write down what is asked of them."""

    def __init__(self, mailbox: Tensor, own_steps: int = 40) -> None:
        self.mailbox = mailbox
        self.own_steps = own_steps
        self.moments = {name: torch.rand(NUMEL, generator=torch.Generator().manual_seed(3)) for name in MOMENTS}
        self.asked: list[str] = []

    async def store(self, *, kind: str) -> int:
        self.asked.append(kind)
        self.mailbox.copy_(self.moments[kind])
        return self.own_steps

    async def load(self, *, kind: str, own_steps: int) -> None:
        self.moments[kind], self.own_steps = self.mailbox.clone(), own_steps


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


def make(hasher: Hasher, *, are_shared: bool = True, has_trained: bool = True) -> Moments:
    return Moments(
        mailbox=torch.zeros(NUMEL),
        hasher=hasher,
        are_shared=are_shared,
        least_steps=20,
        has_trained=lambda: has_trained,
    )


def pool_of(moments: Moments, own_steps: int = 40) -> Any:
    return Pool(moments.mailbox, own_steps)


async def lent(moments: Moments, pool: Any) -> Any:
    """What somebody gets who asks while this peer trains."""
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(moments.lend())
        while not asking.done():
            await asyncio.sleep(0)
            await moments.after_step(pool)
    return asking.result()


def fill(moments: Moments, copy: Any) -> None:
    """The transfer."""
    size = copy.manifest.chunk_nbytes
    for tensor, destination in enumerate(moments.begin_borrowing(copy.manifest)):
        for start in range(0, destination.nbytes, size):
            destination[start : start + size] = copy.chunk(tensor, start // size)


async def test_a_newcomer_begins_with_what_the_donor_had_after_its_step(hasher: Hasher) -> None:
    donor, newcomer = make(hasher), make(hasher, has_trained=False)
    donors_pool, own_pool = pool_of(donor), pool_of(newcomer, own_steps=0)
    expected = {name: tensor.clone() for name, tensor in donors_pool.moments.items()}
    copy = await lent(donor, donors_pool)
    donors_pool.moments["exp_avg"].zero_()  # it trains on
    copy.manifest.verify()
    assert newcomer.is_wanted
    fill(newcomer, copy)
    await newcomer.borrowed()
    assert not newcomer.is_wanted
    await newcomer.begin(own_pool)
    assert own_pool.own_steps == 40
    assert all(torch.equal(own_pool.moments[name], expected[name]) for name in MOMENTS)
    own_pool.own_steps = 0
    await newcomer.begin(own_pool)
    assert own_pool.own_steps == 0, "once"


async def test_a_copy_serves_all_who_ask_while_it_is_used_and_the_next_is_new(hasher: Hasher) -> None:
    donor = make(hasher)
    pool = pool_of(donor)
    first = await lent(donor, pool)
    assert await donor.lend() is first
    first.release()
    assert await donor.lend() is first
    first.release()
    first.release()
    assert donor._copy is None, "its memory is free"
    assert await lent(donor, pool) is not first
    assert pool.asked == [*MOMENTS, *MOMENTS]


async def test_nobody_who_asks_costs_a_step_nothing(hasher: Hasher) -> None:
    donor = make(hasher)
    pool = pool_of(donor)
    await donor.after_step(pool)
    assert pool.asked == []


async def test_who_has_not_trained_or_is_young_has_nothing_to_lend(hasher: Hasher) -> None:
    assert await make(hasher, has_trained=False).lend() is None
    assert await make(hasher, are_shared=False).lend() is None, "its workers may have none, with another optimizer"
    young = make(hasher)
    assert await lent(young, pool_of(young, own_steps=19)) is None


async def test_who_asks_a_peer_that_stands_still_hears_so_and_the_next_may_ask(
    hasher: Hasher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEND_S", 0.01)
    donor = make(hasher)
    pool = pool_of(donor)
    assert await donor.lend() is None
    await donor.after_step(pool)
    assert pool.asked == [], "nobody waits any more"
    monkeypatch.undo()
    assert await lent(donor, pool) is not None


async def test_who_goes_away_while_it_waits_leaves_the_next_one_its_turn(hasher: Hasher) -> None:
    donor = make(hasher)
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(donor.lend())
        await asyncio.sleep(0)
        gone.cancel()
    assert await lent(donor, pool_of(donor)) is not None


def _other_names(manifest: StateManifest) -> StateManifest:
    first, *rest = manifest.tensors
    return msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(first, name="momentum"), *rest))


def _other_sizes(manifest: StateManifest) -> StateManifest:
    first, *rest = manifest.tensors
    return msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(first, nbytes=1 << 40), *rest))


def _one_twice(manifest: StateManifest) -> StateManifest:
    return msgspec.structs.replace(manifest, tensors=(*manifest.tensors, manifest.tensors[0]))


@pytest.mark.parametrize("change", [_other_names, _other_sizes, _one_twice])
async def test_moments_of_another_model_are_refused_before_any_memory_is_taken(hasher: Hasher, change: Any) -> None:
    donor, newcomer = make(hasher), make(hasher, has_trained=False)
    manifest = (await lent(donor, pool_of(donor))).manifest
    with pytest.raises(StateMismatch, match="other names or sizes"):
        newcomer.begin_borrowing(change(manifest))


@pytest.mark.parametrize(("name", "value"), [("exp_avg", torch.nan), ("exp_avg_sq", torch.inf), ("exp_avg_sq", -1e-9)])
async def test_numbers_that_no_optimizer_makes_are_refused(hasher: Hasher, name: str, value: float) -> None:
    donor, newcomer = make(hasher), make(hasher, has_trained=False)
    pool = pool_of(donor)
    pool.moments[name][500] = value
    fill(newcomer, await lent(donor, pool))
    with pytest.raises(StateMismatch, match="no moments"):
        await newcomer.borrowed()
    assert newcomer.is_wanted, "the next donor may have better ones"


def test_a_peer_that_was_not_told_to_or_trains_already_wants_none(hasher: Hasher) -> None:
    assert not make(hasher, are_shared=False, has_trained=False).is_wanted
    assert not make(hasher).is_wanted
