# SPDX-License-Identifier: Apache-2.0
"""The shared state in fragments: a step writes, hashes and allocates one of them, and shares the others."""

import random
from collections.abc import Iterator

import msgspec
import pytest
import torch

from isthmus.collective.errors import RemoteProtocolError
from isthmus.elastic.core.messages import Held
from isthmus.elastic.errors import StateDiverged
from isthmus.elastic.state.digest import Hasher
from isthmus.elastic.state.parity import contents_of, salvage
from isthmus.elastic.state.replica import CommitEntry
from isthmus.optim.fragments import FragmentTable
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.streaming import Streaming
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.engine.state_version import Version, gather_anchor
from tests.unit.trainer.rig import entry_of, has_the_bits_of_its_manifest, numbers, recorded, stage_mean

TABLE = FragmentTable.from_named_shapes([("embedding", (300,)), *((f"layer{n}", (500,)) for n in range(8))])
OUTER = Streaming(inner_steps=12, num_fragments=4, delay=2)


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


def make(hasher: Hasher, outer: Streaming = OUTER) -> OuterState:
    return OuterState(outer, outer.fragments(TABLE), OuterPlan(outer), hasher)


async def founded(hasher: Hasher) -> OuterState:
    state = make(hasher)
    await state.found(numbers(0, TABLE.numel))
    return state


async def stage(state: OuterState, seed: int, weight_sum: float = 2.0) -> Held:
    return await stage_mean(state, numbers(seed, numel_after(state)), dict.fromkeys("ab", weight_sum / 2))


def numel_after(state: OuterState) -> int:
    """Elements of the fragment whose turn it is."""
    (round_,) = state.next_rounds()
    return state.fragments[state.places[round_.fragment]].numel


async def commit(state: OuterState, seed: int, weight_sum: float = 2.0) -> Held:
    held = await stage(state, seed, weight_sum)
    state.install_staged(held)
    return held


def entry_after(state: OuterState, held: Held, seed: int) -> CommitEntry:
    """What a member keeps of the commit that made `held`, which `state` holds."""
    (round_,) = OuterPlan(OUTER).rounds(held.outer_step)
    numel = state.fragments[state.places[round_.fragment]].numel
    return entry_of(held, recorded(numbers(seed, numel), {"a": 1.0, "b": 1.0}))


def anchor_of(state: OuterState) -> torch.Tensor:
    flat = torch.full((TABLE.numel,), float("nan"))
    gather_anchor(state.live.tensors, OUTER.fragments(TABLE), out=flat)
    return flat


def hashed_anew(before: Version, after: Version) -> list[str]:
    """The tensors of whose digests nothing was taken over."""
    known = before.parts()
    return [name for name, part in after.parts().items() if part is not known[name]]


async def test_tensors_are_named_by_fragment_and_together_they_are_the_model(hasher: Hasher) -> None:
    state = await founded(hasher)
    names = [tensor.name for tensor in state.live.manifest.tensors]
    assert names == [f"{index}/{name}" for index in range(4) for name in ("anchor", "momentum")]
    assert torch.equal(anchor_of(state), numbers(0, TABLE.numel))


async def test_a_step_hashes_and_writes_its_own_fragment_and_shares_the_others(hasher: Hasher) -> None:
    state = await founded(hasher)
    for step in range(8):
        before = state.pin()
        await commit(state, step)
        moved = (step + 1) % 4
        assert hashed_anew(before, state.live) == [f"{moved}/anchor", f"{moved}/momentum"]
        assert [old is new for old, new in zip(before.states, state.live.states, strict=True)] == [
            index != moved for index in range(4)
        ]
        assert state.live.moved_from(before) == (moved,)
        assert has_the_bits_of_its_manifest(before)
        assert has_the_bits_of_its_manifest(state.live)
        before.release()


async def test_the_digest_is_that_of_the_whole_state_hashed_anew(hasher: Hasher) -> None:
    state, other = await founded(hasher), make(hasher)
    for step in range(6):
        held = await commit(state, step)
    assert await other.adopt(held.outer_step, state.live.tensors, digest=held.digest) == held


async def test_a_round_without_weight_counts_and_neither_hashes_nor_moves_anything(hasher: Hasher) -> None:
    state = await founded(hasher)
    before = state.pin()
    held = await commit(state, 1, weight_sum=0.0)
    assert held.outer_step == 1
    assert held.digest != before.manifest.digest
    assert hashed_anew(before, state.live) == []
    assert state.live.states == before.states


async def test_a_pinned_version_keeps_its_bits_through_any_number_of_turns(hasher: Hasher) -> None:
    state = await founded(hasher)
    pins = []
    chance = random.Random(1)
    for step in range(40):
        if chance.random() < 0.4:
            pins.append(state.pin())
        if pins and chance.random() < 0.4:
            pins.pop(chance.randrange(len(pins))).release()
        if chance.random() < 0.2:
            await stage(state, 100 + step)
            state.discard_staged()
        await commit(state, step)
        assert all(has_the_bits_of_its_manifest(version) for version in (*pins, state.live))
    assert pins


async def test_memory_is_two_copies_and_one_spare_fragment_of_each_size(hasher: Hasher) -> None:
    state = await founded(hasher)
    seen = set()
    for step in range(40):
        await commit(state, step)
        seen |= {tensor.data_ptr() for tensor in state.live.tensors.values()}
    sizes = {fragment.numel for fragment in OUTER.fragments(TABLE)}
    assert len(sizes) == 2  # the embedding goes with the first layer
    assert len(seen) == 2 * (4 + len(sizes))


async def test_eight_commits_of_fragments_are_replayed_to_the_members_digests(hasher: Hasher) -> None:
    member, learner = await founded(hasher), await founded(hasher)
    for step in range(8):
        held = await commit(member, step)
        assert await learner.replay(entry_after(member, held, step)) == held
    assert torch.equal(anchor_of(learner), anchor_of(member))


async def test_a_recorded_step_of_other_rounds_is_the_donors_fault(hasher: Hasher) -> None:
    member, learner = await founded(hasher), await founded(hasher)
    before = learner.held()
    entry = entry_after(member, await commit(member, 1), 1)
    for rounds in ((), entry.rounds * 2):
        with pytest.raises(RemoteProtocolError, match="not as many results"):
            await learner.replay(msgspec.structs.replace(entry, rounds=rounds))
    assert learner.held() == before
    assert await learner.replay(entry) == member.held()


async def test_of_a_diverged_replay_only_the_wrong_chunk_is_missing(hasher: Hasher) -> None:
    """The other fragments are not in the memory of the restore, but in the held state with the same digests."""
    member, learner = await founded(hasher), await founded(hasher)
    for step in range(3):
        held = await commit(member, step)
        await learner.replay(entry_after(member, held, step))
    held = await commit(member, 3)
    entry = entry_after(member, held, 3)
    mean = torch.frombuffer(bytearray(entry.chunks[0].data), dtype=torch.float32)
    mean[700] += 1.0
    with pytest.raises(StateDiverged):
        await learner.replay(entry_of(held, recorded(mean, {"a": 1.0, "b": 1.0})))
    manifest, leftover = member.live.manifest, learner.leftover()
    destinations = learner.begin_restore(manifest)
    pinned = learner.pin()
    found = await salvage(manifest, destinations, contents=contents_of(leftover, manifest), live=pinned, hasher=hasher)
    pinned.release()
    num_chunks = sum(len(tensor.chunk_digests) for tensor in manifest.tensors)
    assert num_chunks - len(found.present) == 2  # of 256 elements each: of the anchor and of the momentum
    assert found.damaged == ()
    assert has_the_bits_of_its_manifest(learner.live)


async def test_a_restored_state_goes_on_as_its_donor_does(hasher: Hasher) -> None:
    donor, learner = await founded(hasher), make(hasher)
    for step in range(5):
        held = await commit(donor, step)
    for destination, tensor in zip(
        learner.begin_restore(donor.live.manifest), donor.live.tensors.values(), strict=True
    ):
        destination[:] = tensor.view(torch.uint8).numpy().data
    assert await learner.finish_restore(donor.live.manifest) == held
    for step in range(5, 10):
        assert await commit(learner, step) == await commit(donor, step)


async def test_a_range_of_a_fragment_has_the_models_names(hasher: Hasher) -> None:
    state = await founded(hasher)
    assert state.parameters_in("0/momentum", 1199, 1201) == ("embedding", "layer0")
    assert state.parameters_in("3/anchor", 1199, 1201) == ("layer3",)
