# SPDX-License-Identifier: Apache-2.0
"""What keys, signatures and the disk cost a commit.

Processes of scripts/join_peer.py: all of a peer but its workers, over a small synthetic model, on loopback and (needs
root) on emulated networks. A run has signatures and seals, and writes results and certificates to the disk, as daemons
do; another one has neither. Both have the coordinator's journal. Runs are made in turn, so that all meet the same
weather on this machine.

    wait     a round trip to the coordinator, and what comes to it between the last vote and the last member's having
             the commit: its signature, words, the checks of all signatures, the journal, the seal and its check
    round    from the last member's hand-in until the last member has the commit: exchange, staging, wait

A figure is the median over the outer steps of a run after the first ones; of runs it is the median again. Every commit
has one digest at all members.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.join_run import Process, Row, Run, network, tell

FIRST_STEPS = 6
"""Links are measured and warm up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One network."""

    members: int
    rtt_ms: float = 0.0
    """0: loopback."""

    def __str__(self) -> str:
        return f"{self.members} members, " + (f"{self.rtt_ms:g} ms round trips" if self.rtt_ms else "loopback")


CASES = (Case(members=2), Case(members=4), Case(members=4, rtt_ms=50.0), Case(members=4, rtt_ms=150.0))


async def measure(case: Case, options: argparse.Namespace, *, is_proven: bool) -> tuple[float, float]:
    """One run; returns the medians of wait and round, in seconds."""
    with tempfile.TemporaryDirectory(prefix="bench-commit-", dir=options.folder) as folder:
        settings: Row = {"numel": options.parameters, "fragments": 1, "codec": "int8", "inner_s": options.inner_s}
        settings |= {"start_peers": case.members, "signs": is_proven, "folder": folder if is_proven else None}
        async with network(options.mbit if case.rtt_ms else None, case.rtt_ms / 2, case.members) as wan:
            run = Run(settings, wan, Path(folder), deadline_s=options.deadline_s)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(case.members):
                        process = await run.start(tasks)
                        await run.until("address", partial(process.has_said, "listening"))
                    await run.until_step(FIRST_STEPS + options.steps, run.processes)
                    await run.end()
            finally:
                await run.end()
        steps = range(FIRST_STEPS + 1, FIRST_STEPS + options.steps + 1)
        return figures(run.processes, steps, trip_s=case.rtt_ms / 2000)


def figures(members: Sequence[Process], steps: range, *, trip_s: float) -> tuple[float, float]:
    """Medians over these outer steps, of wait and round.

    `trip_s`: one way. The first member coordinates: its own vote and commit have no way to go.
    """
    waits, rounds = [], []
    for step in steps:
        rows = [row for process in members for row in process.of("committed") if row["outer_step"] == step]
        if len(rows) != len(members) or len({row["digest"] for row in rows}) != 1:
            raise RuntimeError(f"outer step {step} is not one commit of all: {rows}")
        all_have_it = max(row["t"] for row in rows)
        all_votes_are_in = max(row["voted"] + (trip_s if number else 0.0) for number, row in enumerate(rows))
        waits.append(all_have_it - all_votes_are_in + trip_s)
        rounds.append(all_have_it - max(row["handed_in"] for row in rows))
    return statistics.median(waits), statistics.median(rounds)


async def run_all(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for case in CASES:
        if case.rtt_ms and options.no_wan:
            continue
        runs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(options.runs):
            for is_proven, results in runs.items():
                results.append(await measure(case, options, is_proven=is_proven))
        row = row_of(case, runs)
        rows.append(row)
        print(line(row), flush=True)
    return rows


def row_of(case: Case, runs: dict[bool, list[tuple[float, float]]]) -> Row:
    row: Row = {"case": str(case)}
    for name, results in (("without", runs[False]), ("with", runs[True])):
        waits, rounds = zip(*results, strict=True)
        row[name] = {"wait_s": statistics.median(waits), "round_s": statistics.median(rounds), "waits_s": sorted(waits)}
    return row


def line(row: Row) -> str:
    before, after = row["without"], row["with"]
    added_s, of_round_s = after["wait_s"] - before["wait_s"], after["round_s"] - before["round_s"]
    spreads = ", ".join(f"{1e3 * min(one['waits_s']):.1f}–{1e3 * max(one['waits_s']):.1f}" for one in (before, after))
    return (
        f"{row['case']}: wait {1e3 * before['wait_s']:.1f} → {1e3 * after['wait_s']:.1f} ms "
        f"({1e3 * added_s:+.1f} ms, {100 * added_s / before['wait_s']:+.1f} %; {spreads}), "
        f"round {1e3 * before['round_s']:.1f} → {1e3 * after['round_s']:.1f} ms "
        f"({1e3 * of_round_s:+.1f} ms, {100 * of_round_s / before['round_s']:+.1f} %)"
    )


def main() -> int:
    """Run and print; returns the exit code."""
    options = _options()
    tell(asyncio.run(run_all(options)), options.json)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench commit", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--parameters", type=int, default=100_000, help="of the model; 100,000")
    parser.add_argument("--inner-s", type=float, default=0.1, help="between two rounds; 0.1")
    parser.add_argument("--steps", type=int, default=60, help="commits of a run that count; 60")
    parser.add_argument("--runs", type=int, default=3, help="of each kind; 3")
    parser.add_argument("--mbit", type=float, default=100.0, help="of the emulated links, 10^6 bit/s; 100")
    parser.add_argument("--no-wan", action="store_true", help="loopback alone")
    parser.add_argument("--folder", type=Path, help="on which disk; that of temporary files")
    parser.add_argument("--deadline-s", type=float, default=180.0, help="for anything that is waited for; 180")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
