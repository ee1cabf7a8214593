# SPDX-License-Identifier: Apache-2.0
"""What several tests of the trainer need."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from isthmus.trainer.run.founding import find_authorities
from tests.keys import Keys
from tests.unit.elastic.machines import KEYS


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB: the only honest way to run out of space."""
    disk = tmp_path / "small-disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def keys_of_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers of made-up histories have no real keys, hence no real signatures; who has which authority is real."""

    def find(folders: Sequence[Path], run_id: str) -> Keys | None:
        return KEYS if any(find_authorities(folder, run_id) for folder in folders) else None

    monkeypatch.setattr("isthmus.trainer.audit.audit.find_verifier", find)
