#!/usr/bin/env python3
"""A peer joins a running run of three, is frozen, and comes back: what does it cost it, and what the members?

Four processes of scripts/join_peer.py: all of a peer but its workers, over a synthetic model (25 M parameters: 100 MB,
a shared state of 200 MB), on loopback and, with --mbit RATE, on an emulated network of that rate (needs root).

Measured: start-up (from the start of the process to its first word), time until it is a member, and the transfer (the
first catch-up): its share of the link, of all the time and of the time between rounds, as state waits while an exchange
moves. The stall is how much longer than a calm outer step the longest one took; an outer step lasts from one commit, at
the last member, to the next. Steps from the start of the joiner to its admission are compared with those before, of
three members; the step of its first contribution with those after, of four.
Then the joiner is stopped (SIGSTOP) until the others have made N more steps, and continued: bytes that it verified
until it is a member again, over those of the state. Checked: one digest a step, and every weight in every result.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collective.standalone import peer_id_of
from elastic.core.records import CommitRecord
from elastic.journal import Journal
from scripts.join_peer import RUN_ID
from scripts.wanlink.scenario import Scenario, Step
from scripts.wanlink.wan import Wan

PEER = Path(__file__).resolve().parent / "join_peer.py"
MEMBERS, JOINER = 3, 3
MAX_STALL_S = 0.05
MIN_LINK_SHARE = 0.7
MAX_RETURN_SHARE = 0.2
QUEUE_MS = 64.0
Row = dict[str, Any]


class Process:
    """One peer, and what it has said."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, changed: asyncio.Condition) -> None:
        self.number = number
        self.started = time.monotonic()
        self.process = process
        self.said: list[Row] = []
        self._changed = changed

    async def listen(self) -> None:
        """Take its words until it ends; it must not end by itself."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.said.append(json.loads(line))
            async with self._changed:
                self._changed.notify_all()
        raise RuntimeError(f"peer {self.number} has ended with {await self.process.wait()}")

    def of(self, event: str) -> list[Row]:
        return [row for row in self.said if row["event"] == event]

    @property
    def step(self) -> int:
        return max((row["outer_step"] for row in self.of("committed")), default=0)


class Run:
    """The processes of one measurement."""

    def __init__(self, options: argparse.Namespace, wan: Wan | None, folder: Path) -> None:
        self.options, self.wan, self.folder = options, wan, folder
        self.processes: list[Process] = []
        self._changed = asyncio.Condition()
        self._listening: list[asyncio.Task[None]] = []

    async def start(self, tasks: asyncio.TaskGroup) -> Process:
        """The next peer."""
        number = len(self.processes)
        config = {
            "number": number,
            "host": "127.0.0.1" if self.wan is None else self.wan.address(number),
            "coordinator": self.processes[0].of("listening")[0]["address"] if number else None,
            "numel": self.options.parameters,
            "fragments": self.options.fragments,
            "codec": self.options.codec,
            "inner_s": self.options.inner_s,
            "journal": str(self.folder / "journal.sqlite"),
            "heartbeat_timeout_s": 2.0,
        }
        argv = [sys.executable, str(PEER), json.dumps(config)]
        if self.wan is not None:
            argv = self.wan.command(number, argv)
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, start_new_session=True)
        self.processes.append(Process(number, process, self._changed))
        self._listening.append(tasks.create_task(self.processes[-1].listen()))
        return self.processes[-1]

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self.options.deadline_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            said = "\n".join(f"peer {process.number}: {process.said[-5:]}" for process in self.processes)
            raise RuntimeError(f"no {what} within {self.options.deadline_s:.0f} s\n{said}") from None

    async def until_step(self, step: int, processes: Sequence[Process]) -> None:
        await self.until(f"outer step {step}", lambda: all(process.step >= step for process in processes))

    async def end(self) -> None:
        for task in self._listening:
            task.cancel()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.process.kill()
            await process.process.wait()


# ------------------------------------------------------------------------------------------ what is measured


async def measure(options: argparse.Namespace, wan: Wan | None) -> Row:
    with tempfile.TemporaryDirectory(prefix="bench-join-") as folder:
        run = Run(options, wan, Path(folder))
        try:
            async with asyncio.TaskGroup() as tasks:
                row = await story(run, tasks)
                await run.end()
        finally:
            await run.end()
        return row | {"contributions": check(run, Path(folder) / "journal.sqlite")}


async def story(run: Run, tasks: asyncio.TaskGroup) -> Row:
    options = run.options
    for _ in range(MEMBERS):
        process = await run.start(tasks)
        await run.until("address", lambda process=process: bool(process.of("listening")))
    members = run.processes[:MEMBERS]
    await run.until_step(1, members)
    warm = max(process.step for process in members) + 2
    await run.until_step(warm + options.calm, members)
    joiner = await run.start(tasks)
    await run.until("first contribution", lambda: len(joiner.of("committed")) >= 2)
    first = joiner.of("committed")[0]
    calm = spans(members, range(warm + 1, warm + options.calm + 1))
    during = [step for step in steps(members) if last(members, step) > joiner.started and step <= first["outer_step"]]
    row: Row = {"mbit": options.mbit if run.wan is not None else None, "codec": options.codec, "members": MEMBERS}
    row["fragments"] = options.fragments
    row |= join_of(members, joiner, first, options, run.wan is not None)
    everybody = [*members, joiner]
    await run.until_step(first["outer_step"] + 1 + options.calm, everybody)
    after = spans(members, range(first["outer_step"] + 2, first["outer_step"] + 2 + options.calm))
    row |= stall_of(calm, spans(members, during), after, options.inner_s)
    row["returns"] = [await freeze(run, members, joiner, missed) for missed in options.missed]
    return row


def join_of(
    members: Sequence[Process], joiner: Process, first: Row, options: argparse.Namespace, has_link: bool
) -> Row:
    state_nbytes = 8 * options.parameters
    snapshot = joiner.of("caught_up")[0]
    rate = snapshot["nbytes"] / snapshot["seconds"]
    begin, end = snapshot["t"] - snapshot["seconds"], snapshot["t"]
    rounds_s = sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in rounds_of(members))
    link_share = rate * 8 / (options.mbit * 1e6) if has_link else None
    return {
        "state_nbytes": state_nbytes,
        "start_s": joiner.of("listening")[0]["t"] - joiner.started,
        "transfer_s": snapshot["seconds"],
        "transfer_nbytes": snapshot["nbytes"],
        "transfer_bytes_per_s": rate,
        "rounds_meanwhile_s": rounds_s,
        "link_share": link_share,
        "free_link_share": None if link_share is None else link_share / (1 - rounds_s / snapshot["seconds"]),
        "active_s": joiner.of("active")[0]["t"] - joiner.started,
        "contributed_s": first["t"] - joiner.started,
    }


def stall_of(calm: Sequence[float], during: Sequence[float], after: Sequence[float], inner_s: float) -> Row:
    *fetching, admission = during
    before, of_four = statistics.median(calm), statistics.median(after)
    return {
        "calm_round_s": before - inner_s,
        "calm_spread_s": [min(calm) - before, max(calm) - before],
        "after_round_s": of_four - inner_s,
        "after_spread_s": [min(after) - of_four, max(after) - of_four],
        "steps_during_fetch": len(fetching),
        "fetch_stall_s": max(fetching, default=before) - before,
        "fetch_stalls_s": [span - before for span in fetching],
        "admission_stall_s": admission - of_four,
    }


async def freeze(run: Run, members: Sequence[Process], joiner: Process, missed: int) -> Row:
    """Stop the joiner for so many steps of the others; what does it fetch when it is back?"""
    await run.until_step(max(process.step for process in members) + 1, [*members, joiner])
    num_actives, num_catch_ups, held = len(joiner.of("active")), len(joiner.of("caught_up")), joiner.step
    joiner.process.send_signal(signal.SIGSTOP)
    await run.until_step(held + missed, members)
    behind = min(process.step for process in members) - held
    joiner.process.send_signal(signal.SIGCONT)
    continued = time.monotonic()
    await run.until("return", lambda: len(joiner.of("active")) > num_actives)
    nbytes = sum(row["nbytes"] for row in joiner.of("caught_up")[num_catch_ups:])
    active = joiner.of("active")[-1]
    return {
        "missed": behind,
        "replayed_to": active["outer_step"] - held,
        "nbytes": nbytes,
        "share": nbytes / (8 * run.options.parameters),
        "seconds": active["t"] - continued,
    }


def steps(members: Sequence[Process]) -> list[int]:
    return sorted({row["outer_step"] for row in members[0].of("committed")})


def last(members: Sequence[Process], step: int) -> float:
    """When the last member had this commit."""
    return max(row["t"] for process in members for row in process.of("committed") if row["outer_step"] == step)


def rounds_of(members: Sequence[Process]) -> list[tuple[float, float]]:
    """When each exchange began, with the last hand-in, and when its commit was everywhere."""
    begins = {
        step: max(
            row["handed_in"] for process in members for row in process.of("committed") if row["outer_step"] == step
        )
        for step in steps(members)
    }
    return [(begin, last(members, step)) for step, begin in begins.items()]


def spans(members: Sequence[Process], numbers: Sequence[int]) -> list[float]:
    """Length of each of these outer steps, from commit to commit."""
    return [last(members, step) - last(members, step - 1) for step in numbers]


def check(run: Run, path: Path) -> int:
    """One digest a step, and in every result each member once with its weight. Returns the joiner's contributions."""
    journal = Journal(path, run_id=RUN_ID)
    try:
        commits = [record for record in journal.replay() if isinstance(record, CommitRecord)]
    finally:
        journal.close()
    weight_of = {peer_id_of(process.number): 100.0 + process.number for process in run.processes}
    written = {commit.outer_step: commit for commit in commits}
    for process in run.processes:
        for row in process.of("committed"):
            commit = written[row["outer_step"]]
            if commit.digest.hex() != row["digest"]:
                raise RuntimeError(f"peer {process.number} has another state at outer step {row['outer_step']}")
            recorded = {item.ref.peer_id: item.weight for item in commit.contributions}
            if recorded != row["weights"] or any(weight_of[peer] != weight for peer, weight in recorded.items()):
                raise RuntimeError(f"outer step {row['outer_step']} was made with {row['weights']}, not {recorded}")
    joiner = peer_id_of(JOINER)
    return sum(item.ref.peer_id == joiner for commit in commits for item in commit.contributions)


# ------------------------------------------------------------------------------------------ telling


def lines(row: Row) -> list[str]:
    where = "loopback" if row["mbit"] is None else f"{row['mbit']:g} Mbit/s"
    share = ""
    if row["link_share"] is not None:
        share = f", {100 * row['link_share']:.0f} % of the link, {100 * row['free_link_share']:.0f} % between rounds"
    fragments = f", {row['fragments']} fragments in turn" if row["fragments"] > 1 else ""
    result = [
        f"{where}, {row['codec']}, state of {row['state_nbytes'] / 1e6:.0f} MB{fragments}, {row['members']} members",
        f"  start-up {row['start_s']:.2f} s, transfer {row['transfer_s']:.2f} s "
        f"({row['transfer_bytes_per_s'] / 1e6:.0f} MB/s{share}), member after {row['active_s']:.2f} s",
        f"  calm round {row['calm_round_s']:.3f} s ({_spread(row['calm_spread_s'])}); longest of "
        f"{row['steps_during_fetch']} steps during the join {row['fetch_stall_s']:+.3f} s",
        f"  calm round of four {row['after_round_s']:.3f} s ({_spread(row['after_spread_s'])}); the first one "
        f"{row['admission_stall_s']:+.3f} s",
        f"  {row['contributions']} contributions of the joiner, all weights right",
    ]
    returns = [
        f"  back after {back['missed']} steps: {back['nbytes'] / 1e6:.1f} MB, {100 * back['share']:.1f} % of the "
        f"state, for {back['replayed_to']} steps, in {back['seconds']:.2f} s"
        for back in row["returns"]
    ]
    return [*result, *returns]


def _spread(spread: Sequence[float]) -> str:
    return f"{spread[0]:+.3f} to {spread[1]:+.3f}"


@contextlib.asynccontextmanager
async def network(mbit: float | None, delay_ms: float) -> AsyncIterator[Wan | None]:
    if mbit is None:
        yield None
        return
    port = {"up_mbit": mbit, "down_mbit": mbit, "queue_ms": QUEUE_MS}
    start = Step(links={"*": {"delay_ms": delay_ms}}, ports={"*": port})
    with Wan(scenario=Scenario(peers=MEMBERS + 1, seed=1, start=start)) as wan:
        yield wan


async def run_all(options: argparse.Namespace) -> list[Row]:
    rows = []
    rates: list[float | None] = [] if options.no_loopback else [None]
    if options.mbit and os.geteuid() == 0:
        rates.append(options.mbit)
    elif options.mbit:
        print("no emulated link: it needs root")
    for rate in rates:
        async with network(rate, options.delay_ms) as wan:
            rows.append(await measure(options, wan))
        print(*lines(rows[-1]), sep="\n", flush=True)
    return rows


def main() -> int:
    options = _options()
    rows = asyncio.run(run_all(options))
    if options.json:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench join", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parameters", type=int, default=25_000_000, help="of the model; 25,000,000")
    parser.add_argument("--fragments", type=int, default=1, help="that take turns, as in Streaming DiLoCo; 1")
    parser.add_argument("--codec", default="int8", help="of the exchange; int8")
    parser.add_argument("--inner-s", type=float, default=2.0, help="between two rounds; 2")
    parser.add_argument("--calm", type=int, default=8, help="outer steps before the join that it is compared with; 8")
    parser.add_argument("--missed", type=_numbers, default=[1, 4, 8], metavar="A,B", help="steps of an absence; 1,4,8")
    parser.add_argument("--mbit", type=float, default=0.0, help="also over emulated links of this rate, 10^6 bit/s")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of those, one way; 10")
    parser.add_argument("--no-loopback", action="store_true", help="the emulated links alone")
    parser.add_argument("--deadline-s", type=float, default=180.0, help="for anything that is waited for; 180")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if options.fragments < 1 or options.parameters % options.fragments:
        parser.error("--parameters must be a multiple of --fragments")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
