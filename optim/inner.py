# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer: what a worker runs between outer steps, on its own shards and its own device.

Its state is private: its bits matter to nobody else, even where a method averages it. So torch's own optimizers, fused
arithmetic and all, are right here and wrong in the outer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, assert_never, overload

import torch
from torch import nn

from isthmus.optim.adopt import SECOND_MOMENT, Adopt, momentum_names
from isthmus.optim.hidden import hidden_matrices

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torch.nn import Parameter

    NamedParams: TypeAlias = list[tuple[str, Parameter]]

InnerType: TypeAlias = Literal["adamw", "sgd", "adopt", "muon"]

_ADAMW_STATES: Final = ("exp_avg", "exp_avg_sq")
_MUON_STATES: Final = ("momentum_buffer",)
_FUSED_ON: Final = ("cpu", "cuda")


def build_inner_optimizer(
    model: nn.Module | Iterable[tuple[str, Parameter]],
    *,
    type: InnerType = "adamw",
    lr: float,
    betas: tuple[float, ...] | None = None,
    eps: float | None = None,
    weight_decay: float = 0.1,
    omegas: tuple[float, ...] | None = None,
    momentum: float = 0.95,
    hidden: Collection[str] | None = None,
) -> torch.optim.Optimizer:
    """Build the inner optimizer; only tensors of two or more dimensions decay.

    Biases, gains and other vectors set a scale that has no reason to be small, so they are left alone. Frozen
    parameters are left out. Names are kept in the optimizer's state, which lets a checkpoint be read by name.

    Args:
        model: what is trained, or named parameters of it; DTensors of FSDP2 are welcome.
        type: "adamw"; "sgd" (plain: no momentum), under which H = 1 is data parallelism and which DeMo wants; "adopt"
            (arXiv:2411.02853), also with several first moments; "muon" for hidden matrices and AdamW for the rest,
            embeddings and head among it.
        lr: peak learning rate; `set_lr` moves it. Muon's steps are scaled to AdamW's root mean square, so that one rate
            serves both (arXiv:2502.16982).
        betas: decay rates of the first moments, then that of the second. None: (0.9, 0.99), the second from
            arXiv:2503.09799; "adopt": (0.9, 0.9999). One first moment, but any number for "adopt". Unused by SGD.
        eps: least denominator. None: 1e-8; "adopt": 1e-6. Unused by SGD.
        weight_decay: decoupled; for SGD added to the gradient.
        omegas: "adopt" only: weight of each first moment, see `Adopt`. None: one moment, 1.
        momentum: of Muon's matrices, Nesterov's, in [0, 1).
        hidden: names of what Muon trains. None: the model's `hidden_matrices`; with named parameters it must be given.

    Raises:
        ValueError: if no parameter is trainable, or a setting is missing, out of its range or another type's.
    """
    named_params = model.named_parameters() if isinstance(model, nn.Module) else model
    trainable = [(name, param) for name, param in named_params if param.requires_grad]
    if not trainable:
        raise ValueError("no parameter is trainable")
    if not lr >= 0.0 or not weight_decay >= 0.0:
        raise ValueError(f"lr and weight_decay must not be negative, got {lr} and {weight_decay}")
    if omegas is not None and type != "adopt":
        raise ValueError(f"omegas belong to adopt, not to {type}")
    match type:
        case "adamw":
            return _adamw(trainable, lr, betas, eps, weight_decay)
        case "sgd":
            # torch has no such kernel for what FSDP2 has cut.
            fused = True if _have_kernels(trainable) and not _is_cut(trainable) else None
            return torch.optim.SGD(_decay_matrices(trainable, weight_decay), lr=lr, fused=fused)
        case "adopt":
            return Adopt(
                _decay_matrices(trainable, weight_decay),
                lr=lr,
                betas=(0.9, 0.9999) if betas is None else betas,
                omegas=(1.0,) if omegas is None else omegas,
                eps=1e-6 if eps is None else eps,
            )
        case "muon":
            names = _hidden_names(model, hidden)
            muon = _muon([(n, p) for n, p in trainable if n in names], lr, momentum, weight_decay)
            rest = [(n, p) for n, p in trainable if n not in names]
            return CompositeOptimizer([muon, _adamw(rest, lr, betas, eps, weight_decay)] if rest else [muon])
        case _:
            assert_never(type)


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the device itself leaves out a step: where `found_inf`, a tensor that the optimizer is given, is not 0.

    Fused kernels look at it, as they do for torch's gradient scaler.
    """
    return all(group.get("fused") for group in optimizer.param_groups)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all groups this learning rate, before a step: peak rate times `schedule(inner_step)`."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_names(type: InnerType, betas: tuple[float, ...] | None = None) -> tuple[str, ...]:
    """Names of the tensors that an inner optimizer keeps, each in the shape of its parameter; none for SGD.

    Muon keeps its own for hidden matrices and AdamW's for the rest; every other type keeps all for all.

    Args:
        type: see `build_inner_optimizer`.
        betas: likewise.
    """
    match type:
        case "adamw":
            return _ADAMW_STATES
        case "sgd":
            return ()
        case "adopt":
            return (*momentum_names(1 if betas is None else len(betas) - 1), SECOND_MOMENT)
        case "muon":
            return (*_MUON_STATES, *_ADAMW_STATES)
        case _:
            assert_never(type)


def begin_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states that the first step would make, as it makes them: no steps yet, and zeros.

    Args:
        optimizer: of `build_inner_optimizer`. Parameters that have states keep them.
    """
    parts = optimizer.parts() if isinstance(optimizer, CompositeOptimizer) else (optimizer,)
    for part in parts:
        for group in part.param_groups:
            names = _names_of(part, group)
            for param in group["params"]:
                state = part.state[param]
                if state or not names:
                    continue
                if not isinstance(part, torch.optim.Muon):
                    state["step"] = torch.zeros((), device=param.device if group.get("fused") else "cpu")
                for name in names:
                    state[name] = torch.zeros_like(param)


def _names_of(part: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    match part:
        case Adopt():
            return state_names("adopt", group["betas"])
        case torch.optim.AdamW():
            return _ADAMW_STATES
        case torch.optim.Muon():
            return _MUON_STATES
        case _:
            return ()


class CompositeOptimizer(torch.optim.Optimizer):
    """Several optimizers, each for its own parameters, that look like one.

    Parameter groups and states are this object's; the parts work on them. So `state`, `state_dict`, `zero_grad` and the
    learning rates are the ordinary ones of torch.

    Args:
        parts: their groups hold different parameters.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = tuple(parts)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of each part; `closure` evaluates the model anew, once, and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts():
            part.step()
        return loss

    def parts(self) -> Iterator[torch.optim.Optimizer]:
        """The parts, each with its groups and all states."""
        first = 0
        for part in self._parts:
            # Anew each time: loading a state dict replaces both objects.
            stop = first + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[first:stop]
            yield part
            first = stop

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_parts": self._parts}


def _hidden_names(
    model: nn.Module | Iterable[tuple[str, Parameter]], hidden: Collection[str] | None
) -> Collection[str]:
    if hidden is not None:
        return hidden
    if isinstance(model, nn.Module):
        return hidden_matrices(model)
    raise ValueError("parameters do not say which of them are hidden: give muon the model, or `hidden`")


def _muon(params: NamedParams, lr: float, momentum: float, weight_decay: float) -> torch.optim.Muon:
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if not params:
        raise ValueError("muon trains hidden matrices, and there is none; use adamw")
    return torch.optim.Muon(
        [{"params": params}], lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )


def _adamw(
    params: NamedParams, lr: float, betas: tuple[float, ...] | None, eps: float | None, weight_decay: float
) -> torch.optim.AdamW:
    first, second = _two((0.9, 0.99) if betas is None else betas)
    groups = _decay_matrices(params, weight_decay)
    return torch.optim.AdamW(
        groups,
        lr=lr,
        betas=(first, second),
        eps=1e-8 if eps is None else eps,
        fused=True if _have_kernels(params) else None,
    )


def _have_kernels(params: NamedParams) -> bool:
    """Whether torch steps these in one kernel, which on the CPU takes a sixth of the time."""
    return all(param.device.type in _FUSED_ON for _, param in params)


def _two(betas: tuple[float, ...]) -> tuple[float, float]:
    if len(betas) != 2:
        raise ValueError(f"AdamW has two betas, got {betas}")
    return betas[0], betas[1]


def _decay_matrices(params: NamedParams, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, fewer if one is empty: what decays and what does not."""
    split = (
        {"params": [(n, p) for n, p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in params if p.ndim < 2], "weight_decay": 0.0},
    )
    return [group for group in split if group["params"]]


def _is_cut(params: NamedParams) -> bool:
    from torch.distributed.tensor import DTensor  # takes a second, and whoever has one has loaded it

    return any(isinstance(param, DTensor) for _, param in params)
