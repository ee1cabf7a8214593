# SPDX-License-Identifier: Apache-2.0
"""The shared state: live versions never change, staging is nothing until it is installed, memory is recycled."""

import asyncio
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isthmus.collective.core.types import OuterStep, PeerId
from isthmus.collective.errors import RemoteProtocolError
from isthmus.elastic.core.messages import Held
from isthmus.elastic.errors import StateDiverged, StateMismatch
from isthmus.elastic.state.digest import Hasher, chunk_of, digest_of
from isthmus.elastic.state.parity import differing
from isthmus.elastic.state.replica import CommitEntry, ResultChunk, RoundRecord
from isthmus.optim.decoupled import DecoupledDiLoCo
from isthmus.optim.diloco import MOMENTUM, DiLoCo
from isthmus.optim.fragments import FragmentTable
from isthmus.optim.noloco import NoLoCo
from isthmus.optim.outer import ANCHOR, Outer, Result
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.engine.state_version import Version
from tests.unit.trainer.rig import (
    NUMEL,
    entry_of,
    has_the_bits_of_its_manifest,
    numbers,
    outer_state,
    stage_mean,
)

MEMBERS = ("a", "b")


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


async def stage(state: OuterState, mean: torch.Tensor, weight_sum: float = 2.0) -> Held:
    return await stage_mean(state, mean, dict.fromkeys(MEMBERS, weight_sum / len(MEMBERS)))


async def commit(state: OuterState, mean: torch.Tensor, weight_sum: float = 2.0) -> Held:
    held = await stage(state, mean, weight_sum)
    state.install_staged(held)
    return held


def entry(held: Held, *chunks: ResultChunk, weights: tuple[float, ...] = (1.0, 1.0), codec: str = "raw") -> CommitEntry:
    given = tuple((member, weight) for member, weight in zip(MEMBERS, weights, strict=True) if weight > 0.0)
    return entry_of(held, RoundRecord(codec, given, chunks=chunks))


def raw(mean: torch.Tensor, start_numel: int = 0) -> ResultChunk:
    return ResultChunk(start_numel, mean.numpy().tobytes())


def address_of(buffer: memoryview) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def addresses(version: Version) -> frozenset[int]:
    return frozenset(tensor.data_ptr() for tensor in version.tensors.values())


# ------------------------------------------------------------------------------------------------ staging


async def test_nothing_is_held_before_the_first_state(hasher: Hasher) -> None:
    state = outer_state(hasher)
    assert state.held() is None
    with pytest.raises(AssertionError, match="no shared state"):
        _ = state.live
    held = await state.found(numbers(0))
    assert state.held() == held
    assert held.outer_step == 0
    assert torch.equal(state.live.tensors[ANCHOR], numbers(0))


async def test_two_peers_that_found_from_the_same_bytes_hold_the_same_digest(hasher: Hasher) -> None:
    assert await outer_state(hasher).found(numbers(0)) == await outer_state(hasher).found(numbers(0))
    assert await outer_state(hasher).found(numbers(0)) != await outer_state(hasher).found(numbers(1))


async def test_staging_leaves_the_live_state_alone_until_it_is_installed(hasher: Hasher) -> None:
    state = outer_state(hasher)
    before = await state.found(numbers(0))
    held = await stage(state, numbers(1))
    assert state.held() == before
    assert has_the_bits_of_its_manifest(state.live)
    (outcome,) = state.install_staged(held)
    assert state.held() == held
    assert has_the_bits_of_its_manifest(state.live)
    assert outcome.after[ANCHOR] is state.live.tensors[ANCHOR]
    assert outcome.result is not None


async def test_the_mean_in_a_recycled_buffer_gives_the_bits_of_the_plain_formula(hasher: Hasher) -> None:
    outer = DiLoCo(inner_steps=4)
    state = outer_state(hasher, outer)
    await state.found(numbers(0))
    plain = outer.init(state.fragments[0], numbers(0))
    for step in range(4):
        mean = numbers(step + 1)
        (round_,) = state.next_rounds()
        plain = outer.step(round_, Result(value=mean, members=MEMBERS, weight_sum=2.0), plain)
        await commit(state, mean)
        for name in (ANCHOR, MOMENTUM):
            assert torch.equal(state.live.tensors[name], plain[name])


async def test_a_discarded_attempt_leaves_no_trace_in_the_next_one(hasher: Hasher) -> None:
    state, other = outer_state(hasher), outer_state(hasher)
    for each in (state, other):
        await each.found(numbers(0))
    await stage(state, numbers(7))
    state.discard_staged()
    assert await commit(state, numbers(1)) == await commit(other, numbers(1))


async def test_only_what_is_staged_can_be_installed(hasher: Hasher) -> None:
    state = outer_state(hasher)
    founded = await state.found(numbers(0))
    with pytest.raises(AssertionError, match="nothing is staged"):
        state.install_staged(founded)
    held = await stage(state, numbers(1))
    with pytest.raises(AssertionError, match="is staged, committed was"):
        state.install_staged(Held(held.outer_step, bytes(32)))
    assert state.held() == founded


async def test_a_round_without_weight_moves_nothing_and_counts(hasher: Hasher) -> None:
    state = outer_state(hasher)
    await state.found(numbers(0))
    await commit(state, numbers(1))
    anchor, momentum = (state.live.tensors[name].clone() for name in (ANCHOR, MOMENTUM))
    held = await commit(state, torch.zeros(NUMEL), weight_sum=0.0)
    assert held.outer_step == 2
    assert torch.equal(state.live.tensors[ANCHOR], anchor)
    assert torch.equal(state.live.tensors[MOMENTUM], momentum)
    assert has_the_bits_of_its_manifest(state.live)


# ------------------------------------------------------------------------------------------------ memory and pins


async def test_two_versions_worth_of_memory_serve_any_number_of_steps(hasher: Hasher) -> None:
    state = outer_state(hasher)
    await state.found(numbers(0))
    seen = {addresses(state.live)}
    for step in range(6):
        await commit(state, numbers(step))
        seen.add(addresses(state.live))
    assert len(seen) == 2


async def test_a_pinned_version_keeps_its_bits_while_training_goes_on(hasher: Hasher) -> None:
    state = outer_state(hasher)
    await state.found(numbers(0))
    first, second = state.pin(), state.pin()
    for step in range(3):
        await commit(state, numbers(step))
        assert has_the_bits_of_its_manifest(first)
    first.release()
    await commit(state, numbers(3))
    assert has_the_bits_of_its_manifest(second)
    second.release()
    assert first is second
    assert first.pins == 0


async def test_a_version_released_before_it_is_replaced_is_recycled_again(hasher: Hasher) -> None:
    state = outer_state(hasher)
    await state.found(numbers(0))
    pinned = state.pin()
    await commit(state, numbers(1))
    home = addresses(state.live)
    pinned.release()
    await commit(state, numbers(2))
    await commit(state, numbers(3))
    assert addresses(state.live) == home


async def test_the_first_anchor_lies_in_lent_memory_whether_founded_adopted_or_fetched(hasher: Hasher) -> None:
    founder, resumed, learner = states = [outer_state(hasher) for _ in range(3)]
    lent = torch.zeros(3, 2, NUMEL)
    for state, memory in zip(states, lent, strict=True):
        state.lend(tuple(memory))
    held = await founder.found(numbers(0))
    assert await resumed.adopt(0, founder.live.tensors) == held
    assert await restore(founder, learner) == held
    for state, memory in zip(states, lent, strict=True):
        assert state.live.tensors[ANCHOR].data_ptr() in {tensor.data_ptr() for tensor in memory}
        assert torch.equal(state.live.tensors[ANCHOR], numbers(0))


async def test_new_anchors_lie_in_lent_memory_and_are_there_again_after_a_version_was_pinned(hasher: Hasher) -> None:
    state = outer_state(hasher)
    lent = tuple(torch.zeros(2, NUMEL))
    state.lend(lent)
    await state.found(numbers(0))
    places = []
    for number in range(12):
        if number == 4:
            pinned = state.pin()
            bits = pinned.tensors[ANCHOR].clone()
        if number == 8:
            assert torch.equal(pinned.tensors[ANCHOR], bits)
            pinned.release()
        await commit(state, numbers(number + 1))
        places.append(next((at for at, tensor in enumerate(lent) if tensor is state.live.tensors[ANCHOR]), None))
    calm, disturbed, after = places[:4], places[4:8], places[8:]
    assert sorted(set(calm)) == [0, 1]
    assert set(disturbed) == {None, next(at for at in (0, 1) if at != calm[-1])}
    assert sorted(set(after[2:])) == [0, 1]


async def test_cancelling_an_exchange_that_stages_waits_until_nothing_writes_to_staging(hasher: Hasher) -> None:
    loop = asyncio.get_running_loop()
    has_begun, may_end = asyncio.Event(), threading.Event()

    class Slow(DiLoCo):
        def step(self, *args, **kwargs):
            loop.call_soon_threadsafe(has_begun.set)
            may_end.wait(30.0)
            return DiLoCo.step(self, *args, **kwargs)

    slow, other = outer_state(hasher, Slow(inner_steps=4)), outer_state(hasher)
    for each in (slow, other):
        await each.found(numbers(0))
    staging = asyncio.ensure_future(stage(slow, numbers(5)))
    await has_begun.wait()
    try:
        for _ in range(2):  # elastic cancels when the machine says so, and again when its turn comes
            staging.cancel()
            await asyncio.sleep(0)
        assert not staging.done()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await staging
    slow.discard_staged()
    assert await commit(slow, numbers(1)) == await commit(other, numbers(1))


# ------------------------------------------------------------------------------------------------ replay


async def test_a_learner_replays_commits_to_the_members_digests(hasher: Hasher) -> None:
    member, learner = outer_state(hasher), outer_state(hasher)
    for each in (member, learner):
        await each.found(numbers(0))
    for mean, weight in ((numbers(1), 1.0), (torch.zeros(NUMEL), 0.0), (numbers(2), 1e-3)):
        held = await commit(member, mean, weight_sum=2 * weight)
        pieces = (raw(mean[:300]), raw(mean[300:], 300))
        assert await learner.replay(entry(held, *pieces, weights=(weight, weight))) == held
    assert torch.equal(learner.live.tensors[ANCHOR], member.live.tensors[ANCHOR])


async def test_a_replay_that_diverges_keeps_what_was_held(hasher: Hasher) -> None:
    member, learner = outer_state(hasher), outer_state(hasher)
    for each in (member, learner):
        await each.found(numbers(0))
    before = learner.held()
    held = await commit(member, numbers(1))
    with pytest.raises(StateDiverged) as diverged:
        await learner.replay(entry(held, raw(numbers(2))))
    assert diverged.value.expected == held.digest
    assert learner.held() == before
    assert has_the_bits_of_its_manifest(learner.live)
    assert await learner.replay(entry(held, raw(numbers(1)))) == held


@pytest.mark.parametrize(
    "bad",
    [
        entry(Held(OuterStep(1), bytes(32)), raw(torch.zeros(NUMEL), 1)),
        entry(Held(OuterStep(1), bytes(32)), ResultChunk(0, b"12345")),
        entry(Held(OuterStep(1), bytes(32)), ResultChunk(0, b"")),
        entry(Held(OuterStep(1), bytes(32)), raw(torch.zeros(NUMEL)), codec="strange"),
    ],
    ids=["beyond the end", "half an element", "empty", "unknown codec"],
)
async def test_a_recorded_result_that_does_not_fit_is_the_donors_fault(hasher: Hasher, bad: CommitEntry) -> None:
    learner = outer_state(hasher)
    before = await learner.found(numbers(0))
    with pytest.raises(RemoteProtocolError):
        await learner.replay(bad)
    assert learner.held() == before
    assert has_the_bits_of_its_manifest(learner.live)


LOUD = RoundRecord("raw", tuple((PeerId(peer), 1.0) for peer in MEMBERS), ((1.7e308,), (1.7e308,)), (raw(numbers(1)),))
"""Lengths that cannot be added up."""


@pytest.mark.parametrize(
    ("outer", "record"),
    [
        (NoLoCo(inner_steps=4), RoundRecord("raw", ((PeerId("a"), 0.0),))),
        (DecoupledDiLoCo(inner_steps=4, num_fragments=1, embeddings=""), LOUD),
    ],
    ids=["weighs nothing", "too large"],
)
async def test_a_recorded_result_that_no_round_returns_is_the_donors_fault(
    hasher: Hasher, outer: Outer, record: RoundRecord
) -> None:
    # Found before: ValueError and OverflowError came out of the replay, and ended the learner instead of the donor.
    learner = outer_state(hasher, outer)
    before = await learner.found(numbers(0))
    with pytest.raises(RemoteProtocolError):
        await learner.replay(entry_of(Held(OuterStep(1), bytes(32)), record))
    assert learner.held() == before
    assert has_the_bits_of_its_manifest(learner.live)


# ------------------------------------------------------------------------------------------------ restore and adopt


async def restore(donor: OuterState, learner: OuterState) -> Held:
    pinned = donor.pin()
    for destination, tensor in zip(
        learner.begin_restore(pinned.manifest), range(len(pinned.manifest.tensors)), strict=True
    ):
        size = pinned.manifest.chunk_nbytes
        for chunk in range(len(pinned.manifest.tensors[tensor].chunk_digests)):
            data = pinned.chunk(tensor, chunk)
            destination[chunk * size : chunk * size + data.nbytes] = data
    pinned.release()
    return await learner.finish_restore(pinned.manifest)


@pytest.mark.parametrize("has_state", [False, True])
async def test_a_restored_state_goes_on_as_its_donor_does(hasher: Hasher, has_state: bool) -> None:
    donor, learner = outer_state(hasher), outer_state(hasher)
    await donor.found(numbers(0))
    if has_state:
        await learner.found(numbers(50))
    for step in range(3):
        held = await commit(donor, numbers(step))
    assert await restore(donor, learner) == held
    assert learner.held() == held
    assert await commit(learner, numbers(4)) == await commit(donor, numbers(4))


async def test_a_broken_restore_keeps_its_memory_and_what_was_held(hasher: Hasher) -> None:
    donor, learner = outer_state(hasher), outer_state(hasher)
    await donor.found(numbers(0))
    manifest = donor.live.manifest
    before = await learner.found(numbers(50))
    first = learner.begin_restore(manifest)
    first[0][:4] = b"kept"
    assert learner.held() == before
    assert has_the_bits_of_its_manifest(learner.live)
    again = learner.begin_restore(manifest)
    assert again is first
    assert bytes(again[0][:4]) == b"kept"


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
async def test_memory_for_a_state_that_is_to_be_fetched_is_touched_by_what_arrives_only(hasher: Hasher) -> None:
    """To fill gigabytes first took seconds, in which the peer was silent."""
    numel = 12 << 20  # 48 MiB: the allocator asks the system for so much at once
    donor, learner = outer_state(hasher, numel=numel), outer_state(hasher, numel=numel)
    await donor.found(torch.zeros(numel))
    before = resident_nbytes()
    destinations = learner.begin_restore(donor.live.manifest)
    state_nbytes = sum(buffer.nbytes for buffer in destinations)
    assert resident_nbytes() - before < state_nbytes / 4
    for buffer in destinations:
        buffer[:] = bytes(buffer.nbytes)
    assert resident_nbytes() - before > state_nbytes / 2


async def test_a_replay_takes_the_memory_of_a_broken_restore_and_the_next_one_is_told(hasher: Hasher) -> None:
    """Live and spare are all the memory there is: a third copy for what may never be finished would be too much."""
    donor, learner = outer_state(hasher), outer_state(hasher)
    await donor.found(numbers(0))
    await learner.found(numbers(50))
    first = learner.begin_restore(donor.live.manifest)
    homes = {addresses(learner.live), frozenset(address_of(buffer) for buffer in first)}
    for step in range(3):
        await commit(learner, numbers(step))
        assert addresses(learner.live) in homes
    again = learner.begin_restore(donor.live.manifest)
    assert again is not first
    assert frozenset(address_of(buffer) for buffer in again) in homes


async def test_what_was_staged_in_vain_is_known_until_its_memory_is_needed(hasher: Hasher) -> None:
    state = outer_state(hasher)
    await state.found(numbers(0))
    assert state.leftover() is None
    held = await stage(state, numbers(1))
    state.discard_staged()
    leftover = state.leftover()
    assert leftover is not None
    assert leftover.digest == held.digest
    first, second = state.begin_restore(leftover)
    assert state.leftover() is None
    for buffer, part in zip((first, second), leftover.tensors, strict=True):
        assert [digest_of(chunk_of(buffer, n, 1024)) for n in range(4)] == list(part.chunk_digests)
    assert await state.finish_restore(leftover) == held
    await stage(state, numbers(2))
    state.discard_staged()
    state.mean_buffer(*state.next_rounds())
    assert state.leftover() is None


async def test_a_diverged_replay_is_known_by_its_digests(hasher: Hasher) -> None:
    member, learner = outer_state(hasher), outer_state(hasher)
    for each in (member, learner):
        await each.found(numbers(0))
    held = await commit(member, numbers(1))
    wrong = numbers(1)
    wrong[700] += 1.0
    with pytest.raises(StateDiverged):
        await learner.replay(entry(held, raw(wrong)))
    leftover = learner.leftover()
    assert leftover is not None
    # One element of 1,000 is in one chunk of 256 of the anchor and one of the momentum.
    assert differing(member.live.manifest, leftover) == [2, 6]


async def test_a_range_of_the_state_has_the_models_names(hasher: Hasher) -> None:
    table = FragmentTable.from_named_shapes([("first", (10, 10)), ("second", (300,)), ("third", (600,))])
    state = OuterState(outer := DiLoCo(inner_steps=4), (table.whole(),), OuterPlan(outer), hasher)
    await state.found(numbers(0))
    assert state.parameters_in(MOMENTUM, 399, 401) == ("first", "second")
    assert state.parameters_in(MOMENTUM, 400, 401) == ("second",)
    assert state.parameters_in(MOMENTUM, 3996, 4000) == ("third",)


async def test_a_checkpoint_with_other_bits_than_were_voted_is_refused(hasher: Hasher) -> None:
    state, resumed = outer_state(hasher), outer_state(hasher)
    held = await state.found(numbers(0))
    tensors = dict(state.live.tensors)
    assert await resumed.adopt(0, tensors, digest=held.digest) == held
    with pytest.raises(StateMismatch, match="not the one that was committed"):
        await outer_state(hasher).adopt(1, tensors, digest=held.digest)


async def test_a_restore_needs_no_more_memory_than_a_step_of_training(hasher: Hasher) -> None:
    donor, learner = outer_state(hasher), outer_state(hasher)
    await donor.found(numbers(0))
    await learner.found(numbers(50))
    seen = {addresses(learner.live)}
    await commit(learner, numbers(1))
    seen.add(addresses(learner.live))
    await restore(donor, learner)
    assert addresses(learner.live) in seen
    await commit(learner, numbers(2))
    assert addresses(learner.live) in seen


async def test_a_restore_never_writes_into_a_pinned_version(hasher: Hasher) -> None:
    donor, learner = outer_state(hasher), outer_state(hasher)
    await donor.found(numbers(0))
    await learner.found(numbers(50))
    pinned = learner.pin()
    await commit(learner, numbers(1))
    await restore(donor, learner)
    await commit(learner, numbers(2))
    assert has_the_bits_of_its_manifest(pinned)


async def test_a_state_of_another_model_is_refused_before_anything_is_written(hasher: Hasher) -> None:
    donor, learner = outer_state(hasher, numel=NUMEL + 1), outer_state(hasher)
    await donor.found(numbers(0, NUMEL + 1))
    before = await learner.found(numbers(0))
    with pytest.raises(StateMismatch, match="momentum"):
        learner.begin_restore(donor.live.manifest)
    assert learner.held() == before
    assert await commit(learner, numbers(1))


async def test_an_adopted_checkpoint_is_the_state_that_was_saved(hasher: Hasher) -> None:
    state, resumed = outer_state(hasher), outer_state(hasher)
    await state.found(numbers(0))
    held = await commit(state, numbers(1))
    saved = {name: tensor.clone().view(2, -1) for name, tensor in state.live.tensors.items()}
    assert await resumed.adopt(1, saved) == held
    saved[ANCHOR].zero_()
    assert has_the_bits_of_its_manifest(resumed.live)


@pytest.mark.parametrize(
    "broken", [{ANCHOR: torch.zeros(NUMEL)}, {ANCHOR: torch.zeros(NUMEL), MOMENTUM: torch.zeros(3)}]
)
async def test_a_checkpoint_of_another_model_or_method_is_refused(hasher: Hasher, broken: dict) -> None:
    state = outer_state(hasher)
    with pytest.raises(StateMismatch, match="this model and method need"):
        await state.adopt(1, broken)
    assert state.held() is None
