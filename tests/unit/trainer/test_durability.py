# SPDX-License-Identifier: Apache-2.0
"""What a peer's disk brings back: the newest checkpoint and all results since, of this run and this history only."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from isthmus.collective.core.types import Epoch, OuterStep, PeerId, RoundKey
from isthmus.collective.transport.wire import MAX_WEIGHT
from isthmus.elastic.core.messages import DataPosition, Held
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.state.digest import Hasher
from isthmus.elastic.state.replica import CommitEntry, ResultChunk, RoundRecord
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, CheckpointStore
from isthmus.trainer.checkpoint.durability import Durability, Origin
from isthmus.trainer.checkpoint.result_files import FOLDER_NAME as RESULTS_NAME
from isthmus.trainer.checkpoint.result_files import VOTED_NAME, ResultFile, ResultFiles
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.errors import CheckpointFailed
from tests.unit.trainer.rig import entry_of, numbers, outer_state, recorded, stage_mean
from tests.unit.trainer.test_checkpoint import watch_the_disk

ORIGIN = Origin(run_id="run", run_manifest=b"{}")


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


class Machine:
    """One start of a peer: its state, and what keeps it."""

    def __init__(self, folder: Path, hasher: Hasher, *, every: int, origin: Origin, before_votes: bool) -> None:
        self.state: OuterState = outer_state(hasher)
        self.log = CommitLog(0)
        self.saved: list[int] = []
        self.failed: list[CheckpointFailed] = []
        self.durability = Durability(
            folder,
            origin,
            state=self.state,
            commit_log=self.log,
            every=every,
            keep=3,
            before_votes=before_votes,
            on_saved=lambda step, _: self.saved.append(step),
            on_failed=self.failed.append,
        )

    async def found(self) -> None:
        await self.state.found(numbers(0))
        self.durability.founded(self.state.live.held)

    async def stage(self, seed: int) -> CommitEntry:
        """A round whose mean is these numbers, up to the vote."""
        step, mean = self.state.live.held.outer_step, numbers(seed)
        entry = entry_of(await stage_mean(self.state, mean, {"a": 1.0}), recorded(mean, {"a": 1.0}))
        await self.durability.before_vote(RoundKey(Epoch(1), step, 0), entry)
        return entry

    async def commit(self, seed: int) -> Held:
        """The whole round."""
        entry, before = await self.stage(seed), self.state.live.held
        self.state.install_staged(Held(entry.outer_step, entry.digest))
        self.durability.committed(before.digest, entry)
        held = self.state.live.held
        self.durability.reported(held.outer_step, held.digest, DataPosition(8 * held.outer_step))
        return held


@contextlib.asynccontextmanager
async def started(
    folder: Path, hasher: Hasher, *, every: int = 100, origin: Origin = ORIGIN, before_votes: bool = False
) -> AsyncIterator[Machine]:
    """A start that ends without warning, as by a power cut, but for what was written before."""
    machine = Machine(folder, hasher, every=every, origin=origin, before_votes=before_votes)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(machine.durability.run())
        yield machine
        task.cancel()


async def a_past(folder: Path, hasher: Hasher, num_commits: int, **options: int) -> Held:
    """A run of so many commits whose disk has taken all of them."""
    async with started(folder, hasher, **options) as machine:
        await machine.found()
        held = machine.state.live.held
        for seed in range(num_commits):
            await machine.durability._checkpoints.drain()  # one that is due while another is written is left out
            held = await machine.commit(seed)
        await machine.stage(99)  # a vote waits for the disk
        await machine.durability._checkpoints.drain()
    return held


async def come_back(folder: Path, hasher: Hasher, **options: Origin) -> Held | None:
    async with started(folder, hasher, **options) as machine:
        await machine.durability.recover(None)
        return machine.state.held()


async def test_results_since_the_checkpoint_are_replayed(hasher: Hasher, tmp_path: Path) -> None:
    held = await a_past(tmp_path, hasher, 5, every=3)
    assert CheckpointStore(tmp_path / FOLDER_NAME, keep=1).steps()[-1] == 3
    assert await come_back(tmp_path, hasher) == held


def test_a_result_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = watch_the_disk(monkeypatch)
    chunk = ResultChunk(0, b"mean")
    files = ResultFiles(tmp_path / RESULTS_NAME, "run")
    files.save(bytes(32), CommitEntry(OuterStep(1), bytes(32), (RoundRecord("raw", (("a", 1.0),), chunks=(chunk,)),)))
    content, name, folder = happened
    assert Path(content).name.endswith(".partial")
    assert name.startswith("renamed to ")
    assert folder == str(tmp_path / RESULTS_NAME)
    assert files.steps() == (1,)


async def test_a_run_that_has_made_no_checkpoint_yet_comes_back_to_its_newest_commit(
    hasher: Hasher, tmp_path: Path
) -> None:
    held = await a_past(tmp_path, hasher, 4)
    assert held.outer_step == 4
    assert await come_back(tmp_path, hasher) == held


async def test_learners_find_the_replayed_results_at_a_peer_that_has_come_back(hasher: Hasher, tmp_path: Path) -> None:
    await a_past(tmp_path, hasher, 4)
    async with started(tmp_path, hasher) as machine:
        await machine.durability.recover(None)
        assert machine.log.span == range(1, 5)


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
async def test_a_damaged_result_ends_the_way_at_the_state_before_it(
    hasher: Hasher, tmp_path: Path, damage: str
) -> None:
    await a_past(tmp_path, hasher, 4)
    path = tmp_path / RESULTS_NAME / "step-00000003.result"
    content = bytearray(path.read_bytes())
    match damage:
        case "cut":
            path.write_bytes(content[:-7])
        case "flipped":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case _:
            path.unlink()
    held = await come_back(tmp_path, hasher)
    assert held is not None
    assert held.outer_step == 2


async def test_results_of_another_run_are_left_alone(hasher: Hasher, tmp_path: Path) -> None:
    await a_past(tmp_path, hasher, 3)
    assert await come_back(tmp_path, hasher, origin=Origin(run_id="other", run_manifest=b"{}")) is None


async def test_results_of_commits_that_the_run_gave_up_are_not_replayed(hasher: Hasher, tmp_path: Path) -> None:
    await a_past(tmp_path, hasher, 4)
    async with started(tmp_path, hasher) as machine:
        await machine.durability.recover(None)
    (tmp_path / RESULTS_NAME / "step-00000004.result").unlink()
    (tmp_path / RESULTS_NAME / "step-00000003.result").unlink()
    async with started(tmp_path, hasher) as machine:  # the others hold no newer one either, and the run goes on from 2
        await machine.durability.recover(None)
        held = await machine.commit(77)
        await machine.stage(99)
    assert held.outer_step == 3
    assert ResultFiles(tmp_path / RESULTS_NAME, "run").steps() == (1, 2, 3)
    assert await come_back(tmp_path, hasher) == held


async def test_a_checkpoint_makes_the_results_before_it_go_but_for_the_two_newest(
    hasher: Hasher, tmp_path: Path
) -> None:
    async with started(tmp_path, hasher, every=5) as machine:
        await machine.found()
        for seed in range(5):
            await machine.commit(seed)
        await machine.durability._checkpoints.drain()
        await machine.commit(5)
        await machine.stage(99)
        assert machine.saved == [0, 5]
    assert ResultFiles(tmp_path / RESULTS_NAME, "run").steps() == (4, 5, 6)


async def test_a_state_that_was_fetched_is_saved_with_the_next_commit(hasher: Hasher, tmp_path: Path) -> None:
    async with started(tmp_path, hasher) as machine:
        await machine.state.found(numbers(0))  # as a donor would have sent it: the disk has nothing of it
        held = await machine.commit(1)
        await machine.durability._checkpoints.drain()
        assert machine.saved == [1]
        newest = await machine.commit(2)
        await machine.stage(99)
        assert machine.saved == [1]
    assert held.outer_step == 1
    assert await come_back(tmp_path, hasher) == newest


async def test_without_checkpoints_the_disk_has_results_for_learners_and_no_state_until_the_end(
    hasher: Hasher, tmp_path: Path
) -> None:
    async with started(tmp_path, hasher, every=0) as machine:
        await machine.found()
        for seed in range(5):
            held = await machine.commit(seed)
            await machine.durability._is_idle.wait()
        assert machine.saved == []
        assert machine.log.memory_nbytes == 0
        assert machine.log.span == range(4, 6), "two results in fp32 are as large as anchor and momentum"
        assert ResultFiles(tmp_path / RESULTS_NAME, "run").steps() == (4, 5)
        await machine.durability.finish()
        assert machine.saved == [5]
    assert await come_back(tmp_path, hasher) == held


async def test_no_vote_waits_for_a_result_that_is_for_learners_alone(
    hasher: Hasher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, may_write = ResultFiles.save, threading.Event()

    def save_later(files: ResultFiles, previous: bytes, entry: CommitEntry) -> ResultFile:
        may_write.wait()
        return save(files, previous, entry)

    monkeypatch.setattr(ResultFiles, "save", save_later)
    async with started(tmp_path, hasher, every=0) as machine:
        with contextlib.ExitStack() as stack:
            stack.callback(may_write.set)
            await machine.found()
            for seed in range(8):
                await machine.commit(seed)
            assert machine.log.span == range(7, 9), "of what the disk does not take only the newest two are kept"


async def test_what_is_on_the_disk_is_in_memory_no_more(hasher: Hasher, tmp_path: Path) -> None:
    async with started(tmp_path, hasher) as machine:
        await machine.found()
        for seed in range(3):
            held = await machine.commit(seed)
        await machine.stage(99)  # a vote waits for the disk
        assert machine.log.span == range(1, 4)
        assert machine.log.memory_nbytes == 0
        stored = machine.log.get(held.outer_step)
    assert isinstance(stored, ResultFile)
    assert read_back(stored, piece_nbytes=1000).digest == held.digest


def test_a_result_can_be_read_with_whatever_its_round_let_a_member_weigh(tmp_path: Path) -> None:
    # Found before: with EDiT's factor (up to e^30) on a member's tokens it was damaged, for joiners and on this disk.
    record = RoundRecord("raw", ((PeerId("a"), MAX_WEIGHT), (PeerId("b"), 1.0)), chunks=(ResultChunk(0, b"mean"),))
    entry = CommitEntry(OuterStep(1), bytes(32), (record,))
    stored = ResultFiles(tmp_path, "run").save(bytes(32), entry)
    assert read_back(stored, piece_nbytes=4) == entry
    loaded = ResultFiles(tmp_path, "run").load(1, bytes(32))
    assert loaded is not None
    assert loaded[1] == entry


def saved_result(folder: Path, nbytes: int = 2500) -> tuple[ResultFile, CommitEntry]:
    """A result of two chunks on the disk."""
    chunks = (ResultChunk(0, bytes(range(250)) * (nbytes // 500)), ResultChunk(9, bytes(nbytes // 2)))
    entry = CommitEntry(OuterStep(1), bytes(32), (RoundRecord("raw", ((PeerId("a"), 1.0),), chunks=chunks),))
    return ResultFiles(folder, "run").save(bytes(32), entry), entry


def read_back(stored: ResultFile, *, piece_nbytes: int) -> CommitEntry:
    with contextlib.closing(stored.open()) as file:
        header = file.read_header()
        chunks = []
        for start_numel, nbytes in header.chunks:
            pieces = [file.read(min(piece_nbytes, nbytes - start)) for start in range(0, nbytes, piece_nbytes)]
            chunks.append(ResultChunk(start_numel, b"".join(pieces)))
    return header.with_chunks(chunks)


@pytest.mark.parametrize("piece_nbytes", [1, 300, 10_000])
def test_a_result_is_read_in_pieces_of_any_length(tmp_path: Path, piece_nbytes: int) -> None:
    stored, entry = saved_result(tmp_path)
    assert read_back(stored, piece_nbytes=piece_nbytes) == entry


@pytest.mark.parametrize("place", [3, 40, 700, -40, None])
def test_a_result_that_was_changed_is_not_read_to_its_end(tmp_path: Path, place: int | None) -> None:
    stored, _ = saved_result(tmp_path)
    content = bytearray(stored.path.read_bytes())
    if place is None:
        del content[-100:]
    else:
        content[place] ^= 1
    stored.path.write_bytes(content)
    with pytest.raises(OSError, match="changed since it was written"):
        read_back(stored, piece_nbytes=300)


def test_a_result_that_is_being_read_may_be_removed_or_replaced(tmp_path: Path) -> None:
    stored, entry = saved_result(tmp_path)
    with contextlib.closing(stored.open()) as file:
        saved_result(tmp_path, nbytes=500)
        ResultFiles(tmp_path, "run").forget_before(2)
        assert not stored.path.exists()
        header = file.read_header()
        assert b"".join(file.read(nbytes) for _, nbytes in header.chunks) == b"".join(c.data for c in entry.chunks)
    with pytest.raises(FileNotFoundError):
        stored.open()


def test_a_result_in_the_place_of_a_link_is_not_read(tmp_path: Path) -> None:
    stored, _ = saved_result(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    stored.path.rename(elsewhere)
    stored.path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"):
        stored.open()


async def test_a_full_disk_is_told_once_and_training_goes_on(
    hasher: Hasher, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(small_disk, hasher) as machine:
        await machine.found()
        await machine.durability._checkpoints.drain()
        (small_disk / "filler").write_bytes(bytes(1 << 20 >> 1))
        with contextlib.suppress(OSError), (small_disk / "rest").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        for seed in range(3):
            await machine.commit(seed)
        await machine.stage(99)
        assert machine.state.live.held.outer_step == 3
    assert sum("result_not_kept" in record.getMessage() for record in caplog.records) == 1


async def test_a_disk_that_has_room_again_gets_a_checkpoint_and_results_follow(hasher: Hasher, tmp_path: Path) -> None:
    blocked = tmp_path / RESULTS_NAME
    blocked.write_bytes(b"")  # no folder can be made there
    async with started(tmp_path, hasher, every=3) as machine:
        await machine.found()
        await machine.durability._checkpoints.drain()
        for seed in range(2):
            await machine.commit(seed)
            await machine.stage(99)
            machine.state.discard_staged()
        blocked.unlink()
        await machine.commit(2)
        await machine.durability._checkpoints.drain()
        held = await machine.commit(3)
        await machine.stage(99)
    assert await come_back(tmp_path, hasher) == held


async def test_what_was_voted_for_is_on_the_disk_before_the_vote(hasher: Hasher, tmp_path: Path) -> None:
    async with started(tmp_path, hasher, before_votes=True) as machine:
        await machine.found()
        held = await machine.commit(1)
        entry = await machine.stage(2)
        assert (tmp_path / RESULTS_NAME / VOTED_NAME).exists()
        await machine.durability._checkpoints.drain()
    async with started(tmp_path, hasher, before_votes=True) as machine:
        voted = await machine.durability.recover(None)
        assert machine.state.held() == held, "whether it was committed is for others to say"
        assert voted == (RoundKey(Epoch(1), OuterStep(1), 0), entry)
        await machine.state.stage_entry(voted[1])
        machine.state.install_staged(Held(entry.outer_step, entry.digest))


@pytest.mark.parametrize("is_founder", [True, False])
async def test_the_state_under_a_first_vote_is_on_the_disk_as_well(
    hasher: Hasher, tmp_path: Path, is_founder: bool
) -> None:
    async with started(tmp_path, hasher, before_votes=True) as machine:
        if is_founder:
            await machine.found()
        else:
            await machine.state.found(numbers(0))  # as fetched
        held = machine.state.held()
        entry = await machine.stage(1)
    async with started(tmp_path, hasher, before_votes=True) as machine:
        voted = await machine.durability.recover(None)
        assert machine.state.held() == held
        assert voted == (RoundKey(Epoch(1), OuterStep(0), 0), entry)


async def test_an_older_vote_is_no_vote(hasher: Hasher, tmp_path: Path) -> None:
    async with started(tmp_path, hasher, before_votes=True) as machine:
        await machine.found()
        await machine.commit(1)
        await machine.commit(2)
        await machine.durability._checkpoints.drain()
        await machine.durability.before_vote(RoundKey(Epoch(1), OuterStep(9), 0), await machine.stage(3))
        machine.state.discard_staged()
        files = ResultFiles(tmp_path / RESULTS_NAME, "run")
        digest = machine.state.live.held.digest
        assert files.load_voted(2, digest) is None
        assert files.load_voted(3, bytes(32)) is None
        assert files.load_voted(3, digest) is not None


async def test_a_result_in_the_place_of_a_link_is_not_followed(hasher: Hasher, tmp_path: Path) -> None:
    await a_past(tmp_path, hasher, 2)
    path = tmp_path / RESULTS_NAME / "step-00000002.result"
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    held = await come_back(tmp_path, hasher)
    assert held is not None
    assert held.outer_step == 1


async def test_files_and_folder_are_private(hasher: Hasher, tmp_path: Path) -> None:
    await a_past(tmp_path, hasher, 1)
    folder = tmp_path / RESULTS_NAME
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


async def test_a_state_of_another_method_does_not_take_results(hasher: Hasher, tmp_path: Path) -> None:
    held = await a_past(tmp_path, hasher, 2)
    path = tmp_path / RESULTS_NAME / "step-00000002.result"
    files = ResultFiles(tmp_path / RESULTS_NAME, "run")
    state = outer_state(hasher)
    await state.found(numbers(0))
    found = files.load(1, state.live.held.digest)
    assert found is not None
    _, entry = found
    wrong = recorded(torch.zeros(1000), dict(entry.rounds[0].weights))
    files.save(state.live.held.digest, CommitEntry(entry.outer_step, entry.digest, (wrong,)))
    assert not path.exists(), "what came after it belonged to the other history"
    came_back = await come_back(tmp_path, hasher)
    assert came_back is not None
    assert came_back.outer_step == 0, f"replayed something else than {held}"
