# SPDX-License-Identifier: Apache-2.0
"""Tensors as a safetensors file, streamed to the disk and hashed on the way, without a copy of them in memory.

The library would need such a copy; tests read the files back with it. Must not know what the tensors mean.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from isthmus.trainer.files import open_private

_WRITE_NBYTES = 8 << 20


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Write a new file and flush it.

    Args:
        path: nothing may be there.
        tensors: fp32 CPU tensors, contiguous; they lie in the file in this order, without gaps.
        about: what the header says beside them.

    Returns:
        Its size in bytes, and its SHA-256 in hex.

    Raises:
        OSError: the disk refuses; a part of the file may be there.
        ValueError: a tensor is not fp32, contiguous and on the CPU.
    """
    header = _header(tensors, about)
    digest = hashlib.sha256()
    nbytes = 0
    with open_private(path, "xb", buffering=0) as file:
        for piece in (memoryview(header), *map(bytes_of, tensors.values())):
            for start in range(0, len(piece), _WRITE_NBYTES):
                block = piece[start : start + _WRITE_NBYTES]
                digest.update(block)
                written = 0
                while written < len(block):  # a disk that is nearly full takes less than all
                    written += file.write(block[written:])
            nbytes += len(piece)
        os.fsync(file.fileno())
    return nbytes, digest.hexdigest()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 in hex of names, sizes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.numel()};".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    view: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return view


def _header(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None) -> bytes:
    """Length and JSON that stand before the data."""
    entries: dict[str, object] = {} if about is None else {"__metadata__": dict(about)}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"tensor {name!r} must be contiguous fp32 on the CPU")
        stop = offset + tensor.nbytes
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return len(text).to_bytes(8, "little") + text
