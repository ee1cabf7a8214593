#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The exchange over emulated wide-area networks, against the best time that their links allow. Needs root.

Peers have the settings that a user gets by default, but where a row's name says otherwise. Between the view and the
first operation they look ahead for some seconds, as a daemon does whose workers train. A row is the median over
repetitions, after one operation to warm up and a survey of the links; a repetition takes as long as its slowest peer.
Peers and emulator run in a real-time class, as far as that is allowed (wanlink/processor.py).
Rows of a case are measured in turn, one repetition each, so that all meet the same weather on this machine. Every
result is checked, and is the same bits on all peers.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.wanlink.bounds import LowerBound, lower_bound
from scripts.wanlink.fleet import Fleet
from scripts.wanlink.scenario import Scenario, Step
from scripts.wanlink.wan import Wan, WanError

FORMULA = """\
lower bound, for peers i with a share s_i of the tensor, B bytes, N peers, rates up_i and down_i:
    min over s of max over i of  B (1 + (N - 2) s_i) / min(up_i, down_i)   + two one-way trips (one between two peers)
fraction = lower bound / median. Headers alone take 4 % of a frame of 1514 bytes: no fraction is above 0.96."""
MIB = 1 << 20
SMALL_NBYTES = 64 << 10
SMALL_REPEATS = 31
QUEUE_MS = 64.0  # room before each transmitter, as time at its rate
PEER = Path(__file__).resolve().parent / "wan_peer.py"
BEGIN_S = 0.3  # from an order to the instant when all begin
LATE_S = 0.1  # after it, a peer's beginning spoils the run
ATTEMPTS = 3
PATIENCE = 20.0  # bounds that an operation may take
DOUBTFUL_LATE = 0.5
DOUBTFUL_CORES = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One network and one exchange.

    Attributes:
        name, text: for the report.
        nbytes: fp32 tensor to be averaged.
        rtt_ms, loss_percent: of every path; the loss is each way.
        up_mbit, down_mbit: [peer], 10⁶ bit/s.
        small_target_s: what 64 KiB may take; 0 if that is not measured.
    """

    name: str
    text: str
    nbytes: int
    rtt_ms: float
    loss_percent: float
    up_mbit: tuple[float, ...]
    down_mbit: tuple[float, ...]
    small_target_s: float = 0.0

    def scenario(self, seed: int = 1) -> Scenario:
        """The network, for the emulator."""
        ports = {
            str(peer): {"up_mbit": up, "down_mbit": down, "queue_ms": QUEUE_MS}
            for peer, (up, down) in enumerate(zip(self.up_mbit, self.down_mbit, strict=True))
        }
        links = {"*": {"delay_ms": self.rtt_ms / 2, "loss_percent": self.loss_percent}}
        return Scenario(peers=len(self.up_mbit), seed=seed, start=Step(links=links, ports=ports))

    def bound(self) -> LowerBound:
        """No all-reduce of uncompressed fp32 in two steps, or one between two peers, is faster."""
        up, down = ([mbit * 1e6 / 8 for mbit in rates] for rates in (self.up_mbit, self.down_mbit))
        trips = 1 if len(up) == 2 else 2
        return lower_bound(self.nbytes, up, down, one_way_s=self.rtt_ms / 2e3, trips=trips)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to do a case's exchange. Those with equal settings share their peers.

    Attributes:
        name: for the report.
        target: least fraction of the bound that is asked for; 0 for nothing.
        repeats: how often, with --quick in brackets.
        settings: see wan_peer.main.
        plan: of the all-reduce.
    """

    name: str
    target: float = 0.0
    repeats: tuple[int, int] = (5, 2)
    settings: dict[str, Any] = field(default_factory=dict)
    plan: str = "auto"


PLAIN = {"tls": False}
TLS = {"tls": True}
CUBIC = {"tls": False, "control": "cubic"}

CASES: tuple[tuple[Case, tuple[Variant, ...]], ...] = (
    (
        Case(
            name="a",
            text="2 peers, 1 Gbit/s, 50 ms, 0.1 % loss",
            nbytes=128 * MIB,
            rtt_ms=50,
            loss_percent=0.1,
            up_mbit=(1000,) * 2,
            down_mbit=(1000,) * 2,
        ),
        (
            Variant(name="default", target=0.8, repeats=(15, 2), settings=PLAIN),
            Variant(name="TLS", repeats=(15, 2), settings=TLS),
            Variant(name="cubic", target=0.3, settings=CUBIC),
        ),
    ),
    (
        Case(
            name="b",
            text="4 peers, 200 Mbit/s, 150 ms, 0.1 % loss",
            nbytes=64 * MIB,
            rtt_ms=150,
            loss_percent=0.1,
            up_mbit=(200,) * 4,
            down_mbit=(200,) * 4,
            small_target_s=2.2 * 0.075 + 0.010,
        ),
        (
            Variant(name="default", target=0.75, repeats=(9, 2), settings=PLAIN),
            Variant(name="TLS", repeats=(9, 2), settings=TLS),
            Variant(name="ring", repeats=(2, 1), settings=PLAIN, plan="ring"),
        ),
    ),
    (
        Case(
            name="c",
            text="4 peers, 300 Mbit/s, 20 ms, no loss, one uplink of 30 Mbit/s",
            nbytes=64 * MIB,
            rtt_ms=20,
            loss_percent=0,
            up_mbit=(300, 300, 300, 30),
            down_mbit=(300,) * 4,
        ),
        (
            Variant(name="default", target=0.85, repeats=(3, 1), settings=PLAIN),
            Variant(name="TLS", repeats=(3, 0), settings=TLS),
            Variant(name="ring", repeats=(1, 0), settings=PLAIN, plan="ring"),
        ),
    ),
    (
        Case(
            name="d",
            text="3 peers, 200 Mbit/s, 50 ms, no loss; two of them behind NATs have no link",
            nbytes=32 * MIB,
            rtt_ms=50,
            loss_percent=0,
            up_mbit=(200,) * 3,
            down_mbit=(200,) * 3,
        ),
        (
            Variant(name="all linked", repeats=(5, 2), settings=PLAIN),
            Variant(name="two NATs", repeats=(5, 2), settings=PLAIN | {"apart": [[1, 2]]}),
        ),
    ),
)


class World:
    """Peers of one setting on a network of their own."""

    def __init__(self, case: Case, settings: dict[str, Any]) -> None:
        self.case = case
        self._settings = settings
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "World":
        with contextlib.ExitStack() as stack:
            self.wan = stack.enter_context(Wan(scenario=self.case.scenario()))
            addresses = [f"{self.wan.address(peer)}:4000" for peer in range(self.wan.peers)]

            def argv(peer: int) -> list[str | Path]:
                config = {**self._settings, "number": peer, "addresses": addresses}
                return [sys.executable, PEER, json.dumps(config)]

            self._fleet = stack.enter_context(Fleet(self.wan, argv, {**os.environ, "OMP_NUM_THREADS": "1"}))
            self._patience_s = PATIENCE * self.case.bound().seconds
            self._fleet.ask({"do": "connect"}, timeout=self._patience_s)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def survey(self) -> dict[str, Any]:
        """The table of links that all members have now."""
        return self._fleet.ask({"do": "survey"}, timeout=self._patience_s)[0]

    def links(self) -> list[dict[str, Any]]:
        """What the first peer knows of its links."""
        links: list[dict[str, Any]] = self._fleet.ask({"do": "links"}, timeout=self._patience_s)[0]["links"]
        return links

    def reduce(self, plan: str = "auto", nbytes: int | None = None) -> dict[str, Any]:
        """One all-reduce: what its slowest peer says, and what it cost. Repeated if the machine kept a peer waiting.

        Raises:
            WanError: a peer failed, results differ, or a peer began late each time.
        """
        for _ in range(ATTEMPTS):
            run = self._reduce_once(plan, nbytes)
            if run["late_s"] <= LATE_S:
                return run
        raise WanError(
            f"a peer began more than {LATE_S} s late {ATTEMPTS} times: this machine is too busy to measure on"
        )

    def _reduce_once(self, plan: str, nbytes: int | None) -> dict[str, Any]:
        self._fleet.ask({"do": "prepare", "nbytes": nbytes or self.case.nbytes}, timeout=self._patience_s)
        before, busy_s, since = self.wan.stats(), _busy_s(), time.monotonic()
        order = {"do": "reduce", "plan": plan, "at": time.monotonic() + BEGIN_S}
        answers = self._fleet.ask(order, timeout=self._patience_s)
        after, others_s, seconds = self.wan.stats(), _busy_s() - busy_s, time.monotonic() - since
        if len({answer["digest"] for answer in answers}) != 1:
            raise WanError("peers have different results")
        peers_s = sum(answer.pop("order_cpu_s") for answer in answers)
        emulator_s = after.cpu_s - before.cpu_s
        slowest = max(answers, key=lambda answer: answer["seconds"])
        return {
            **slowest,
            "late_s": max(answer["late_s"] for answer in answers),
            "peer_cpu_s": max(answer["cpu_s"] for answer in answers),
            "emulator_cores": emulator_s / slowest["seconds"],
            "other_cores": max(0.0, others_s - peers_s - emulator_s) / seconds,
            "late": (after.late - before.late) / max(1, after.delivered - before.delivered),
            "dropped": sum(after.up_dropped + after.down_dropped) - sum(before.up_dropped + before.down_dropped),
            "device_drops": after.device_drops - before.device_drops,
        }


def _busy_s() -> float:
    """Processor time of the whole machine so far, all cores."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(case: Case, variants: Sequence[Variant], *, quick: bool) -> dict[str, Any]:
    """Run a case; returns its part of the report."""
    bound = case.bound()
    wanted = [variant for variant in variants if variant.repeats[quick]]
    runs: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in wanted}
    small: list[dict[str, Any]] = []
    print(f"\n({case.name}) {case.text}, {case.nbytes // MIB} MiB")
    print(f"    lower bound {bound.seconds:.3f} s, slices {', '.join(f'{share:.3f}' for share in bound.shares)}")
    with contextlib.ExitStack() as stack:
        worlds: dict[str, World] = {}
        for variant in wanted:
            name = json.dumps(variant.settings, sort_keys=True)
            if name not in worlds:
                worlds[name] = stack.enter_context(World(case, variant.settings))
                worlds[name].reduce(variant.plan)
                worlds[name].survey()
        by_variant = [(variant, worlds[json.dumps(variant.settings, sort_keys=True)]) for variant in wanted]
        for repeat in range(max(variant.repeats[quick] for variant in wanted)):
            for variant, world in by_variant:
                if repeat < variant.repeats[quick]:
                    runs[variant.name].append(world.reduce(variant.plan))
        rows = []
        for variant, world in by_variant:
            rows.append(row(case, variant, runs[variant.name], world.links()))
            show(rows[0], rows[-1])
        world = by_variant[0][1]
        table = world.survey()
        if case.small_target_s:
            small = [world.reduce(nbytes=SMALL_NBYTES) for _ in range(SMALL_REPEATS)]
            show_small(case, small)
    return {
        "case": dataclasses.asdict(case),
        "bound": dataclasses.asdict(bound),
        "rows": rows,
        "table": table,
        "small": small,
    }


def row(
    case: Case, variant: Variant, runs: Sequence[dict[str, Any]], links: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What is reported of a variant."""
    seconds = [run["seconds"] for run in runs]
    median = statistics.median(seconds)
    return {
        "name": variant.name,
        "settings": variant.settings,
        "plan": runs[-1]["plan"],
        "streams": [link["num_streams"] for link in links],
        "seconds": seconds,
        "median_s": median,
        "fraction": case.bound().seconds / median,
        "target": variant.target,
        "predicted_s": runs[-1]["predicted_s"],
        "runs": list(runs),
    }


def show(first: dict[str, Any], row: dict[str, Any]) -> None:
    """Print a row; `first` is what others of the case are compared with."""
    predicted = "-" if row["predicted_s"] is None else f"{row['predicted_s']:.2f}"
    target = f" (asked {row['target']:.2f})" if row["target"] else ""
    cost = "" if row is first else f" {row['median_s'] / first['median_s'] - 1:+.1%}"
    print(
        f"    {row['name']:8s} {row['plan']:9s} {max(row['streams']):2d} streams  {row['median_s']:.3f} s "
        f"[{min(row['seconds']):.2f}-{max(row['seconds']):.2f}]{cost}  fraction {row['fraction']:.3f}{target}  "
        f"predicted {predicted} s"
    )
    late, others = (max(run[name] for run in row["runs"]) for name in ("late", "other_cores"))
    if late > DOUBTFUL_LATE or others > DOUBTFUL_CORES:
        print(f"             doubtful: {late:.0%} of packets came late, others used {others:.1f} cores")


def show_small(case: Case, runs: Sequence[dict[str, Any]]) -> None:
    """Print what a small tensor takes."""
    milliseconds = [1e3 * run["seconds"] for run in runs]
    in_time = sum(run["seconds"] <= case.small_target_s for run in runs)
    print(
        f"    {SMALL_NBYTES >> 10} KiB {runs[-1]['plan']}: {statistics.median(milliseconds):.0f} ms "
        f"[{min(milliseconds):.0f}-{max(milliseconds):.0f}], asked {1e3 * case.small_target_s:.0f}, "
        f"{in_time} of {len(runs)} in time; two trips are {case.rtt_ms:.0f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench wan", description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[case.name for case, _ in CASES], action="append", help="only this one")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: two minutes")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(argv)
    report: dict[str, Any] = {
        "machine": {"kernel": platform.release(), "cores": os.cpu_count(), "python": platform.python_version()},
        "formula": FORMULA,
        "cases": [],
    }
    print(FORMULA)
    try:
        for case, variants in CASES:
            if options.case is None or case.name in options.case:
                report["cases"].append(measure(case, variants, quick=options.quick))
    except WanError as error:
        print(f"isthmus: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
