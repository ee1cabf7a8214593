# SPDX-License-Identifier: Apache-2.0
"""Is a checkpoint what was voted for? Proved without loading it, in the memory of one chunk.

`load_checkpoint` finds bytes that changed since they were written. Whether what was written is the state that the run
committed is another question: here the digest of the shared state is made again, from the bytes on the disk.
"""

import hashlib
import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import msgspec

from isthmus.elastic.core.messages import Natural
from isthmus.elastic.state.digest import CHUNK_NBYTES, TensorManifest, digest_of, root_digest
from isthmus.trainer.checkpoint.checkpoint import (
    MANIFEST_NAME,
    STATE_NAME,
    Manifest,
    open_regular,
    read_manifest,
    require_tokenizer,
)
from isthmus.trainer.errors import CheckpointCorrupted

_MAX_HEADER_NBYTES = 64 << 20


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file."""

    data_offsets: tuple[Natural, Natural]


def prove_checkpoint(path: Path) -> Manifest:
    """Check one checkpoint folder: every byte is what was written, and the tensors have the digest that it names.

    Raises:
        CheckpointCorrupted: a file is missing, cut, changed, not ours, or not the state it says it is.
    """
    manifest = read_manifest(path / MANIFEST_NAME)
    file_path = path / STATE_NAME
    with open_regular(file_path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes != manifest.state_nbytes:
            raise CheckpointCorrupted(file_path, f"has {nbytes} bytes instead of {manifest.state_nbytes}")
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest.state_sha256:
            raise CheckpointCorrupted(file_path, "was changed since it was written (its SHA-256 differs)")
        file.seek(0)
        try:
            tensors = tuple(_tensors(file))
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
            raise CheckpointCorrupted(file_path, f"is not a safetensors file: {error}") from error
    if root_digest(manifest.outer_step, tensors).hex() != manifest.digest:
        raise CheckpointCorrupted(file_path, f"is not the state of step {manifest.outer_step} that its manifest names")
    require_tokenizer(path, manifest)
    return manifest


def _tensors(file: BufferedReader) -> Iterator[TensorManifest]:
    """Every tensor as the shared state's digest sees it: in the order of the file, in chunks."""
    header_nbytes = int.from_bytes(file.read(8), "little")
    if header_nbytes > _MAX_HEADER_NBYTES:
        raise ValueError(f"a header of {header_nbytes} bytes")
    header = msgspec.json.decode(file.read(header_nbytes), type=dict[str, _Entry])
    offset = 0
    for name, entry in header.items():
        start, stop = entry.data_offsets
        if start != offset or stop < start:
            raise ValueError(f"tensor {name[:80]!r} is not where it should be")
        chunks = (min(CHUNK_NBYTES, stop - at) for at in range(start, stop, CHUNK_NBYTES))
        digests = tuple(digest_of(file.read(nbytes)) for nbytes in chunks)
        yield TensorManifest(name, stop - start, digests)
        offset = stop
