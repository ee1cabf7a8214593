# SPDX-License-Identifier: Apache-2.0
"""MT-DAO: several first moments of different speed, averaged each with a period of its own.

    inner step:   u_j <- beta_j u_j + (1 - beta_j) g                     for j = 1..N
                  x   <- x - lr [(1 - sum_j w_j) g + sum_j w_j u_j]      with g the normalised gradient
    after it:     x, each u_j and v are averaged with periods K_x, K_j, K_v

A slow u_j, whose half-life is longer than its period, carries the common direction from one exchange to the next; the
fresh gradient beside it keeps the step responsive. Choose beta_j so that its half-life, ln 0.5 / ln beta_j, exceeds
K_j: 0.999 has 693 steps. One slow moment is enough in practice and costs no more memory than Adam.

The inner step is `adopt.Adopt`, with its betas and omegas; here is only what crosses the network. States, wire and
departures are DES-LOC's (desloc.py): with N = 1 and w = 1 this is DES-LOC around ADOPT. Around AdamW, which is what
runs where no inner optimizer is named, it is Local Adam.

A slow u_j needs a run that is many of its half-lives long. Held-out loss against plain averaging around AdamW, 4
workers, inner rate 2e-3, from first weights, ADOPT with one moment and beta2 0.99 (torch's C++ headers, then Python's
library; H x rounds):

    beta1, w       8 x 10             8 x 40             30 x 10
    0.9, 1      +1.0    +0.9 %     -0.3    +1.1 %     +0.6    -1.7 %
    0.9, 0.9    -0.4    +0.4       -1.9    -1.3       -3.6    -4.4
    0.95, 0.9   +1.9    +2.0       +1.5    +2.0       +0.0    -1.4
    0.99, 0.9  +10.1   +18.5      +16.1   +11.1      +10.8    +5.1
    0.99, 1    +17.1   +32.5      +34.3   +16.6      +28.3   +11.0
    AdamW       +0.0    +0.0       -2.0    -0.1       -0.9    -0.5

Source: MT-DAO (arXiv:2510.05361). Its formula divides g and u_j by the root of v after they are mixed; its experiments
use ADOPT, which divides g before, and so do we.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.optim.adopt import SECOND_MOMENT, momentum_names
from isthmus.optim.desloc import StateAveraging, checked_multiples
from isthmus.optim.outer import PARAM
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from collections.abc import Mapping


@register("mtdao")
@dataclass(frozen=True, slots=True, kw_only=True)
class MTDAO(StateAveraging):
    """MT-DAO's settings; defaults are the paper's: one slow moment, all periods 32.

    Raises:
        ValueError: if a setting is out of its range.
    """

    inner_steps: int = 32
    """K_x, inner steps between exchanges of the parameters, >= 1."""
    momentum_multiples: tuple[int, ...] = (1,)
    """Period of each first moment in periods of the parameters, >= 1, in the order of the inner optimizer's betas. As
    many as it has first moments."""
    second_moment_multiple: int = 1
    """The same for the second moment."""

    def __post_init__(self) -> None:
        multiples = checked_multiples(self.momentum_multiples, "momentum_multiples")
        object.__setattr__(self, "momentum_multiples", multiples)
        checked_multiples((self.second_moment_multiple,), "second_moment_multiple")
        if not multiples:
            raise ValueError("MT-DAO needs at least one first moment: momentum_multiples is empty")
        StateAveraging.__post_init__(self)

    @property
    def periods(self) -> Mapping[str, int]:
        """K_x of the parameters, then K_j and K_v."""
        names = (*momentum_names(len(self.momentum_multiples)), SECOND_MOMENT)
        multiples = (*self.momentum_multiples, self.second_moment_multiple)
        return {PARAM: self.inner_steps} | {n: m * self.inner_steps for n, m in zip(names, multiples, strict=True)}
