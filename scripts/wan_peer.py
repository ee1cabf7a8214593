#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One peer of `scripts/bench wan`: a communicator that does what it is told on its standard input, line by line.

    {"do": "connect"}                              -> {}
    {"do": "survey"}                               -> the table of links, as all members have it
    {"do": "prepare", "nbytes": ...}               -> {}
    {"do": "reduce", "plan": "auto", "at": T}      -> {"seconds": ..., "predicted_s": ..., "digest": ..., ...}
    {"do": "links"}                                -> {"links": [...]}

T is an instant of CLOCK_MONOTONIC, which all processes of a machine share: so all peers begin together, and no barrier
is part of what is measured.

Rules: making tensors and checking results is not measured. It ends when its input does.
"""

import asyncio
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import torch
import xxhash

from isthmus.collective import BulkOptions
from isthmus.collective.api.communicator import Communicator
from isthmus.collective.api.standalone import open_communicator, peer_id_of, view_of
from isthmus.collective.core.apart import Pair
from isthmus.collective.core.types import RoundKey
from isthmus.collective.transport.security import Mode, Security
from isthmus.collective.transport.sockets import SocketOptions
from scripts.wanlink import processor

SECRET = bytes(range(32))  # of a network that lives for some minutes on one machine
TOLERANCE = 1e-5
IDLE_S = 8.0


class Peer:
    """What one process does.

    Args:
        number: ours.
        addresses: of all, in the order of numbers.
        communicator: open, without a view.
        apart: pairs of numbers that have no link.
    """

    def __init__(
        self, number: int, addresses: list[str], communicator: Communicator, *, apart: tuple[Pair, ...] = ()
    ) -> None:
        self._number, self._addresses, self._communicator = number, addresses, communicator
        self._apart = apart
        self._step = 0
        self._shared = self._tensor = self._out = torch.empty(0)

    async def obey(self, do: str, **order: Any) -> dict[str, Any]:  # noqa: ANN401
        """Carry out one order, see the module; returns the answer."""
        match do:
            case "connect":
                return await self.connect()
            case "survey":
                table = await self._communicator.survey(self._key())
                return {name: _without_inf(one) for name, one in dataclasses.asdict(table).items()}
            case "prepare":
                return self.prepare(**order)
            case "reduce":
                return await self.reduce(**order)
            case "links":
                return {"links": [dataclasses.asdict(report) for report in self._communicator.links()]}
            case _:
                raise ValueError(f"no such order: {do}")

    async def connect(self) -> dict[str, Any]:
        """Install the view of all peers as a daemon does, and leave the links idle as while its workers train."""
        await self._communicator.install(msgspec.structs.replace(view_of(0, self._addresses), apart=self._apart))
        await self._communicator.barrier(self._key())
        self._communicator.look_ahead()
        await asyncio.sleep(IDLE_S)
        return {}

    def prepare(self, nbytes: int) -> dict[str, Any]:
        """Make the tensor. It is what all share, plus our number: so everybody knows the mean."""
        if nbytes != self._tensor.nbytes:
            self._shared = torch.rand(nbytes // 4, generator=torch.Generator().manual_seed(1))
            self._tensor = self._shared + self._number
            self._out = torch.empty_like(self._tensor)
        self._out.fill_(math.nan)
        return {}

    async def reduce(self, plan: str, at: float) -> dict[str, Any]:
        """One all-reduce (mean of fp32) that begins at `at`; its time, and whether the mean is right."""
        key, ordered_cpu_s = self._key(), time.process_time()
        await asyncio.sleep(at - time.monotonic())
        late_s, cpu_s = time.monotonic() - at, time.process_time()
        stats = await self._communicator.all_reduce(key, self._tensor, out=self._out, plan=plan)
        seconds, cpu_s = time.monotonic() - at, time.process_time() - cpu_s
        error = float((self._out - self._shared).sub_((len(self._addresses) - 1) / 2).abs_().max())
        if not error < TOLERANCE:
            raise RuntimeError(f"the mean is wrong by {error}")
        digest = xxhash.xxh3_64_hexdigest(self._out.numpy().data)
        return {
            "late_s": late_s,
            "seconds": seconds,
            "cpu_s": cpu_s,
            "order_cpu_s": time.process_time() - ordered_cpu_s,
            "plan": stats.plan,
            "predicted_s": stats.predicted_s,
            "bytes_sent": stats.bytes_sent,
            "digest": digest,
        }

    def _key(self) -> RoundKey:
        self._step += 1
        return self._communicator.key(self._step)


def _without_inf(value: Any) -> Any:  # noqa: ANN401
    """JSON has no infinity; null stands for what is unknown."""
    if isinstance(value, dict):
        return {name: _without_inf(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_inf(one) for one in value]
    return None if value == math.inf else value


async def main(config: dict[str, Any]) -> None:
    """Obey until the input ends.

    Args:
        config: number, addresses, tls; num_streams, chunk_nbytes, control and apart where they are not the default.
    """
    torch.set_num_threads(1)
    processor.claim(processor.PEER)
    number, addresses = config["number"], config["addresses"]
    chosen = {name: config[name] for name in ("num_streams", "chunk_nbytes") if config.get(name) is not None}
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with open_communicator(
        number,
        addresses[number],
        options=BulkOptions(sockets=SocketOptions(congestion_control=config.get("control"))),
        security=Security.shared(peer_id_of(number), SECRET, mode=Mode.ON) if config["tls"] else None,
        **chosen,
    ) as communicator:
        apart = tuple((one, other) for one, other in config.get("apart", ()))
        peer = Peer(number, addresses, communicator, apart=apart)
        print("{}", flush=True)
        while line := await orders.readline():
            print(json.dumps(await peer.obey(**json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
