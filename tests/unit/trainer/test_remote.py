# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a second place: copied, read back, fetched again; and a place that fails or hangs ends nothing."""

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path, PurePosixPath

import pytest
import torch

from isthmus.trainer.checkpoint import copier as copier_module
from isthmus.trainer.checkpoint.checkpoint import CheckpointMeta, CheckpointStore, load_checkpoint
from isthmus.trainer.checkpoint.copier import CheckpointCopier
from isthmus.trainer.checkpoint.remote import RemoteFolder, find_resumed
from isthmus.trainer.errors import CheckpointCorrupted, ConfigError, EnvironmentFault

PEER = "0123456789abcdef"


def saved(folder: Path, step: int, *, run_id: str = "run", numel: int = 1000) -> Path:
    """A checkpoint on this disk."""
    meta = CheckpointMeta(run_id=run_id, outer_step=step, digest=bytes(32), run_manifest=b"{}", next_index=step)
    store = CheckpointStore(folder / "checkpoints", keep=100)
    return store.save(meta, {"anchor": torch.full((numel,), float(step))})


def own_of(folder: Path, step: int) -> Path:
    path = folder / "private" / f"step-{step:08d}.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"moments of %d" % step)
    return path


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/elsewhere"


def test_a_checkpoint_comes_back_whole_with_what_is_the_peers_own(tmp_path: Path, url: str) -> None:
    remote = RemoteFolder(f"{url}/{PEER}")
    assert remote.steps() == []
    here = tmp_path / "here"
    for step in (4, 8, 12):
        assert remote.put(saved(here, step), own_of(here, step), keep=2)
    assert remote.steps() == [8, 12]
    found, newest = find_resumed(url)
    assert newest == 12
    assert find_resumed(f"{url}/{PEER}/checkpoints/step-00000008")[1] == 8
    there = tmp_path / "there"
    there.mkdir()
    place = found.fetch(newest, there)
    assert torch.equal(load_checkpoint(place).tensors["anchor"], torch.full((1000,), 12.0))
    assert (there / "private" / "step-00000012.safetensors").read_bytes() == b"moments of 12"
    assert found.fetch(newest, there) == place, "it is there already"
    saved(tmp_path / "third", 12, run_id="other")
    with pytest.raises(ConfigError, match="another checkpoint of outer step 12"):
        found.fetch(newest, tmp_path / "third")


def test_what_is_the_peers_own_may_come_after_the_checkpoint(tmp_path: Path, url: str) -> None:
    remote, here = RemoteFolder(url), tmp_path / "here"
    place = saved(here, 4)
    assert remote.put(place, here / "private" / place.name, keep=1)
    state = place / "state.safetensors"
    state.unlink()  # it is not read again
    assert remote.put(place, own_of(here, 4), keep=1)
    (tmp_path / "there").mkdir()
    remote.fetch(4, tmp_path / "there")
    assert (tmp_path / "there" / "private" / "step-00000004.safetensors").read_bytes() == b"moments of 4"


def test_a_run_that_went_back_takes_its_copies_along_and_leaves_those_of_others(tmp_path: Path, url: str) -> None:
    remote, none = RemoteFolder(url), tmp_path / "none"
    remote.put(saved(tmp_path / "a", 9, run_id="other"), none, keep=5)
    remote.put(saved(tmp_path / "b", 8), none, keep=5)
    remote.put(saved(tmp_path / "b", 6), none, keep=5)
    assert remote.steps() == [6]
    assert RemoteFolder(f"{url}/lineage-1").steps() == [9]


def test_another_runs_copies_push_none_out(tmp_path: Path, url: str) -> None:
    remote, here = RemoteFolder(url), tmp_path / "a"
    for step in (20, 30, 40):
        remote.put(saved(here, step, run_id="other"), own_of(here, step), keep=3)
    for step in (1, 2):
        assert remote.put(saved(tmp_path / "b", step), tmp_path / "none", keep=3)
    assert remote.steps() == [1, 2]
    assert find_resumed(url)[1] == 2
    aside, there = RemoteFolder(f"{url}/lineage-1"), tmp_path / "there"
    assert aside.steps() == [20, 30, 40]
    there.mkdir()
    aside.fetch(40, there)
    assert (there / "private" / "step-00000040.safetensors").read_bytes() == b"moments of 40"


def test_a_copy_has_its_tokenizer_with_it(tmp_path: Path, url: str) -> None:
    here, there, remote = tmp_path / "here", tmp_path / "there", RemoteFolder(url)
    here.mkdir()
    there.mkdir()
    (here / "tokenizer.json").write_text("{}")
    assert remote.put(saved(here, 4), tmp_path / "none", keep=1)
    tokenizer = load_checkpoint(remote.fetch(4, there)).tokenizer
    assert tokenizer == there / "checkpoints" / "step-00000004" / "tokenizer.json"
    assert tokenizer.read_text() == "{}"


def test_a_copy_that_was_cut_short_goes_with_the_next(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, none, whole = RemoteFolder(url), tmp_path / "none", RemoteFolder._put_file

    def cut(self: RemoteFolder, source: Path, target: PurePosixPath) -> str:
        if source.name == "manifest.json":
            raise OSError(errno.ECONNRESET, "connection reset")
        return whole(self, source, target)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteFolder, "_put_file", cut)
        with pytest.raises(OSError, match="reset"):
            remote.put(saved(tmp_path / "here", 4), none, keep=3)
    assert remote._names(remote._root / "checkpoints") == ["step-00000004"]
    assert remote.put(saved(tmp_path / "here", 8), none, keep=3)
    assert remote._names(remote._root / "checkpoints") == ["step-00000008"]


def test_a_place_with_room_for_as_many_as_stay_is_large_enough(tmp_path: Path, small_disk: Path) -> None:
    remote, none = RemoteFolder(str(small_disk / "copies")), tmp_path / "none"
    for step in (1, 2, 3, 4, 5):  # 300 kB each, on a disk of 1 MiB
        assert remote.put(saved(tmp_path / "here", step, numel=75_000), none, keep=3)
        assert remote.steps() == [*range(max(1, step - 2), step + 1)]
    with pytest.raises(OSError, match="No space left"):
        remote.put(saved(tmp_path / "here", 6, numel=300_000), none, keep=3)
    assert remote.steps() == [4, 5], "the two newest stay, whatever comes"


def test_damage_is_found_on_both_ends(tmp_path: Path) -> None:
    remote, none = RemoteFolder(str(tmp_path / "elsewhere")), tmp_path / "none"
    place = saved(tmp_path / "here", 4)
    assert remote.put(place, none, keep=1)
    copy = tmp_path / "elsewhere" / "checkpoints" / place.name / "state.safetensors"
    copy.write_bytes(copy.read_bytes()[:-1] + b"x")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointCorrupted, match="was changed"):
        remote.fetch(4, tmp_path / "there")
    assert list((tmp_path / "there" / "checkpoints").iterdir()) == []
    copy.write_bytes(bytes(10_000))
    with pytest.raises(OSError, match="more than the"):
        remote.fetch(4, tmp_path / "there")
    place = saved(tmp_path / "here", 8)
    state = place / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointCorrupted, match="was changed"):
        remote.put(place, none, keep=1)
    assert remote.steps() == [4], "what has no manifest is none"
    assert not remote.put(tmp_path / "gone" / "step-00000005", none, keep=1)


def test_what_cannot_be_reached_or_holds_nothing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be used"):
        find_resumed("nosuchplace://bucket/run")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        find_resumed(f"file://{tmp_path}")
    for number, run_id in enumerate(("one", "another")):
        RemoteFolder(f"file://{tmp_path}/{number:016x}").put(
            saved(tmp_path / run_id, 4, run_id=run_id), tmp_path / "none", keep=1
        )
    with pytest.raises(ConfigError, match="several runs"):
        find_resumed(f"file://{tmp_path}")


class Told:
    def __init__(self) -> None:
        self.copied: list[int] = []
        self.failed: list[str] = []


@contextlib.asynccontextmanager
async def copying(copy: Callable[[int], bool]) -> AsyncIterator[tuple[CheckpointCopier, Told]]:
    told = Told()
    copier = CheckpointCopier(copy, on_copied=lambda step, _: told.copied.append(step), on_failed=told.failed.append)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(copier.run())
        yield copier, told
        task.cancel()


async def test_only_the_newest_that_waits_is_copied_and_a_failure_is_told_and_no_more() -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    asked: list[int] = []

    def copy(step: int) -> bool:
        asked.append(step)
        has_begun.set()
        may_go_on.wait(30.0)
        if step == 4:
            raise ConnectionError("no route")
        return True

    async with copying(copy) as (copier, told):
        copier.offer(4)
        await asyncio.to_thread(has_begun.wait, 30.0)
        for step in (8, 12):
            copier.offer(step)
        may_go_on.set()
        await copier.drain()
        assert (asked, told.copied, told.failed) == ([4, 12], [12], ["no route"])


async def test_a_place_that_hangs_keeps_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "_FAREWELL_S", 0.05)
    may_end = threading.Event()
    async with copying(lambda _: may_end.wait(30.0)) as (copier, told):
        copier.offer(4)
        await copier.drain()
    assert told.failed == ["the last one was not there after 0 s"]
    may_end.set()
