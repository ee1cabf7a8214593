# SPDX-License-Identifier: Apache-2.0
"""How long a training loop stands still for one outer step of DiLoCo: two peers on this machine, int8.

    scripts/bench outer --millions 50 150 --json outer.json

Both peers are loops of their own (`isthmus.attach`) whose inner step is nothing but an SGD update, so that what is
measured is the outer step: the time of `optimizer.step()` where an exchange is due, less what it takes elsewhere. Of
that the exchange itself is what the daemon says of it (`round` in events.jsonl). Beside it, in the same run:

    all-reduce   a bare one of the parameters in fp32 by gloo, which is four times the bytes
    torchft      its DiLoCo over gloo in fp32, if it is installed: what its hook of `optimizer.step` takes

Linux and two free cores; say which processor it was. What a daemon's memory is for: `scripts/bench memory`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from isthmus.trainer.record.event_log import FILE_NAME, read_events

INNER_STEPS = 4
WARM_UP = 2
TIMEOUT_S = 600
NUM_LAYERS = 12
MILLION = 1_000_000


def main() -> int:
    """Measure and print; returns the exit code."""
    options = _options()
    if options.role is not None:
        _ROLES[options.role](options)
        return 0
    rows = []
    print(f"{'parameters':>10} {'':12} {'exchange':>9} {'outer step':>10} {'beyond / exchange':>18}")
    for millions in options.millions:
        row: dict[str, Any] = {"millions": millions, "processor": _processor(), "cores": os.cpu_count()}
        row["isthmus"] = _isthmus(millions, options.outer_steps)
        row["all_reduce_s"] = _both("gloo", millions, options.outer_steps)["median_s"]
        if find_spec("torchft") is not None:
            row["torchft"] = _both("torchft", millions, options.outer_steps)
        _print(row)
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))
    return 0


def _print(row: dict[str, Any]) -> None:
    ours = row["isthmus"]
    name = f"{row['millions']} M"
    print(
        f"{name:>10} {'isthmus':12} {ours['exchange_s']:8.3f}s {ours['median_s']:9.3f}s {ours['beyond']:17.2f}",
        flush=True,
    )
    print(f"{name:>10} {'all-reduce':12} {row['all_reduce_s']:8.3f}s", flush=True)
    if "torchft" in row:
        print(f"{name:>10} {'torchft':12} {'':9} {row['torchft']['median_s']:9.3f}s", flush=True)


# ------------------------------------------------------------------------------------------------- two processes


def _isthmus(millions: int, outer_steps: int) -> dict[str, float]:
    words = ["--outer-steps", str(outer_steps + WARM_UP), "--outer.inner-steps", str(INNER_STEPS)]

    def start(rank: int, command: str) -> subprocess.Popen[str]:
        return _start("isthmus", rank, millions, outer_steps, {"ISTHMUS_COMMAND": command})

    result, events = run_pair(start, [*words, "--checkpoint.every", "0"])
    exchange_s = statistics.median([event["seconds"] for event in events if event["event"] == "round"][WARM_UP:])
    return result | {"exchange_s": exchange_s, "beyond": (result["median_s"] - exchange_s) / exchange_s}


def run_pair(
    start: Callable[[int, str], subprocess.Popen[str]], words: Sequence[str]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """As `run_two`; what the founder prints last is JSON."""
    told, events = run_two(start, [*words, "--members.equal_steps", "true"])  # each outer step has its place then
    result: dict[str, float] = json.loads(told[0].strip().splitlines()[-1])
    return result, events


def run_two(
    start: Callable[[int, str], subprocess.Popen[str]], words: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Two peers on this machine.

    Args:
        start: of a rank and its command.
        words: of the founder's command.

    Returns:
        What each of them prints, and the events of the founder's daemon.
    """
    with tempfile.TemporaryDirectory() as folder:
        ticket = Path(folder, "ticket")
        common = ["--listen", "127.0.0.1:0", "--dir"]
        founder = start(
            0, " ".join(["up", "--peers", "2", "--ticket-file", str(ticket), *words, *common, f"{folder}/0"])
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not ticket.exists():
            if founder.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("isthmus: the founder has not come up")
            time.sleep(0.05)
        joined = start(1, " ".join(["join", f"@{ticket}", *common, f"{folder}/1"]))
        told = _ended(founder, joined)
        return told, list(read_events(Path(folder, "0", FILE_NAME)))


def _both(role: str, millions: int, outer_steps: int) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lighthouse = None
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if role == "torchft":
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
        place["TORCHFT_LIGHTHOUSE"] = lighthouse.address().replace(socket.gethostname(), "127.0.0.1")
    try:
        told = _ended(*(_start(role, rank, millions, outer_steps, place) for rank in range(2)))
        result: dict[str, float] = json.loads(told[0].strip().splitlines()[-1])
        return result
    finally:
        if lighthouse is not None:
            lighthouse.shutdown()


def _start(role: str, rank: int, millions: int, outer_steps: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    words = ["--role", role, "--rank", str(rank), "--millions", str(millions), "--outer-steps", str(outer_steps)]
    return subprocess.Popen(
        [sys.executable, __file__, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def _ended(*processes: subprocess.Popen[str]) -> list[str]:
    """What each of them prints, once all have ended."""
    told: list[str] = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=TIMEOUT_S)
            if process.returncode:
                raise SystemExit(f"isthmus: a peer ended with {process.returncode}:\n{errors[-2000:]}")
            told.append(out)
    finally:
        for process in processes:
            process.kill()
    return told


# --------------------------------------------------------------------------------------------------- in a process


def model_of(millions: int) -> tuple[nn.Module, Optimizer]:
    """So many parameters in matrices of a dozen layers, and an optimizer that costs next to nothing."""
    rows = millions * MILLION // NUM_LAYERS // 1000
    model = nn.ModuleList([nn.Linear(1000, rows, bias=False) for _ in range(NUM_LAYERS)])
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def _timed_steps(optimizer: Optimizer, number: int) -> list[float]:
    times = []
    for _ in range(number):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return times


def _tell(times: list[float]) -> None:
    """The outer steps among them: every `INNER_STEPS`-th, less what the others take."""
    inner_s = statistics.median(time_s for number, time_s in enumerate(times, 1) if number % INNER_STEPS)
    outer = [time_s - inner_s for time_s in times[INNER_STEPS - 1 :: INNER_STEPS]][WARM_UP:]
    print(json.dumps({"median_s": statistics.median(outer), "least_s": min(outer), "inner_s": inner_s}))


def _peer_isthmus(options: argparse.Namespace) -> None:
    import isthmus

    model, optimizer = model_of(options.millions[0])
    times: list[float] = []
    with isthmus.attach(model, optimizer) as session:
        while not session.is_over:
            times += _timed_steps(optimizer, 1)
    _tell(times[: (options.outer_steps + WARM_UP) * INNER_STEPS - 1])


def _peer_gloo(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo", rank=options.rank, world_size=2)
    flat = torch.zeros(options.millions[0] * MILLION)
    times = []
    for _ in range(options.outer_steps + WARM_UP):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(flat)
        times.append(time.perf_counter() - began)
    print(json.dumps({"median_s": statistics.median(times[WARM_UP:]), "least_s": min(times[WARM_UP:])}))
    dist.destroy_process_group()


def _peer_torchft(options: argparse.Namespace) -> None:
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    model, optimizer = model_of(options.millions[0])
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    port = int(os.environ["MASTER_PORT"]) + options.rank
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"peer-{options.rank}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    gradients = [param.grad for param in model.parameters()]
    times: list[float] = []
    with DiLoCo(manager, [model], optimizer, outer, sync_every=INNER_STEPS):
        for _ in range((options.outer_steps + WARM_UP) * INNER_STEPS):
            for param, gradient in zip(model.parameters(), gradients, strict=True):
                param.grad = gradient  # its outer step takes them away
            times += _timed_steps(optimizer, 1)
    _tell(times)
    sys.stdout.flush()
    os._exit(0)  # its servers need not be asked


_ROLES = {"isthmus": _peer_isthmus, "gloo": _peer_gloo, "torchft": _peer_torchft}


def _processor() -> str:
    def names() -> Iterator[str]:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                yield line.partition(":")[2].strip()

    return next(names(), "unknown")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench outer", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--millions", type=int, nargs="+", default=[50], metavar="N", help="parameters; 50")
    parser.add_argument("--outer-steps", type=int, default=9, help="of which the median is taken; 9")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--role", choices=sorted(_ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
