# SPDX-License-Identifier: Apache-2.0
"""One worker's training: model, inner optimizer, learning rate, and its share of every step.

Owns the sharded model. Rules: a step's gradient is the mean over all samples of the peer's batch, whatever the number
of workers and the size of a micro-batch; all workers of the peer call the same methods in the same order, because each
is a collective of the site; a loss or gradient that is not finite never reaches the parameters, whoever made it; a
gradient is clipped by the peer that computes it, before others see it. Must not know messages, processes or other
peers.

A step may be begun before the one before it is done: `begin_step` tells the device what to do, and waits for nothing.
Whether loss and gradient are numbers is then looked at by the device, which leaves the update out if they are not, and
by the host when it reads them. An optimizer that cannot leave out a step (`optim.inner.can_skip`) has the host wait.
"""

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from isthmus.optim.fragments import FragmentTable
from isthmus.optim.inner import build_inner_optimizer, can_skip, set_lr
from isthmus.optim.outer import GRAD, PARAM
from isthmus.optim.schedule import build_schedule, warmup
from isthmus.trainer.config.job import TrainingJob, choose_precision
from isthmus.trainer.data.corpus import TokenArray
from isthmus.trainer.data.samples import SampleSource, Shards, validation_batches
from isthmus.trainer.workers.judge import Judge
from isthmus.trainer.workers.loader import Indices, Loader, micro_batches
from isthmus.trainer.workers.readout import Readout, Watch
from isthmus.trainer.workers.sharded_model import device_of, reduce_gradients, sharded_model
from isthmus.trainer.workers.step import Gradient, PendingStep, StepResult, fail, require_finite
from isthmus.trainer.workers.tensors import WorkerTensors


class InnerLoop:
    """Trains one peer's model together with the other workers of the peer.

    Args:
        job: what is trained and how.
        mesh: the workers of the peer, one dimension.
        train: tokens in one piece, kept, not copied, or in shards.
        validation: likewise, that are held out.

    The parameters have no values before the first `load`.

    Raises:
        DataError: too few tokens for one sample.
        ValueError: a setting out of its range.
    """

    def __init__(
        self, job: TrainingJob, *, mesh: DeviceMesh, train: TokenArray | Shards, validation: TokenArray | Shards
    ) -> None:
        self._mesh = mesh
        self._device = device_of(mesh)
        self._grad_clip = job.grad_clip
        self._micro_batch = job.micro_batch
        self._seq_len = job.seq_len
        self._loader = Loader(SampleSource(train, job.seq_len, job.data_seed), self._device)
        self.precision = choose_precision(job.precision, mesh.device_type)
        """What it computes in."""
        self._model = sharded_model(
            job.model,
            mesh=mesh,
            precision=self.precision,
            activation_checkpointing=job.activation_checkpointing,
            is_compiled=job.is_compiled,
        )
        self._params = list(self._model.parameters())
        self._job = optimizer = job.optimizer
        self._optimizer = build_inner_optimizer(
            self._model,
            type=optimizer.type,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            omegas=optimizer.omegas,
            momentum=optimizer.momentum,
        )
        self._can_skip = can_skip(self._optimizer)
        self._tensors = WorkerTensors(
            self._model, self._optimizer, FragmentTable.from_named_shapes(job.model.named_shapes())
        )
        batches = validation_batches(validation, job.seq_len, job.eval_batch, job.num_eval_batches)
        parts = [
            (inputs[at : at + job.micro_batch], targets[at : at + job.micro_batch])
            for inputs, targets in batches
            for at in range(0, len(inputs), job.micro_batch)
        ]
        self._judge = Judge(self._model, self._tensors, parts, mesh)
        self._peak_lr = optimizer.lr
        schedule = job.schedule
        self._schedule = build_schedule(
            schedule.type,
            total_steps=schedule.total_steps,
            warmup_steps=schedule.warmup_steps,
            min_ratio=schedule.min_ratio,
            decay_steps=schedule.decay_steps,
        )
        self._warmup_steps = schedule.warmup_steps
        self.own_steps = 0
        """Inner steps since the inner optimizer began."""
        self._has_weights = False
        self._gradient: Gradient | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole flat vector of parameters."""
        return self._tensors.numel

    @property
    def judge(self) -> Judge:
        """Says how good the parameters are on held-out text.

        Raises:
            RuntimeError: they have no values yet.
        """
        self._require_weights()
        return self._judge

    def load(
        self,
        mailbox: Tensor,
        ranges: Sequence[range] = (),
        *,
        kind: str = PARAM,
        keep: float = 0.0,
        own_steps: int | None = None,
    ) -> int:
        """value <- keep * value + (1 - keep) * mailbox; see `ShardMap.read`.

        Args:
            mailbox: [numel] fp32 CPU.
            ranges: the parts of the flat vector to move; empty: all of it.
            kind: "param", "grad", or the name of a tensor that the inner optimizer keeps. Parameters for which it does
                not keep it are left out.
            keep: in [0, 1].
            own_steps: of how many inner steps the optimizer's states are the outcome from now on; None: as before.

        Returns:
            How many elements of this worker were not finite and have taken the mailbox's value instead of a blend.

        Raises:
            ConfigError: the inner optimizer keeps nothing of this kind.
            RuntimeError: this is the first load, and it would leave parameters without a value.
        """
        self._job.require_kinds((kind,))
        if kind == PARAM and not self._has_weights and (ranges or keep != 0.0):
            raise RuntimeError("the first load must replace all parameters: they have no values yet")
        num_broken = self._tensors.read(kind, mailbox, ranges, keep=keep)
        if own_steps is not None:
            self._tensors.set_steps(own_steps)
            self.own_steps = own_steps
        self._has_weights = self._has_weights or kind == PARAM
        if kind == GRAD and self._gradient is not None:
            self._gradient.is_own = False
        return num_broken

    def store(self, mailbox: Tensor, ranges: Sequence[range] = (), *, kind: str = PARAM) -> None:
        """Write this worker's shards into the mailbox, zeros where there is no such tensor. Arguments as for `load`.

        Raises:
            ConfigError: the inner optimizer keeps nothing of this kind.
        """
        self._job.require_kinds((kind,))
        if kind == PARAM:
            self._require_weights()
        self._tensors.write(kind, mailbox, ranges)

    def close(self) -> None:
        """End what runs beside."""
        self._loader.close()

    def prefetch(self, indices: Sequence[int]) -> None:
        """Let the text of a later step be made ready, beside what is computed now."""
        self._loader.prefetch([batch for batch in self._micro_batches(indices) if batch])

    def step(self, indices: Sequence[int], inner_step: int, position: float | None = None) -> StepResult:
        """One inner step on the peer's batch, to its end. Arguments and errors as for `backward` and `update`."""
        return self.begin_step(indices, inner_step, position).result()

    def begin_step(self, indices: Sequence[int], inner_step: int, position: float | None = None) -> PendingStep:
        """The same, without waiting for the device.

        Raises:
            TrainingFault: already now, if the inner optimizer cannot leave out a step.
        """
        gradient = self._compute(indices, inner_step)
        if not self._can_skip:
            require_finite(gradient)
            return self._apply(gradient, position)
        is_broken = (~torch.isfinite(gradient.numbers).all()).float()
        self._optimizer.found_inf = is_broken  # type: ignore[attr-defined]
        try:
            return self._apply(gradient, position)
        finally:
            del self._optimizer.found_inf  # type: ignore[attr-defined]

    def backward(self, indices: Sequence[int], inner_step: int) -> tuple[float, int]:
        """Compute the clipped gradient on the peer's batch; it stays until `update`, or the next backward.

        Args:
            indices: samples of the whole batch, the same on every worker of the peer; at least one.
            inner_step: number of this step in the run's global count, from 1.

        Returns:
            Mean loss over the batch in nats per token, and its number of targets.

        Raises:
            TrainingFault: the loss or the gradient is not finite.
        """
        gradient = self._compute(indices, inner_step)
        loss, _ = require_finite(gradient)
        self._gradient = gradient
        return loss, gradient.num_tokens

    def update(self, inner_step: int, position: float | None = None) -> StepResult:
        """Let the inner optimizer use the gradient that is there. Who starts in the middle of a run warms up as it did.

        Args:
            inner_step: of the backward before.
            position: where the run is before this step, in planned inner steps: what the learning rate follows. None:
                as far as `inner_step` says.

        Raises:
            TrainingFault: a gradient that was loaded is not finite; the parameters are as before.
            RuntimeError: there was no such backward, or it has been used.
        """
        gradient, self._gradient = self._gradient, None
        if gradient is None or gradient.inner_step != inner_step:
            raise RuntimeError(f"there is no gradient for inner step {inner_step}")
        gradient.watch.mark()
        if not gradient.is_own and not math.isfinite(norm := float(self._clip(None))):
            self._optimizer.zero_grad()
            fail(f"inner step {inner_step}: norm of the peers' common gradient {norm}")
        return self._apply(gradient, position).result()

    def _compute(self, indices: Sequence[int], inner_step: int) -> Gradient:
        """The clipped gradient of the batch into `.grad`; nobody has looked at it yet."""
        if not indices or inner_step < 1:
            raise ValueError(f"a step needs samples and a number from 1, got {len(indices)} and {inner_step}")
        self._require_weights()
        self._gradient = None
        self._optimizer.zero_grad()  # of a step that was given up, if there is one
        watch = Watch(self._device)
        watch.mark()
        loss, data_s = self._backward(indices)
        watch.mark()
        numbers = torch.stack((loss, self._clip(self._grad_clip).double()))
        watch.mark()
        return Gradient(
            inner_step=inner_step,
            num_tokens=len(indices) * self._seq_len,
            numbers=numbers,
            readout=Readout(numbers),
            watch=watch,
            data_s=data_s,
        )

    def _apply(self, gradient: Gradient, position: float | None) -> PendingStep:
        """Let the inner optimizer use it."""
        # Who comes in the middle of a run has no moments yet: its first steps would be as long as they are arbitrary.
        warm = warmup(self.own_steps, self._warmup_steps)
        position = gradient.inner_step - 1.0 if position is None else position
        lr = self._peak_lr * min(self._schedule(position), warm)
        self.own_steps += 1
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()
        gradient.watch.mark()
        return PendingStep(gradient, lr)

    def _backward(self, indices: Sequence[int]) -> tuple[Tensor, float]:
        """Gradient of the mean loss over the whole batch into `.grad`.

        Returns:
            That loss, fp64 on the device, and how many seconds the host waited for text.
        """
        batches, size = self._micro_batches(indices), self._mesh.size()
        self._model.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        data_s = 0.0
        for number, batch in enumerate(batches, 1):
            began = time.perf_counter()
            # Who has no sample left goes along with one that weighs nothing: every forward is a collective.
            inputs_BL, targets_BL = self._loader.take(batch or (indices[0],))
            data_s += time.perf_counter() - began
            reduce_gradients(self._model, is_last=number == len(batches))
            loss = self._model(inputs_BL, targets_BL)
            # FSDP takes the mean over workers, so a sum over them needs the factor `size`.
            torch.autograd.backward(loss * (len(batch) * size / len(indices)))
            loss_sum += loss.detach().double() * len(batch)
        if size > 1:
            dist.all_reduce(loss_sum, group=self._mesh.get_group())
        return loss_sum / len(indices), data_s

    def _micro_batches(self, indices: Sequence[int]) -> list[Indices]:
        rank, size = self._mesh.get_local_rank(), self._mesh.size()
        return micro_batches(indices, rank=rank, num_workers=size, size=self._micro_batch)

    def _clip(self, limit: float | None) -> Tensor:
        """Scale the gradient to `limit`, if there is one; returns its norm before that, on the device."""
        grads = [param.grad for param in self._params if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(self._params, limit, norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _require_weights(self) -> None:
        if not self._has_weights:
            raise RuntimeError("parameters have no values before the first load")
