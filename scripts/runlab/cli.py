# SPDX-License-Identifier: Apache-2.0
"""`scripts/lab`: a run of several peers on this machine, over an emulated WAN if you like, and faults by command.

    scripts/lab up --peers 3 --wan us-eu-asia [flags of isthmus up]    until the run is over; Ctrl-C: all leave
    scripts/lab status                     from another terminal: each peer
    scripts/lab kill 0 1 2                 SIGKILL, here to all; `start 0 1 2` starts them again, in their folders
    scripts/lab freeze 1 --seconds 5       as a suspended machine; `thaw 1` ends it
    scripts/lab cut 1 --seconds 10         it reaches and hears nobody; `heal 1` ends it
    scripts/lab leave 1                    it hands in its work and goes
    scripts/lab add                        one more peer joins
    scripts/lab down                       all leave

--wan takes places (us, eu, asia, home), one for each peer in turn, or a scenario of scripts/wan as a file. It needs
root. The peers' folders are in runs/lab: `isthmus top --dir runs/lab/0` shows one. Exit codes: 0 done; 1 a peer has
failed; 2 usage; 3 this machine lacks something; 130 interrupted twice. Paths are from the checkout's folder.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, count
from pathlib import Path

from scripts.runlab import orders
from scripts.runlab.lab import ORDERS, Lab, OrderError
from scripts.runlab.places import Network, network_of, round_trip_ms
from scripts.wanlink.scenario import PEERS_MAX, ScenarioError, read
from scripts.wanlink.wan import Wan, WanError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "tiny.toml"
_OURS = ("--dir", "--listen", "--ticket-file")
_SPARE = 2
"""Peers that `add` can start in an emulated network, beside those of the beginning."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = _parser()
    arguments, flags = parser.parse_known_args(argv)
    if flags and arguments.what != "up":
        parser.error(f"unknown: {' '.join(flags)}")
    try:
        if arguments.what == "up":
            return _up(arguments, flags)
        folder = arguments.folder or _running()
        for number in arguments.numbers:
            print(orders.send(folder, arguments.what, number, arguments.seconds))
    except (OrderError, ScenarioError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except WanError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 3
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="begin; flags that are not of the lab are those of isthmus up")
    up.add_argument("--peers", type=int, default=3, help=f"how many begin, 1 to {PEERS_MAX} (default 3)")
    up.add_argument("--wan", metavar="PLACES|FILE", help="us-eu-asia, or a scenario as JSON; none: one loopback")
    for name in (*ORDERS, "add", "status", "down"):
        command = commands.add_parser(name, help=f"see scripts/lab --help: {name}")
        command.set_defaults(numbers=[None], seconds=None)
        if name in ORDERS:
            command.add_argument("numbers", type=int, nargs="+", metavar="PEER", help="0 is the founder; or several")
        if name in ("freeze", "cut"):
            command.add_argument("--seconds", type=_seconds, help="it ends by itself (default: it does not)")
    for command in commands.choices.values():
        command.add_argument(
            "--folder", type=Path, help="of the lab (default: the one that runs; of up: runs/lab, or the next free one)"
        )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds <= 1e6:
        raise argparse.ArgumentTypeError(f"{text}: give more than 0")
    return seconds


# ------------------------------------------------------------------------------------------------------------ up


def _up(arguments: argparse.Namespace, flags: list[str]) -> int:
    if not 1 <= arguments.peers <= PEERS_MAX:
        raise OrderError(f"--peers {arguments.peers}: give 1 to {PEERS_MAX}")
    network = None if arguments.wan is None else _network(arguments.wan, arguments.peers)
    for flag in flags:
        if flag.partition("=")[0] in _OURS:
            raise OrderError(f"{flag}: the lab gives each peer its own; leave it out")
    if not {"-c", "--config"} & set(flags):
        flags = ["-c", str(CONFIG), *flags]
    folder = arguments.folder or _free()
    if folder.exists():
        raise OrderError(f"{folder} is there already: give another --folder, or remove it")
    _say(f"{arguments.peers} peers in {folder}: isthmus up {' '.join(flags)}")
    if network is None:
        return asyncio.run(_run(folder, arguments.peers, flags, None, ()))
    _say_network(network, arguments.peers)
    with Wan(scenario=network.scenario) as wan:
        wan.play()
        return asyncio.run(_run(folder, arguments.peers, flags, wan, network.places))


async def _run(folder: Path, num_peers: int, flags: list[str], wan: Wan | None, places: Sequence[str]) -> int:
    _make(folder)
    lab = Lab(folder, num_peers=num_peers, flags=flags, wan=wan, places=places, say=_say)
    loop = asyncio.get_running_loop()
    for what in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(what, lambda: _say(lab.end()))
    async with orders.served(folder, lab.order):
        try:
            code = await lab.run()
        except OrderError:
            if not (folder / "ticket").exists():  # nothing has begun
                shutil.rmtree(folder)
            raise
    _say(lab.line())
    _say(f"`isthmus audit {folder}/[0-9]*` proves what they did; `isthmus up --resume {folder}/0` goes on from there")
    return 130 if lab.was_forced else code


def _network(name: str, num_peers: int) -> Network:
    if os.geteuid() != 0:
        raise WanError("--wan needs root, for network namespaces; without it all peers share one loopback")
    if not (Path(name).is_file() or "/" in name or name.endswith(".json")):
        return network_of(name, min(PEERS_MAX, max(2, num_peers + _SPARE)))
    try:
        scenario = read(Path(name).read_text())
    except OSError as error:
        raise ScenarioError(f"--wan {name}: {error.strerror}; give a file, or places as in us-eu-asia") from error
    except ScenarioError as error:
        raise ScenarioError(f"--wan {name}: {error}") from error
    if scenario.peers < num_peers:
        raise ScenarioError(f"--wan {name} has {scenario.peers} peers: give --peers {scenario.peers}, or fewer")
    return Network(scenario, ("",) * scenario.peers)


def _say_network(network: Network, num_peers: int) -> None:
    places = list(dict.fromkeys(place for place in network.places[:num_peers] if place))
    pairs = list(combinations_with_replacement(places, 2))
    if places:
        trips = ", ".join(f"{one} and {other} {round_trip_ms(one, other):.0f} ms" for one, other in pairs)
        _say(f"there and back: {trips}")


# ------------------------------------------------------------------------------------------------------------ folders


def _labs() -> Iterator[Path]:
    yield Path("runs/lab")
    for number in count(2):
        yield Path(f"runs/lab-{number}")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OrderError(f"{folder} cannot be made ({error.strerror}): give another --folder") from error


def _free() -> Path:
    return next(folder for folder in _labs() if not folder.exists())


def _running() -> Path:
    """The lab that runs; one is enough."""
    found = [path.parent for path in Path("runs").glob(f"lab*/{orders.NAME}") if orders.is_served(path)]
    if len(found) > 1:
        raise OrderError(f"several labs run: name one by --folder, of {', '.join(map(str, sorted(found)))}")
    if not found:
        raise OrderError("no lab runs here; `scripts/lab up` begins one")
    return found[0]


def _say(line: str) -> None:
    try:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
    except OSError:  # nobody reads that any more
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
