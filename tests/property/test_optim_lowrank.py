# SPDX-License-Identifier: Apache-2.0
"""PowerSGD's factors: exact where they must be, and linear. tests/unit/optim/test_bit_stability.py has their bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.optim.lowrank import decompress, first_q, orthonormalise, project, project_back, warm_start

SHAPES = st.tuples(st.integers(1, 60), st.integers(1, 60))


def matrix_of_rank(rows, columns, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(rank, columns, generator=generator, dtype=torch.float64)
    return (left @ right).float()


def round_of(matrices, q):
    """One round of members with these matrices. Returns the mean's approximation and Q'."""
    rows, columns = matrices[0].shape
    rank = q.shape[1]
    p = torch.stack([project(a, q, torch.empty(rows, rank)) for a in matrices]).mean(0)
    orthonormalise(p)
    new_q = torch.stack([project_back(a, p, torch.empty(columns, rank)) for a in matrices]).mean(0)
    return decompress(p, new_q, torch.empty(rows, columns)), new_q


@given(shape=SHAPES, true_rank=st.integers(0, 6), spare=st.integers(0, 4), seed=st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_a_mean_of_low_rank_is_exact_in_one_round(shape, true_rank, spare, seed):
    rank = max(true_rank + spare, 1)
    matrices = [matrix_of_rank(*shape, true_rank, seed)] * 3
    approximation, _ = round_of(matrices, first_q(shape[1], rank, seed))
    error = (approximation - matrices[0]).norm()
    assert error <= 1e-3 * matrices[0].norm()
    # an unlucky Q costs digits, but what a second round starts from is the right space
    _, q = round_of(matrices, first_q(shape[1], rank, seed))
    approximation, _ = round_of(matrices, warm_start(q, seed))
    assert (approximation - matrices[0]).norm() <= 1e-4 * matrices[0].norm()


@given(shape=SHAPES, rank=st.integers(1, 8), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_projections_are_linear(shape, rank, seed):
    first, second = (matrix_of_rank(*shape, 5, seed + index) for index in range(2))
    q, p = first_q(shape[1], rank, seed), first_q(shape[0], rank, seed)
    for function, factor in ((project, q), (project_back, p)):
        out = torch.empty(shape[0] if function is project else shape[1], rank)
        parts = 2.0 * function(first, factor, out.clone()) - 3.0 * function(second, factor, out.clone())
        torch.testing.assert_close(function(2.0 * first - 3.0 * second, factor, out), parts, rtol=1e-4, atol=1e-3)


@given(shape=SHAPES, rank=st.integers(1, 12), true_rank=st.integers(0, 12), seed=st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_columns_become_orthonormal_or_zero_and_span_the_same(shape, rank, true_rank, seed):
    p = matrix_of_rank(shape[0], rank, true_rank, seed)
    basis = orthonormalise(p.clone())
    gram = basis.double().t() @ basis.double()
    alive = gram.diagonal() > 0.5
    assert ((gram - torch.diag(alive.double())).abs() <= 1e-5).all()
    assert int(alive.sum()) >= min(shape[0], rank, true_rank) - 1  # a column that is nearly dependent may go
    rest = p.double() - basis.double() @ (basis.double().t() @ p.double())
    assert rest.norm() <= 1e-4 * p.double().norm()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_size_does_not_matter(scale):
    matrix = matrix_of_rank(30, 20, 3, 1) * scale
    approximation, _ = round_of([matrix], first_q(20, 4, 1))
    assert (approximation.double() - matrix.double()).norm() <= 1e-4 * matrix.double().norm()


def test_with_a_residual_the_sum_of_what_is_sent_comes_close_to_the_sum_of_what_was_meant():
    matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(3))
    residual, sent, q = torch.zeros(40, 30), torch.zeros(40, 30), first_q(30, 4, 0)
    for step in range(60):
        wanted = matrix + residual
        approximation, q = round_of([wanted], q)
        residual = wanted - approximation
        sent += approximation
        q = warm_start(q, step)
    assert (sent / 60 - matrix).norm() <= 0.2 * matrix.norm()
    assert residual.norm() <= 12 * matrix.norm()


def test_a_matrix_of_zeros_does_not_end_what_comes_after_it():
    matrix = matrix_of_rank(20, 10, 2, 5)
    approximation, q = round_of([torch.zeros(20, 10)], first_q(10, 3, 0))
    assert not approximation.any()
    approximation, _ = round_of([matrix], warm_start(q, 1))
    assert (approximation - matrix).norm() <= 1e-4 * matrix.norm()


def test_the_first_factor_is_even_in_its_range_and_differs_by_seed():
    q = first_q(4000, 8, 7)
    assert -1.0 <= float(q.min()) < -0.999
    assert 0.999 < float(q.max()) < 1.0
    assert abs(float(q.mean())) < 0.02
    assert abs(float(q.var()) - 1 / 3) < 0.02
    assert float(torch.corrcoef(q.t()).fill_diagonal_(0.0).abs().max()) < 0.08
    assert not torch.equal(q, first_q(4000, 8, 8))


@given(shape=SHAPES, rank=st.integers(1, 40), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_the_order_in_which_a_library_adds_changes_no_bit(shape, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(shape[0], rank, generator=generator), torch.randn(shape[1], rank, generator=generator)
    order = torch.randperm(rank, generator=generator)
    one, other = (
        decompress(p[:, columns], q[:, columns], torch.empty(shape)) for columns in (torch.arange(rank), order)
    )
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    torch.testing.assert_close(one.double(), p.double() @ q.double().t(), rtol=1e-5, atol=1e-4)
