"""A peer in its own process, driven by JSON lines on stdin. Not a test; test_collective_processes.py starts it."""

import asyncio
import hashlib
import json
import os
import signal
import sys
import time

import msgspec
import torch

from collective import BulkOptions, Communicator, OperationAborted, PeerRef, RoundKey, View
from collective.core.progress import StallLimits
from collective.supervision import Patience
from collective.transport import Hello, HelloReply, Listener, Purpose
from collective.wire import PROTOCOL_VERSION


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def part(number, numel, kind):
    if kind == "integers":
        return torch.arange(numel).remainder(997).float() * (number + 1)
    return torch.randn(numel, generator=torch.Generator().manual_seed(number))


async def reduce(communicator, number, order):
    """One round. `signal_after` sends that signal to ourselves when so many result chunks are in place."""
    tensor = part(number, order["numel"], order.get("kind", "gaussian"))
    before = digest(tensor)
    out = torch.empty_like(tensor)
    num_recorded = 0

    def record(_start, _wire):
        nonlocal num_recorded
        num_recorded += 1
        if num_recorded == order.get("signal_after"):
            os.kill(os.getpid(), signal.Signals[order["signal"]])

    key = RoundKey(order["epoch"], order["outer_step"], 0)
    started = time.monotonic()
    try:
        await communicator.all_reduce_mean(key, tensor, out=out, codec=order.get("codec", "raw"), record=record)
    except OperationAborted as error:
        answer = {"aborted": error.cause, "suspects": error.suspects}
    else:
        answer = {"digest": digest(out)}
        if number == 0:
            answer["head"] = out[:64].tolist()
            members = order["members"]
            mean = sum(part(member, order["numel"], order.get("kind", "gaussian")).double() for member in members)
            mean /= len(members)
            answer["relative_error"] = float((out - mean).norm() / mean.norm())
    return answer | {"input_untouched": digest(tensor) == before, "seconds": time.monotonic() - started}


async def main(number):
    torch.set_num_threads(1)
    me = PeerRef(f"{number:016x}", 1)

    def hello(_peer, stream, num_streams):
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id="run",
            purpose=Purpose.BULK,
            peer_id=me.peer_id,
            incarnation=me.incarnation,
            stream=stream,
            num_streams=num_streams,
        )

    options = BulkOptions(patience=Patience(stall=StallLimits(floor_s=1.0)))
    communicator = Communicator(me=me, hello=hello, num_streams=2, chunk_nbytes=256 << 10, options=options)
    listener = Listener(
        "127.0.0.1:0",
        accept=lambda _: HelloReply(accepted=True, peer_id=me.peer_id, incarnation=me.incarnation),
        routes={},
        bulk=communicator.adopt,
    )
    async with listener:
        say({"address": listener.address})
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            if "install" in order:
                await communicator.install(msgspec.convert(order["install"], View))
                say({"installed": True})
            else:
                say(await reduce(communicator, number, order))
        await communicator.close()


def say(answer):
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
