# SPDX-License-Identifier: Apache-2.0
"""A peer's own state on its disk and back: which file counts for which shared state, and what the workers get of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.messages import Held
from isthmus.elastic.state.digest import Hasher
from isthmus.optim.inner import state_names
from isthmus.trainer.checkpoint.private_files import PrivateFiles, verify_private_file
from isthmus.trainer.engine.moments import MOMENTS, Moments
from isthmus.trainer.engine.own_state import InnerState, OwnState, copy_inner_state, give_inner_state, is_of_size
from isthmus.trainer.errors import CheckpointCorrupted

NUMEL = 1000


def held(step: int, digest: int = 7) -> Held:
    return Held(OuterStep(step), bytes([digest]) * 32)


def inner(seed: int, own_steps: int = 12, kinds: tuple[str, ...] = MOMENTS) -> InnerState:
    numbers = torch.Generator().manual_seed(seed)
    return InnerState(own_steps=own_steps, tensors={kind: torch.rand(NUMEL, generator=numbers) for kind in kinds})


@contextlib.asynccontextmanager
async def writing(folder: Path, run_id: str = "run", *, keep: int = 3, max_age: int = 4) -> AsyncIterator[PrivateFiles]:
    files = PrivateFiles(folder, run_id, keep=keep, max_age=max_age)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(files.run())
        yield files
        task.cancel()


async def test_what_was_written_is_read_back_bit_by_bit_and_by_the_library_too(tmp_path: Path) -> None:
    state = inner(1)
    async with writing(tmp_path) as files:
        await files.offer(held(8), {0: {"residual": torch.arange(5.0)}}, state)
        assert files.is_busy
        await files.offer(held(9), {}, inner(2))  # the disk has not taken the one before
        await files.drain()
        assert files.steps() == (8,)
        found = files.recall(held(8))
    assert found is not None
    assert (found.outer_step, found.is_exact) == (8, True)
    assert torch.equal(found.private[0]["residual"], torch.arange(5.0))
    assert found.inner is not None
    assert found.inner.own_steps == 12
    assert all(torch.equal(found.inner.tensors[kind], state.tensors[kind]) for kind in MOMENTS)
    assert load_file(files.path_of(8)).keys() == {"0/residual", "inner/exp_avg", "inner/exp_avg_sq"}


async def test_moments_may_be_a_little_older_than_the_shared_state_and_no_more(tmp_path: Path) -> None:
    async with writing(tmp_path, max_age=4) as files:
        await files.offer(held(8), {}, inner(1))
        await files.drain()
    later = files.recall(held(12))
    assert later is not None
    assert (later.outer_step, later.is_exact) == (8, False)
    assert files.recall(held(13)) is None
    assert files.recall(held(7)) is None, "the run went back behind it"
    assert files.recall(held(8, digest=3)) is None, "of a commit that was given up"


async def test_another_run_counts_only_where_it_left_off_from_this_very_state(tmp_path: Path) -> None:
    async with writing(tmp_path, "before") as files:
        await files.offer(held(8), {}, inner(1))
        await files.drain()
        resumed = PrivateFiles(tmp_path, "after", keep=3, max_age=4)
        assert (found := resumed.recall(held(8))) is not None
        assert found.is_exact
        assert resumed.recall(held(9)) is None
        await files.offer(held(0), {}, inner(2))
        await files.drain()
    assert PrivateFiles(tmp_path, "after", keep=3).recall(held(0)) is None, "two runs may begin with the same weights"


async def test_a_damaged_file_is_found_and_the_one_before_it_serves(tmp_path: Path, caplog: Any) -> None:
    async with writing(tmp_path) as files:
        for step in (4, 6):
            await files.offer(held(step), {}, inner(step))
            await files.drain()
    path = files.path_of(6)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointCorrupted, match="was changed"):
        verify_private_file(path)
    assert verify_private_file(files.path_of(4)).own_steps == 12
    found = files.recall(held(6))
    assert found is not None
    assert found.outer_step == 4
    assert "private_state_damaged" in caplog.text


async def test_a_disk_that_refuses_is_told_and_the_next_one_is_tried(tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "private"
    folder.write_text("in the way")
    async with writing(folder) as files:
        await files.offer(held(4), {}, inner(1))
        await files.drain()
        assert "private_state_not_kept" in caplog.text
        folder.unlink()
        await files.offer(held(8), {}, inner(2))
        await files.drain()
    assert files.steps() == (8,)


class Pool:
    """Workers with an inner optimizer."""

    def __init__(self, mailbox: Tensor, state: InnerState | None = None) -> None:
        self.mailbox = mailbox
        self.tensors = {} if state is None else dict(state.tensors)
        self.own_steps = 0 if state is None else state.own_steps

    async def store(self, ranges: tuple[slice, ...] = (), *, kind: str = "param") -> int:
        if not ranges:
            self.mailbox.copy_(self.tensors[kind])
        assert not ranges or ranges == (slice(0, 0),)
        return self.own_steps

    async def load(self, ranges: tuple[slice, ...] = (), *, kind: str = "param", own_steps: int) -> None:
        if not ranges:
            self.tensors[kind] = self.mailbox.clone()
        self.own_steps = own_steps


@pytest.mark.parametrize("kinds", [state_names("adamw"), state_names("muon"), state_names("sgd")])
async def test_new_workers_go_on_with_what_the_old_ones_had(kinds: tuple[str, ...]) -> None:
    state, mailbox = inner(1, kinds=kinds), torch.zeros(NUMEL)
    old: Any = Pool(mailbox, state)
    copied = await copy_inner_state(old, mailbox, kinds)
    for tensor in old.tensors.values():
        tensor.zero_()  # it trains on
    assert is_of_size(copied, kinds, NUMEL)
    assert not is_of_size(copied, (*kinds, "exp_avg_0"), NUMEL)
    new: Any = Pool(mailbox)
    await give_inner_state(new, mailbox, copied)
    assert new.own_steps == 12
    assert new.tensors.keys() == {*kinds}
    assert all(torch.equal(new.tensors[kind], inner(1, kinds=kinds).tensors[kind]) for kind in kinds)


@pytest.mark.parametrize(
    ("is_exact", "is_borrowed", "expected"), [(True, True, 1), (False, True, 2), (False, False, 1), (None, True, 2)]
)
async def test_own_moments_of_this_state_come_first_then_a_donors_then_older_ones(
    is_exact: bool | None, is_borrowed: bool, expected: int
) -> None:
    mailbox, hasher = torch.zeros(NUMEL), Hasher(num_threads=1)
    moments = Moments(mailbox=mailbox, hasher=hasher, are_shared=True, least_steps=0, has_trained=lambda: False)
    if is_borrowed:
        moments._borrowed = {**inner(2).tensors, "own_steps": torch.tensor([30.0])}
    own = None
    if is_exact is not None:
        own = OwnState(outer_step=OuterStep(8), is_exact=is_exact, private={}, inner=inner(1))
    pool: Any = Pool(mailbox)
    await moments.begin(pool, own)
    hasher.close()
    assert all(torch.equal(pool.tensors[kind], inner(expected).tensors[kind]) for kind in MOMENTS)
    assert pool.own_steps == {1: 12, 2: 30}[expected]
