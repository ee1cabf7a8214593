# SPDX-License-Identifier: Apache-2.0
"""Small files: the old content or the new, also after a power cut."""

import os
from pathlib import Path

import pytest

from isthmus.trainer.files import write_atomically
from tests.unit.trainer.test_checkpoint import watch_the_disk


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = watch_the_disk(monkeypatch)
    write_atomically(tmp_path / "identity", b"mine")
    content, name, folder = happened
    assert Path(content).name.endswith(".partial")
    assert name == "renamed to identity"
    assert folder == os.fspath(tmp_path)
    assert (tmp_path / "identity").read_bytes() == b"mine"
