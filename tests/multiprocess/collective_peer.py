# SPDX-License-Identifier: Apache-2.0
"""A peer in its own process, driven by JSON lines on stdin. Not a test; those of test_collective_*.py start it."""

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import time

import msgspec
import torch

from isthmus.collective import BulkOptions, Communicator, OperationAborted, PeerRef, PlanMismatch, RoundKey, View
from isthmus.collective.rounds.supervision import Patience
from isthmus.collective.transport import Hello, HelloReply, Listener, Purpose
from isthmus.collective.transport.wire import PROTOCOL_VERSION


def digest(tensor):
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def part(number, numel, kind):
    if kind == "integers":
        return torch.arange(numel).remainder(997).float() * (number + 1)
    return torch.randn(numel, generator=torch.Generator().manual_seed(number))


async def reduce(communicator, number, order):
    """One mean. `signal_after` sends that signal to ourselves when so many result chunks are in place."""
    tensor = part(number, order["numel"], order.get("kind", "gaussian"))
    before = digest(tensor)
    out = tensor if order.get("in_place") else torch.empty_like(tensor)
    num_recorded = 0

    def record(_start, _numel, _wire):
        nonlocal num_recorded
        num_recorded += 1
        if num_recorded == order.get("signal_after"):
            os.kill(os.getpid(), signal.Signals[order["signal"]])

    key = RoundKey(order["epoch"], order["outer_step"], 0)
    codec = order.get("codec", "raw")
    started = time.monotonic()
    try:
        await communicator.all_reduce(
            key, tensor, op="mean", out=None if out is tensor else out, codec=codec, record=record
        )
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


def whole_numbers(numel, rank, dtype):
    """From -3 to 9, others on every rank; exact in every dtype, and so are their sums."""
    index = torch.arange(numel)
    return ((index * 7 + rank * 5 + index // 13 * rank) % 13 - 3).to(getattr(torch, dtype))


async def operate(communicator, number, one, epoch):
    """One operation of any kind; the digest of its result."""
    key = RoundKey(epoch, one["outer_step"], one["fragment"])
    tensor = whole_numbers(one.get("numel", 0), number, one.get("dtype", "float32"))
    match one["kind"]:
        case "all_reduce":
            out = None if one.get("in_place") else torch.empty_like(tensor)
            await communicator.all_reduce(key, tensor, op=one["op"], out=out, codec=one.get("codec", "raw"))
            return digest(tensor if out is None else out)
        case "all_gather":
            sizes = one["sizes"]
            own = tensor[: sizes[communicator.view.rank_of(communicator.me.peer_id)]].clone()
            parts, _ = await communicator.all_gather(key, own, sizes=sizes)
            return digest(torch.cat(parts))
        case "broadcast":
            await communicator.broadcast(key, tensor, root=one["root"])
            return digest(tensor)
        case "exchange":
            out = torch.empty_like(tensor)
            await communicator.exchange(key, tensor, out=out, partner=one["partner"][number])
            return digest(out)
        case _:
            await communicator.barrier(key)
            return digest(torch.empty(0))


async def run_batch(communicator, number, order):
    """Many at once, posted in an order of our own."""

    async def outcome(one):
        try:
            return await operate(communicator, number, one, order["epoch"])
        except OperationAborted as error:
            return {"error": "OperationAborted", "suspects": error.suspects}
        except PlanMismatch as error:
            return {"error": "PlanMismatch", "field": error.field, "peer_id": error.peer_id}

    async def kill_ourselves():
        while communicator.bytes_received < order["kill_at_nbytes"]:  # noqa: ASYNC110 - sockets have no event
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    works = {index: outcome(one) for index, one in enumerate(order["batch"])}
    shuffled = random.Random(number).sample(sorted(works), len(works))
    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        posted = {index: tasks.create_task(works[index]) for index in shuffled}
        if "kill_at_nbytes" in order:
            tasks.create_task(kill_ourselves())
    return {
        "outcomes": [posted[index].result() for index in sorted(posted)],
        "seconds": time.monotonic() - started,
    }


async def main(number, max_upload):
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

    options = BulkOptions(patience=Patience(), max_upload=max_upload)
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
            elif "batch" in order:
                say(await run_batch(communicator, number, order))
            else:
                say(await reduce(communicator, number, order))
        await communicator.close()


def say(answer):
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else None))
