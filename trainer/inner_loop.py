# SPDX-License-Identifier: Apache-2.0
"""One worker's training: model, inner optimizer, learning rate, and its share of every step.

Owns the sharded model. Rules: a step's gradient is the mean over all samples of the peer's batch, whatever the number
of workers and the size of a micro-batch; all workers of the peer call the same methods in the same order, because each
is a collective of the site; a loss or gradient that is not finite never reaches the parameters. Must not know messages,
processes or other peers.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from isthmus.optim.fragments import FragmentTable
from isthmus.optim.inner import Moment, build_inner_optimizer, set_lr
from isthmus.optim.schedule import build_schedule, warmup
from isthmus.trainer.corpus import TokenArray
from isthmus.trainer.data import SampleSource, validation_batches
from isthmus.trainer.errors import TrainingFault
from isthmus.trainer.evaluate import evaluate
from isthmus.trainer.model import Decoder, named_shapes, token_loss
from isthmus.trainer.shards import ShardMap
from isthmus.trainer.worker_job import Precision, TrainingJob


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one inner step did; equal on all workers of the peer, but for the seconds."""

    loss: float
    """Mean over the batch in nats per token, before the step."""
    num_tokens: int
    """Targets in the peer's batch."""
    grad_norm: float
    """Of the whole gradient, before it is clipped."""
    lr: float
    seconds: float


class InnerLoop:
    """Trains one peer's model together with the other workers of the peer.

    Args:
        job: what is trained and how.
        mesh: the workers of the peer, one dimension.
        train: uint8 tokens, kept, not copied.
        validation: uint8 tokens that are held out.

    The parameters have no values before the first `load`.

    Raises:
        DataError: too few tokens for one sample.
        ValueError: a setting out of its range.
    """

    def __init__(self, job: TrainingJob, *, mesh: DeviceMesh, train: TokenArray, validation: TokenArray) -> None:
        self._mesh = mesh
        self._device = _device_of(mesh)
        self._grad_clip = job.grad_clip
        self._micro_batch = job.micro_batch
        self._seq_len = job.seq_len
        self._samples = SampleSource(train, job.seq_len, job.data_seed)
        self._validation = validation_batches(validation, job.seq_len, job.eval_batch, job.num_eval_batches)
        self._model = _sharded_model(job, mesh, self._device)
        # Kept by hand: between a forward and a backward FSDP2 shows unsharded parameters under the same names.
        self._params = list(self._model.parameters())
        self._table = FragmentTable.from_named_shapes(named_shapes(job.model))
        self._shards = ShardMap.build(self._model.named_parameters(), self._table)
        self._names = [name for name, _ in self._model.named_parameters()]
        optimizer = job.optimizer
        self._optimizer = build_inner_optimizer(
            self._model.named_parameters(),
            type=optimizer.type,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            momentum=optimizer.momentum,
        )
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

    @property
    def numel(self) -> int:
        """Elements of the whole flat vector of parameters."""
        return self._shards.numel

    def load(
        self, mailbox: Tensor, ranges: Sequence[range] = (), *, keep: float = 0.0, reset_optimizer: bool = False
    ) -> None:
        """p <- keep * p + (1 - keep) * mailbox; see `ShardMap.read`.

        Args:
            mailbox: [numel] fp32 CPU.
            ranges: the parts of the flat vector to move; empty: all of it.
            keep: in [0, 1].
            reset_optimizer: forget the inner optimizer's state, as for a peer that begins anew.

        Raises:
            RuntimeError: this is the first load, and it would leave parameters without a value.
        """
        if not self._has_weights and (ranges or keep != 0.0):
            raise RuntimeError("the first load must replace all parameters: they have no values yet")
        self._shards.read(mailbox, ranges, keep=keep)
        self._has_weights = True
        if reset_optimizer:
            self._optimizer.state.clear()
            self.own_steps = 0

    def store(self, mailbox: Tensor, ranges: Sequence[range] = ()) -> None:
        """Write this worker's shards into the mailbox, [numel] fp32 CPU; empty `ranges`: all of them."""
        self._require_weights()
        self._shards.write(mailbox, ranges)

    def load_moment(self, name: Moment, mailbox: Tensor, *, own_steps: int) -> None:
        """Begin with a moment of AdamW's that another peer has made in so many steps; see `load`. Both are needed."""
        self._moment(name).read(mailbox)
        for param in self._params:
            self._optimizer.state[param]["step"].fill_(own_steps)
        self.own_steps = own_steps

    def store_moment(self, name: Moment, mailbox: Tensor) -> None:
        """Write this worker's shards of a moment of AdamW's into the mailbox, [numel] fp32 CPU."""
        self._moment(name).write(mailbox)

    def _moment(self, name: Moment) -> ShardMap:
        """Where it lies. What is not there yet is made as torch makes it before the first step: zeros."""
        for param in self._params:
            state = self._optimizer.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        moments = [self._optimizer.state[param][name] for param in self._params]
        return ShardMap.build(zip(self._names, moments, strict=True), self._table)

    def step(self, indices: Sequence[int], inner_step: int) -> StepResult:
        """One inner step on the peer's batch. Who starts in the middle of a run warms up as the run did.

        Args:
            indices: samples of the whole batch, the same on every worker of the peer; at least one.
            inner_step: number of this step in the run's global count, from 1.

        Raises:
            TrainingFault: the loss or the gradient is not finite; the parameters are as before the step.
        """
        started = time.perf_counter()
        if not indices or inner_step < 1:
            raise ValueError(f"a step needs samples and a number from 1, got {len(indices)} and {inner_step}")
        self._require_weights()
        loss = self._backward(indices)
        grad_norm = self._clip()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._optimizer.zero_grad()
            raise TrainingFault(
                f"inner step {inner_step}: loss {loss}, norm of the gradient {grad_norm}",
                cure="lower inner.lr or inner.grad_clip, and resume from a checkpoint",
            )
        # Who comes in the middle of a run has no moments yet: its first steps would be as long as they are arbitrary.
        lr = self._peak_lr * min(self._schedule(inner_step - 1), warmup(self.own_steps, self._warmup_steps))
        self.own_steps += 1
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepResult(
            loss=loss,
            num_tokens=len(indices) * self._seq_len,
            grad_norm=grad_norm,
            lr=lr,
            seconds=time.perf_counter() - started,
        )

    def evaluate(self) -> float:
        """Loss in nats per token on the held-out text, the same number on every worker of the peer."""
        self._require_weights()
        rank, size = self._mesh.get_local_rank(), self._mesh.size()
        own = self._validation[rank::size]
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        if own:
            num_tokens = sum(targets.numel() for _, targets in own)
            totals[0] = evaluate(self._model, own, device=self._device) * num_tokens
            totals[1] = num_tokens
        if len(own) < -(-len(self._validation) // size):
            # Another worker has one batch more, and its forward needs our shards.
            evaluate(self._model, self._validation[:1], device=self._device)
        self._reshard()
        dist.all_reduce(totals, group=self._mesh.get_group())
        return float(totals[0] / totals[1])

    def _backward(self, indices: Sequence[int]) -> float:
        """Gradient of the mean loss over the whole batch into `.grad`; returns that loss."""
        rank, size = self._mesh.get_local_rank(), self._mesh.size()
        share = shares(len(indices), size)[rank]
        num_micro_batches = -(-len(shares(len(indices), size)[0]) // self._micro_batch)
        self._model.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for number in range(num_micro_batches):
            own = share[number * self._micro_batch :][: self._micro_batch]
            # Who has no sample left goes along with one that weighs nothing: every forward is a collective.
            inputs_BL, targets_BL = self._samples.batch([indices[at] for at in own] or indices[:1])
            loss = token_loss(self._model(inputs_BL.to(self._device)), targets_BL.to(self._device))
            # FSDP takes the mean over workers, so a sum over them needs the factor `size`.
            torch.autograd.backward(loss * (len(own) * size / len(indices)))
            loss_sum += loss.detach().double() * len(own)
        dist.all_reduce(loss_sum, group=self._mesh.get_group())
        return float(loss_sum) / len(indices)

    def _clip(self) -> float:
        """Scale the gradient to `grad_clip`; returns its norm before that."""
        grads = [param.grad for param in self._params if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if self._grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self._params, self._grad_clip, norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _reshard(self) -> None:
        """Drop gathered parameters.

        A forward without a backward leaves those of the root gathered, and a later forward would use them whatever
        has been loaded meanwhile.
        """
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _require_weights(self) -> None:
        if not self._has_weights:
            raise RuntimeError("parameters have no values before the first load")


def shares(num_samples: int, num_workers: int) -> list[range]:
    """Who takes which positions of a batch: contiguous, the first ones at most one sample larger."""
    base, extra = divmod(num_samples, num_workers)
    starts = [rank * base + min(rank, extra) for rank in range(num_workers + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _sharded_model(job: TrainingJob, mesh: DeviceMesh, device: torch.device) -> Decoder:
    with torch.device("meta"):
        model = Decoder(job.model)
    policy = _mixed_precision(job.precision)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.init_buffers(device)
    return model


def _mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
