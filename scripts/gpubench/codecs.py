# SPDX-License-Identifier: Apache-2.0
"""Every codec on the device: whether it writes the CPU's bytes, how fast, and what it would save over today's way.

Today a worker copies its fp32 values to the mailbox and the daemon encodes there (`cpu_way`). The other way would be to
encode on the device and to copy the wire form (`device_way`). GB/s are of fp32. The CPU computes on one thread, as in a
daemon's exchange.
"""

import torch
from torch import Tensor

from isthmus.collective.codec import codec_named
from scripts.gpubench.task import Figures, Task, gigabytes_per_s, seconds_of

_NAMES = ("bf16", "int8", "e3m0", "twobit", "topk")
_NUMEL_CUDA = 1 << 26
_NUMEL_CPU = 1 << 18
_RAGGED = 1000
"""Elements beyond whole blocks and chunks."""


def measure(task: Task) -> Figures:
    """By codec; `ok` is false if any writes other bytes than the CPU."""
    torch.set_num_threads(1)
    numel = (_NUMEL_CUDA if task.is_cuda else _NUMEL_CPU) + _RAGGED
    source = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    source[::97] *= 1e-30  # blocks that are not Gaussian
    rows = {name: _codec(name, source, task) for name in _NAMES}
    return {
        "numel": numel,
        "codecs": rows,
        "ok": all(row["same_bytes"] and row["same_values"] for row in rows.values()),
    }


def _codec(name: str, source: Tensor, task: Task) -> Figures:
    codec, device = codec_named(name), task.device
    there = source.to(device)
    nbytes, numel = source.nbytes, source.numel()
    wire = torch.empty(codec.wire_nbytes(numel), dtype=torch.uint8)
    wire_there = torch.empty_like(wire, device=device)
    host = torch.empty(numel, pin_memory=task.is_cuda)
    host_wire = torch.empty(len(wire), dtype=torch.uint8, pin_memory=task.is_cuda)
    out, out_there = torch.empty(numel), torch.empty(numel, device=device)
    codec.encode(source, wire)
    codec.encode(there, wire_there)
    codec.decode(wire, out)
    codec.decode(wire_there, out_there)

    def cpu_way() -> None:
        host.copy_(there)
        codec.encode(host, wire)

    def device_way() -> None:
        codec.encode(there, wire_there)
        host_wire.copy_(wire_there)

    figures: Figures = {
        "same_bytes": torch.equal(wire_there.cpu(), wire),
        "same_values": torch.equal(out_there.cpu().view(torch.int32), out.view(torch.int32)),
        "bytes_per_element": round(len(wire) / numel, 4),
    }
    speeds = {
        "encode": lambda: codec.encode(there, wire_there),
        "decode": lambda: codec.decode(wire_there, out_there),
        "cpu_encode": lambda: codec.encode(source, wire),
        "cpu_decode": lambda: codec.decode(wire, out),
        "cpu_way": cpu_way,
        "device_way": device_way,
    }
    for what, call in speeds.items():
        figures[f"{what}_gb_s"] = gigabytes_per_s(nbytes, seconds_of(call, device, for_s=task.for_s(1 / 150)))
    return figures
