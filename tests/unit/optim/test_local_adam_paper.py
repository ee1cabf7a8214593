# SPDX-License-Identifier: Apache-2.0
"""Local Adam (arXiv:2409.13155): every K steps x, u and v become their means."""

import pytest
import torch

from isthmus.optim.local_adam import LocalAdam
from isthmus.optim.outer import PARAM
from isthmus.optim.registry import build_outer
from tests.unit.optim.adam_lab import AdamRows, adam_directly, run_rows
from tests.unit.optim.lab import assert_parity


@pytest.mark.parametrize("period", [1, 5, 24])
def test_it_follows_a_direct_implementation(period):
    rows = AdamRows()
    trajectory = run_rows(LocalAdam(inner_steps=period), 27, rows=rows)
    direct = adam_directly({"x": period, "u": period, "v": period}, 27)
    for kind, name in ((PARAM, "x"), ("exp_avg", "u"), ("exp_avg_sq", "v")):
        torch.testing.assert_close(rows.of_workers(kind).double(), direct[name], rtol=1e-4, atol=1e-5)
    assert_parity(trajectory)


def test_after_every_exchange_the_workers_are_one():
    rows = AdamRows()
    run_rows(LocalAdam(inner_steps=4), 12, rows=rows)
    for kind in (PARAM, "exp_avg", "exp_avg_sq"):
        assert (rows.of_workers(kind) == rows.of_workers(kind)[0]).all()


def test_members_agree_after_every_round_whoever_comes_and_goes():
    trajectory = run_rows(
        LocalAdam(inner_steps=3),
        30,
        rows=AdamRows(),
        joins={4: ["elm"], 17: ["fir"]},
        leaves={7: ["birch"]},
        aborted=lambda round_: round_.inner_step == 12,
    )
    assert_parity(trajectory)
    assert len(trajectory.dropped) == 3


def test_its_settings():
    assert build_outer("local_adam", inner_steps=7, states=["exp_avg"]) == LocalAdam(inner_steps=7, states=("exp_avg",))
    assert LocalAdam().periods == {PARAM: 256, "exp_avg": 256, "exp_avg_sq": 256}
    with pytest.raises(ValueError, match="inner_steps must be at least 1"):
        LocalAdam(inner_steps=0)
    with pytest.raises(ValueError, match="different names"):
        LocalAdam(states=("exp_avg", "exp_avg"))
