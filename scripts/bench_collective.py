# SPDX-License-Identifier: Apache-2.0
"""All-reduce (mean, fp32) between processes on loopback: torch's gloo and ours, in turn, in one run.

Every repetition runs each contender once, after a barrier; a contender's time is that of its slowest peer. Gloo
computes the sum and divides, as its users do. "bare" is the floor: bare_loop.py, the same exchange with nothing but
its bytes and checksums, over TCP. Ours shares memory between processes of one machine; "tcp" is raw without that, as
between machines. Gloo's sockets take the kernel's default congestion control; where that
is not cubic and we are root, everything is run again in a network namespace whose default is cubic.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from isthmus.collective import BulkOptions, Communicator
from isthmus.collective.api.standalone import open_communicator, view_of
from isthmus.collective.transport import SocketOptions
from isthmus.collective.transport.copying import HAS_STREAM_COPY
from scripts.bare_loop import BareLoop, near_socket

Row = dict[str, Any]
MIB = 1 << 20
DEFAULT_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


# ------------------------------------------------------------------------------------ one peer


def rss_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def settled_group(rank: int, world: int, port: int) -> Store:
    store = TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return store


class Contenders:
    """What is compared, each as `await run(name, tensor, out)`."""

    def __init__(self, communicator: Communicator, over_tcp: Communicator, bare: BareLoop, world: int) -> None:
        self.communicator = communicator
        self.over_tcp = over_tcp
        self.bare = bare
        self.world = world
        self.step = 0

    async def run(self, name: str, tensor: Tensor, out: Tensor) -> tuple[float, float]:
        if name == "gloo":
            out.copy_(tensor)  # it works in place and our callers keep their input; not timed, see timed()
            return await self.timed(self.gloo(out))
        if name == "bare":
            return await self.timed(self.barely(tensor, out))
        self.step += 1
        return await self.timed(self.ours(name, tensor, out))

    async def timed(self, work: Awaitable[None]) -> tuple[float, float]:
        dist.barrier()
        cpu, started = time.process_time(), time.perf_counter()
        await work
        return time.perf_counter() - started, time.process_time() - cpu

    async def gloo(self, out: Tensor) -> None:
        dist.all_reduce(out)
        out.div_(self.world)

    async def barely(self, tensor: Tensor, out: Tensor) -> None:
        self.bare.all_reduce(tensor, out)

    async def ours(self, name: str, tensor: Tensor, out: Tensor) -> None:
        communicator, codec = (self.over_tcp, "raw") if name == "tcp" else (self.communicator, name)
        await communicator.all_reduce(communicator.key(self.step), tensor, out=out, codec=codec)


def bare_loop(rank: int, world: int, store: Store) -> BareLoop:
    """Each rank dials those before it."""
    sockets = {}
    with near_socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(world)
        store.set(f"bare{rank}", str(listener.getsockname()[1]))
        for other in range(rank):
            sockets[other] = near_socket()
            sockets[other].connect(("127.0.0.1", int(store.get(f"bare{other}"))))
            sockets[other].sendall(bytes([rank]))
        for _ in range(rank + 1, world):
            accepted, _ = listener.accept()
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets[accepted.recv(1)[0]] = accepted
    return BareLoop(rank, sockets)


async def peer(options: argparse.Namespace) -> None:
    rank, world = options.rank, options.world_size
    torch.set_num_threads(1)
    store = settled_group(rank, world, options.port)
    async with contextlib.AsyncExitStack() as stack:
        communicators = []
        for shares_memory in (True, False):
            communicator = await stack.enter_async_context(
                open_communicator(
                    rank,
                    chunk_nbytes=options.chunk_kib << 10,
                    num_streams=options.streams,
                    options=BulkOptions(sockets=SocketOptions(shares_memory=shares_memory)),
                )
            )
            store.set(f"address{rank}/{shares_memory}", str(communicator.address))
            addresses = [store.get(f"address{other}/{shares_memory}").decode() for other in range(world)]
            await communicator.install(view_of(0, addresses))
            communicators.append(communicator)
        sharing, over_tcp = communicators
        contenders = Contenders(sharing, over_tcp, bare_loop(rank, world, store), world)
        answers = [await measure(contenders, rank, world, mib, options) for mib in options.mib]
        (options.into / f"{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


async def measure(contenders: Contenders, rank: int, world: int, mib: int, options: argparse.Namespace) -> Row:
    numel = mib * MIB // 4
    tensor = gaussian(rank, numel)
    out = torch.zeros(numel)
    mean: Tensor | None = None
    repeats = options.repeats if mib >= 256 else 4 * options.repeats  # a second is too short: machines have bad ones
    names = (["gloo", "bare"] if options.gloo else []) + ["tcp", *options.codecs]
    rows: dict[str, Row] = {name: {"seconds": [], "cpu": [], "extra_kib": 0} for name in names}
    for repeat in range(-options.warmups, repeats):
        for name in names:
            reset_peak()
            before = rss_kib("VmRSS")
            seconds, cpu = await contenders.run(name, tensor, out)
            row = rows[name]
            row["extra_kib"] = max(row["extra_kib"], rss_kib("VmHWM") - before)
            if repeat >= 0:
                row["seconds"].append(seconds)
                row["cpu"].append(cpu)
            if repeat == repeats - 1 and rank == 0:
                mean = mean if mean is not None else exact_mean(world, numel)
                head = out[: len(mean)].double()
                row["relative_error"] = float((head - mean).norm() / mean.norm())
    return {"rank": rank, "mib": mib, "rows": rows}


def gaussian(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def exact_mean(world: int, numel: int) -> Tensor:
    """Of the first elements, in double precision."""
    total = torch.zeros(min(numel, 1 << 20), dtype=torch.float64)
    for rank in range(world):
        total += gaussian(rank, numel)[: 1 << 20]
    return total / world


# ------------------------------------------------------------------------------------ all peers


def run_world(world: int, options: argparse.Namespace, *, in_cubic_namespace: bool) -> list[Row]:
    """[{mib, name, ...}] of one world size."""
    port = free_port()
    argv = [sys.executable, __file__, "--peer", "--world-size", str(world), "--port", str(port)]
    argv += ["--mib", ",".join(map(str, options.mib)), "--codecs", ",".join(options.codecs)]
    argv += ["--repeats", str(options.repeats), "--chunk-kib", str(options.chunk_kib)]
    argv += ["--streams", str(options.streams)] + ([] if options.gloo else ["--no-gloo"])
    ranks = " ".join(map(str, range(world)))
    into = Path(tempfile.mkdtemp(prefix="isthmus-bench-"))
    argv += ["--into", str(into)]
    together = f"for rank in {ranks}; do {' '.join(argv)} --rank $rank & done; wait"
    if in_cubic_namespace:
        together = f"ip link set lo up; echo cubic > {DEFAULT_CONTROL}; {together}"
    command = (["unshare", "--net"] if in_cubic_namespace else []) + ["bash", "-c", together]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    answers = [answer for file in sorted(into.glob("*.json")) for answer in json.loads(file.read_text())]
    shutil.rmtree(into)
    if len(answers) != world * len(options.mib):
        sys.exit(f"isthmus: a peer of the benchmark failed:\n{finished.stderr[-3000:]}")
    return [row for mib in options.mib for row in summarise(world, mib, [a for a in answers if a["mib"] == mib])]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def summarise(world: int, mib: int, answers: list[Row]) -> Iterator[Row]:
    gigabytes = mib * MIB / 1e9
    for name in answers[0]["rows"]:
        rows = [answer["rows"][name] for answer in answers]
        slowest = [max(values) for values in zip(*(row["seconds"] for row in rows), strict=True)]
        quartiles = statistics.quantiles(slowest, n=4)
        cpu = zip(*(row["cpu"] for row in rows), strict=True)
        yield {
            "world_size": world,
            "mib": mib,
            "contender": name,
            "ms": 1e3 * statistics.median(slowest),
            "ms_quartiles": [1e3 * quartiles[0], 1e3 * quartiles[2]],
            "gb_per_s": gigabytes / statistics.median(slowest),
            "cpu_s_per_gb": statistics.median(map(statistics.mean, cpu)) / gigabytes,
            "extra_memory": max(row["extra_kib"] for row in rows) / 1024 / mib,
            "relative_error": next(row["relative_error"] for row in rows if "relative_error" in row),
            "repeats": len(slowest),
        }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


def show(rows: list[Row], title: str) -> None:
    print(f"\n{title}")
    print("peers   MiB  contender      ms   (quartiles)      GB/s  CPU s/GB  +memory  error     gloo/ours")
    gloo = {(row["world_size"], row["mib"]): row["ms"] for row in rows if row["contender"] == "gloo"}
    for row in rows:
        base = gloo.get((row["world_size"], row["mib"]))
        ratio = f"{base / row['ms']:.2f} x" if base and row["contender"] != "gloo" else ""
        low, high = row["ms_quartiles"]
        time_ms = f"{row['ms']:8.2f}  ({low:.1f}-{high:.1f})"
        print(
            f"{row['world_size']:5d} {row['mib']:5d}  {row['contender']:9s} {time_ms}".ljust(50)
            + f"{row['gb_per_s']:6.2f}  {row['cpu_s_per_gb']:8.3f}  {row['extra_memory']:6.2f}x  "
            f"{row['relative_error']:.1e}   {ratio}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench collective", description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=numbers, default=[2, 4], help="numbers of peers, such as 2,4")
    parser.add_argument("--mib", type=numbers, default=[1, 16, 64, 256], help="tensor sizes, such as 1,16")
    parser.add_argument("--codecs", type=words, default=["raw", "bf16", "int8", "e3m0"])
    parser.add_argument("--repeats", type=int, default=9, help="at least 7; four times as many below 256 MiB")
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--chunk-kib", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--no-gloo", dest="gloo", action="store_false", help="ours alone")
    parser.add_argument("--no-cubic", dest="cubic", action="store_false", help="leave the second pass out")
    parser.add_argument("--json", type=Path)
    for internal in ("--rank", "--world-size", "--port"):
        parser.add_argument(internal, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peer:
        asyncio.run(peer(options))
        return
    control = DEFAULT_CONTROL.read_text().strip()
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    report: Row = {
        "machine": machine | {"has_stream_copy": HAS_STREAM_COPY},
        "congestion_control": control,
        "rows": [],
        "rows_cubic": [],
    }
    for world in options.world:
        report["rows"] += run_world(world, options, in_cubic_namespace=False)
    show(report["rows"], f"kernel's default congestion control ({control}) for gloo, cubic for ours")
    if options.cubic and control != "cubic" and os.geteuid() == 0:
        for world in options.world:
            report["rows_cubic"] += run_world(world, options, in_cubic_namespace=True)
        show(report["rows_cubic"], "cubic for both")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
