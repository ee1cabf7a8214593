# SPDX-License-Identifier: Apache-2.0
"""A small world in which a method shows what it is: a few tensors, workers that pull in different directions."""

import torch

from isthmus.optim import ANCHOR, FragmentTable
from isthmus.optim.simulate import simulate
from isthmus.optim.workload import ExactWire, OneByOne

TABLE = FragmentTable.from_named_shapes([(f"layer{i}", (i + 2, 3)) for i in range(6)])
WORKERS = ("ash", "birch", "cedar", "dogwood")
INITIAL = torch.linspace(-1.0, 1.0, TABLE.numel)


def gradient(worker: str, inner_step: int, value: torch.Tensor) -> torch.Tensor:
    """Of another quadratic for each worker, whose minimum moves. Workers are known by their first letter."""
    number = 1.0 + ord(worker[0]) - ord("a")
    index = torch.arange(value.numel(), dtype=torch.float32)
    return (0.5 + 0.2 * number) * (value - torch.sin(index * number + 0.1 * inner_step))


def sgd_step(worker: str, inner_step: int, value: torch.Tensor) -> None:
    value -= 0.03 * gradient(worker, inner_step, value)


def run(outer, num_inner_steps=24, workers=WORKERS, *, inner_step=sgd_step, table=TABLE, initial=INITIAL, **settings):
    """Simulate; joiners have room too."""
    settings.setdefault("workload", OneByOne(inner_step, rows=len(workers) + 4, numel=table.numel))
    return simulate(outer, table=table, initial=initial, workers=workers, num_inner_steps=num_inner_steps, **settings)


class TopKWire:
    """Where a round asks for it, what `lossy(run, topk)` leaves of runs of 4096 elements; remembers all it gave."""

    def __init__(self, lossy):
        self.lossy = lossy
        self.sent = {}

    def exchange(self, round_, fragment, payloads, weights):
        delivered = dict(payloads)
        if round_.codec is not None and round_.codec.startswith("topk:"):
            topk = int(round_.codec.removeprefix("topk:"))
            delivered = {
                name: torch.cat([self.lossy(part, topk) for part in payload.split(4096)])
                for name, payload in payloads.items()
            }
        for name, payload in delivered.items():
            self.sent[name] = self.sent.get(name, 0.0) + payload.double()
        return ExactWire().exchange(round_, fragment, delivered, weights)


def anchors(trajectory):
    return [committed.shared[ANCHOR] for committed in trajectory.committed]


def assert_same(left, right, tolerance=1e-6):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_parity(trajectory):
    """Shared state has the same bits on all workers after every round."""
    assert trajectory.committed
    assert all(len(set(committed.digests.values())) == 1 for committed in trajectory.committed)
