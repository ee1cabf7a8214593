# SPDX-License-Identifier: Apache-2.0
"""ADOPT: Adam that converges with any beta2, here with one or several first moments.

    first step:   v <- g²
    later, t from 1:
        n   <- clip(g / max(√v, eps), ±t^(1/4))            v is without this g
        u_j <- beta_j u_j + (1 - beta_j) n                 for j = 1..N
        x   <- x - lr (weight_decay x + (1 - Σ_j w_j) n + Σ_j w_j u_j)
        v   <- beta2 v + (1 - beta2) g²

One moment with w = 1 is ADOPT. Other weights mix fresh gradient and moments, the quasi-hyperbolic form (w = 0: no
momentum at all); several moments of different speed make the inner step of MT-DAO (mtdao.py).

Sources: ADOPT (arXiv:2411.02853v3, the clipped algorithm); quasi-hyperbolic momentum (arXiv:1810.06801); MT-DAO
(arXiv:2510.05361). Like all inner arithmetic its bits matter to nobody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, overload

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim.optimizer import ParamsT

SECOND_MOMENT: Final = "exp_avg_sq"
"""Name of v in the optimizer's state, as in torch's Adam."""

_ROUNDING: Final = 1e-9
"""By how much weights that are meant to be one in sum may miss it."""


class Adopt(torch.optim.Optimizer):
    """ADOPT with decoupled weight decay, and any number of first moments.

    The states of a parameter are "step", `momentum_names(N)` and "exp_avg_sq", all updated in place. Moments are
    fp32 at least: in bf16 a factor of 0.9999 changes nothing, and they would never forget.

    Args:
        params: as for any optimizer of torch; gradients are dense. DTensors are welcome.
        lr: learning rate, >= 0.
        betas: decay rates of the first moments, then that of the second, each in [0, 1). MT-DAO: (0.999, 0.9999).
        omegas: weight of each first moment in the step, in [0, 1], at most 1 in sum. MT-DAO searches it.
        eps: least denominator, > 0.
        weight_decay: decoupled, times lr, as AdamW's.

    Raises:
        ValueError: if a setting is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        betas: tuple[float, ...] = (0.9, 0.9999),
        omegas: tuple[float, ...] = (1.0,),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0.0 or not weight_decay >= 0.0 or not eps > 0.0:
            raise ValueError(f"need lr >= 0, weight_decay >= 0 and eps > 0, got {lr}, {weight_decay} and {eps}")
        if len(betas) < 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas are those of the first moments and that of the second, in [0, 1), got {betas}")
        if len(omegas) != len(betas) - 1:
            raise ValueError(f"omegas need one weight for each of {len(betas) - 1} first moments, got {omegas}")
        if not all(0.0 <= omega <= 1.0 for omega in omegas) or sum(omegas) > 1.0 + _ROUNDING:
            raise ValueError(f"omegas must be in [0, 1] and at most 1 in sum, got {omegas}")
        defaults = {"lr": lr, "betas": betas, "omegas": omegas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step on the gradients that are there; `closure` evaluates the model anew and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        *betas, second_beta = group["betas"]
        names, state = momentum_names(len(betas)), self.state[param]
        wide = torch.promote_types(param.dtype, torch.float32)
        grad = grad.to(wide)
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in (*names, SECOND_MOMENT):
                state[name] = torch.zeros_like(param, dtype=wide)
        for name in (*names, SECOND_MOMENT):
            state[name] = state[name].to(wide)  # `load_state_dict` gives them the parameter's dtype
        second, steps = state[SECOND_MOMENT], state["step"].item()
        state["step"] += 1
        if steps == 0:
            second.copy_(grad.square())
            return
        bound = steps**0.25
        fresh = (grad / second.sqrt().clamp_(min=group["eps"])).clamp_(-bound, bound)
        direction = fresh * (1.0 - sum(group["omegas"]))
        for name, beta, omega in zip(names, betas, group["omegas"], strict=True):
            state[name].lerp_(fresh, 1.0 - beta)
            direction.add_(state[name], alpha=omega)
        param.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        second.mul_(second_beta).addcmul_(grad, grad, value=1.0 - second_beta)


def momentum_names(num_momenta: int) -> tuple[str, ...]:
    """Names of the first moments in the optimizer's state: "exp_avg" of a single one, else "exp_avg_0" and so on."""
    return ("exp_avg",) if num_momenta == 1 else tuple(f"exp_avg_{number}" for number in range(num_momenta))
