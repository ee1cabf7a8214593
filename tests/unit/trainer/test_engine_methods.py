# SPDX-License-Identifier: Apache-2.0
"""Every method under the daemon's engine does what `optim.simulate` does with the same workers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.messages import Held
from isthmus.elastic.state.digest import Hasher
from isthmus.optim import build_outer
from isthmus.optim.outer import Outer, Work
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.run_facts import RunFacts
from isthmus.optim.simulate import Trajectory, by_samples, simulate
from isthmus.trainer.checkpoint.private_files import PrivateFiles
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.engine.own_state import OwnState
from isthmus.trainer.engine.state_version import tensor_name
from isthmus.trainer.engine.worker_values import OWN_PARAMETERS
from scripts.convergence.codec_wire import CodecWire
from tests.unit.optim.adam_lab import AdamRows, OptimizerRows, Rows
from tests.unit.optim.lab import INITIAL, TABLE
from tests.unit.trainer.engine_fleet import BATCH, WORKERS, Coordinator, Peer, fleet, train
from tests.unit.trainer.rig import view_of

RUN = RunFacts(num_peers=3, outer_steps=8, peak_lr=1e-3, schedule="cosine", warmup_steps=2)
FALLING = {"alpha": 0.002}
METHODS: dict[str, dict[str, object]] = {
    "diloco": {"inner_steps": 3},
    "streaming": {"inner_steps": 6, "num_fragments": 3, "delay": 1},
    "qsr": {"inner_steps": 3, **FALLING},
    "autoloco": {"inner_steps": 3, **FALLING},
    "edit": {"inner_steps": 3},
    "sparseloco": {"inner_steps": 3, "topk": 1024, "dense_steps": 6},
    "powersgd": {"inner_steps": 3, "rank": 1, "min_compression": 0.5, "dense_steps": 6},
    "desloc": {"inner_steps": 2, "state_multiples": (1, 3)},
    "local_adam": {"inner_steps": 3},
    "decoupled": {"inner_steps": 6, "num_fragments": 6, "delay": 2},
    "delayed": {"inner_steps": 3},
    "eager": {"inner_steps": 3},
    "co2": {"inner_steps": 3},
    "noloco": {"inner_steps": 3},
    "async": {"inner_steps": 4, "poll_steps": 2},
    "data_parallel": {"resync_steps": 3},
    "demo": {"resync_steps": 3, "topk": 1024},
}
GO_ON = ("streaming", "decoupled", "eager")
"""Their workers keep a part of what they do while a round is out. Peers do nothing more while the last one is."""


def rows_of(name: str) -> Rows:
    """Workers with the inner optimizer that the method is for."""
    if name == "demo":
        return OptimizerRows(lambda params: torch.optim.SGD(params, lr=0.01), rows=len(WORKERS))
    return AdamRows(rows=len(WORKERS))


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


def simulated(outer: Outer, num_inner_steps: int, rows: Rows, codec: str = "raw") -> Trajectory:
    return simulate(
        outer,
        table=TABLE,
        initial=INITIAL,
        workers=WORKERS,
        workload=rows,
        num_inner_steps=num_inner_steps,
        weigh=by_samples,
        batch_size=BATCH,
        wire=CodecWire(codec),
    )


@pytest.mark.parametrize("name", METHODS)
async def test_state_goes_the_way_of_the_simulation(hasher: Hasher, name: str) -> None:
    outer_steps = 8
    outer = build_outer(name, **METHODS[name]).fitted(TABLE, RUN)
    plan = OuterPlan(outer)
    fragments = outer.fragments(TABLE)
    places = {fragment.key: place for place, fragment in enumerate(fragments)}
    async with fleet(outer, hasher, outer_steps=outer_steps, rows=rows_of(name)) as peers:
        await train(peers)
    assert [len(peer.reports) for peer in peers] == [outer_steps] * len(peers)
    expected = simulated(outer, plan.due_step(outer_steps), rows_of(name))
    compared = 0
    for step in range(1, outer_steps + 1):
        for committed in expected.committed:
            if committed.round_ in plan.rounds(step):
                place = places[committed.round_.fragment]
                for name_, value in committed.shared.items():
                    found = peers[0].anchors[step - 1][tensor_name(fragments, place, name_)]
                    torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
                    compared += 1
    assert compared > 0 or name == "noloco"
    for worker, peer in zip(WORKERS, peers, strict=True):
        own = {fragments[place].key: state for place, state in peer.values.private.items() if place >= 0}
        simulated_own = {key: state.private for key, state in expected.states[worker].items() if state.private}
        assert own.keys() == simulated_own.keys()
        for key, state in simulated_own.items() if name != "eager" else ():  # here no payload follows the last one
            for name_, value in state.items():
                torch.testing.assert_close(own[key][name_], value, rtol=1e-4, atol=1e-5)
    for worker, peer in zip(WORKERS, peers, strict=True) if name not in GO_ON else ():
        torch.testing.assert_close(peer.parameters, expected.values[worker], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
async def test_learners_come_to_the_committed_digest_by_replay_and_by_a_snapshot(hasher: Hasher, name: str) -> None:
    outer = build_outer(name, **METHODS[name]).fitted(TABLE, RUN)
    async with fleet(outer, hasher, outer_steps=7, codec="int8") as peers:
        await train(peers)
        (donor, *_), log = peers, peers[1].site.log
        replaying, restoring = (OuterState(outer, outer.fragments(TABLE), OuterPlan(outer), hasher) for _ in range(2))
        await replaying.found(INITIAL)
        for step in log.span:
            entry = log.get(OuterStep(step))
            assert entry is not None
            assert (await replaying.replay(entry)).digest == donor.reports[step - 1].digest
        pinned = donor.site.state.pin()
        for destination, tensor in zip(restoring.begin_restore(pinned.manifest), pinned.tensors.values(), strict=True):
            destination[:] = tensor.view(torch.uint8).numpy().data
        assert await restoring.finish_restore(pinned.manifest) == replaying.held() == donor.site.state.held()
        pinned.release()


@pytest.mark.parametrize("name", ["sparseloco", "powersgd", "edit", "delayed", "noloco"])
async def test_a_peer_that_comes_back_from_its_disk_sends_what_it_would_have_sent(
    hasher: Hasher, tmp_path: Path, name: str
) -> None:
    """Its private state is on the disk, so its next payload from the same values has the same bits."""
    outer = build_outer(name, **METHODS[name]).fitted(TABLE, RUN)
    async with fleet(outer, hasher, outer_steps=5) as peers:
        await train(peers)
        values, held = peers[1].values, peers[1].site.state.live.held
        files = PrivateFiles(tmp_path / "private", "run", keep=2)
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(files.run())
            await files.offer(held, values.private)
            await files.drain()
            writing.cancel()
        assert files.recall(Held(held.outer_step, bytes(32))) is None, "of another state of this step"
        elsewhere = PrivateFiles(tmp_path / "private", "a run that was resumed from this one", keep=2).recall(held)
        assert elsewhere is not None
        assert elsewhere.is_exact
        # Own parameters (noloco) are where the workers begin; what they send then tells of them.
        own = {place: state for place, state in values.private.items() if place != OWN_PARAMETERS}
        before = {place: {k: v.clone() for k, v in state.items()} for place, state in own.items()}
        rounds, works = OuterPlan(outer).rounds(6), [Work(inner_steps=3, samples=12.0)] * len(outer.fragments(TABLE))
        sent = [item.emitted.payload.clone() for item in await values.emit(rounds, works)]

        async def recall(wanted: Held) -> OwnState | None:
            return files.recall(wanted)

        values = peers[1].new_values(recall)
        await values.start_from(peers[1].site.state.pin())
        assert values.private.keys() == before.keys()
        for place, state in before.items():
            assert all(torch.equal(values.private[place][key], tensor) for key, tensor in state.items())
        again = [item.emitted.payload for item in await values.emit(rounds, works)]
        # Workers begin at the anchor, as after a landing that replaces all values: of these methods all do.
        assert all(torch.equal(one, other) for one, other in zip(sent, again, strict=True))


async def test_private_state_that_was_changed_on_the_disk_begins_anew(tmp_path: Path, caplog: Any) -> None:
    files = PrivateFiles(tmp_path, "run", keep=1)
    held = Held(OuterStep(3), bytes(32))
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(files.run())
        for step in (2, 3):
            await files.offer(Held(OuterStep(step), bytes(32)), {0: {"residual": torch.ones(5)}})
            await files.drain()
        writing.cancel()
    path = tmp_path / "step-00000003.safetensors"
    assert await asyncio.to_thread(lambda: [entry.name for entry in tmp_path.iterdir()]) == [path.name]
    found = files.recall(held)
    assert found is not None
    assert torch.equal(found.private[0]["residual"], torch.ones(5))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert files.recall(held) is None
    assert "it begins anew" in caplog.text
    assert files.recall(Held(OuterStep(4), bytes(32))) is None


@pytest.mark.parametrize("name", ["data_parallel", "demo"])
async def test_who_is_waited_for_gives_a_gradient_all_the_same(hasher: Hasher, name: str) -> None:
    """There is nothing else to hand in. It goes on from the newest anchor, with its fellows."""
    outer, rows = build_outer(name, **METHODS[name]).fitted(TABLE, RUN), rows_of(name)
    async with fleet(outer, hasher, outer_steps=4, rows=rows) as peers:
        await train(peers)
        sites, later = [peer.site for peer in peers], Coordinator(len(peers), 7)
        again = [Peer(site, rows, row, later, hasher, is_awaited=True) for row, site in enumerate(sites)]
        for peer in again:
            peer.view = view_of(sites)
        await train(again)
        assert [[report.num_tokens for report in peer.reports] for peer in again] == [[BATCH] * 3] * len(again)
        assert all(torch.equal(peer.parameters, again[0].parameters) for peer in again)
