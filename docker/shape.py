#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make one network interface behave like one wide-area link, with `tc` or, where the kernel lacks that, without.

Owns: reading the scenario, choosing this container's link, building the commands, applying them, and reading back what
is in force. It shapes what *leaves* the interface: a delay is one-way, and the round trip between two peers is the
sum of both. Where the kernel lacks netem or tbf, scripts/wanlink/uplink.py emulates the whole link for one user.

Rules: standard library only, for it runs as root. A shape is in force as a whole or the interface is bare and the
exit code says why. It knows nothing of isthmus.

    ShapeError
    ├── ScenarioError      the scenario or the arguments are wrong             exit code 2
    └── EnvironmentLacks   a right, a tool, an interface or a qdisc is absent  exit code 3
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NETEM_LIMIT_PACKETS = 100_000  # so that netem's own queue never drops; a second at 1 Gbit/s
# tbf cannot pass what is larger than its bucket: room for a jumbo frame, and for one tick of a 250 Hz kernel,
# so that a late timer costs no throughput.
BURST_MIN_NBYTES = 10_000
BURST_S = 0.004
GSO_MAX_SEGS_DEFAULT = 65_535  # what Linux gives a new interface
TOOL_TIMEOUT_S = 10.0
USER = 10001  # whose packets the emulator takes; the entrypoint becomes it
EMULATOR = "scripts.wanlink.uplink"
EMULATOR_DEVICE = "uplink0"  # is there as long as the emulator's link is in force
AUTO = "auto"
NAME_TRIES, NAME_PAUSE_S = 20, 0.25  # the engine may tell a container's name only when it has started it

# The queueing disciplines, outermost first, and what each of them emulates.
FIELDS = {"netem": ("delay_ms", "jitter_ms", "loss_percent"), "tbf": ("rate_mbit", "queue_kb")}
# What a scenario may ask for, beside 0 = not shaped.
BOUNDS = {
    "delay_ms": (0.001, 60_000.0),
    "jitter_ms": (0.001, 60_000.0),
    "loss_percent": (0.0001, 100.0),
    "rate_mbit": (0.01, 100_000.0),
    "queue_kb": (10.0, 1_000_000.0),
}


class ShapeError(Exception):
    """The interface is not shaped as asked; the message says why and what to do."""

    exit_code = 1


class ScenarioError(ShapeError):
    """The scenario file or the command line is wrong."""

    exit_code = 2


class EnvironmentLacks(ShapeError):
    """This machine, container or kernel lacks something that shaping needs."""

    exit_code = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one link does to the packets that leave by it. Zero means: not shaped.

    Attributes:
        delay_ms: added one-way delay.
        jitter_ms: each packet's delay is uniform in delay_ms ± jitter_ms.
        loss_percent: independent loss of each packet, 0 to 100.
        rate_mbit: rate of the link, 10^6 bit/s, Ethernet headers included.
        queue_kb: queue of the bottleneck, 1024 bytes; what does not fit is dropped. Goes with rate_mbit.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    rate_mbit: float = 0.0
    queue_kb: float = 0.0

    def kinds(self) -> list[str]:
        """The queueing disciplines this shape needs, outermost first."""
        return [kind for kind, names in FIELDS.items() if any(getattr(self, name) for name in names)]

    def __str__(self) -> str:
        shaped = [(name, value) for name, value in dataclasses.asdict(self).items() if value]
        return ", ".join(f"{name} = {value:g}" for name, value in shaped) or "nothing"


# ------------------------------------------------------------------------------------------ pure


def read_scenario(text: str) -> dict[str, Shape]:
    """Parse a scenario: one table `[links.NAME]` for each link, with the fields of `Shape` as keys.

    Raises:
        ScenarioError: not TOML, an unknown key (with a suggestion), or a value that makes no sense.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"the scenario is not valid TOML ({error}): correct that line") from error
    _refuse_unknown(document, ["links"], "at the top of the scenario")
    links = document.get("links")
    if not isinstance(links, dict) or not links:
        raise ScenarioError("the scenario has no link: add a table [links.NAME]")
    return {name: _read_link(f"[links.{name}]", table) for name, table in links.items()}


def _read_link(title: str, table: object) -> Shape:
    if not isinstance(table, dict):
        raise ScenarioError(f"{title} must be a table: put its keys under a line {title}")
    _refuse_unknown(table, list(BOUNDS), f"in {title}")
    for name, value in table.items():
        low, high = BOUNDS[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ScenarioError(f"{name} = {value!r} in {title} is not a number: write it without quotes or unit")
        if value != 0 and not low <= value <= high:
            raise ScenarioError(f"{name} = {value:g} in {title} is out of range: give 0 or {low:g} to {high:g}")
    shape = Shape(**table)
    if shape.jitter_ms > shape.delay_ms:
        raise ScenarioError(f"jitter_ms exceeds delay_ms in {title}: a packet cannot leave before it came")
    if (shape.rate_mbit > 0) != (shape.queue_kb > 0):
        raise ScenarioError(f"rate_mbit and queue_kb go together in {title}: give both or neither")
    return shape


def _refuse_unknown(table: dict[str, object], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ScenarioError(f"unknown key {key!r} {where}: {_suggestion(key, known)}")


def _suggestion(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"


def commands(shape: Shape, interface: str) -> list[list[str]]:
    """The commands that put `shape` on a bare `interface`, in the order they must run.

    netem stands outside, tbf inside: a packet is delayed or lost first and then queues for the bottleneck, so that
    queue_kb is the bottleneck's queue alone and holds no packet that is merely under way.
    """
    if not shape.kinds():
        return []
    built = []
    place = ["root", "handle", "1:"]
    for kind in shape.kinds():
        options = _netem_options(shape) if kind == "netem" else _tbf_options(shape)
        built.append(["tc", "qdisc", "add", "dev", interface, *place, kind, *options])
        place = ["parent", "1:1", "handle", "10:"]
    # Otherwise one "packet" is up to 64 KiB of a TCP stream, cut up only behind tc, and one loss would be forty.
    built.append(["ip", "link", "set", "dev", interface, "gso_max_segs", "1"])
    return built


def _netem_options(shape: Shape) -> list[str]:
    options = ["limit", str(NETEM_LIMIT_PACKETS)]
    if shape.delay_ms:
        options += ["delay", f"{shape.delay_ms * 1000:.0f}us", f"{shape.jitter_ms * 1000:.0f}us"]
    if shape.loss_percent:
        options += ["loss", f"{shape.loss_percent:.4f}%"]
    return options


def _tbf_options(shape: Shape) -> list[str]:
    rate_bits_per_s = round(shape.rate_mbit * 1e6)
    burst_nbytes = max(BURST_MIN_NBYTES, round(rate_bits_per_s / 8 * BURST_S))
    limit_nbytes = round(shape.queue_kb * 1024)
    return ["rate", f"{rate_bits_per_s}bit", "burst", f"{burst_nbytes}b", "limit", f"{limit_nbytes}b"]


def clear_commands(interface: str) -> list[list[str]]:
    """The commands that make a shaped `interface` bare again."""
    return [
        ["tc", "qdisc", "del", "dev", interface, "root"],
        ["ip", "link", "set", "dev", interface, "gso_max_segs", str(GSO_MAX_SEGS_DEFAULT)],
    ]


def parse_in_force(qdiscs_json: str) -> Shape:
    """The shape that the JSON of `tc -s -r -j qdisc show dev INTERFACE` describes; other qdiscs shape nothing."""
    values: dict[str, float] = {}
    for qdisc in json.loads(qdiscs_json):
        options = qdisc.get("options", {})
        if qdisc["kind"] == "netem":
            delay = options.get("delay", {"delay": 0.0, "jitter": 0.0})  # seconds
            values |= {"delay_ms": delay["delay"] * 1e3, "jitter_ms": delay["jitter"] * 1e3}
            values["loss_percent"] = options.get("loss-random", {"loss": 0.0})["loss"] * 100  # was a fraction
        elif qdisc["kind"] == "tbf":
            values |= {"rate_mbit": options["rate"] * 8 / 1e6, "queue_kb": options["limit"] / 1024}  # was bytes/s
    return Shape(**values)


def differences(asked: Shape, found: Shape) -> list[str]:
    """Where what is in force is not what was asked, beyond the kernel's rounding of 1 % or one tick."""
    found_values = dataclasses.asdict(found)
    return [
        f"{name} is {found_values[name]:g} instead of {value:g}"
        for name, value in dataclasses.asdict(asked).items()
        if not math.isclose(value, found_values[name], rel_tol=0.01, abs_tol=1e-4)
    ]


# ---------------------------------------------------------------------------------------- kernel


def lacking_kinds(kinds: Sequence[str]) -> list[str]:
    """Which of `kinds` this kernel does not offer, found by trying each on a throwaway interface."""
    probe = f"probe{os.getpid()}"
    create = ["ip", "link", "add", "dev", probe, "type"]
    if _run([*create, "dummy"]).returncode:
        _must([*create, "veth"])  # a kernel without dummy interfaces that runs containers has this one
    try:
        return [kind for kind in kinds if not _is_offered(kind, probe)]
    finally:
        _must(["ip", "link", "del", "dev", probe])


def _is_offered(kind: str, interface: str) -> bool:
    sample = Shape(delay_ms=1) if kind == "netem" else Shape(rate_mbit=1, queue_kb=10)
    tried = _run(commands(sample, interface)[0])
    if "qdisc kind is unknown" in tried.stderr:
        return False
    if tried.returncode:
        raise _failed(tried)
    _must(["tc", "qdisc", "del", "dev", interface, "root"])
    return True


def in_force(interface: str) -> Shape:
    """What the emulator, if it is there, or else the kernel says that it does on `interface` now."""
    if told := emulated(interface):
        return Shape(**told["link"])
    return parse_in_force(_must(["tc", "-s", "-r", "-j", "qdisc", "show", "dev", interface]))


def clear(interface: str) -> None:
    """Take the emulator, netem and tbf off `interface`; one that has none of them is left as it is."""
    if EMULATOR_DEVICE in interfaces():
        _emulator("clear")
    if in_force(interface).kinds():
        for command in clear_commands(interface):
            _must(command)


def apply(shape: Shape, interface: str, *, emulate: bool = False) -> Shape:
    """Put `shape` on `interface` in place of an earlier one and return what is read back.

    Args:
        shape, interface: what, and where.
        emulate: by the emulator even if the kernel has netem and tbf.

    Raises:
        EnvironmentLacks: a command failed, or what is in force differs; the interface is bare again.
    """
    clear(interface)
    lacking = lacking_kinds(shape.kinds())
    try:
        if shape.kinds() and (emulate or lacking):
            why = f"this kernel has no {' and no '.join(lacking)}" if lacking else "as asked"
            sys.stderr.write(f"shape: {why}: the link is emulated, for what user {USER} sends\n")
            _emulator("start", interface, str(USER), json.dumps(dataclasses.asdict(shape)))
        else:
            for command in commands(shape, interface):
                _must(command)
        found = in_force(interface)
        if wrong := differences(shape, found):
            raise EnvironmentLacks(f"{interface} has not what was asked ({'; '.join(wrong)}): update iproute2")
    except ShapeError:
        clear(interface)
        raise
    return found


def interfaces() -> list[str]:
    """Their names, here."""
    return [name for _, name in socket.if_nameindex()]


def emulated(interface: str) -> dict[str, Any] | None:
    """What the emulator says of `interface`: its link, and counters; None if it is not there."""
    if EMULATOR_DEVICE not in interfaces():
        return None
    told: dict[str, Any] | None = json.loads(_emulator("show"))
    if told is None:
        raise EnvironmentLacks("the emulator has ended, nothing leaves this container: start it again")
    return told if told["interface"] == interface else None


def _emulator(*arguments: str) -> str:
    here = Path(__file__).resolve().parent
    home = next((home for home in (here, here.parent) if (home / "scripts" / "wanlink").is_dir()), None)
    if home is None:
        raise EnvironmentLacks(f"scripts/wanlink is not beside {here}: copy the emulator there, or load sch_netem")
    # stderr is not read: the process that stays behind keeps it open.
    done = subprocess.run(
        [sys.executable, "-P", "-m", EMULATOR, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
        env=os.environ | {"PYTHONPATH": str(home)},
    )
    if done.returncode:
        raise EnvironmentLacks(done.stdout.strip() or f"the emulator ended with {done.returncode}: see above")
    return done.stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise EnvironmentLacks(f"{command[0]!r} is not here: install iproute2") from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentLacks(f"`{shlex.join(command)}` hung for {TOOL_TIMEOUT_S:g} s: try again") from error


def _must(command: Sequence[str]) -> str:
    done = _run(command)
    if done.returncode:
        raise _failed(done)
    return done.stdout


def _failed(done: subprocess.CompletedProcess[str]) -> EnvironmentLacks:
    cure = "correct that and try again"
    if "not permitted" in done.stderr:
        cure = "give the container the capability NET_ADMIN"
    elif "Exclusivity flag" in done.stderr or "NLM_F_REPLACE" in done.stderr:
        cure = "another qdisc holds this interface, remove it first"
    return EnvironmentLacks(f"`{shlex.join(done.args)}` failed ({' '.join(done.stderr.split())}): {cure}")


# --------------------------------------------------------------------------------------- command


def _pick(scenario: Path, link: str, interface: str) -> Shape:
    try:
        text = scenario.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"cannot read the scenario ({error}): give its path with --scenario") from error
    shapes = read_scenario(text)
    if link == AUTO:
        return list(shapes.values())[(own_number(interface) - 1) % len(shapes)]
    if link not in shapes:
        raise ScenarioError(f"no link {link!r} in {scenario}: {_suggestion(link, list(shapes))}")
    return shapes[link]


def own_number(interface: str) -> int:
    """The number that Compose gave this container, from the name of its address: isthmus-peer-2.isthmus_wan.

    Raises:
        EnvironmentLacks: it has no such name.
    """
    found = json.loads(_must(["ip", "-j", "-4", "address", "show", "dev", interface]))
    addresses = [info["local"] for link in found for info in link.get("addr_info", ())]
    for attempt in range(NAME_TRIES if addresses else 0):
        if attempt:
            time.sleep(NAME_PAUSE_S)
        # The engine's name server alone: /etc/hosts knows the container's id.
        line = _run(["getent", "-s", "hosts:dns", "hosts", addresses[0]]).stdout
        if name := re.search(r"-(\d+)(\.|$)", " ".join(line.split()[1:2])):
            return int(name[1])
    raise EnvironmentLacks(f"no name with a number belongs to {interface}: name a link of the scenario instead of auto")


def _execute(options: argparse.Namespace) -> str:
    interface: str = options.interface
    wanted = _pick(options.scenario, options.link, interface) if options.link else Shape()
    if options.dry_run:
        dry = clear_commands(interface) if options.clear else commands(wanted, interface)
        return "\n".join(shlex.join(command) for command in dry)
    if interface not in interfaces():
        raise EnvironmentLacks(f"no interface {interface!r} here: give --interface one of {', '.join(interfaces())}")
    if options.show:
        told = emulated(interface)
        counters = f"emulated for user {told['uid']}: {told['counters']}\n" if told else ""
        counters += _must(["tc", "-s", "qdisc", "show", "dev", interface])
        return f"{interface}: in force: {in_force(interface)}\n{counters}"
    if os.geteuid() != 0:
        raise EnvironmentLacks("only root may shape an interface: run this as root, or look with --dry-run")
    if options.link:
        apply(wanted, interface, emulate=options.emulate)
    else:
        clear(interface)
    return f"{interface}: in force: {in_force(interface)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="shape", description="Shape one interface like one wide-area link.")
    parser.add_argument("--scenario", type=Path, default=Path(__file__).with_name("scenario.toml"))
    parser.add_argument("--interface", default="eth0")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--link", help="put this link of the scenario in force; auto: by this container's number")
    what.add_argument("--clear", action="store_true", help="take it off again")
    what.add_argument("--show", action="store_true", help="say what is in force, with the kernel's counters")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, change nothing")
    parser.add_argument("--emulate", action="store_true", help="by the emulator, whatever the kernel has")
    options = parser.parse_args(arguments)
    if options.dry_run and options.show:
        parser.error("--show changes nothing anyway: leave --dry-run out")
    try:
        result = _execute(options)
    except ShapeError as error:
        sys.stderr.write(f"shape: {error}\n")
        return error.exit_code
    sys.stdout.write(result.rstrip("\n") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
