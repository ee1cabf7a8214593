# SPDX-License-Identifier: Apache-2.0
"""Every method under the daemon's engine does what `optim.simulate` does with the same workers."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from isthmus.elastic.digest import Hasher
from isthmus.optim import build_outer
from isthmus.optim.error_feedback import ErrorFeedback
from isthmus.optim.outer import Outer
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.robust import Guard, Robust
from isthmus.optim.run_facts import RunFacts
from isthmus.optim.simulate import Trajectory, by_samples, simulate
from isthmus.trainer.state_version import tensor_name
from scripts.convergence.codec_wire import CodecWire
from tests.unit.optim.adam_lab import AdamRows
from tests.unit.optim.lab import INITIAL, TABLE
from tests.unit.trainer.engine_fleet import BATCH, WORKERS, fleet, train

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
}


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


WRAPPED: dict[str, tuple[Outer, str]] = {
    guard: (Robust(outer=build_outer("diloco", inner_steps=3), guard=guard), "int8") for guard in get_args(Guard)
} | {
    "edit trimmed": (Robust(outer=build_outer("edit", inner_steps=3), guard="trimmed"), "raw"),
    "feedback": (ErrorFeedback(outer=build_outer("diloco", inner_steps=3)), "twobit"),
    "streaming feedback": (ErrorFeedback(outer=build_outer("streaming", **METHODS["streaming"])), "twobit"),
}


def simulated(outer: Outer, num_inner_steps: int, codec: str) -> Trajectory:
    return simulate(
        outer,
        table=TABLE,
        initial=INITIAL,
        workers=WORKERS,
        workload=AdamRows(rows=len(WORKERS)),
        num_inner_steps=num_inner_steps,
        weigh=by_samples,
        batch_size=BATCH,
        wire=CodecWire(codec),
    )


async def assert_as_simulated(outer: Outer, codec: str, hasher: Hasher) -> None:
    outer_steps = 8
    plan = OuterPlan(outer)
    fragments = outer.fragments(TABLE)
    places = {fragment.key: place for place, fragment in enumerate(fragments)}
    async with fleet(outer, hasher, outer_steps=outer_steps, codec=codec) as peers:
        await train(peers)
    assert [len(peer.reports) for peer in peers] == [outer_steps] * len(peers)
    expected = simulated(outer, plan.due_step(outer_steps), codec)
    compared = 0
    for step in range(1, outer_steps + 1):
        for committed in expected.committed:
            if committed.round_ in plan.rounds(step):
                place = places[committed.round_.fragment]
                for name, value in committed.shared.items():
                    found = peers[0].anchors[step - 1][tensor_name(fragments, place, name)]
                    torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
                    compared += 1
    assert compared > 0


@pytest.mark.parametrize("name", METHODS)
async def test_shared_state_goes_the_way_of_the_simulation(hasher: Hasher, name: str) -> None:
    await assert_as_simulated(build_outer(name, **METHODS[name]).fitted(TABLE, RUN), "raw", hasher)


@pytest.mark.parametrize("name", WRAPPED)
async def test_guards_and_error_feedback_go_the_way_of_the_simulation(hasher: Hasher, name: str) -> None:
    outer, codec = WRAPPED[name]
    await assert_as_simulated(outer.fitted(TABLE, RUN), codec, hasher)
