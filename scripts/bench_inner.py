# SPDX-License-Identifier: Apache-2.0
"""What a peer's inner steps cost beyond a bare training loop of the same model, on this machine's CPU.

    scripts/bench inner --json inner.json

Three measurements; --only picks some of them:

    speed     tokens a second of a worker, asked as its daemon asks it, over those of a bare loop: the same decoder,
              plain cross-entropy, fused AdamW, clipping, nothing else. Both are processes with the same number of
              threads, which take turns of a few steps; the median of the ratios of neighbouring turns counts. Beside it
              the same by processor time, which others on the machine disturb less.
    exchange  how much slower two peers train with Streaming, whose exchanges are under way while inner steps go on,
              than two that exchange nothing: whole daemons, a thread each, one pair after the other. By the workers'
              own seconds, and by all that passes between the first and the last step.
    memory    the most memory of a worker of the 50m preset with each `node.activation_checkpointing`

Linux, and two free cores. Say which processor it was.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import psutil
import torch

from isthmus.trainer.config.job import ActivationCheckpointing, OptimizerJob, ScheduleJob, TrainingJob
from isthmus.trainer.data.corpus import Corpus, load_corpus
from isthmus.trainer.data.samples import SampleSource
from isthmus.trainer.model.decoder import ModelConfig, preset
from isthmus.trainer.record.event_log import FILE_NAME, read_events
from isthmus.trainer.workers.link import WINDOW
from isthmus.trainer.workers.make_pool import worker_pool
from isthmus.trainer.workers.pool import WorkerPool
from isthmus.trainer.workers.shared_buffer import SharedBuffer
from scripts.bare_training import BareTraining

Row = dict[str, Any]
TIMEOUT_S = 1800
LR = 1e-4
SEED = 0


def main() -> int:
    """Measure and print; returns the exit code."""
    options = _options()
    if options.role == "bare":
        _bare(options)
        return 0
    result: Row = {"processor": _processor(), "cores": os.cpu_count(), "threads": options.threads}
    for name, measure in (("speed", _speed), ("exchange", _exchange), ("memory", _memory)):
        if name in options.only:
            result[name] = measure(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0


def _job(name: str, batch: int, keep: ActivationCheckpointing = "none") -> TrainingJob:
    model = preset(name)
    return TrainingJob(
        model=model,
        seq_len=model.max_seq_len,
        data_seed=SEED,
        optimizer=OptimizerJob(lr=LR),
        schedule=ScheduleJob(total_steps=1_000_000),
        micro_batch=batch,
        activation_checkpointing=keep,
        eval_batch=1,
        num_eval_batches=1,
    )


# --------------------------------------------------------------------------------------------------------- speed


def _speed(options: argparse.Namespace) -> Row:
    words = ["--role", "bare", "--model", options.model, "--batch", str(options.batch)]
    words += ["--steps", str(options.steps), "--threads", str(options.threads)]
    # In a session of its own, as a worker is: some kernels share the processor between sessions.
    bare = subprocess.Popen(
        [sys.executable, __file__, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        turns = asyncio.run(_turns(options, bare))
    finally:
        bare.kill()
        bare.wait()
    tokens = options.batch * options.steps * preset(options.model).max_seq_len
    row: Row = {"model": options.model, "batch": options.batch, "turns": turns}
    for name in ("wall_s", "processor_s"):
        ratios = [bare[name] / worker[name] for worker, bare in turns]
        row[f"ratio_by_{name}"] = statistics.median(ratios)
        row[f"ratios_by_{name}"] = ratios
    worker_s, bare_s = (statistics.median(turn[side]["wall_s"] for turn in turns) for side in (0, 1))
    ratios = row["ratios_by_wall_s"]
    print(
        f"speed     {options.model}, batches of {options.batch}: worker {tokens / worker_s:,.0f} tokens/s, "
        f"bare loop {tokens / bare_s:,.0f}: {row['ratio_by_wall_s']:.3f} (aim 0.97; {min(ratios):.3f} to "
        f"{max(ratios):.3f} in {len(ratios)} pairs of turns); by processor time {row['ratio_by_processor_s']:.3f}",
        flush=True,
    )
    return row


async def _turns(
    options: argparse.Namespace, bare: subprocess.Popen[str]
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """What the worker and the bare loop took, of each pair of turns but the first, in which both warm up."""
    assert bare.stdin is not None
    assert bare.stdout is not None
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        async with _pool(_job(options.model, options.batch), Path(folder), options.threads) as pool:
            await pool.load()
            for turn in range(options.turns + 1):
                began, had = time.perf_counter(), _processor_s(pool.pids[0])
                await _steps(pool, turn * options.steps, options.steps, options.batch)
                wall_s = time.perf_counter() - began
                worker = {"wall_s": wall_s, "processor_s": _processor_s(pool.pids[0]) - had}
                bare.stdin.write("go\n")
                bare.stdin.flush()
                turns.append((worker, json.loads(await asyncio.to_thread(bare.stdout.readline))))
    return turns[1:]


def _processor_s(pid: int) -> float:
    """What a process has computed so far, all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _pool(job: TrainingJob, folder: Path, threads: int) -> WorkerPool:
    first = job.model.initial_parameters(SEED)
    mailbox = SharedBuffer.create(first.numel())
    mailbox.tensor.copy_(first)
    return worker_pool(job, mailbox=mailbox, corpus=_corpus(), device="cpu", num_threads=threads, log_dir=folder)


async def _steps(pool: WorkerPool, before: int, number: int, batch: int) -> None:
    """So many inner steps, as a training loop asks for them: the next is with the worker before this one is done."""
    under_way: list[asyncio.Future[object]] = []
    for step in range(before, before + number):
        indices = range(step * batch, (step + 1) * batch)
        under_way.append(asyncio.ensure_future(pool.step(indices, inner_step=step + 1)))
        if len(under_way) == WINDOW:
            await under_way.pop(0)
    await asyncio.gather(*under_way)


@cache
def _corpus() -> Corpus:
    """The standard library's sources, as by default."""
    return load_corpus(None, seq_len=1)


def _bare(options: argparse.Namespace) -> None:
    """A turn for each line that is read; prints what it took."""
    torch.set_num_threads(options.threads)
    job = _job(options.model, options.batch)
    assert isinstance(job.model, ModelConfig), "a preset"
    training = BareTraining(job.model, device=torch.device("cpu"), lr=LR, seed=SEED)
    samples = SampleSource(_corpus().train, job.seq_len, SEED)
    step = itertools.count()
    for _ in sys.stdin:
        began, had = time.perf_counter(), time.process_time()
        for _ in range(options.steps):
            at = next(step) * options.batch
            training.step(*samples.batch(range(at, at + options.batch))).item()
        took = {"wall_s": time.perf_counter() - began, "processor_s": time.process_time() - had}
        print(json.dumps(took), flush=True)


# ------------------------------------------------------------------------------------------------------ exchange


def _exchange(options: argparse.Namespace) -> Row:
    rows = [(_pair(options, exchanges=False), _pair(options, exchanges=True)) for _ in range(options.pairs)]
    row: Row = {"model": options.model, "batch": options.batch, "inner_steps": options.inner_steps, "pairs": rows}
    for name in ("step", "wall"):
        row[f"slower_by_{name}"] = statistics.median(alone[name] / both[name] - 1.0 for alone, both in rows)
    print(
        f"exchange  {options.model}, Streaming in {options.fragments} fragments every {options.every} steps: "
        f"slower by {row['slower_by_step']:+.1%} in the workers, {row['slower_by_wall']:+.1%} in all (aim 3 %)",
        flush=True,
    )
    return row


def _pair(options: argparse.Namespace, *, exchanges: bool) -> dict[str, float]:
    """Tokens a second of two peers at once, by the workers' seconds (`step`) and by all that passed (`wall`)."""
    outer = ["--outer.type", "streaming", "--outer.inner-steps", str(options.every)]
    outer += ["--outer.num-fragments", str(options.fragments)]
    # An outer step of Streaming is one fragment's.
    number = options.inner_steps * options.fragments // options.every
    if not exchanges:
        outer, number = ["--outer.type", "diloco", "--outer.inner-steps", str(options.inner_steps)], 1
    words = ["--model.preset", options.model, "--inner.batch-size", str(options.batch), *outer]
    words += ["--run.outer-steps", str(number), "--eval.every", "0", "--checkpoint.every", "0"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = ["--listen", "127.0.0.1:0", "--node.threads", "1", "--metrics.port", "none"]
        ticket = folder / "ticket"
        first = [*words, *common, "--ticket-file", str(ticket), "--dir", str(folder / "0")]
        peers = [_isthmus("up", *first, *(["--peers", "2"] if exchanges else []))]
        if exchanges:
            _await(ticket, peers[0])
            local = ["--listen", "127.0.0.1:0", "--node.threads", "1"]
            peers.append(_isthmus("join", f"@{ticket}", *local, "--dir", str(folder / "1")))
        else:
            peers.append(_isthmus("up", *words, *common, "--dir", str(folder / "1")))
        _end(peers)
        return _rates([list(read_events(folder / str(peer) / FILE_NAME)) for peer in range(2)])


def _isthmus(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "isthmus.trainer.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def _await(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("isthmus: the founder has not come up")
        time.sleep(0.05)


def _end(peers: Sequence[subprocess.Popen[str]]) -> None:
    try:
        for peer in peers:
            _, errors = peer.communicate(timeout=TIMEOUT_S)
            if peer.returncode:
                raise SystemExit(f"isthmus: a peer ended with {peer.returncode}:\n{errors[-2000:]}")
    finally:
        for peer in peers:
            peer.kill()


def _rates(logs: Sequence[Sequence[Row]]) -> dict[str, float]:
    rounds = [event for log in logs for event in log if event["event"] == "trained"]
    tokens = sum(event["tokens"] for event in rounds)
    return {
        "step": sum(event["step_tokens"] for event in rounds) / sum(event["step_s"] for event in rounds),
        "wall": tokens / sum(event["train_s"] + event["wait_s"] for event in rounds),
    }


# -------------------------------------------------------------------------------------------------------- memory


def _memory(options: argparse.Namespace) -> Row:
    row: Row = {"model": "50m", "batch": options.memory_batch}
    for keep in get_args(ActivationCheckpointing):
        nbytes, seconds = asyncio.run(_peak(_job("50m", options.memory_batch, keep), options))
        row[keep] = {"nbytes": nbytes, "step_s": seconds}
        print(
            f"memory    50m, {options.memory_batch} samples at a time, activation_checkpointing = {keep}: "
            f"{nbytes / 1e9:.2f} GB, {seconds:.1f} s a step",
            flush=True,
        )
    return row


async def _peak(job: TrainingJob, options: argparse.Namespace) -> tuple[int, float]:
    """The most memory that the worker had in two steps, bytes, and the seconds of the second."""
    with tempfile.TemporaryDirectory() as folder:
        async with _pool(job, Path(folder), options.threads) as pool:
            await pool.load()
            await pool.step(range(options.memory_batch), inner_step=1)
            done = await pool.step(range(options.memory_batch), inner_step=2)
            return _most_nbytes(pool.pids[0]), done.seconds


def _most_nbytes(pid: int) -> int:
    kilobytes = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert kilobytes is not None, "Linux tells it"
    return int(kilobytes[1]) << 10


def _processor() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else "unknown"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench inner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("speed", "exchange", "memory")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="what to measure; all")
    parser.add_argument("--model", default="10m", help="preset, of speed and exchange; 10m")
    parser.add_argument("--batch", type=int, default=4, help="samples of an inner step; 4")
    parser.add_argument("--threads", type=int, default=1, help="of the worker and of the bare loop; 1")
    parser.add_argument("--steps", type=int, default=4, help="inner steps of a turn; 4")
    parser.add_argument("--turns", type=int, default=9, help="pairs of turns; 9")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of peers with and without exchanges; 3")
    parser.add_argument("--inner-steps", type=int, default=64, help="of each of these; 64")
    parser.add_argument("--every", type=int, default=16, help="inner steps between two exchanges of a fragment; 16")
    parser.add_argument("--fragments", type=int, default=4, help="of Streaming; 4")
    parser.add_argument("--memory-batch", type=int, default=4, help="samples at a time; 4")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--role", choices=("bare",), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
