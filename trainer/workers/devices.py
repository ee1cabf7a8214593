# SPDX-License-Identifier: Apache-2.0
"""Where a peer's workers compute and in which numbers, found out before anybody is told of the peer."""

import os
import shutil
import sys
from importlib.util import find_spec

import torch

from isthmus.trainer.config.job import Device, RealPrecision
from isthmus.trainer.errors import EnvironmentFault

_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250e12, 1125e12),
    ("H200", 989e12, 494e12),
    ("H100 PCIe", 756e12, 378e12),
    ("H100 NVL", 835e12, 417e12),
    ("H100", 989e12, 494e12),
    ("A100", 312e12, 156e12),
    ("A10G", 70e12, 35e12),
    ("A10", 125e12, 62e12),
    ("L40S", 362e12, 183e12),
    ("L4", 121e12, 60e12),
    ("RTX 4090", 165e12, 82e12),
    ("RTX 3090", 71e12, 36e12),
)
"""FLOP/s of dense products by their makers' data sheets: a part of the device's name, in bf16, in TF32. The first that
fits counts."""


def choose_device(wanted: Device, num_workers: int) -> str:
    """`cuda` or `cpu`. Only counts devices, and opens none.

    Raises:
        EnvironmentFault: there are fewer devices than workers.
    """
    if wanted == "cpu":
        return "cpu"
    num_devices = torch.cuda.device_count()
    if wanted == "auto" and num_devices == 0:
        return "cpu"
    if num_devices < num_workers:
        need = (
            "1 worker needs a CUDA device" if num_workers == 1 else f"{num_workers} workers need as many CUDA devices"
        )
        raise EnvironmentFault(
            f"{need}, and this machine shows {num_devices}",
            cure="set node.local_workers to the number of devices, or node.device to cpu",
        )
    return "cuda"


def peak_flops(name: str, precision: RealPrecision, *, has_tf32: bool) -> float | None:
    """What a device can do at most, in FLOP/s; None if that is not known.

    Args:
        name: of the device, as torch tells it.
        precision: of the matrix products.
        has_tf32: whether products of fp32 are computed in TF32.
    """
    if precision == "fp32" and not has_tf32:
        return None
    for part, bf16, tf32 in _PEAKS:
        if part in name:
            return bf16 if precision == "bf16" else tf32
    return None


def require_compiler(device_type: str) -> None:
    """Demand what torch.compile needs on this machine.

    Raises:
        EnvironmentFault: something is missing.
    """
    if device_type == "cuda" and find_spec("triton") is None:
        raise EnvironmentFault(
            "node.compile needs Triton on a GPU, and it is not installed",
            cure="install triton, or set node.compile to false",
        )
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise EnvironmentFault(
            f"node.compile needs a C++ compiler, and there is no {compiler}",
            cure="install one or name it in CXX, or set node.compile to false",
        )
