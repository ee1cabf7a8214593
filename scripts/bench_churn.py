# SPDX-License-Identifier: Apache-2.0
"""Churn: up to 8 peers start and are killed at random, an action every 0.5 to 2 s, while the rest goes on.

`scripts/bench churn --minutes 10`: values and bits of every result are checked, see scripts/faults. Exits with 1 if
anything was wrong, hung or silent, if no operation ended for longer than 3 s, or if the peer that lived through it all
holds more at the end: any descriptor, or more than 16 MiB.
"""

import argparse
import asyncio
import random
import sys
from pathlib import Path

import msgspec

from scripts.faults.attempts import Tally
from scripts.faults.churn import Churn, churn
from scripts.faults.values import MAX_PEERS
from scripts.faults.views import open_server

MAX_GAP_S = 3.0
MAX_GROWTH_KIB = 16 << 10


def main() -> int:
    """Run and print; returns the exit code."""
    options = _options()
    story, tally = asyncio.run(_run(options))
    print(*_lines(story, tally), *tally.notes, sep="\n")
    if options.json:
        figures = {"mib": options.mib, "seed": options.seed, "churn": story, "tally": tally}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    return 0 if is_good(story, tally) else 1


async def _run(options: argparse.Namespace) -> tuple[Churn, Tally]:
    async with open_server(nbytes=options.mib << 20, deadline_s=options.deadline_s) as server:
        rng = random.Random(options.seed)
        story = await churn(server, 60 * options.minutes, rng, max_peers=options.peers)
        return story, server.tally


def is_good(story: Churn, tally: Tally) -> bool:
    """Whether it went as it must."""
    assert story.before is not None
    assert story.after is not None
    return (
        not (tally.wrong or tally.hung or tally.silent)
        and story.longest_gap_s <= MAX_GAP_S
        and story.after.descriptors <= story.before.descriptors
        and story.after.rss_kib - story.before.rss_kib <= MAX_GROWTH_KIB
    )


def _lines(story: Churn, tally: Tally) -> list[str]:
    assert story.before is not None
    assert story.after is not None
    sizes = ", ".join(f"{size}: {count}" for size, count in sorted(story.world_sizes.items()))
    return [
        f"{story.seconds:.0f} s, {story.starts} starts, {story.kills} SIGKILLs, {story.steps} steps",
        f"{tally.operations} operations of single peers: {tally.wrong} wrong, {tally.hung} hung, {tally.silent} silent",
        f"longest gap {story.longest_gap_s:.2f} s; steps by number of members: {sizes}",
        f"peer 0: {story.before.rss_kib / 1024:.1f} MiB and {story.before.descriptors} descriptors before, "
        f"{story.after.rss_kib / 1024:.1f} MiB and {story.after.descriptors} after",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench churn", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=10.0, help="of churn; 10")
    parser.add_argument("--peers", type=int, default=MAX_PEERS, help=f"that live at once; {MAX_PEERS}")
    parser.add_argument("--mib", type=int, default=4, help="tensor of a step; 4")
    parser.add_argument("--deadline-s", type=float, default=20.0, help="of an operation; 20")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
