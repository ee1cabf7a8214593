# SPDX-License-Identifier: Apache-2.0
"""Faults in the middle of an all-reduce: is every result right, and how soon do the survivors have their next one?

`scripts/bench faults --kills 100` kills (SIGKILL) a random peer at a random moment, in each mode and world size; with
`--freezes N` it is stopped instead and wakes up later, with `--blackholes N` its network cable is cut without a word
and healed later (needs root). One row each. Values and bits of every result are checked; see scripts/faults/views.py
for what is wrong, hung or silent. Exits with 1 if anything is.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from scripts.faults.reviving import KINDS, Revival, Reviver
from scripts.faults.views import open_server
from scripts.faults.words import Mode

MIB = 1 << 20
PARTS = ("ended", "felt", "view", "installed", "operation")
Row = dict[str, Any]


def main() -> int:
    """Measure and print; returns the exit code."""
    options = _options()
    counts = {"kill": options.kills, "freeze": options.freezes, "blackhole": options.blackholes}
    if counts["blackhole"] and (os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter")):
        print("no blackholes: they need root, iproute2 and nsenter, for a network namespace of each peer")
        counts["blackhole"] = 0
    rows = []
    print(_HEAD)
    for kind in KINDS:
        for world_size in options.world if counts[kind] else []:
            for mode in options.modes:
                row = asyncio.run(_measure(kind, counts[kind], mode, world_size, options))
                print(_line(row), *row["notes"], sep="\n    ", flush=True)
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"mib": options.mib, "seed": options.seed, "rows": rows}, indent=1))
    return 1 if any(row["wrong"] or row["hung"] or row["silent"] for row in rows) else 0


async def _measure(kind: str, count: int, mode: Mode, world_size: int, options: argparse.Namespace) -> Row:
    rng = random.Random(f"{options.seed} {kind} {mode} {world_size}")
    async with open_server(
        nbytes=options.mib * MIB,
        deadline_s=options.deadline_s,
        num_streams=options.streams,
        namespaces=kind == "blackhole",
    ) as server:
        reviver = Reviver(server, mode, world_size, rng)
        await reviver.warm_up()
        revivals = [await reviver.revive(kind) for _ in range(count)]
        tally = server.tally
    return _row(revivals) | {
        "kind": kind,
        "mode": mode,
        "world_size": world_size,
        "operations": tally.operations,
        "wrong": tally.wrong,
        "hung": tally.hung,
        "silent": tally.silent,
        "again": len(reviver.put_out_again),
        "notes": tally.notes + [f"put out again:\n{story}" for story in reviver.put_out_again],
        "undisturbed_ms": 1e3 * reviver.typical_s,
    }


def _row(revivals: list[Revival]) -> Row:
    times_ms = sorted(1e3 * revival.seconds for revival in revivals)
    in_parts = [revival.parts for revival in revivals if revival.parts]
    return {
        "faults": len(revivals),
        "median_ms": statistics.median(times_ms),
        "p99_ms": times_ms[min(len(times_ms) - 1, int(0.99 * len(times_ms)))],
        "unharmed": sum(not revival.parts for revival in revivals),
        "parts_ms": {name: 1e3 * statistics.median(parts[name] for parts in in_parts) for name in PARTS if in_parts},
        "times_ms": times_ms,
    }


_HEAD = (
    "fault      mode          peers  faults  wrong  hung  silent  unharmed  again   median ms    p99 ms   undisturbed "
    "ms   median ms until: process ended, felt, view sent, installed, operation done"
)


def _line(row: Row) -> str:
    parts = ", ".join(f"{ms:.1f}" for ms in row["parts_ms"].values())
    return (
        f"{row['kind']:<10} {row['mode']:<12} {row['world_size']:>6} {row['faults']:>7} {row['wrong']:>6} "
        f"{row['hung']:>5} {row['silent']:>7} {row['unharmed']:>9} {row['again']:>6} {row['median_ms']:>11.1f} "
        f"{row['p99_ms']:>9.1f} {row['undisturbed_ms']:>16.1f}   {parts}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench faults", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="SIGKILLs a mode and world size")
    parser.add_argument("--freezes", type=int, default=0, metavar="N", help="SIGSTOPs, likewise")
    parser.add_argument("--blackholes", type=int, default=0, metavar="N", help="cut cables, likewise")
    parser.add_argument("--modes", type=_modes, default=list(Mode), metavar="A,B", help=f"of {', '.join(Mode)}; all")
    parser.add_argument("--world", type=_numbers, default=[3, 4], metavar="A,B", help="peers; 3,4")
    parser.add_argument("--mib", type=int, default=64, help="tensor of a step; 64")
    parser.add_argument("--streams", type=int, default=1, help="connections of a pair; 1")
    parser.add_argument("--deadline-s", type=float, default=20.0, help="of an operation; 20")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if not (options.kills or options.freezes or options.blackholes):
        options.kills = 100
    return options


def _modes(text: str) -> list[Mode]:
    return [Mode(part) for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
