# SPDX-License-Identifier: Apache-2.0
"""`scripts/chaos --minutes 10 --json FILE`: real peers train while they are killed, frozen, cut off, out of disk.

A coordinator and up to seven peers run as processes of this machine, each in a network namespace and with a disk of its
own where this is root. Faults come by seed. In the end everything is healed, must commit together again and leave in
order; then journal, logs and exit codes are audited. Exits with 1 if anything asked does not hold; the folder is kept
then. See scripts/chaoslab/ for what is done and what is asked.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from scripts.chaoslab import host
from scripts.chaoslab.evidence import KINDS, NEED_ROOT, Evidence, now_s
from scripts.chaoslab.faults import Faults, settle
from scripts.chaoslab.host import HostError
from scripts.chaoslab.injector import inject
from scripts.chaoslab.report import lines, summary
from scripts.chaoslab.verdict import judge
from scripts.chaoslab.watch import Stuck
from scripts.chaoslab.world import World

CALM_ROUNDS, CALM_LIMIT_S = 12, 20.0
SETTLE_LIMIT_S = 120.0
"""Until all peers commit together after the last fault: whoever was killed may still have to start."""


def main() -> int:
    """Run, judge and print; returns the exit code."""
    options = _options()
    # As an exception, so that nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
    kept = options.keep
    folder = Path(tempfile.mkdtemp(prefix="chaos-")) if kept is None else kept
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"chaos: {folder} is not empty", file=sys.stderr)
        return 2
    holds = False
    try:
        told = summary(*_run(folder, options), seed=options.seed, num_peers=options.peers)
        print(*lines(told), sep="\n", flush=True)
        if options.json:
            options.json.write_text(json.dumps(told, indent=1) + "\n")
        holds = told["holds"]
    except (HostError, Stuck) as error:
        print(f"chaos: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    finally:
        if holds and kept is None:
            shutil.rmtree(folder)
        else:
            print(f"kept: {folder}", flush=True)
    return 0 if holds else 1


def _run(folder: Path, options: argparse.Namespace) -> tuple[Evidence, dict[str, list[str]]]:
    began_s = now_s()

    def tell(line: str, *, at_s: float | None = None) -> None:
        print(f"{(now_s() if at_s is None else at_s) - began_s:7.2f} s  {line}", flush=True)

    has_namespaces, has_disks = "cut" in options.faults, "disk" in options.faults
    with contextlib.ExitStack() as stack:
        if has_disks:
            host.enter_own_mounts()
        network = host.open_network(options.peers + 1, seed=options.seed, with_namespaces=has_namespaces)
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True))
        world = World(
            folder,
            Path(sockets),
            num_peers=options.peers,
            network=stack.enter_context(network),
            has_disks=has_disks,
            tell=tell,
        )
        try:
            evidence = asyncio.run(_train(world, options))
            wrong = judge(evidence)
        finally:
            world.close()
            world.keep_disks()
    return evidence, wrong


async def _train(world: World, options: argparse.Namespace) -> Evidence:
    """From the first process to the last; returns what is left."""
    async with asyncio.TaskGroup() as tasks:
        helpers = [tasks.create_task(task) for task in (world.supervise(), world.ask_around())]
        await world.open()
        began_s, step = now_s(), world.outer_step
        world.tell(f"{options.peers} peers are members")
        await world.until(lambda: world.outer_step >= step + CALM_ROUNDS, CALM_LIMIT_S)
        calm_until_s = now_s()
        faults = Faults(world)
        await inject(world, faults, options.faults, seed=options.seed, seconds=60 * options.minutes)
        world.tell("no more faults")
        settled_s = now_s()
        is_settled = await settle(world, SETTLE_LIMIT_S)
        ended_s = now_s()
        world.tell(f"all commit together after {ended_s - settled_s:.1f} s" if is_settled else "not all commit again")
        await world.leave_all()
        for task in helpers:
            task.cancel()
    leftovers = world.close()
    evidence = world.evidence(began_s=began_s, calm_until_s=calm_until_s, ended_s=ended_s)
    evidence.faults, evidence.leftovers = faults.done, leftovers
    if not is_settled:
        evidence.leftovers.append(f"not all peers commit together within {SETTLE_LIMIT_S:g} s after the last fault")
    return evidence


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults; 10")
    parser.add_argument(
        "--peers", type=int, default=6, choices=range(4, 8), metavar="4..7", help="beside the coordinator; 6"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=_kinds, metavar="A,B", help=f"of {', '.join(KINDS)}; all that can be had")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="empty or new: keep all folders there")
    options = parser.parse_args()
    if not host.is_root():
        refused = [kind for kind in NEED_ROOT if options.faults is None or kind in options.faults]
        if refused and options.faults is not None:
            parser.error(f"{' and '.join(refused)}: need root, for network namespaces and file systems in memory")
        print(f"without {' and '.join(refused)}: they need root, for network namespaces and file systems in memory")
    if options.faults is None:
        options.faults = [kind for kind in KINDS if host.is_root() or kind not in NEED_ROOT]
    return options


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := set(kinds) - set(KINDS):
        raise argparse.ArgumentTypeError(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
