# SPDX-License-Identifier: Apache-2.0
"""`scripts/simulate`: run seeds until one of them breaks an invariant; replay, shrink and keep the ones that do."""

import argparse
import dataclasses
import difflib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.simulation.blocks import Kind, Tally, run_seeds
from tests.simulation.marks import KNOWN
from tests.simulation.minimise import minimise
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.rounds.mutants import ROUND_MUTANTS, RoundMutant
from tests.simulation.scenario import Scenario


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: no violation; 1: there is one, and how to replay it is printed; 2: usage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    mutants: Mapping[str, Mutant | RoundMutant] = ROUND_MUTANTS if options.rounds else MUTANTS
    if options.list_mutants:
        for name, mutant in sorted(mutants.items()):
            print(f"{name:28s} {mutant.what}")
        return 0
    if options.seeds < 1 or options.jobs < 0:
        parser.error("--seeds must be at least 1, --jobs not negative")
    if options.mutant and options.mutant not in mutants:
        parser.error(f"no mutant {options.mutant!r}; --list-mutants names them")
    kind = Kind(is_rounds=options.rounds, mutant=options.mutant)
    if options.scenario is not None:
        return _replay(options.scenario, has_echo=options.trace, rewrites=options.rewrite)
    if options.minimise:
        return _shrink(options.first, options.mutant)
    started = time.monotonic()
    if options.trace:
        tally = Tally()
        tally.count(kind.run(options.first, has_echo=True))
    else:
        tally = run_seeds(kind, options.first, options.seeds, num_jobs=options.jobs or None)
    report = summary(tally, time.monotonic() - started, has_marks=not options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if tally.violation is not None:
        seed, invariant, what = tally.violation
        variant = (" --rounds" if options.rounds else "") + (f" --mutant {options.mutant}" if options.mutant else "")
        print(f"seed {seed} violates {invariant}: {what}")
        print(f"after {tally.num_seeds} seeds. Replay: scripts/simulate --first {seed} --trace{variant}")
        return 1
    print("  ".join(f"{key}={value}" for key, value in report.items() if not isinstance(value, dict | list)))
    print("ends: " + ", ".join(f"{end} {count}" for end, count in sorted(tally.ends.items())))
    return 0


def _replay(path: Path, *, has_echo: bool, rewrites: bool) -> int:
    """Does the file still tell its story?"""
    scenario = Scenario.load(path)
    outcome, actual = scenario.run(print if has_echo else None)
    if rewrites:
        dataclasses.replace(scenario, expect=actual).save(path)
        return 0
    if actual == scenario.expect:
        print(f"{path.name}: {scenario.title}")
        return 0
    print(f"{path.name} tells another story" + (f": {outcome.violation}" if outcome.violation else ""))
    before, after = ([f"violation {e.violation}", f"end {e.end}", *e.story] for e in (scenario.expect, actual))
    print("\n".join(difflib.unified_diff(before, after, "expected", "actual", lineterm="")))
    return 1


def _shrink(seed: int, mutant: str | None) -> int:
    """Find the smallest history like this one, and write it to a file."""
    failure = minimise(seed, mutant, print)
    if failure is None:
        print(f"seed {seed} breaks no invariant")
        return 0
    scenario = failure.scenario(mutant)
    path = Path(f"seed_{seed}{'_' + mutant if mutant else ''}.toml")
    scenario.save(path)
    print(path.read_text(), end="")
    print(f"written to {path}. Replay: scripts/simulate --scenario {path} --trace")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds to run (default 1)")
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: one a processor)")
    parser.add_argument("--rounds", action="store_true", help="the collective layer alone (tests/simulation/rounds)")
    parser.add_argument("--mutant", metavar="NAME", help="run a broken variant instead")
    parser.add_argument("--list-mutants", action="store_true", help="name the broken variants and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    parser.add_argument("--scenario", type=Path, metavar="FILE", help="replay a file of tests/simulation/scenarios")
    parser.add_argument("--rewrite", action="store_true", help="with --scenario: write down what happens now")
    parser.add_argument("--minimise", action="store_true", help="shrink the first seed's violation to a scenario file")
    parser.add_argument("--trace", action="store_true", help="print the story of the first seed")
    return parser


def summary(tally: Tally, wall_s: float, *, has_marks: bool) -> dict[str, object]:
    """The figures of a run of seeds. All but the times follow from the seeds."""
    violation = None
    if tally.violation is not None:
        violation = {"seed": tally.violation[0], "what": f"{tally.violation[1]}: {tally.violation[2]}"}
    return {
        "seeds": tally.num_seeds,
        "violations": int(violation is not None),
        "violation": violation,
        "commits": tally.num_commits,
        "view_changes": tally.num_views,
        "events": tally.num_events,
        "virtual_hours": round(tally.virtual_s / 3600, 2),
        "wall_s": round(wall_s, 1),
        "schedules_per_s": round(tally.num_seeds / wall_s, 1),
        "schedules_per_s_and_core": round(tally.num_seeds / max(tally.cpu_s, 1e-9), 1),
        "never_exercised": sorted(KNOWN - set(tally.counters)) if has_marks else [],
        "unlisted": sorted(set(tally.counters) - KNOWN) if has_marks else [],
        "counters": dict(sorted(tally.counters.items())),
        "ends": dict(sorted(tally.ends.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
