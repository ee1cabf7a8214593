# SPDX-License-Identifier: Apache-2.0
"""Where this worker's shards lie in the flat vector of parameters, and the copies between the two.

FSDP2 cuts every parameter along its first dimension by the rule of `torch.chunk`: with n rows on L local ranks each
takes ceil(n / L) of them until none are left, so the last shards may be smaller or empty. In the flat vector
(`optim.fragments.FragmentTable`) rows lie one after another. A shard is therefore one contiguous range of it, and
goes to and from the mailbox without a gather: no collective, no second copy of the parameters.

Rules: every element of the flat vector belongs to exactly one local rank. Must not know messages, the optimizer or
what the other side does with the mailbox.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from isthmus.optim.flat import blend
from isthmus.optim.fragments import FragmentTable, ParameterSpec


def shard_rows(num_rows: int, local_rank: int, local_world_size: int) -> range:
    """Rows of a parameter that `local_rank` holds.

    Raises:
        ValueError: the rank is not one of the `local_world_size`.
    """
    if not 0 <= local_rank < local_world_size:
        raise ValueError(f"local rank {local_rank} is not in [0, {local_world_size})")
    rows_per_rank = -(-num_rows // local_world_size)
    start = min(local_rank * rows_per_rank, num_rows)
    return range(start, min(start + rows_per_rank, num_rows))


@torch.no_grad()
def fill_shard(place: Tensor, whole: Tensor) -> None:
    """Copy into a parameter or buffer of a worker's model what belongs there of a whole tensor.

    Args:
        place: a DTensor cut along dimension 0 over a mesh of one dimension, or a whole tensor.
        whole: of the same shape, of any dtype and device.

    Raises:
        ValueError: the shapes differ.
    """
    if place.shape != whole.shape:
        raise ValueError(f"the model has shape {tuple(place.shape)}, the value {tuple(whole.shape)}")
    if not isinstance(place, DTensor):
        place.copy_(whole)
        return
    mesh = place.device_mesh
    rows = shard_rows(whole.shape[0], mesh.get_local_rank(), mesh.size())
    place.to_local().copy_(whole[rows.start : rows.stop])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    """One parameter's local part: its memory, flat, and its place in the flat vector."""

    name: str
    offset: int
    stop: int
    values: Tensor | None
    """None where something is kept for some parameters only, and not for this one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardMap:
    """All shards of one worker. Build it once, after the model is sharded and has memory (`to_empty`)."""

    shards: tuple[_Shard, ...]
    numel: int
    """Elements of the whole flat vector."""

    @classmethod
    def build(cls, named_params: Iterable[tuple[str, Tensor]], table: FragmentTable) -> Self:
        """Find the place of every shard.

        Args:
            named_params: `model.trained_parameters()`, in any order: DTensors cut along dimension 0 over a mesh of one
                dimension, as `fully_shard` makes them, or whole tensors of a worker that is alone.
            table: the canonical layout of all parameters.

        Raises:
            ValueError: names or shapes are not those of the table, or a parameter is cut in another way.
        """
        params = dict(named_params)
        specs = {spec.name: spec for spec in table.specs}
        if strangers := sorted(params.keys() ^ specs.keys()):
            raise ValueError(f"the model and the table of fragments differ in {', '.join(map(repr, strangers))}")
        return cls(shards=tuple(_locate(params[name], spec) for name, spec in specs.items()), numel=table.numel)

    def of(self, tensors: Mapping[str, Tensor]) -> Self:
        """The map of what is kept beside the parameters, as gradients and an optimizer's states, in the same places.

        Args:
            tensors: by the parameter's name, in its shape and cut as it is; a parameter may have none.

        Raises:
            ValueError: a tensor has another shape than its parameter's shard, or no floating dtype.
        """
        return replace(self, shards=tuple(_beside(shard, tensors.get(shard.name)) for shard in self.shards))

    @torch.no_grad()
    def write(self, mailbox: Tensor, ranges: Sequence[range] = ()) -> None:
        """Copy the shards into their places, zeros where a parameter has no values. Done when it returns.

        The rest of the mailbox is untouched.

        Args:
            mailbox: [numel] fp32 CPU.
            ranges: the parts of the flat vector that are wanted (a fragment's); empty: all of it.

        Raises:
            ValueError: the mailbox has another size, or a range leaves it.
        """
        for values, place in self._pairs(mailbox, ranges):
            if values is None:
                place.zero_()
            else:
                place.copy_(values, non_blocking=True)
        self._synchronize()

    @torch.no_grad()
    def read(self, mailbox: Tensor, ranges: Sequence[range] = (), *, keep: float = 0.0) -> int:
        """shard <- keep * shard + (1 - keep) * mailbox, as `optim.flat.blend` does it. Done when it returns.

        With `keep` = 0 the shards take the mailbox's bits, whatever they held before.

        Args:
            mailbox: [numel] fp32 CPU, not written.
            ranges: as for `write`.
            keep: in [0, 1]; Streaming DiLoCo's alpha (arXiv:2501.18512, eq. 3).

        Returns:
            How many elements of these shards were not finite and have taken the mailbox's value instead of a blend.

        Raises:
            ValueError: as for `write`, or `keep` is out of its range.
        """
        if not 0.0 <= keep <= 1.0:
            raise ValueError(f"keep must be in [0, 1], got {keep}")
        num_broken = 0
        for values, place in self._pairs(mailbox, ranges):
            if values is None:
                continue
            if keep == 0.0:
                values.copy_(place, non_blocking=True)
            else:
                num_broken += blend(values, place, keep)
        self._synchronize()
        return num_broken

    def _pairs(self, mailbox: Tensor, ranges: Sequence[range]) -> Iterable[tuple[Tensor | None, Tensor]]:
        """(part of a shard, its place in the mailbox), both flat and of the same size, never empty."""
        if mailbox.shape != (self.numel,) or mailbox.dtype != torch.float32:
            raise ValueError(f"the mailbox must be fp32 of shape ({self.numel},), not {mailbox.dtype} {mailbox.shape}")
        wanted = ranges or (range(self.numel),)
        for part in wanted:
            if part.step != 1 or not 0 <= part.start <= part.stop <= self.numel:
                raise ValueError(f"{part} is no range of {self.numel} elements")
        for shard in self.shards:
            for part in wanted:
                start, stop = max(part.start, shard.offset), min(part.stop, shard.stop)
                if start < stop:
                    values = shard.values
                    part_of_it = None if values is None else values[start - shard.offset : stop - shard.offset]
                    yield part_of_it, mailbox[start:stop]

    def _synchronize(self) -> None:
        # Without it the other side would read what the device has yet to write, or overwrite what it has yet to read.
        if any(shard.values is not None and shard.values.is_cuda for shard in self.shards):
            torch.cuda.synchronize()


def _locate(param: Tensor, spec: ParameterSpec) -> _Shard:
    if tuple(param.shape) != spec.shape:
        raise ValueError(f"{spec.name!r} has shape {tuple(param.shape)} in the model, {spec.shape} in the table")
    if not isinstance(param, DTensor):
        return _shard(spec.name, spec.offset, param.detach())
    mesh = param.device_mesh
    if mesh.ndim != 1 or tuple(param.placements) != (Shard(0),):
        raise ValueError(
            f"{spec.name!r} is placed as {param.placements} over {mesh}, not cut along its first dimension"
        )
    rows = shard_rows(spec.shape[0], mesh.get_local_rank(), mesh.size())
    with torch.no_grad():
        local = param.to_local()
    if tuple(local.shape) != (len(rows), *spec.shape[1:]):
        raise ValueError(f"{spec.name!r} has a shard of shape {tuple(local.shape)}, not of rows {rows}")
    row_numel = spec.numel // spec.shape[0] if spec.shape[0] else 0
    return _shard(spec.name, spec.offset + rows.start * row_numel, local)


def _beside(shard: _Shard, tensor: Tensor | None) -> _Shard:
    if tensor is None:
        return replace(shard, values=None)
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if local.numel() != shard.stop - shard.offset:
        raise ValueError(f"what is kept for {shard.name!r} has {local.numel()} elements here, not as many as its shard")
    return _shard(shard.name, shard.offset, local)


def _shard(name: str, offset: int, local: Tensor) -> _Shard:
    """The same memory, one-dimensional."""
    if not local.dtype.is_floating_point:
        raise ValueError(f"{name!r} is kept in {local.dtype}, and what is exchanged is fp32")
    if local.layout != torch.strided or not local.is_contiguous():
        raise ValueError(f"{name!r} does not lie in memory in the order of its elements; make it contiguous")
    return _Shard(name=name, offset=offset, stop=offset + local.numel(), values=local.view(-1))
