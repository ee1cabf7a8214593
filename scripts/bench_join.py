#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A peer joins a running run of three, is frozen, and comes back: what does it cost it, and what the members?

Processes of scripts/join_peer.py: all of a peer but its workers, over a synthetic model (25 M parameters: 100 MB,
a shared state of 200 MB), on loopback and, with --mbit RATE, on an emulated network of that rate (needs root).

Measured: start-up (from the start of the process to its first word), time until it is a member, and the transfer (the
first catch-up): its share of the link, of all the time and of the time between rounds, as state waits while an exchange
moves. The stall is how much longer than a calm outer step one took; an outer step lasts from one commit, at the last
member, to the next. Steps from the start of the joiner to its admission are compared with those before, of three
members; the step of its first contribution with those after, of four. One step differs from the next by more than what
is asked for, so with --joins N newcomers come and are killed one after another, and medians count.
Then the last one is stopped (SIGSTOP) until the others have made N more steps, and continued: bytes that it verified
until it is a member again, over those of the state. Checked: one digest a step, and every weight in every result.
"""

import argparse
import asyncio
import dataclasses
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from isthmus.elastic.core.records import CommitRecord
from isthmus.elastic.journal.journal import Journal
from scripts.join_peer import RUN_ID, peer_id_of
from scripts.join_run import Process, Row, Run, network, tell
from scripts.wanlink.wan import Wan

MEMBERS = 3


# ------------------------------------------------------------------------------------------ what is measured


async def measure(options: argparse.Namespace, wan: Wan | None) -> Row:
    with tempfile.TemporaryDirectory(prefix="bench-join-") as folder:
        settings = {
            "numel": options.parameters,
            "fragments": options.fragments,
            "codec": options.codec,
            "inner_s": options.inner_s,
        }
        run = Run(settings, wan, Path(folder), deadline_s=options.deadline_s)
        try:
            async with asyncio.TaskGroup() as tasks:
                row = await story(run, tasks, options)
                await run.end()
        finally:
            await run.end()
        return row | {"contributions": check(run, Path(folder) / "journal.sqlite")}


async def story(run: Run, tasks: asyncio.TaskGroup, options: argparse.Namespace) -> Row:
    for _ in range(MEMBERS):
        process = await run.start(tasks)
        await run.until("address", partial(process.has_said, "listening"))
    members = run.processes[:MEMBERS]
    await run.until_step(1, members)
    calm: list[int] = []
    joins = []
    for number in range(options.joins):
        if number:
            run.processes[-1].kill()
        calm += await calm_steps(run, members, options.calm)
        joins.append(await join(run, tasks, members, options.calm))
    row: Row = {"mbit": options.mbit if run.wan is not None else None, "codec": options.codec, "members": MEMBERS}
    row |= {
        "fragments": options.fragments,
        "joins": [join_of(members, one, options, run.wan is not None) for one in joins],
    }
    row |= stall_of(members, calm, joins, options.inner_s)
    row["returns"] = [
        await freeze(run, members, joins[-1].joiner, missed, 8 * options.parameters) for missed in options.missed
    ]
    return row


async def calm_steps(run: Run, members: Sequence[Process], count: int) -> list[int]:
    """Outer steps of the members alone, after two that whoever came or went may have disturbed."""
    warm = max(process.step for process in members) + 2
    await run.until_step(warm + count, members)
    return list(range(warm + 1, warm + count + 1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A newcomer, and which outer steps it can have disturbed."""

    joiner: Process
    first: Row
    fetching: list[int]
    """From its start to its admission."""
    after: list[int]
    """Calm ones with it, after its first contribution."""


async def join(run: Run, tasks: asyncio.TaskGroup, members: Sequence[Process], count: int) -> Join:
    """One more peer, until it has taken part for some steps."""
    joiner = await run.start(tasks)
    await run.until("first contribution", lambda: len(joiner.of("committed")) >= 2)
    first = joiner.of("committed")[0]
    fetching = [step for step in steps(members) if last(members, step) > joiner.started and step < first["outer_step"]]
    after = list(range(first["outer_step"] + 2, first["outer_step"] + 2 + count))
    await run.until_step(after[-1], [*members, joiner])
    return Join(joiner=joiner, first=first, fetching=fetching, after=after)


def join_of(members: Sequence[Process], join: Join, options: argparse.Namespace, has_link: bool) -> Row:
    joiner = join.joiner
    snapshot = joiner.of("caught_up")[0]
    rate = snapshot["nbytes"] / snapshot["seconds"]
    begin, end = snapshot["t"] - snapshot["seconds"], snapshot["t"]
    rounds_s = sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in rounds_of(members))
    link_share = rate * 8 / (options.mbit * 1e6) if has_link else None
    return {
        "state_nbytes": 8 * options.parameters,
        "start_s": joiner.of("listening")[0]["t"] - joiner.started,
        "transfer_s": snapshot["seconds"],
        "transfer_nbytes": snapshot["nbytes"],
        "transfer_bytes_per_s": rate,
        "rounds_meanwhile_s": rounds_s,
        "link_share": link_share,
        "free_link_share": None if link_share is None else link_share / (1 - rounds_s / snapshot["seconds"]),
        "active_s": joiner.of("active")[0]["t"] - joiner.started,
        "contributed_s": join.first["t"] - joiner.started,
    }


def stall_of(members: Sequence[Process], calm: Sequence[int], joins: Sequence[Join], inner_s: float) -> Row:
    calm_s = spans(members, calm)
    after_s = spans(members, [step for join in joins for step in join.after])
    before, of_four = statistics.median(calm_s), statistics.median(after_s)
    return {
        "calm_round_s": before - inner_s,
        "calm_spread_s": sorted(span - before for span in calm_s),
        "after_round_s": of_four - inner_s,
        "after_spread_s": sorted(span - of_four for span in after_s),
        "fetch_stalls_s": [span - before for join in joins for span in spans(members, join.fetching)],
        "admission_stalls_s": [spans(members, [join.first["outer_step"]])[0] - of_four for join in joins],
    }


async def freeze(run: Run, members: Sequence[Process], joiner: Process, missed: int, state_nbytes: int) -> Row:
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
        "share": nbytes / state_nbytes,
        "seconds": active["t"] - continued,
    }


def steps(members: Sequence[Process]) -> list[int]:
    return sorted({row["outer_step"] for row in members[0].of("committed")})


def last(members: Sequence[Process], step: int) -> float:
    """When the last member had this commit."""
    return max(float(row["t"]) for process in members for row in process.of("committed") if row["outer_step"] == step)


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
    joiners = {peer_id_of(process.number) for process in run.processes[MEMBERS:]}
    return sum(item.ref.peer_id in joiners for commit in commits for item in commit.contributions)


# ------------------------------------------------------------------------------------------ telling


def lines(row: Row) -> list[str]:
    where = "loopback" if row["mbit"] is None else f"{row['mbit']:g} Mbit/s"
    fragments = f", {row['fragments']} fragments in turn" if row["fragments"] > 1 else ""
    state_nbytes = row["joins"][0]["state_nbytes"]
    result = [f"{where}, {row['codec']}, state of {state_nbytes / 1e6:.0f} MB{fragments}, {row['members']} members"]
    for join in row["joins"]:
        share = ""
        if join["link_share"] is not None:
            share = (
                f", {100 * join['link_share']:.0f} % of the link, {100 * join['free_link_share']:.0f} % between rounds"
            )
        result.append(
            f"  start-up {join['start_s']:.2f} s, transfer {join['transfer_s']:.2f} s "
            f"({join['transfer_bytes_per_s'] / 1e6:.0f} MB/s{share}), member after {join['active_s']:.2f} s"
        )
    result += [
        f"  calm round {row['calm_round_s']:.3f} s ({_spread(row['calm_spread_s'])}); steps during the join "
        f"{_median(row['fetch_stalls_s'])}",
        f"  calm round of four {row['after_round_s']:.3f} s ({_spread(row['after_spread_s'])}); the first one "
        f"{_median(row['admission_stalls_s'])}",
        f"  {row['contributions']} contributions of joiners, all weights right",
    ]
    returns = [
        f"  back after {back['missed']} steps: {back['nbytes'] / 1e6:.1f} MB, {100 * back['share']:.1f} % of the "
        f"state, for {back['replayed_to']} steps, in {back['seconds']:.2f} s"
        for back in row["returns"]
    ]
    return [*result, *returns]


def _spread(differences: Sequence[float]) -> str:
    return f"{min(differences):+.3f} to {max(differences):+.3f} in {len(differences)}"


def _median(stalls: Sequence[float]) -> str:
    if not stalls:
        return "none"
    return f"{statistics.median(stalls):+.3f} s (of {', '.join(f'{stall:+.3f}' for stall in stalls)})"


async def run_all(options: argparse.Namespace) -> list[Row]:
    rows = []
    rates: list[float | None] = [] if options.no_loopback else [None]
    if options.mbit and os.geteuid() == 0:
        rates.append(options.mbit)
    elif options.mbit:
        print("no emulated link: it needs root")
    for rate in rates:
        async with network(rate, options.delay_ms, MEMBERS + options.joins) as wan:
            rows.append(await measure(options, wan))
        print(*lines(rows[-1]), sep="\n", flush=True)
    return rows


def main() -> int:
    options = _options()
    tell(asyncio.run(run_all(options)), options.json)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench join", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parameters", type=int, default=25_000_000, help="of the model; 25,000,000")
    parser.add_argument("--fragments", type=int, default=1, help="that take turns, as in Streaming DiLoCo; 1")
    parser.add_argument("--codec", default="int8", help="of the exchange; int8")
    parser.add_argument("--inner-s", type=float, default=2.0, help="between two rounds; 2")
    parser.add_argument(
        "--calm", type=int, default=8, help="outer steps before a join, and after it, that it is compared with; 8"
    )
    parser.add_argument("--joins", type=int, default=1, help="newcomers, one after another; 1")
    parser.add_argument("--missed", type=_numbers, default=[1, 4, 8], metavar="A,B", help="steps of an absence; 1,4,8")
    parser.add_argument("--mbit", type=float, default=0.0, help="also over emulated links of this rate, 10^6 bit/s")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of those, one way; 10")
    parser.add_argument("--no-loopback", action="store_true", help="the emulated links alone")
    parser.add_argument("--deadline-s", type=float, default=180.0, help="for anything that is waited for; 180")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if options.joins < 1:
        parser.error("--joins must be at least 1")
    if options.fragments < 1 or options.parameters % options.fragments:
        parser.error("--parameters must be a multiple of --fragments")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
