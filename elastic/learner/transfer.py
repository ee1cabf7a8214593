# SPDX-License-Identifier: Apache-2.0
"""A snapshot on its way: where its chunks belong, which are missing, which are under way.

Rules: a chunk is with one donor at a time, so that no two ever write to the same memory; what a donor did not deliver
is missing again. Nothing here knows connections.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Sequence

from isthmus.elastic.state.digest import StateManifest, chunk_of
from isthmus.elastic.state.parity import Contents, contents_of
from isthmus.elastic.state.wire import ChunkMap


class Transfer:
    """The chunks of one manifest.

    Args:
        manifest: what is fetched.
        destinations: writable memory of every tensor.
        present: chunks that are in their place and verified already.
    """

    def __init__(self, manifest: StateManifest, destinations: Sequence[memoryview], present: Collection[int]) -> None:
        self.manifest = manifest
        self.destinations = destinations
        self._map = ChunkMap(manifest)
        self._changed = asyncio.Event()
        self.num_chunks = len(self._map)
        self._present = set(present)
        self.missing: deque[int] = deque(index for index in range(self.num_chunks) if index not in self._present)

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is in its place and verified."""
        return len(self._present) == self.num_chunks

    def place(self, index: int) -> tuple[memoryview, bytes]:
        """Destination and digest of a chunk."""
        tensor, chunk = self._map.place(index)
        destination = chunk_of(self.destinations[tensor], chunk, self.manifest.chunk_nbytes)
        return destination, self.manifest.tensors[tensor].chunk_digests[chunk]

    def contents(self, like: StateManifest) -> Contents:
        """What the destinations contain as far as known: for another transfer into the same memory."""
        digests = contents_of(self.manifest, like)
        return [digest if index in self._present else None for index, digest in enumerate(digests)]

    def arrived(self, index: int) -> None:
        """This chunk is in its place and verified."""
        self._present.add(index)
        self._changed.set()

    def give_back(self, indices: Sequence[int]) -> None:
        """These were asked for and will not come."""
        self.missing.extend(indices)
        self._changed.set()

    async def more(self) -> bool:
        """Wait until a chunk is missing again (True) or all have arrived (False).

        Bounded by the deadlines of the donors that have the last chunks under way.
        """
        while not self.missing and not self.is_complete:
            self._changed.clear()
            await self._changed.wait()
        return bool(self.missing)
