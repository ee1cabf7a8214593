"""A snapshot on its way: where its chunks belong, which are missing, which are under way.

Rules: a chunk is with one donor at a time, so that no two ever write to the same memory; what a donor did not deliver
is missing again. Nothing here knows connections.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from elastic.digest import StateManifest, chunk_of
from elastic.state_wire import ChunkMap


class Transfer:
    """The chunks of one manifest.

    Args:
        manifest: what is fetched.
        destinations: writable memory of every tensor.
        present: digests of what the destinations contain now; what is right already is not missing.
    """

    def __init__(
        self, manifest: StateManifest, destinations: Sequence[memoryview], present: Sequence[Sequence[bytes]]
    ) -> None:
        self.manifest = manifest
        self._destinations = destinations
        self._map = ChunkMap(manifest)
        self._changed = asyncio.Event()
        self.num_chunks = len(self._map)
        self.missing: deque[int] = deque()
        for index in range(self.num_chunks):
            tensor, chunk = self._map.place(index)
            if present[tensor][chunk] != manifest.tensors[tensor].chunk_digests[chunk]:
                self.missing.append(index)
        self._num_left = len(self.missing)

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is in its place and verified."""
        return self._num_left == 0

    def place(self, index: int) -> tuple[memoryview, bytes]:
        """Destination and digest of a chunk."""
        tensor, chunk = self._map.place(index)
        destination = chunk_of(self._destinations[tensor], chunk, self.manifest.chunk_nbytes)
        return destination, self.manifest.tensors[tensor].chunk_digests[chunk]

    def arrived(self) -> None:
        """One more chunk is in its place and verified."""
        self._num_left -= 1
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
