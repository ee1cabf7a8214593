# SPDX-License-Identifier: Apache-2.0
"""The benchmark's peer reports every operation, however words come."""

import asyncio

from isthmus.collective.api.standalone import open_communicator, view_of
from scripts.faults.peer import FaultPeer
from scripts.faults.words import Launch, Mode, Post, Prepare, Report, line


async def test_a_post_that_is_overtaken_before_it_began_is_reported_as_aborted(until):
    said = []
    async with open_communicator(0) as communicator:
        launch = Launch(number=0, incarnation=1, path="", nbytes=4096, deadline_s=5.0, num_streams=1)
        peer = FaultPeer(launch, communicator, said.append)
        mode = Mode.OUT_OF_PLACE
        posts = [
            Post(view=view_of(epoch, [communicator.address]), step=1, mode=mode, fragments=mode.fragments)
            for epoch in (1, 2)
        ]
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(map(line, (Prepare(step=1, mode=mode), *posts))))
        obeying = asyncio.ensure_future(peer.obey(reader))
        await until(lambda: sum(isinstance(word, Report) for word in said) == 2)
        reader.feed_eof()
        await obeying
    outcomes = {word.key.epoch: word.outcome for word in said if isinstance(word, Report)}
    assert outcomes == {1: "aborted", 2: "finished"}
