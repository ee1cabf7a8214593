# SPDX-License-Identifier: Apache-2.0
"""I1: whoever joins, leaves or fails, all members hold the same shared state after every committed round."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.optim import ANCHOR, FragmentTable, build_outer
from isthmus.optim.simulate import simulate
from isthmus.optim.workload import OneByOne

TABLE = FragmentTable.from_named_shapes([("layer0.w", (5, 3)), ("layer1.b", (7,))])
INNER_STEPS, NUM_STEPS = 3, 30


def step(worker: str, inner_step: int, value: torch.Tensor) -> None:
    number = int(worker[1:]) + 1.0
    index = torch.arange(TABLE.numel, dtype=torch.float32)
    value -= 0.1 * (value - torch.sin(index * number + 0.3 * inner_step)) / number


FALLING = {
    "alpha": 0.002,
    "peak_lr": 0.001,
    "total_steps": NUM_STEPS,
    "schedule": "cosine",
    "warmup_steps": 0,
    "min_ratio": 0.1,
}
METHODS = {
    "diloco": {},
    "streaming": {"num_fragments": 2, "delay": 1},
    "delayed": {},
    "eager": {},
    "co2": {},
    "sparseloco": {"dense_steps": 6},
    "async": {"poll_steps": 2},
    "edit": {"num_fragments": 1},
    "decoupled": {"num_fragments": 2, "delay": 1},
    "powersgd": {"rank": 1, "min_compression": 0.5, "dense_steps": 6},
    "qsr": FALLING,
    "autoloco": FALLING,
}
"""All whose shared state follows from exchanged parameters; those that exchange gradients or moments have their own
tests."""


@settings(deadline=None, max_examples=80)  # machines are slow at times; pytest bounds the whole
@given(
    method=st.sampled_from(sorted(METHODS)),
    num_workers=st.integers(1, 4),
    weights=st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12),
    arrivals=st.lists(st.integers(0, NUM_STEPS), max_size=4),
    departures=st.dictionaries(st.integers(1, 3), st.integers(0, NUM_STEPS), max_size=3),
    aborts=st.sets(st.integers(1, NUM_STEPS // INNER_STEPS), max_size=6),
)
def test_shared_digests_are_equal_after_every_committed_round(
    method, num_workers, weights, arrivals, departures, aborts
):
    workers = [f"w{i}" for i in range(num_workers)]
    joins, leaves = {}, {}
    for number, when in enumerate(arrivals):
        joins.setdefault(when, []).append(f"w{num_workers + number}")
    for number, when in departures.items():  # worker 0 stays, so that somebody can be the donor
        if number < num_workers:
            leaves.setdefault(when, []).append(f"w{number}")
    trajectory = simulate(
        build_outer(method, inner_steps=INNER_STEPS, **METHODS[method]),
        table=TABLE,
        initial=torch.linspace(-1.0, 1.0, TABLE.numel),
        workers=workers,
        workload=OneByOne(step, rows=8, numel=TABLE.numel),
        num_inner_steps=NUM_STEPS,
        weigh=lambda worker, _work: weights[int(worker[1:])],
        joins=joins,
        leaves=leaves,
        aborted=lambda round_: round_.inner_step // INNER_STEPS in aborts,
    )
    if method == "diloco":
        assert len(trajectory.committed) == NUM_STEPS // INNER_STEPS - len(aborts)
    for committed in trajectory.committed:
        assert len(set(committed.digests.values())) == 1
        assert set(committed.members) <= set(committed.digests)
    moved = [committed.shared[ANCHOR] for committed in trajectory.committed]
    if method == "diloco":
        assert all(not torch.equal(a, b) for a, b in itertools.pairwise(moved))
    assert all(torch.isfinite(value).all() for value in trajectory.values.values())
