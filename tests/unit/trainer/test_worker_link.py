# SPDX-License-Identifier: Apache-2.0
"""Requests, replies and deadlines, over real sockets with workers that the test itself plays."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from isthmus.trainer.errors import ConfigError, EnvironmentFault, IsthmusError, TrainingFault, WorkerCrashed
from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.link import WINDOW, WorkerLink, WorkerStalled

TIMEOUT_S = 5.0


class PlayedWorker:
    """A worker's end of the socket."""

    def __init__(self, context: zmq.asyncio.Context, path: Path, local_rank: int) -> None:
        self.local_rank = local_rank
        self.socket = context.socket(zmq.DEALER)
        ipc.configure(self.socket, linger_s=0.0)
        self.socket.setsockopt(zmq.ROUTING_ID, ipc.worker_identity(local_rank))
        self.socket.connect(f"ipc://{path}")

    async def ready(self) -> None:
        await self.send(ipc.Ready(serial=0, local_rank=self.local_rank, device="cpu", seconds=0.0))

    async def send(self, reply: ipc.Reply) -> None:
        await self.socket.send(ipc.encode(reply))

    async def receive(self) -> ipc.Request:
        async with asyncio.timeout(TIMEOUT_S):
            return ipc.decode_request(await self.socket.recv())


class Peer:
    """A link, two played workers, and how often the link has called for help."""

    def __init__(self, path: Path) -> None:
        self.num_failures = 0
        self.wanted: list[int] = []
        self.looking = asyncio.Event()
        self.seen = asyncio.Event()
        self.seen.set()
        self.link = WorkerLink(path, 2, on_failure=self._count, explain=self._explain)
        self.context = zmq.asyncio.Context()
        self.workers = [PlayedWorker(self.context, path, local_rank) for local_rank in range(2)]

    def _count(self) -> None:
        self.num_failures += 1

    async def _explain(self, local_ranks: Sequence[int]) -> str:
        self.wanted += local_ranks
        self.looking.set()
        await self.seen.wait()
        return "sleeps"

    async def store(self, timeout_s: float = TIMEOUT_S) -> int:
        request = ipc.Store(serial=self.link.next_serial())
        replies = await self.link.ask(request, ipc.Stored, timeout_s)
        assert [reply.serial for reply in replies] == [request.serial] * 2
        return request.serial


@contextlib.asynccontextmanager
async def _peer(tmp_path: Path) -> AsyncIterator[Peer]:
    peer = Peer(tmp_path / "s")
    try:
        async with asyncio.TaskGroup() as group:
            receiver = group.create_task(peer.link.run())
            for worker in peer.workers:
                await worker.ready()
            await peer.link.ready(TIMEOUT_S)
            yield peer
            receiver.cancel()
    finally:
        for worker in peer.workers:
            worker.socket.close()
        peer.context.term()
        peer.link.close()


async def test_a_request_is_done_when_every_worker_has_answered(tmp_path: Path) -> None:
    async with _peer(tmp_path) as peer, asyncio.TaskGroup() as group:
        asked = group.create_task(peer.store())
        first, second = [await worker.receive() for worker in peer.workers]
        assert first == second == ipc.Store(serial=1)
        await peer.workers[1].send(ipc.Stored(serial=1))
        assert not asked.done()
        await peer.workers[0].send(ipc.Stored(serial=1))
        assert await asked == 1


async def test_a_third_request_waits_until_one_is_done(tmp_path: Path) -> None:
    async with _peer(tmp_path) as peer, asyncio.TaskGroup() as group:
        asked = [group.create_task(peer.store()) for _ in range(WINDOW + 1)]
        for worker in peer.workers:
            assert [(await worker.receive()).serial for _ in range(WINDOW)] == [1, 2]
            assert not await worker.socket.poll(50), "the window is full"
            await worker.send(ipc.Stored(serial=1))
        assert await asked[0] == 1
        for worker in peer.workers:
            assert (await worker.receive()).serial == 3
            await worker.send(ipc.Stored(serial=2))
            await worker.send(ipc.Stored(serial=3))


async def test_the_reply_to_a_caller_that_has_gone_frees_its_place(tmp_path: Path) -> None:
    async with _peer(tmp_path) as peer, asyncio.TaskGroup() as group:
        for _ in range(WINDOW):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await peer.store()
        asked = group.create_task(peer.store())
        for worker in peer.workers:
            assert [(await worker.receive()).serial for _ in range(WINDOW)] == [1, 2]
            await worker.send(ipc.Stored(serial=1))
        for worker in peer.workers:
            assert (await worker.receive()).serial == 3
            await worker.send(ipc.Stored(serial=2))
            await worker.send(ipc.Stored(serial=3))
        assert await asked == 3


async def test_who_is_silent_has_stalled_and_the_oldest_request_is_named(tmp_path: Path) -> None:
    async with _peer(tmp_path) as peer:
        async with asyncio.TaskGroup() as group:
            older = group.create_task(_error_of(peer.store()))
            await peer.workers[0].receive()
            await peer.workers[0].send(ipc.Stored(serial=1))
            request = ipc.Evaluate(serial=peer.link.next_serial())
            newer = group.create_task(_error_of(peer.link.ask(request, ipc.Evaluated, 0.2)))
        stalled = newer.result()
        assert isinstance(stalled, WorkerStalled)
        assert (stalled.request, stalled.local_ranks, stalled.what) == ("store", (1,), "sleeps")
        assert peer.wanted == [1]
        assert older.result() is stalled
        assert peer.num_failures == 1


async def test_an_answer_that_comes_while_it_is_asked_why_there_is_none_is_taken(tmp_path: Path) -> None:
    async with _peer(tmp_path) as peer, asyncio.TaskGroup() as group:
        peer.seen.clear()
        asked = group.create_task(peer.store(timeout_s=0.1))
        await peer.looking.wait()
        next_one = group.create_task(peer.store())
        for serial in (1, 2):
            for worker in peer.workers:
                assert (await worker.receive()).serial == serial
                await worker.send(ipc.Stored(serial=serial))
        assert await next_one == 2  # so the answers to the first one are here too
        peer.seen.set()
        assert await asked == 1
        assert peer.num_failures == 0


@pytest.mark.parametrize(
    ("kind", "error"),
    [("training_fault", TrainingFault), ("environment", EnvironmentFault), ("config", ConfigError)],
)
async def test_what_a_worker_reports_ends_every_request(kind: str, error: type[IsthmusError], tmp_path: Path) -> None:
    async with _peer(tmp_path) as peer, asyncio.TaskGroup() as group:
        asked = [group.create_task(_error_of(peer.store())) for _ in range(WINDOW + 1)]
        await peer.workers[0].receive()
        await peer.workers[0].send(ipc.WorkerFailed(serial=1, kind=kind, problem="it broke", cure="mend it"))
        failure = await asked[0]
        assert (type(failure), failure.problem, failure.cure) == (error, "it broke", "mend it")
        assert [await task for task in asked] == [failure] * 3
        assert await _error_of(peer.store()) is failure
        await peer.workers[1].send(ipc.Stored(serial=1))  # too late, and harmless
        peer.link.fail(WorkerCrashed("a consequence"))
        assert peer.link.failure is failure
        assert peer.num_failures == 1


async def test_an_answer_of_another_kind_is_a_bug(tmp_path: Path) -> None:
    async with _peer(tmp_path) as peer, asyncio.TaskGroup() as group:
        asked = group.create_task(_error_of(peer.store()))
        for worker in peer.workers:
            await worker.send(ipc.Loaded(serial=(await worker.receive()).serial))
        assert isinstance(await asked, ipc.MalformedMessage)


async def test_an_answer_to_nothing_is_a_bug(tmp_path: Path) -> None:
    async def answer_unasked() -> None:
        async with _peer(tmp_path) as peer:
            await peer.workers[0].send(ipc.Stored(serial=9))
            await peer.link.failed()  # the link's own task ends this wait

    with pytest.raises(ExceptionGroup) as caught:
        await answer_unasked()
    assert caught.group_contains(ipc.MalformedMessage, match="what nobody asked")


async def test_workers_that_do_not_come_up_are_named(tmp_path: Path) -> None:
    peer = Peer(tmp_path / "s")
    with pytest.raises(WorkerStalled) as caught:
        await peer.link.ready(0.05)
    assert (caught.value.request, caught.value.local_ranks) == ("start", (0, 1))
    for worker in peer.workers:
        worker.socket.close()
    peer.context.term()
    peer.link.close()


async def _error_of(awaitable) -> Exception:
    try:
        await awaitable
    except (IsthmusError, ipc.MalformedMessage) as error:
        return error
    raise AssertionError("no error was raised")
