# SPDX-License-Identifier: Apache-2.0
"""Guards and error feedback under the daemon's engine do what they do in `optim.simulate`."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from isthmus.elastic.state.digest import Hasher
from isthmus.optim import build_outer
from isthmus.optim.error_feedback import ErrorFeedback
from isthmus.optim.outer import Outer
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.robust import Guard, Robust
from isthmus.trainer.engine.state_version import tensor_name
from tests.unit.optim.lab import TABLE
from tests.unit.trainer.engine_fleet import fleet, train
from tests.unit.trainer.test_engine_methods import METHODS, RUN, rows_of, simulated

WRAPPED: dict[str, tuple[Outer, str]] = {
    guard: (Robust(outer=build_outer("diloco", inner_steps=3), guard=guard), "int8") for guard in get_args(Guard)
} | {
    "edit trimmed": (Robust(outer=build_outer("edit", inner_steps=3), guard="trimmed"), "raw"),
    "feedback": (ErrorFeedback(outer=build_outer("diloco", inner_steps=3)), "twobit"),
    "streaming feedback": (ErrorFeedback(outer=build_outer("streaming", **METHODS["streaming"])), "twobit"),
}


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1, chunk_nbytes=1024)
    yield threads
    threads.close()


@pytest.mark.parametrize("name", WRAPPED)
async def test_guards_and_error_feedback_go_the_way_of_the_simulation(hasher: Hasher, name: str) -> None:
    wrapped, codec = WRAPPED[name]
    outer, outer_steps = wrapped.fitted(TABLE, RUN), 8
    plan, fragments = OuterPlan(outer), outer.fragments(TABLE)
    places = {fragment.key: place for place, fragment in enumerate(fragments)}
    async with fleet(outer, hasher, outer_steps=outer_steps, codec=codec, rows=rows_of("diloco")) as peers:
        await train(peers)
    expected = simulated(outer, plan.due_step(outer_steps), rows_of("diloco"), codec)
    compared = 0
    for step in range(1, outer_steps + 1):
        for committed in expected.committed:
            if committed.round_ in plan.rounds(step):
                for tensor, value in committed.shared.items():
                    found = peers[0].anchors[step - 1][
                        tensor_name(fragments, places[committed.round_.fragment], tensor)
                    ]
                    torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
                    compared += 1
    assert compared > 0
