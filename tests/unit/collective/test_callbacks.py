# SPDX-License-Identifier: Apache-2.0
"""A peer that can only call does so when it is asked, and outlives whatever a call ends with."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from isthmus.collective.api.callbacks import Callbacks
from isthmus.collective.core.types import Incarnation, PeerId, PeerRef
from isthmus.collective.errors import PeerUnreachable

PEER = PeerRef(PeerId("0" * 16), Incarnation(1))


async def test_the_fault_of_one_call_is_not_the_peers(caplog: pytest.LogCaptureFixture) -> None:
    """Found before: a part of the text made room while it was asked for, and the peer that was to give it ended."""
    wanted: list[Callable[[PeerRef, str], None]] = []
    faults: list[Exception | None] = [PeerUnreachable("there:1", "gone"), FileNotFoundError("it has made room"), None]
    served = asyncio.Event()

    async def dial(address: str, ref: PeerRef) -> object:
        assert (address, ref) == ("there:1", PEER)
        return object()

    async def serve(_channel: object) -> None:
        fault = faults.pop(0)
        if fault is not None:
            raise fault
        served.set()

    communicator = SimpleNamespace(on_call_wanted=wanted.append)
    callbacks = Callbacks(communicator, dial=dial, serve=serve)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(callbacks.run())
        for _ in range(3):
            wanted[0](PEER, "there:1")
        async with asyncio.timeout(20.0):
            await served.wait()
        running.cancel()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == f"call_failed peer_id={PEER.peer_id}"
