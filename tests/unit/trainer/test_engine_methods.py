# SPDX-License-Identifier: Apache-2.0
"""Every method under the daemon's engine does what `optim.simulate` does with the same workers."""

from collections.abc import Iterator

import pytest
import torch

from isthmus.elastic.digest import Hasher
from isthmus.optim import build_outer
from isthmus.optim.outer import Outer
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.run_facts import RunFacts
from isthmus.optim.simulate import Trajectory, by_samples, simulate
from isthmus.trainer.state_version import tensor_name
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
    "sparseloco": {"inner_steps": 3, "topk": 1024},
    "powersgd": {"inner_steps": 3, "rank": 1, "min_compression": 0.5},
    "desloc": {"inner_steps": 2, "state_multiples": (1, 3)},
    "local_adam": {"inner_steps": 3},
    "decoupled": {"inner_steps": 6, "num_fragments": 6, "delay": 2},
    "delayed": {"inner_steps": 3},
    "eager": {"inner_steps": 3},
    "co2": {"inner_steps": 3},
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


def simulated(outer: Outer, num_inner_steps: int, rows: Rows) -> Trajectory:
    return simulate(
        outer,
        table=TABLE,
        initial=INITIAL,
        workers=WORKERS,
        workload=rows,
        num_inner_steps=num_inner_steps,
        weigh=by_samples,
        batch_size=BATCH,
        wire=CodecWire("raw"),
    )


@pytest.mark.parametrize("name", METHODS)
async def test_shared_state_goes_the_way_of_the_simulation(hasher: Hasher, name: str) -> None:
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
    assert compared > 0
    for worker, peer in zip(WORKERS, peers, strict=True) if name not in GO_ON else ():
        torch.testing.assert_close(peer.parameters, expected.values[worker], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["data_parallel", "demo"])
async def test_who_is_waited_for_gives_a_gradient_all_the_same(hasher: Hasher, name: str) -> None:
    """There is nothing else to hand in. It goes on from the newest anchor, with its fellows."""
    outer, rows = build_outer(name, **METHODS[name]).fitted(TABLE, RUN), rows_of(name)
    async with fleet(outer, hasher, outer_steps=4, rows=rows) as peers:
        await train(peers)
        sites, later = [peer.site for peer in peers], Coordinator(len(peers), 7)
        again = [Peer(site, rows, row, later, hasher, others_wait=lambda: True) for row, site in enumerate(sites)]
        for peer in again:
            peer.view = view_of(sites)
        await train(again)
        assert [[report.num_tokens for report in peer.reports] for peer in again] == [[BATCH] * 3] * len(again)
        assert all(torch.equal(peer.parameters, again[0].parameters) for peer in again)
