# SPDX-License-Identifier: Apache-2.0
"""One inner step between its beginning and the reading of its numbers.

Must not know how a gradient is made, nor how it is used.
"""

import math
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from isthmus.trainer.errors import TrainingFault
from isthmus.trainer.workers.ipc import StepParts
from isthmus.trainer.workers.readout import Readout, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one inner step did; equal on all workers of the peer, but for the seconds."""

    loss: float
    """Mean over the batch in nats per token, before the step."""
    num_tokens: int
    """Targets in the peer's batch."""
    grad_norm: float
    """Of the whole gradient of this peer, before it is clipped."""
    lr: float
    seconds: float
    """Of both passes and the update; not what lay between."""
    parts: StepParts


@dataclass(slots=True, kw_only=True)
class Gradient:
    """What a backward pass has made, and what is told of it."""

    inner_step: int
    num_tokens: int
    numbers: Tensor
    """[2] fp64: the loss and the norm."""
    readout: Readout
    """Of these."""
    watch: Watch
    data_s: float
    """How long the host waited for text."""
    is_own: bool = True
    """Whether the gradient is still the one that was judged and clipped here."""


class PendingStep:
    """A step that was begun. Its numbers are there when the device has come so far."""

    def __init__(self, gradient: Gradient, lr: float) -> None:
        self._gradient = gradient
        self._lr = lr

    @property
    def is_ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._gradient.watch.is_passed

    def result(self) -> StepResult:
        """Wait for it.

        Raises:
            TrainingFault: the loss or the gradient was not finite, and the update was left out.
        """
        loss, norm = require_finite(self._gradient)
        # A pass and an update are marked each at both ends: what lies between, if there is something, is not counted.
        passes_s, clip_s, *_, update_s = self._gradient.watch.seconds()
        data_s = self._gradient.data_s
        return StepResult(
            loss=loss,
            num_tokens=self._gradient.num_tokens,
            grad_norm=norm,
            lr=self._lr,
            seconds=passes_s + clip_s + update_s,
            parts=StepParts(data_s=data_s, passes_s=max(0.0, passes_s - data_s), clip_s=clip_s, update_s=update_s),
        )


def require_finite(gradient: Gradient) -> tuple[float, float]:
    """Loss and norm, when the device has them.

    Raises:
        TrainingFault: one is not finite.
    """
    loss, norm = gradient.readout.read()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        fail(f"inner step {gradient.inner_step}: loss {loss}, norm of the gradient {norm}")
    return loss, norm


def fail(problem: str) -> NoReturn:
    """The training itself has failed."""
    raise TrainingFault(problem, cure="lower inner.lr or inner.grad_clip, and resume from a checkpoint")
