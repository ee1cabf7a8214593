# SPDX-License-Identifier: Apache-2.0
"""How good a worker's parameters are on held-out text: the present ones, or a copy that was kept beside them.

The copy is why a peer can go on training while it judges: training moves the parameters, and the copy stays what was
committed. It is judged in parts, whenever the workers have nothing else to do; for each part it changes places with the
parameters, in their memory, so that neither FSDP nor a compiled model notices.

Rules: all workers of the peer call the same methods in the same order, because each is a collective of the site; the
parameters are after a call what they were before. Must not know when something is judged, or what came of it before.
"""

from collections.abc import Sequence

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isthmus.trainer.model.evaluate import evaluate
from isthmus.trainer.workers.sharded_model import device_of, reshard
from isthmus.trainer.workers.shards import ShardMap
from isthmus.trainer.workers.tensors import WorkerTensors

_RESERVE_NBYTES = 256 << 20
"""Of a device's memory, that a copy leaves free."""


class Judge:
    """See the module.

    Args:
        model: sharded over the workers of the peer.
        tensors: its parameters.
        batches: of held-out text, (inputs_BL, targets_BL); the same on all workers.
        mesh: the workers, one dimension.
    """

    def __init__(
        self, model: nn.Module, tensors: WorkerTensors, batches: Sequence[tuple[Tensor, Tensor]], mesh: DeviceMesh
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._batches = batches
        self._mesh = mesh
        self._device = device_of(mesh)
        self._copy: ShardMap | None = None

    @property
    def num_batches(self) -> int:
        """Of held-out text."""
        return len(self._batches)

    def keep(self, values: Tensor | None) -> bool:
        """Keep a copy of the parameters, or of these values for them, in the place of one that was kept before.

        Args:
            values: [numel] fp32 CPU, read until this returns; None: the parameters as they are.

        Returns:
            Whether all workers of the peer have room for it. Else none keeps one.
        """
        self._copy = None
        has_room = torch.tensor(spare_nbytes(self._device) >= self._tensors.local_nbytes, dtype=torch.int32)
        has_room = has_room.to(self._device)
        dist.all_reduce(has_room, op=dist.ReduceOp.MIN, group=self._mesh.get_group())
        if has_room:
            self._copy = self._tensors.copied(values)
        return bool(has_room)

    def evaluate(self, batches: range | None = None, *, is_kept: bool = False) -> tuple[float, int]:
        """Mean loss in nats a token over these batches, and their number of tokens; the same on every worker.

        Args:
            batches: numbers of batches; None: all. With the last one the copy is let go of.
            is_kept: judge the copy instead of the parameters.

        Raises:
            RuntimeError: there is no copy.
        """
        wanted = range(self.num_batches) if batches is None else batches
        if not is_kept:
            return self._evaluate(wanted)
        if (copy := self._copy) is None:
            raise RuntimeError("no parameters were kept")
        self._tensors.swap(copy)
        try:
            return self._evaluate(wanted)
        finally:
            self._tensors.swap(copy)
            if wanted.stop >= self.num_batches:
                self._copy = None

    def _evaluate(self, wanted: range) -> tuple[float, int]:
        rank, size = self._mesh.get_local_rank(), self._mesh.size()
        own = [self._batches[number] for number in wanted[rank::size]]
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        reshard(self._model)  # what is gathered may be of other values
        if own:
            num_tokens = sum(targets.numel() for _, targets in own)
            totals[0] = evaluate(self._model, own, device=self._device) * num_tokens
            totals[1] = num_tokens
        if len(own) < -(-len(wanted) // size):
            # Another worker has one batch more, and its forward needs our shards.
            evaluate(self._model, [self._batches[wanted[0]]], device=self._device)
        reshard(self._model)
        dist.all_reduce(totals, group=self._mesh.get_group())
        return float(totals[0] / totals[1]), int(totals[1])


def spare_nbytes(device: torch.device) -> int:
    """Memory of a device that nobody uses. What torch holds in reserve there is the training's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    return max(0, free - _RESERVE_NBYTES)
