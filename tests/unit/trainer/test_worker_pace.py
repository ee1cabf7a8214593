# SPDX-License-Identifier: Apache-2.0
"""From when on a worker hangs."""

from typing import cast

import pytest

from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.link import WorkerLink
from isthmus.trainer.workers.pace import WorkerPace
from isthmus.trainer.workers.requests import WorkerRequests


def test_the_first_request_of_a_kind_may_take_longest() -> None:
    pace = WorkerPace(floor_s=60.0, first_s=600.0)
    pace.took("step", 0.1)
    assert pace.limit_s("step") == 60.0
    assert pace.limit_s("evaluate") == 600.0


def test_the_limit_is_ten_times_the_slowest_within_floor_and_first() -> None:
    pace = WorkerPace(floor_s=60.0, first_s=600.0)
    pace.took("step", 20.0)
    pace.took("step", 3.0)
    assert pace.limit_s("step") == pytest.approx(10 * 0.99 * 20.0)
    pace.took("step", 100.0)
    assert pace.limit_s("step") == 600.0


class _Answering:
    """A link to a worker that judges at once; `limits_s` is what it was given for each request."""

    def __init__(self) -> None:
        self.limits_s: list[float] = []

    def next_serial(self) -> int:
        return len(self.limits_s)

    async def ask(self, request: ipc.Evaluate, _kind: type[ipc.Evaluated], limit_s: float) -> list[ipc.Evaluated]:
        self.limits_s.append(limit_s)
        return [ipc.Evaluated(serial=request.serial, loss=1.0, num_tokens=1)]


async def test_an_evaluation_of_all_batches_is_not_held_against_one_of_a_few() -> None:
    link, requests = _Answering(), WorkerRequests(request_timeout_s=600.0, hang_timeout_s=60.0)
    requests._ask_over(cast("WorkerLink", link))
    for batches in (range(1), range(1, 2), None, None, range(1)):
        await requests.evaluate(batches)
    assert link.limits_s == [600.0, 60.0, 600.0, 60.0, 60.0]
