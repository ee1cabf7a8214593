"""`scripts/simulate`: run seeds until one of them breaks an invariant."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.parts import Parts
from tests.simulation.rounds.mutants import ROUND_MUTANTS, RoundMutant
from tests.simulation.rounds.simulator import RoundSimulator
from tests.simulation.simulator import Outcome, Simulator


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: no violation; 1: there is one, and how to replay it is printed; 2: usage."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds to run (default 1)")
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first seed (default 0)")
    parser.add_argument("--rounds", action="store_true", help="the collective layer alone (tests/simulation/rounds)")
    parser.add_argument("--mutant", metavar="NAME", help="run a broken variant instead")
    parser.add_argument("--list-mutants", action="store_true", help="name the broken variants and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    parser.add_argument("--trace", action="store_true", help="print the story of the first seed")
    options = parser.parse_args(arguments)
    mutants: Mapping[str, Mutant | RoundMutant] = ROUND_MUTANTS if options.rounds else MUTANTS
    if options.list_mutants:
        for name, mutant in sorted(mutants.items()):
            print(f"{name:28s} {mutant.what}")
        return 0
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    if options.mutant and options.mutant not in mutants:
        parser.error(f"no mutant {options.mutant!r}; --list-mutants names them")
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for seed in range(options.first, options.first + (1 if options.trace else options.seeds)):
        outcomes.append(run_seed(seed, mutant=options.mutant, is_rounds=options.rounds, has_echo=options.trace))
        if outcomes[-1].violation is not None:
            break
    report = summary(outcomes, time.monotonic() - started)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    violation = outcomes[-1].violation
    if violation is not None:
        with_mutant = " --rounds" if options.rounds else ""
        with_mutant += f" --mutant {options.mutant}" if options.mutant else ""
        print(f"seed {outcomes[-1].seed} violates {violation.invariant}: {violation.what}")
        print(f"after {len(outcomes)} seeds. Replay: scripts/simulate --first {outcomes[-1].seed} --trace{with_mutant}")
        return 1
    print("  ".join(f"{key}={value}" for key, value in report.items() if not isinstance(value, dict)))
    print("ends: " + ", ".join(f"{end} {count}" for end, count in report["ends"].items()))  # type: ignore[attr-defined]
    return 0


def run_seed(seed: int, *, mutant: str | None, is_rounds: bool, has_echo: bool) -> Outcome:
    """One seed of either simulator."""
    echo = print if has_echo else None
    if not is_rounds:
        return Simulator(seed, parts=MUTANTS[mutant].parts if mutant else Parts(), echo=echo).run()
    if mutant is None:
        return RoundSimulator(seed, echo=echo).run()
    broken = ROUND_MUTANTS[mutant]
    return RoundSimulator(seed, parts=broken.parts, focus=broken.focus, check_machines=False, echo=echo).run()


def summary(outcomes: list[Outcome], wall_s: float) -> dict[str, object]:
    """The figures of a run of seeds."""
    violation = outcomes[-1].violation
    return {
        "seeds": len(outcomes),
        "violations": int(violation is not None),
        "violation": None if violation is None else {"seed": outcomes[-1].seed, "what": str(violation)},
        "commits": sum(outcome.num_commits for outcome in outcomes),
        "view_changes": sum(outcome.num_views for outcome in outcomes),
        "events": sum(outcome.num_events for outcome in outcomes),
        "virtual_hours": round(sum(outcome.virtual_s for outcome in outcomes) / 3600, 2),
        "wall_s": round(wall_s, 1),
        "schedules_per_s": round(len(outcomes) / wall_s, 1),
        "counters": dict(sum((Counter(outcome.counters) for outcome in outcomes), Counter())),
        "ends": dict(Counter(outcome.end for outcome in outcomes)),
    }


if __name__ == "__main__":
    sys.exit(main())
