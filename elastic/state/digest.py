# SPDX-License-Identifier: Apache-2.0
"""Digests of the shared state: which bits a committed step has.

The state is cut into chunks of `CHUNK_NBYTES`. Every chunk has a BLAKE3, and the root is a SHA-256 over the step,
the names, the sizes and the chunk digests. A peer that knows the committed root can check a manifest against it,
and every chunk against the manifest, whoever sent them.

Rules: a tensor here is a name and bytes, nothing more. Hashing is spread over threads (the GIL is released), so
that the event loop goes on. A tensor's part can be kept and used again: only what changed is hashed again.
"""

import asyncio
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Annotated, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.messages import Digest, Natural
from isthmus.elastic.errors import ManifestInvalid

CHUNK_NBYTES = 4 << 20
"""Bytes of a chunk; the last one of a tensor may be shorter."""

MAX_CHUNK_NBYTES = 4 << 20
"""No manifest may ask for larger chunks than this: it is the limit of a frame."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_DOMAIN = b"isthmus shared state 2\0"


class TensorManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, size and chunk digests of one tensor of the shared state."""

    name: Annotated[str, Meta(max_length=256)]
    nbytes: Natural
    chunk_digests: tuple[Digest, ...]


class StateManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the shared state of one committed step consists of. `digest` is the root over all the rest."""

    outer_step: Annotated[OuterStep, Meta(ge=0, le=2**53)]
    digest: Digest
    tensors: tuple[TensorManifest, ...]
    chunk_nbytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_NBYTES)] = CHUNK_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def verify(self) -> None:
        """Check that the root is the root of the rest, and that every tensor has the chunks its size asks for.

        Raises:
            ManifestInvalid: if not.
        """
        for tensor in self.tensors:
            if len(tensor.chunk_digests) != count_chunks(tensor.nbytes, self.chunk_nbytes):
                raise ManifestInvalid(f"{tensor.name} has {len(tensor.chunk_digests)} chunk digests")
        if root_digest(self.outer_step, self.tensors, chunk_nbytes=self.chunk_nbytes) != self.digest:
            raise ManifestInvalid("the root is not the root of its chunks")


def count_chunks(nbytes: int, chunk_nbytes: int = CHUNK_NBYTES) -> int:
    """Number of chunks of `nbytes` bytes."""
    return -(-nbytes // chunk_nbytes)


def chunk_of(buffer: memoryview, chunk: int, chunk_nbytes: int = CHUNK_NBYTES) -> memoryview:
    """The bytes of chunk number `chunk`, a view into `buffer` (one-dimensional, format B)."""
    return buffer[chunk * chunk_nbytes : (chunk + 1) * chunk_nbytes]


def digest_of(data: memoryview | bytes) -> bytes:
    """BLAKE3 of one chunk, 32 bytes."""
    return blake3(data).digest()


def root_digest(outer_step: int, tensors: Iterable[TensorManifest], *, chunk_nbytes: int = CHUNK_NBYTES) -> bytes:
    """The root: SHA-256 over step, chunk size and, in order, every tensor's name, size and chunk digests."""
    root = hashlib.sha256(_DOMAIN)
    root.update(struct.pack("!QQ", outer_step, chunk_nbytes))
    for tensor in tensors:
        name = tensor.name.encode()
        root.update(struct.pack("!IQ", len(name), tensor.nbytes))
        root.update(name)
        # Their number follows from nbytes, so no two different states are written down as the same bytes.
        for chunk_digest in tensor.chunk_digests:
            root.update(chunk_digest)
    return root.digest()


def describe_state(
    outer_step: int, tensors: Sequence[TensorManifest], *, chunk_nbytes: int = CHUNK_NBYTES
) -> StateManifest:
    """Put the tensors' parts together. Costs microseconds: nothing is hashed but digests."""
    root = root_digest(outer_step, tensors, chunk_nbytes=chunk_nbytes)
    return StateManifest(OuterStep(outer_step), root, tuple(tensors), chunk_nbytes)


class Hasher:
    """Hashes buffers chunk by chunk on a few threads of its own.

    The caller keeps the buffers unchanged until the call has returned.
    """

    def __init__(self, *, num_threads: int | None = None, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self.chunk_nbytes = chunk_nbytes
        # Beyond a few threads memory bandwidth is the limit, and the trainer wants its cores.
        self._num_threads = num_threads or min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="digest")

    def hash(self, buffers: Sequence[memoryview], *, chunk_nbytes: int | None = None) -> list[tuple[bytes, ...]]:
        """Chunk digests of every buffer (one-dimensional, format B), spread over the threads. Blocks until done."""
        size = chunk_nbytes or self.chunk_nbytes
        counts = [count_chunks(buffer.nbytes, size) for buffer in buffers]
        chunks = (
            chunk_of(buffer, chunk, size)
            for buffer, count in zip(buffers, counts, strict=True)
            for chunk in range(count)
        )
        digests = self._threads.map(digest_of, chunks)
        return [tuple(islice(digests, count)) for count in counts]

    async def hash_async(
        self, buffers: Sequence[memoryview], *, chunk_nbytes: int | None = None
    ) -> list[tuple[bytes, ...]]:
        """As `hash`, while the event loop goes on."""
        return await asyncio.to_thread(self.hash, buffers, chunk_nbytes=chunk_nbytes)

    def each(self, work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
        """Whatever else is done chunk by chunk, on the same threads. Blocks until done."""
        return list(self._threads.map(work, items))

    def describe(self, tensors: Sequence[tuple[str, memoryview]]) -> tuple[TensorManifest, ...]:
        """Manifest part of every named buffer (one-dimensional, format B). Blocks until done."""
        digests = self.hash([buffer for _, buffer in tensors])
        return tuple(
            TensorManifest(name, buffer.nbytes, chunk_digests)
            for (name, buffer), chunk_digests in zip(tensors, digests, strict=True)
        )

    async def describe_async(self, tensors: Sequence[tuple[str, memoryview]]) -> tuple[TensorManifest, ...]:
        """As `describe`, while the event loop goes on."""
        return await asyncio.to_thread(self.describe, tensors)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True)
