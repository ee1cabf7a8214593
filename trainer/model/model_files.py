# SPDX-License-Identifier: Apache-2.0
"""Files of a model, as they are written: each is replaced atomically, and tensors lie in files of 5 GB at most.

Must not know what the files mean.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

from isthmus.trainer.model.model_folder import INDEX_NAME, WEIGHTS_NAME

MAX_FILE_NBYTES: Final = 5 * 10**9


def save_weights(directory: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors alone; returns the digest of their files. Files of an older export are replaced or deleted.

    Raises:
        OSError: the disk refuses.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lots = _lots(tensors)
    names = [WEIGHTS_NAME]
    if len(lots) > 1:
        names = [f"model-{number:05d}-of-{len(lots):05d}.safetensors" for number in range(1, len(lots) + 1)]
    for name, lot in zip(names, lots, strict=True):
        with replacing(directory / name) as temporary:
            save_file(
                {key: tensor.detach().cpu().contiguous() for key, tensor in lot.items()},
                temporary,
                metadata={"format": "pt"},
            )
    if len(lots) > 1:
        places = {key: name for name, lot in zip(names, lots, strict=True) for key in lot}
        total_nbytes = sum(map(_nbytes, tensors.values()))
        write_json(directory / INDEX_NAME, {"metadata": {"total_size": total_nbytes}, "weight_map": places})
    return finish_weights(directory, names)


def finish_weights(directory: Path, names: Sequence[str]) -> str:
    """These are its weights from now on: delete those of an older export. Returns their digest.

    Raises:
        OSError: the disk refuses.
    """
    stale = {*directory.glob("model*.safetensors")} - {directory / name for name in names}
    for path in stale if len(names) > 1 else (*stale, directory / INDEX_NAME):
        path.unlink(missing_ok=True)
    return digest_of([directory / name for name in names])


def write_json(path: Path, content: object) -> None:
    """A JSON file, replaced atomically.

    Raises:
        OSError: the disk refuses.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(json.dumps(content, indent=2).encode() + b"\n")


def _lots(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """In order, as many as fit into a file."""
    lots: list[dict[str, Tensor]] = [{}]
    room_nbytes = MAX_FILE_NBYTES
    for name, tensor in tensors.items():
        if _nbytes(tensor) > room_nbytes and lots[-1]:
            lots.append({})
            room_nbytes = MAX_FILE_NBYTES
        lots[-1][name] = tensor
        room_nbytes -= _nbytes(tensor)
    return lots


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def digest_of(paths: Sequence[Path]) -> str:
    """Of the content of all files, in order."""
    total = hashlib.blake2b(digest_size=32)
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).digest())
    return total.hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place, flushed to the disk, if the body succeeds."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    mode = temporary.stat().st_mode
    try:
        yield temporary
        # safetensors makes files that only their owner can read; a model follows the umask like other files.
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # The new name itself is only safe once the folder is on the disk.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
