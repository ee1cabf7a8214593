# SPDX-License-Identifier: Apache-2.0
"""The communicator for ordinary scripts: a loop in a thread of its own, futures instead of coroutines.

    with BlockingCommunicator(rank, "0.0.0.0:4000", secret=secret) as communicator:
        communicator.install(view_of(0, ["10.0.0.1:4000", "10.0.0.2:4000"]))
        work = communicator.all_reduce(communicator.key(0), gradient)  # runs while the script goes on
        work.result()

Rules: methods may be called from any thread. A tensor belongs to the operation until its future is done; cancelling
the future ends the operation for all members. The thread ends with the context.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from isthmus.collective.api.communicator import Communicator
from isthmus.collective.api.standalone import open_communicator
from isthmus.collective.core.link_table import LinkTable
from isthmus.collective.core.types import PeerId, RoundKey, View
from isthmus.collective.links.measurements import LinkReport
from isthmus.collective.rounds.options import BulkOptions, RoundStats
from isthmus.collective.rounds.tensors import Array
from isthmus.collective.transport.security import Security

_T = TypeVar("_T")
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


class BlockingCommunicator:
    """See the module. Operations are those of `Communicator`, with the same arguments, and give futures.

    Args:
        number: of this peer among all, from 0 up.
        address: host:port to listen at; port 0 takes any free one.
        secret: see open_communicator.
        num_streams: see Communicator.
        chunk_nbytes: see Communicator.
        options: see Communicator.
        security: see Communicator.

    Raises:
        AddressInUse: somebody listens there.
        ValueError: an argument is not as described.
    """

    def __init__(
        self,
        number: int,
        address: str = "127.0.0.1:0",
        *,
        secret: bytes = b"",
        num_streams: int | None = None,
        chunk_nbytes: int = 2 << 20,
        options: BulkOptions | None = None,
        security: Security | None = None,
    ) -> None:
        self._opened = open_communicator(
            number,
            address,
            secret=secret,
            num_streams=num_streams,
            chunk_nbytes=chunk_nbytes,
            options=options,
            security=security,
        )
        self._ready: Future[Communicator] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"communicator-{number}", daemon=True)
        self._thread.start()
        self._communicator = self._ready.result(_START_TIMEOUT_S)

    def close(self) -> None:
        """End all operations, connections and the thread. May be called again."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_STOP_TIMEOUT_S)

    def __enter__(self) -> "BlockingCommunicator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------------------------- views and figures

    @property
    def address(self) -> str:
        """Where others reach us."""
        address = self._communicator.address
        assert address is not None, "it listens since it was made"
        return address

    @property
    def view(self) -> View | None:
        """The installed view."""
        return self._communicator.view

    def install(self, view: View) -> None:
        """See Communicator.install; returns when it is done."""
        self._submit(self._communicator.install(view)).result()

    def key(self, outer_step: int, fragment: int = 0) -> RoundKey:
        """See Communicator.key."""
        return self._communicator.key(outer_step, fragment)

    def links(self) -> list[LinkReport]:
        """See Communicator.links."""

        async def ask() -> list[LinkReport]:
            return self._communicator.links()

        return self._submit(ask()).result()

    # -------------------------------------------------------------------------------- operations

    def all_reduce(self, key: RoundKey, tensor: Array, **more: Any) -> Future[RoundStats]:  # noqa: ANN401
        """See Communicator.all_reduce."""
        return self._submit(self._communicator.all_reduce(key, tensor, **more))

    def all_gather(
        self, key: RoundKey, tensor: Array, *, sizes: Sequence[int] | None = None, out: Array | None = None
    ) -> Future[tuple[list[Tensor], RoundStats]]:
        """See Communicator.all_gather."""
        return self._submit(self._communicator.all_gather(key, tensor, sizes=sizes, out=out))

    def broadcast(self, key: RoundKey, tensor: Array, *, root: PeerId) -> Future[RoundStats]:
        """See Communicator.broadcast."""
        return self._submit(self._communicator.broadcast(key, tensor, root=root))

    def exchange(self, key: RoundKey, tensor: Array, *, out: Array, partner: PeerId) -> Future[RoundStats]:
        """See Communicator.exchange."""
        return self._submit(self._communicator.exchange(key, tensor, out=out, partner=partner))

    def barrier(self, key: RoundKey) -> Future[RoundStats]:
        """See Communicator.barrier."""
        return self._submit(self._communicator.barrier(key))

    def look_ahead(self) -> None:
        """See Communicator.look_ahead; returns at once."""
        self._submit(self._look_ahead()).result()

    def survey(self, key: RoundKey) -> Future[LinkTable]:
        """See Communicator.survey."""
        return self._submit(self._communicator.survey(key))

    # -------------------------------------------------------------------------------- inside

    async def _look_ahead(self) -> None:
        self._communicator.look_ahead()

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        if self._loop is None or not self._thread.is_alive():
            work.close()
            raise RuntimeError("the communicator is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - the thread's root; whoever made us hears it
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._opened as communicator:
            self._ready.set_result(communicator)
            await self._stop.wait()
