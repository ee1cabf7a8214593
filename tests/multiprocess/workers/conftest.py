# SPDX-License-Identifier: Apache-2.0
"""What tests of workers share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.trainer.workers.shared_buffer import SharedBuffer
from isthmus.trainer.workers.start import fork_server
from tests.multiprocess.workers.pools import MODEL, NUMEL


@pytest.fixture
def mailbox() -> Iterator[SharedBuffer]:
    buffer = SharedBuffer.create(NUMEL)
    buffer.tensor.copy_(MODEL.initial_parameters(0))
    yield buffer
    buffer.close()


@pytest.fixture(autouse=True)
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets, short enough, that must be empty in the end."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No descriptor may outlive a test; that no child does is seen to for all tests."""
    fork_server()
    before = _inodes_of_descriptors()
    yield
    leaked = _inodes_of_descriptors() - before
    assert not {name for name in leaked if "memfd" in name or "socket" in name or "worker" in name}, leaked


def _inodes_of_descriptors() -> set[str]:
    names = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            names.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return names
