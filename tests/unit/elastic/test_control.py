# SPDX-License-Identifier: Apache-2.0
"""A control connection between two that have nothing to say."""

import asyncio

import msgspec
import pytest

from isthmus.collective.core.address import MAX_LENGTH
from isthmus.collective.core.types import Member, View
from isthmus.collective.errors import ConnectionLost
from isthmus.collective.transport import Channel, FrameType, Purpose, connect
from isthmus.elastic.core.messages import Goodbye, NewView
from isthmus.elastic.shell.control import ControlConnection
from tests.unit.elastic.harness import hello, listening, peer_id, until

DECODER = msgspec.msgpack.Decoder(Goodbye)


async def test_silence_of_two_that_have_nothing_to_say_is_no_loss():
    heard: list[Goodbye] = []
    served: list[ControlConnection[Goodbye]] = []

    async def serve(channel: Channel) -> None:
        served.append(ControlConnection(channel, DECODER, silence_timeout_s=0.4, sign_of_life_s=0.1))
        await served[0].run(heard.append)

    async with listening(0, {Purpose.CONTROL: serve}) as door, asyncio.TaskGroup() as tasks:
        channel = await connect(door.address, hello(Purpose.CONTROL, 1), timeout_s=5.0)
        mine = ControlConnection(channel, DECODER, silence_timeout_s=0.4, sign_of_life_s=0.1)
        running = tasks.create_task(mine.run(heard.append))
        done, _ = await asyncio.wait([running], timeout=1.5)
        assert not done, "several silence timeouts have passed"
        served[0].send(Goodbye(outer_step=3))
        await until(lambda: bool(heard))
        mine.end("enough")
    assert heard == [Goodbye(outer_step=3)]
    assert isinstance(running.result(), ConnectionLost)


async def test_the_view_of_as_many_peers_as_a_run_may_have_reaches_them():
    # Found before: above 256 KiB, about 700 peers with several IPv6 addresses each, every member hung up on it.
    members = tuple(Member(peer_id(number), 2**40 + number, "x" * MAX_LENGTH) for number in range(1024))
    view = NewView(view=View(3, 100, bytes(32), members))

    async def serve(channel: Channel) -> None:
        connection: ControlConnection[Goodbye] = ControlConnection(channel, DECODER)
        connection.send(view)
        await connection.run(lambda _: None)

    async with listening(0, {Purpose.CONTROL: serve}) as door:
        channel = await connect(door.address, hello(Purpose.CONTROL, 1), timeout_s=5.0)
        frame = await channel.receive(timeout_s=5.0)
        assert msgspec.msgpack.decode(frame.payload, type=NewView) == view
        await channel.send(FrameType.CONTROL, bytes(300 << 10), timeout_s=5.0)  # of peers it takes less
        with pytest.raises(ConnectionLost):
            await channel.receive(timeout_s=5.0)


async def test_a_side_that_stops_running_is_lost_after_the_silence_timeout():
    async def freeze(_channel: Channel) -> None:
        await asyncio.Event().wait()

    async with listening(0, {Purpose.CONTROL: freeze}) as door:
        channel = await connect(door.address, hello(Purpose.CONTROL, 1), timeout_s=5.0)
        mine = ControlConnection(channel, DECODER, silence_timeout_s=0.3)
        async with asyncio.timeout(5):
            cause = await mine.run(lambda _message: None)
    assert "took longer" in str(cause)
