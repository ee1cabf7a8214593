# SPDX-License-Identifier: Apache-2.0
"""Where two states differ, and what of a state is here already: comparing manifests, chunk by chunk.

Chunks are counted through all tensors, as `ChunkMap` does. Rules: a manifest is a claim about memory. It says where to
look, so that only what it calls right is hashed; nothing is used that has not been hashed where it lies.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from isthmus.elastic.state.digest import Hasher, StateManifest, chunk_of
from isthmus.elastic.state.replica import Pinned
from isthmus.elastic.state.wire import ChunkMap

Contents = Sequence[bytes | None]
"""By chunk: the digest of what lies there, as far as anybody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two states of the same model differ: the range of the first difference, and in how many chunks.

    The range `[start_nbytes, stop_nbytes)` of `tensor` is a whole chunk, or from the first byte that differs in it to
    the last.
    """

    tensor: str
    start_nbytes: int
    stop_nbytes: int
    num_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    """What need not be fetched. `damaged`: chunks of the held state whose bits are not those that were hashed."""

    present: frozenset[int]
    damaged: tuple[int, ...]


def contents_of(manifest: StateManifest | None, like: StateManifest) -> Contents:
    """The digests of a manifest; nothing known if there is none, or if it is of other tensors than `like`."""
    if manifest is None or not _same_layout(manifest, like):
        return [None] * len(ChunkMap(like))
    return [digest for tensor in manifest.tensors for digest in tensor.chunk_digests]


def differing(manifest: StateManifest, other: StateManifest) -> list[int]:
    """The chunks of `manifest` that `other` has otherwise or not at all, in order."""
    pairs = zip(contents_of(manifest, manifest), contents_of(other, manifest), strict=True)
    return [index for index, (ours, theirs) in enumerate(pairs) if ours != theirs]


def missing_nbytes(manifest: StateManifest, *contents: Contents) -> int:
    """Bytes of the chunks that are in none of these memories."""
    chunks = ChunkMap(manifest)
    wanted = contents_of(manifest, manifest)
    return sum(
        chunks.nbytes(index)
        for index, digest in enumerate(wanted)
        if all(content[index] != digest for content in contents)
    )


def first_difference(manifest: StateManifest, other: StateManifest) -> Difference | None:
    """Where `other` differs from `manifest`; None if every chunk is the same."""
    indices = differing(manifest, other)
    if not indices:
        return None
    chunks = ChunkMap(manifest)
    tensor, chunk = chunks.place(indices[0])
    start_nbytes = chunk * manifest.chunk_nbytes
    return Difference(
        tensor=manifest.tensors[tensor].name,
        start_nbytes=start_nbytes,
        stop_nbytes=start_nbytes + chunks.nbytes(indices[0]),
        num_chunks=len(indices),
    )


def narrowed(difference: Difference, before: bytes, after: memoryview) -> Difference:
    """The same difference with the exact range, from the first chunk as it was and as it is right."""
    places = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    if not places:
        return difference
    start_nbytes = difference.start_nbytes
    return replace(difference, start_nbytes=start_nbytes + places[0], stop_nbytes=start_nbytes + places[-1] + 1)


async def salvage(
    manifest: StateManifest,
    destinations: Sequence[memoryview],
    *,
    contents: Contents,
    live: Pinned | None,
    hasher: Hasher,
) -> Salvage:
    """Put every chunk into its place that is here already: in the destinations themselves, or in the held state.

    Args:
        manifest: what is wanted.
        destinations: writable memory of every tensor.
        contents: what the destinations contain, as far as known.
        live: the held state, if there is one; copied from.
        hasher: looks at what is called right, and at nothing else.
    """
    chunks, size = ChunkMap(manifest), manifest.chunk_nbytes
    held = contents_of(None if live is None else live.manifest, manifest)
    claimed: dict[int, memoryview] = {}
    copied: set[int] = set()
    for index, digest in enumerate(contents_of(manifest, manifest)):
        tensor, chunk = chunks.place(index)
        destination = chunk_of(destinations[tensor], chunk, size)
        if live is not None and held[index] == digest:
            # First of all: what was staged in vain counts as contents of the destinations, and shares memory with this.
            destination[:] = live.chunk(tensor, chunk)
            claimed[index] = destination
            copied.add(index)
            await asyncio.sleep(0)  # a chunk takes half a millisecond, a state may have thousands
        elif contents[index] == digest:
            claimed[index] = destination
    digests = await hasher.hash_async(list(claimed.values()), chunk_nbytes=size)
    wanted = contents_of(manifest, manifest)
    present = frozenset(index for index, found in zip(claimed, digests, strict=True) if _only(found) == wanted[index])
    return Salvage(present=present, damaged=tuple(sorted(copied - present)))


async def damaged_chunks(pinned: Pinned, hasher: Hasher) -> list[int]:
    """The chunks of a state whose bits are no longer those that were hashed when its step was committed."""
    chunks, manifest = ChunkMap(pinned.manifest), pinned.manifest
    views = [pinned.chunk(*chunks.place(index)) for index in range(len(chunks))]
    digests = await hasher.hash_async(views, chunk_nbytes=manifest.chunk_nbytes)
    wanted = contents_of(manifest, manifest)
    return [index for index, found in enumerate(digests) if _only(found) != wanted[index]]


def _only(digests: tuple[bytes, ...]) -> bytes:
    (digest,) = digests
    return digest


def _same_layout(a: StateManifest, b: StateManifest) -> bool:
    return a.chunk_nbytes == b.chunk_nbytes and [(tensor.name, tensor.nbytes) for tensor in a.tensors] == [
        (tensor.name, tensor.nbytes) for tensor in b.tensors
    ]
