# SPDX-License-Identifier: Apache-2.0
"""Small files that must be whole: written beside their place, flushed to the disk, then renamed.

Rules: a reader sees the old content or the new, also after a power cut. Must not know what the files mean.
"""

import os
import secrets
from pathlib import Path
from typing import IO

RUN_NAME = "run.json"
"""In the folder where a run's coordinator lives or stands by: the run's id and secret."""
MEMBERSHIP_NAME = "membership.json"
"""In the folder of a peer that has joined a run: what it was told of it."""
PRIVATE_MODE = 0o600
"""Of every file in a peer's folder: what a run learns is nobody else's business."""
PRIVATE_FOLDER_MODE = 0o700


def write_atomically(path: Path, content: bytes, *, mode: int = PRIVATE_MODE) -> None:
    """Replace a file in one step.

    Args:
        path: its folder must exist.
        content: all of it.
        mode: permissions of the new file, from its first byte on.

    Raises:
        OSError: the system refuses; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def open_private(path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    """As `open`, but a file that it makes is private from its first byte on.

    Raises:
        OSError: the system refuses.
    """
    return open(path, mode, buffering, opener=_private_opener)


def _private_opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_MODE)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter. One that is there keeps its mode: it was made by its owner.

    Raises:
        OSError: the system refuses.
    """
    path.mkdir(mode=PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Make names that were created, renamed or removed in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
