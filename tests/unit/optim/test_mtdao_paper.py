# SPDX-License-Identifier: Apache-2.0
"""MT-DAO (arXiv:2510.05361): x ← x - η [(1 - Σω)ĝ + Σω_j u_j]; x, each u_j and v are averaged by their own periods."""

import pytest
import torch

from isthmus.optim.adopt import Adopt, momentum_names
from isthmus.optim.desloc import DesLoc
from isthmus.optim.mtdao import MTDAO
from isthmus.optim.outer import PARAM
from isthmus.optim.registry import build_outer
from tests.unit.optim.adam_lab import LR, OptimizerRows, fixed_gradient, run_rows
from tests.unit.optim.lab import INITIAL, WORKERS, assert_parity, gradient

BETA2, EPS = 0.999, 1e-6


def adopt_rows(betas, omegas, **settings):
    def build(params):
        return Adopt(params, lr=LR, betas=(*betas, BETA2), omegas=omegas, eps=EPS)

    return OptimizerRows(build, (*momentum_names(len(betas)), "exp_avg_sq"), **settings)


def directly(betas, omegas, periods, num_inner_steps, aborted=()):
    """All workers in double precision; `periods` are those of x, of each u_j and of v."""
    x = INITIAL.double().repeat(len(WORKERS), 1)
    v, momenta = torch.zeros_like(x), [torch.zeros_like(x) for _ in betas]
    for step in range(1, num_inner_steps + 1):
        g = torch.stack([gradient(worker, step, x[row].clone()) for row, worker in enumerate(WORKERS)])
        if step == 1:
            v = g**2
        else:
            bound = (step - 1) ** 0.25
            fresh = (g / v.sqrt().clamp(min=EPS)).clamp(-bound, bound)
            momenta = [beta * u + (1 - beta) * fresh for beta, u in zip(betas, momenta, strict=True)]
            mixed = sum(omega * u for omega, u in zip(omegas, momenta, strict=True))
            x = x - LR * ((1 - sum(omegas)) * fresh + mixed)
            v = BETA2 * v + (1 - BETA2) * g**2
        for number, (values, period) in enumerate(zip((x, *momenta, v), periods, strict=True)):
            if step % period == 0 and (number, step) not in aborted:
                values[:] = values.mean(0)
    return x


@pytest.mark.parametrize(
    ("betas", "omegas", "multiples", "last"),
    [
        ((0.99,), (0.9,), (1,), 1),
        ((0.9, 0.99), (0.3, 0.6), (1, 3), 2),
        ((0.5, 0.9, 0.99), (0.2, 0.3, 0.4), (1, 2, 4), 3),
    ],
)
def test_it_follows_a_direct_implementation(betas, omegas, multiples, last):
    outer = MTDAO(inner_steps=2, momentum_multiples=multiples, second_moment_multiple=last)
    rows = adopt_rows(betas, omegas)
    trajectory = run_rows(outer, 27, rows=rows)
    expected = directly(betas, omegas, [2, *(2 * multiple for multiple in multiples), 2 * last], 27)
    torch.testing.assert_close(rows.of_workers(PARAM).double(), expected, rtol=1e-4, atol=1e-5)
    assert_parity(trajectory)


def test_one_momentum_of_weight_one_is_desloc():
    mtdao, desloc = (adopt_rows((0.95,), (1.0,)) for _ in range(2))
    a = run_rows(MTDAO(inner_steps=3, momentum_multiples=(2,), second_moment_multiple=4), rows=mtdao)
    b = run_rows(DesLoc(inner_steps=3, state_multiples=(2, 4)), rows=desloc)
    assert [c.round_ for c in a.committed] == [c.round_ for c in b.committed]
    assert [c.digests for c in a.committed] == [c.digests for c in b.committed]
    for kind in desloc.tensors:
        assert torch.equal(mtdao.of_workers(kind), desloc.of_workers(kind))


def test_weight_nought_removes_the_momentum():
    ends = []
    for beta, multiple in ((0.5, 1), (0.99, 4)):
        rows = adopt_rows((beta,), (0.0,))
        run_rows(MTDAO(inner_steps=3, momentum_multiples=(multiple,)), rows=rows)
        ends.append(rows.of_workers(PARAM).clone())
    assert torch.equal(*ends)
    with_momentum = adopt_rows((0.5,), (0.5,))
    run_rows(MTDAO(inner_steps=3), rows=with_momentum)
    assert not torch.allclose(with_momentum.of_workers(PARAM), ends[0], atol=1e-3)


def test_two_momenta_of_one_speed_are_one_of_their_common_weight():
    two, one = adopt_rows((0.9, 0.9), (0.25, 0.5)), adopt_rows((0.9,), (0.75,))
    run_rows(MTDAO(inner_steps=3, momentum_multiples=(2, 2)), rows=two)
    run_rows(MTDAO(inner_steps=3, momentum_multiples=(2,)), rows=one)
    torch.testing.assert_close(two.of_workers(PARAM), one.of_workers(PARAM), rtol=1e-5, atol=1e-6)


def test_of_what_was_averaged_beta_to_the_period_is_left_when_the_next_average_comes():
    """What a slow moment is for."""
    for beta in (0.9, 0.99):
        moments = []
        for nudge in (0.0, 1.0):
            rows = adopt_rows((beta,), (1.0,), gradient=fixed_gradient)

            def add(step, _trajectory, rows=rows, nudge=nudge):
                if step == 8:
                    assert (rows.of_workers("exp_avg") == rows.of_workers("exp_avg")[0]).all()
                    rows.tensors["exp_avg"] += nudge

            run_rows(MTDAO(inner_steps=8), 15, rows=rows, on_step=add)
            moments.append(rows.of_workers("exp_avg").clone())
        torch.testing.assert_close(moments[1] - moments[0], torch.full_like(moments[0], beta**7), rtol=1e-4, atol=1e-5)


def test_all_states_have_the_same_period_by_default():
    assert MTDAO().periods == {PARAM: 32, "exp_avg": 32, "exp_avg_sq": 32}


def test_several_momenta_have_a_fragment_each():
    outer = build_outer("mtdao", inner_steps=4, momentum_multiples=[1, 8], second_moment_multiple=2)
    assert outer.periods == {PARAM: 4, "exp_avg_0": 4, "exp_avg_1": 32, "exp_avg_sq": 8}
    assert hash(outer)


def test_members_agree_after_every_round_whoever_comes_and_goes():
    trajectory = run_rows(
        MTDAO(inner_steps=2, momentum_multiples=(1, 3)),
        30,
        rows=adopt_rows((0.9, 0.99), (0.3, 0.6)),
        joins={4: ["elm"], 17: ["fir"]},
        leaves={7: ["birch"]},
        aborted=lambda round_: round_.inner_step in (6, 12),
    )
    assert_parity(trajectory)
    assert all(torch.isfinite(value).all() for value in trajectory.values.values())


def test_aborted_means_are_left_out_and_nothing_else_changes():
    rows = adopt_rows((0.9,), (0.8,))
    aborted = {(0, 4), (1, 8), (2, 6)}
    kinds = (PARAM, "exp_avg", "exp_avg_sq")
    run_rows(
        MTDAO(inner_steps=2),
        13,
        rows=rows,
        aborted=lambda round_: (kinds.index(round_.fragment.kind), round_.inner_step) in aborted,
    )
    expected = directly((0.9,), (0.8,), (2, 2, 2), 13, aborted)
    torch.testing.assert_close(rows.of_workers(PARAM).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_steps": 0}, "inner_steps must be at least 1"),
        ({"momentum_multiples": ()}, "at least one first moment"),
        ({"momentum_multiples": (0,)}, "momentum_multiples must be whole"),
        ({"momentum_multiples": (1.5,)}, "momentum_multiples must be whole"),
        ({"second_moment_multiple": 0}, "second_moment_multiple must be whole"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MTDAO(**settings)
