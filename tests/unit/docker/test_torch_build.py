# SPDX-License-Identifier: Apache-2.0
"""docker/torch_build.py: which torch the image is built from, and that no CUDA comes along unasked."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "docker" / "torch_build.py"
BASE = "Metadata-Version: 2.1\nName: torch\nRequires-Dist: filelock\n"
CUDA = "Requires-Dist: nvidia-cublas-cu12==12.8; platform_system == 'Linux'\nRequires-Dist: cuda-bindings>=12\n"
ELSEWHERE = "Requires-Dist: nvidia-cublas-cu12; platform_system == 'Windows'\n"


def build(folder: Path, version: str, metadata: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with ZipFile(folder / f"torch-{version}-cp311-cp311-linux_x86_64.whl", "w") as wheel:
        wheel.writestr(f"torch-{version}.dist-info/METADATA", metadata)
    command = [sys.executable, str(SCRIPT), str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("metadata", [BASE, BASE + ELSEWHERE], ids=["CPU", "CUDA on another system"])
def test_build_for_cpus_is_pinned(tmp_path: Path, metadata: str) -> None:
    done = build(tmp_path, "2.13.0+cpu", metadata, "")
    assert (done.returncode, done.stdout) == (0, "torch==2.13.0+cpu\n"), done.stderr


def test_build_that_brings_cuda_is_refused_with_the_cure(tmp_path: Path) -> None:
    done = build(tmp_path, "2.13.0", BASE + CUDA, "")
    assert (done.returncode, done.stdout) == (3, "")
    assert "brings 2 CUDA libraries" in done.stderr
    assert "TORCH_INDEX_URL" in done.stderr
    assert done.stderr.count("\n") == 1


def test_build_that_brings_cuda_is_taken_when_allowed(tmp_path: Path) -> None:
    done = build(tmp_path, "2.13.0", BASE + CUDA, "1")
    assert (done.returncode, done.stdout) == (0, "torch==2.13.0\n")
