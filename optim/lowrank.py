# SPDX-License-Identifier: Apache-2.0
"""PowerSGD (arXiv 1905.13727): a matrix as two thin factors, which are additive, so their MEAN is what travels.

A round for A [n, m] and the shared state Q [m, r]:

    P = MEAN(A · Q)        P̂ = orthonormalise(P)        Q' = MEAN(Aᵀ · P̂)        Â = P̂ · Q'ᵀ        Q = warm_start(Q')

With a wire of 4 bytes that is 4 · r · (n + m) bytes instead of 4 · n · m, however many members there are. The caller
makes the MEANs, keeps Q (equal on all members, given to joiners), and adds its residual A - Â to the next A.

Error: none but rounding, about 1e-6 of the largest value, if the mean of all A has rank r or less; else what lies
outside the space of P, which from round to round comes close to the r largest singular values.

Rules: pure functions, no state. What all members compute from the same factors has the same bits on every machine,
whatever its vector units or libraries: `orthonormalise`, `decompress`, `first_q` and `warm_start` use only single
rounded operations in a fixed order, or sums that are exact in any order. `project` and `project_back` are a member's
own and need not. Values that are not finite are the caller's to refuse; fp32 [rows, columns] throughout.
It must not know: rounds, wires, residuals.
"""

import torch
from torch import Tensor

from isthmus.optim.stable import exact_matmul, power_of_two_above, sum_last

_VANISHED = 1e-6
"""A column of which less than this is left, when what lies in earlier ones is taken away, was rounding errors."""
_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
_INDEX_BITS = 40
_RANDOM_BITS = 24


def first_q(rows: int, rank: int, seed: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Q [rows, rank] to begin with: even in [-1, 1), from the lowest 16 bits of `seed`, by whole numbers."""
    state = torch.arange(rows * rank, dtype=torch.int64, device=device).add_(seed % (1 << 16) << _INDEX_BITS)
    for shift in (33, 29, 32):
        state = state.mul_(_MULTIPLIER).add_(_INCREMENT)  # wraps around
        state ^= (state >> shift) & ((1 << (64 - shift)) - 1)
    integers = (state & ((1 << _RANDOM_BITS) - 1)) - (1 << (_RANDOM_BITS - 1))
    return integers.float().mul_(2.0 ** (1 - _RANDOM_BITS)).view(rows, rank)


def project(matrix: Tensor, q: Tensor, out: Tensor) -> Tensor:
    """A · Q: [n, m], [m, r] to `out` [n, r], which is returned. Linear in A."""
    return torch.mm(matrix, q, out=out)


def project_back(matrix: Tensor, p: Tensor, out: Tensor) -> Tensor:
    """Aᵀ · P̂: [n, m], [n, r] to `out` [m, r], which is returned. Linear in A."""
    return torch.mm(matrix.t(), p, out=out)


def orthonormalise(p: Tensor) -> Tensor:
    """Make the columns of `p` [n, r] orthonormal in place, and return it.

    Gram-Schmidt in fp64, each column twice. A column that depends on earlier ones becomes zero.
    """
    columns = p.t().double().contiguous()  # [r, n]
    columns.div_(power_of_two_above(columns))  # no square overflows
    for index, column in enumerate(columns):
        norm_before = sum_last(column * column).sqrt_()
        earlier = columns[:index]
        for _ in range(2):
            shares = sum_last(earlier * column)
            column.sub_(sum_last((earlier * shares.unsqueeze(1)).t()))
        norm = sum_last(column * column).sqrt_()
        if norm.item() > _VANISHED * norm_before.item():
            column.div_(norm)
        else:
            column.zero_()
    return p.copy_(columns.t())


def decompress(p: Tensor, q: Tensor, out: Tensor) -> Tensor:
    """Â = P̂ · Q'ᵀ: orthonormal [n, r] and [m, r] to `out` [n, m], which is returned.

    Exact products, rounded to fp32 once: see `exact_matmul`.
    """
    return exact_matmul(p, q.t(), out=out)


def warm_start(q: Tensor, seed: int) -> Tensor:
    """Make Q' the Q of the next round in place: columns that vanished begin anew, else they would stay zero for ever.

    Args:
        q: [m, r], the same on all members.
        seed: the same on all members, another in each round; its lowest 16 bits count.
    """
    gone = (q == 0.0).all(0)
    if bool(gone.any()):
        q[:, gone] = first_q(q.shape[0], q.shape[1], seed, device=q.device)[:, gone]
    return q
