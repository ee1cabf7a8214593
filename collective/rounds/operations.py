# SPDX-License-Identifier: Apache-2.0
"""Each operation as a plan over its caller's tensors: which trees, which cut, what goes where.

Rules: arguments are checked here, before anything is sent. Every function gives an `Operation` that a round can run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.collective.core import slices
from isthmus.collective.rounds.buffers import OPS, Record
from isthmus.collective.rounds.operation import Operation
from isthmus.collective.rounds.tensors import Array, check_out, check_weight, flat, overlap
from isthmus.collective.rounds.workplace import Workplace


class Reducible:
    """The checked arguments of a reduction; see `Communicator.all_reduce`.

    Raises:
        ValueError: they are not as described there; says what to do.
    """

    def __init__(
        self,
        tensor: Array,
        *,
        out: Array | None,
        op: str,
        weight: float,
        told: Sequence[float] | None = None,
        codec: str = "raw",
        record: Record | None = None,
        is_tolerant: bool = False,
    ) -> None:
        self.source = flat("tensor", tensor)
        self.target = self.source if out is None else flat("out", out)
        self.op, self.weight, self.told, self.codec, self.record = op, weight, told, codec, record
        self.is_tolerant = is_tolerant
        check_weight(weight, self.source.dtype, op)
        if op not in OPS:
            raise ValueError(f"no operation {op!r}; there are {', '.join(OPS)}")
        if op == "mean" and not self.source.is_floating_point():
            raise ValueError('the mean of integers is not an integer; use op="sum" and divide, or convert to float32')
        if codec != "raw" and (self.source.dtype != torch.float32 or op not in ("mean", "sum")):
            raise ValueError(f'codec {codec!r} is for the mean or sum of float32; use codec="raw"')
        check_out(self.source, self.target, self.source.numel())
        is_same = self.target.data_ptr() == self.source.data_ptr()
        if out is not None and not is_same and overlap(self.source, self.target):
            raise ValueError("tensor and out overlap without being the same; pass separate memory, or no out")


def all_reduce(workplace: Workplace, world_size: int, given: Reducible, plan: str) -> Operation:
    """The same result for all."""
    choice, cut = workplace.choose(plan, world_size, given.source, given.codec)
    return Operation(
        workplace,
        op=given.op,
        plan=cut,
        plan_name=choice.name,
        predicted_s=choice.predicted_s,
        paces=choice.paces,
        source=given.source,
        target=given.target,
        weight=given.weight,
        told=given.told,
        codec=given.codec,
        record=given.record,
        is_tolerant=given.is_tolerant,
    )


def all_gather(
    workplace: Workplace, world_size: int, rank: int, tensor: Array, sizes: Sequence[int] | None, out: Array | None
) -> tuple[Operation, list[Tensor]]:
    """The operation, and the parts of the output by rank."""
    source = flat("tensor", tensor)
    numels = [source.numel()] * world_size if sizes is None else list(sizes)
    if len(numels) != world_size or min(numels) < 0 or numels[rank] != source.numel():
        raise ValueError(f"sizes {numels} do not fit {world_size} members and our {source.numel()} elements")
    target = source.new_empty(sum(numels)) if out is None else flat("out", out)
    check_out(source, target, sum(numels))
    _check_apart(source, target)
    operation = Operation(
        workplace,
        op="copy",
        plan=workplace.cut(numels, slices.gather(world_size, workplace.apart), source.element_size()),
        plan_name="gather",
        source=source,
        source_base=sum(numels[:rank]),
        target=target,
    )
    return operation, list(torch.split(target, numels))


def broadcast(workplace: Workplace, world_size: int, rank: int, root: int, tensor: Array) -> Operation:
    """From the member of rank `root`."""
    whole = flat("tensor", tensor)
    nothing = whole[:0]
    return Operation(
        workplace,
        op="copy",
        plan=workplace.cut([whole.numel()], slices.broadcast(root, world_size, workplace.apart), whole.element_size()),
        plan_name="broadcast",
        source=whole if rank == root else nothing,
        target=nothing if rank == root else whole,
    )


def exchange(workplace: Workplace, place: int, tensor: Array, out: Array) -> Operation:
    """Between two, of which we are number `place`."""
    source, target = flat("tensor", tensor), flat("out", out)
    check_out(source, target, source.numel())
    _check_apart(source, target)
    numel = source.numel()
    return Operation(
        workplace,
        op="copy",
        plan=workplace.cut([numel, numel], slices.gather(2), source.element_size()),
        plan_name="exchange",
        source=source,
        source_base=place * numel,
        target=target,
        target_base=(1 - place) * numel,
    )


def barrier(workplace: Workplace, world_size: int) -> Operation:
    """Nothing, with everybody."""
    nothing = torch.empty(0)
    plan = workplace.cut([0], slices.broadcast(0, world_size, workplace.apart), nothing.element_size())
    return Operation(workplace, op="copy", plan=plan, plan_name="barrier", source=nothing, target=nothing)


def _check_apart(source: Tensor, target: Tensor) -> None:
    if overlap(source, target):
        raise ValueError("tensor and out overlap; pass separate memory")
