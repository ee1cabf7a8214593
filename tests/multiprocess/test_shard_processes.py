# SPDX-License-Identifier: Apache-2.0
"""Shards of real FSDP2 processes against a reference that gathers every parameter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from isthmus.optim.fragments import FragmentTable
from isthmus.trainer.workers.shards import ShardMap
from isthmus.trainer.workers.shared_buffer import SharedBuffer

pytestmark = pytest.mark.multiprocess

TIMEOUT_S = 180.0


class Uneven(nn.Module):
    """First dimensions that three ranks share evenly, unevenly, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.empty(6, 3))
        self.uneven = nn.Parameter(torch.empty(7, 2, 2))
        self.two_rows = nn.Parameter(torch.empty(2, 5))
        self.one = nn.Parameter(torch.empty(1))
        self.four = nn.Parameter(torch.empty(4))
        self.inner = nn.Linear(5, 4)


def _table() -> FragmentTable:
    with torch.device("meta"):
        return FragmentTable.from_named_shapes([(name, tuple(p.shape)) for name, p in Uneven().named_parameters()])


@pytest.mark.parametrize("local_world_size", [1, 2, 3])
def test_shards_and_gathered_parameters_are_equal_bit_for_bit(local_world_size: int, tmp_path: Path) -> None:
    table = _table()
    source, target = SharedBuffer.create(table.numel), SharedBuffer.create(table.numel)
    source.tensor.copy_(torch.randn(table.numel, generator=torch.Generator().manual_seed(1)))
    target.tensor.fill_(torch.nan)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(local_world_size), str(tmp_path / "store"),
             str(source.fd), str(target.fd)],
            pass_fds=(source.fd, target.fd),
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(local_world_size)
    ]  # fmt: skip
    try:
        assert [process.wait(TIMEOUT_S) for process in processes] == [0] * local_world_size
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # The ranks have doubled their shards, after each has compared every gathered parameter with its place in `source`.
    assert torch.equal(target.tensor, source.tensor * 2)
    source.close()
    target.close()


def _run_rank(rank: int, size: int, store_path: str, source_fd: int, target_fd: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=size)
    with torch.device("meta"):
        model = Uneven()
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    table = _table()
    source, target = SharedBuffer(source_fd, table.numel), SharedBuffer(target_fd, table.numel)
    shards = ShardMap.build(model.named_parameters(), table)

    num_elements = torch.tensor(sum(shard.stop - shard.offset for shard in shards.shards))
    dist.all_reduce(num_elements)
    assert num_elements == table.numel, "every element has exactly one owner"

    shards.read(source.tensor)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), table.view(source.tensor, name)), name

    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
    shards.write(target.tensor)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
