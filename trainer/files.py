"""Small files that must be whole: written beside their place, flushed to the disk, then renamed.

Rules: a reader sees the old content or the new, also after a power cut. Must not know what the files mean.
"""

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
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


def sync_folder(path: Path) -> None:
    """Make names that were created, renamed or removed in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
