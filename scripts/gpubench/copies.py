# SPDX-License-Identifier: Apache-2.0
"""Copies between a device and the mailbox: one large one, and those of a worker's shards, matrix by matrix.

The mailbox is memory that the worker shares with its daemon, and locked for the device (`SharedBuffer.pin`). Beside it
memory that is not locked, and memory that torch's own allocator has locked. GB/s of fp32.
"""

import time

import torch
from torch import Tensor

from isthmus.optim.fragments import FragmentTable
from isthmus.trainer.workers.shards import ShardMap
from isthmus.trainer.workers.shared_buffer import SharedBuffer
from scripts.gpubench.task import Figures, Task, gigabytes_per_s, seconds_of

_WIDTH = 1024
_LAYERS_CUDA = 48
_LAYERS_CPU = 1


def measure(task: Task) -> Figures:
    """Of some 150 M parameters, in a transformer's shapes."""
    num_layers = _LAYERS_CUDA if task.is_cuda else _LAYERS_CPU
    shapes = [
        shape
        for layer in range(num_layers)
        for shape in (
            (f"{layer}.norm", (_WIDTH,)),
            (f"{layer}.attention", (_WIDTH, _WIDTH)),
            (f"{layer}.feed_forward", (2 * _WIDTH, _WIDTH)),
        )
    ]
    table = FragmentTable.from_named_shapes(shapes)
    mailbox = SharedBuffer.create(table.numel)
    values = torch.randn(table.numel, device=task.device)
    figures: Figures = {"numel": table.numel, "matrices": len(shapes)}
    figures["not_locked"] = _both_ways(values, mailbox.tensor, task)
    if task.is_cuda:
        began = time.perf_counter()
        mailbox.pin()
        figures["lock_s"] = round(time.perf_counter() - began, 3)
        figures["mailbox"] = _both_ways(values, mailbox.tensor, task)
        figures["torch_locked"] = _both_ways(values, torch.empty(table.numel, pin_memory=True), task)
    figures["shards"] = _shards(table, values, mailbox.tensor, task)
    figures["ok"] = figures["shards"].pop("same_bits")
    mailbox.close()
    return figures


def _both_ways(values: Tensor, host: Tensor, task: Task) -> Figures:
    nbytes, device, for_s = values.nbytes, task.device, task.for_s(1 / 40)
    return {
        "to_host_gb_s": gigabytes_per_s(nbytes, seconds_of(lambda: host.copy_(values), device, for_s=for_s)),
        "to_device_gb_s": gigabytes_per_s(nbytes, seconds_of(lambda: values.copy_(host), device, for_s=for_s)),
    }


def _shards(table: FragmentTable, values: Tensor, mailbox: Tensor, task: Task) -> Figures:
    """What `Store` and `Load` do."""
    params = {spec.name: table.view(values, spec.name).clone() for spec in table.specs}
    shards = ShardMap.build(params.items(), table)
    mailbox.zero_()
    shards.write(mailbox)
    same_bits = torch.equal(mailbox, values.cpu())
    expected = values.cpu()
    for param in params.values():
        param.zero_()
    shards.read(mailbox)
    same_bits &= all(torch.equal(param.cpu(), table.view(expected, name)) for name, param in params.items())
    nbytes, for_s = values.nbytes, task.for_s(1 / 40)
    write_s = seconds_of(lambda: shards.write(mailbox), task.device, for_s=for_s)
    read_s = seconds_of(lambda: shards.read(mailbox), task.device, for_s=for_s)
    blend_s = seconds_of(lambda: shards.read(mailbox, keep=0.5), task.device, for_s=for_s)
    return {
        "same_bits": same_bits,
        "store_gb_s": gigabytes_per_s(nbytes, write_s),
        "load_gb_s": gigabytes_per_s(nbytes, read_s),
        "blend_gb_s": gigabytes_per_s(nbytes, blend_s),
    }
