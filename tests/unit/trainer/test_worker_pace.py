# SPDX-License-Identifier: Apache-2.0
"""From when on a worker hangs."""

import pytest

from isthmus.trainer.workers.pace import WorkerPace


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
