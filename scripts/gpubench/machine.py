# SPDX-License-Identifier: Apache-2.0
"""The machine that all other figures are of."""

import os
import platform
from importlib.util import find_spec
from pathlib import Path

import torch

from scripts.gpubench.task import Figures, Task

_PACKAGES = (
    "numpy",
    "msgspec",
    "blake3",
    "xxhash",
    "zmq",
    "cryptography",
    "pydantic",
    "typer",
    "psutil",
    "pytest",
    "triton",
)
_ROOT = Path(__file__).parents[2]


def measure(task: Task) -> Figures:
    """Processor, device, versions, and which of the packages that other parts use are missing."""
    figures: Figures = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "missing": [name for name in _PACKAGES if find_spec(name) is None],
        # Of collective/transport/copying.py. Without it two processes share memory by ordinary copies.
        "has_stream_copy": (_ROOT / "collective/transport/stream_copy.so").exists(),
        "device": "cpu",
    }
    if task.is_cuda:
        properties = torch.cuda.get_device_properties(task.device)
        figures |= {
            "device": properties.name,
            "devices": torch.cuda.device_count(),
            "device_memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
            "has_bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    return figures


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
