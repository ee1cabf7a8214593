# SPDX-License-Identifier: Apache-2.0
"""Which build of torch the index had, for the Dockerfile: prints its exact version, and refuses CUDA in a CPU image.

    python torch_build.py WHEELS [ALLOW_CUDA]

A build's libraries are several GB more, which nothing in this image uses.
"""

import sys
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from pip._vendor.packaging.requirements import Requirement

OF_CUDA = ("nvidia-", "cuda-")


def brings_cuda(metadata: str) -> list[str]:
    """The CUDA libraries that a wheel with this METADATA installs on this machine."""
    lines = HeaderParser().parsestr(metadata).get_all("Requires-Dist") or []
    wanted = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [one.name for one in wanted if one.name.startswith(OF_CUDA)]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    folder, *allowed = arguments
    (wheel,) = Path(folder).glob("torch-*.whl")
    with ZipFile(wheel) as packed:
        name = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        found = brings_cuda(packed.read(name).decode())
    if found and not any(allowed):
        print(
            f"this index's torch brings {len(found)} CUDA libraries, several GB, to an image for CPUs; give one with "
            "CPU builds, which PyTorch's installation page names (TORCH_INDEX_URL=...), or take them (ALLOW_CUDA=1)",
            file=sys.stderr,
        )
        return 3
    print(f"torch=={wheel.name.split('-')[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
