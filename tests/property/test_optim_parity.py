"""I1: whoever joins, leaves or fails, all members hold the same shared state after every committed round."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim import ANCHOR, DiLoCo, FragmentTable
from optim.simulate import simulate
from optim.workload import OneByOne

TABLE = FragmentTable.from_named_shapes([("a", (5, 3)), ("b", (7,))])
INNER_STEPS, NUM_STEPS = 3, 30


def step(worker: str, inner_step: int, value: torch.Tensor) -> None:
    number = int(worker[1:]) + 1.0
    index = torch.arange(TABLE.numel, dtype=torch.float32)
    value -= 0.1 * (value - torch.sin(index * number + 0.3 * inner_step)) / number


@settings(deadline=None)  # machines are slow at times; pytest bounds the whole
@given(
    num_workers=st.integers(1, 4),
    weights=st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12),
    arrivals=st.lists(st.integers(0, NUM_STEPS), max_size=4),
    departures=st.dictionaries(st.integers(1, 3), st.integers(0, NUM_STEPS), max_size=3),
    aborts=st.sets(st.integers(1, NUM_STEPS // INNER_STEPS), max_size=6),
)
def test_shared_digests_are_equal_after_every_committed_round(num_workers, weights, arrivals, departures, aborts):
    workers = [f"w{i}" for i in range(num_workers)]
    joins, leaves = {}, {}
    for number, when in enumerate(arrivals):
        joins.setdefault(when, []).append(f"w{num_workers + number}")
    for number, when in departures.items():  # worker 0 stays, so that somebody can be the donor
        if number < num_workers:
            leaves.setdefault(when, []).append(f"w{number}")
    trajectory = simulate(
        DiLoCo(inner_steps=INNER_STEPS),
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
    assert len(trajectory.committed) == NUM_STEPS // INNER_STEPS - len(aborts)
    for committed in trajectory.committed:
        assert len(set(committed.digests.values())) == 1
        assert set(committed.members) <= set(committed.digests)
    moved = [committed.shared[ANCHOR] for committed in trajectory.committed]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(moved))
    assert all(torch.isfinite(value).all() for value in trajectory.values.values())
