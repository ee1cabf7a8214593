# SPDX-License-Identifier: Apache-2.0
"""A control connection between two that have nothing to say."""

import asyncio

import msgspec

from isthmus.collective.errors import ConnectionLost
from isthmus.collective.transport import Channel, Purpose, connect
from isthmus.elastic.core.messages import Goodbye
from isthmus.elastic.shell.control import ControlConnection
from tests.unit.elastic.harness import hello, listening, until

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


async def test_a_side_that_stops_running_is_lost_after_the_silence_timeout():
    async def freeze(_channel: Channel) -> None:
        await asyncio.Event().wait()

    async with listening(0, {Purpose.CONTROL: freeze}) as door:
        channel = await connect(door.address, hello(Purpose.CONTROL, 1), timeout_s=5.0)
        mine = ControlConnection(channel, DECODER, silence_timeout_s=0.3)
        async with asyncio.timeout(5):
            cause = await mine.run(lambda _message: None)
    assert "took longer" in str(cause)
