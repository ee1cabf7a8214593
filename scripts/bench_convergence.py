# SPDX-License-Identifier: Apache-2.0
"""Held-out loss against bytes: every outer optimizer on the same real text, with the same tokens, each tuned alike.

M workers train small decoders (trainer.model.decoder), all in one batched pass (scripts/convergence/fleet.py), under
`optim.simulate`; payloads go through the collective's own codecs, whose wire forms are counted. All start from the
same weights, which data parallelism has trained for a while. First every method is tuned, with as many runs for each,
at 4 workers and a seed of its own; then its best settings are run with the seeds that are reported. With 8 workers the
best two of these settings are tried, likewise. Variants take their base's settings. What the papers claim is printed
beside what was found.

The whole takes about half an hour on two cores, --quick about 3 minutes.

    scripts/bench convergence --json convergence.json --plot convergence.png

`scripts/bench convergence defaults` is another comparison: nothing is tuned (scripts/convergence/defaults.py).
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.convergence import defaults
from scripts.convergence.cases import CASES, Case, Tuned
from scripts.convergence.report import as_dicts, judge, plot, print_claims, print_table, summarise
from scripts.convergence.text import Text, load_text
from scripts.convergence.trial import Budget, run_trial

QUICK_BUDGET: Final = Budget(start_steps=120, num_steps=240, warmup_steps=15, held_out_samples=256)
QUICK_CASES: Final = (
    "data_parallel",
    "diloco",
    "diloco int8",
    "diloco e3m0",
    "diloco churn",
    "streaming",
    "delayed",
    "eager",
    "sparseloco",
    "local_adam",
    "desloc",
)
QUICK_SWEEP: Final = 2
TUNED_WORKERS: Final = 4
MORE_WORKERS: Final = 8
TRIED_WITH_MORE: Final = 2
"""Settings, best first, that are tried with more workers."""
TUNING_SEED: Final = 99
"""Of all sweeps; none of those that are reported, which would flatter what has more to choose."""
OTHER_SEEDS: Final = 2
"""Seeds of a case that is not of the headline."""

Run = dict[str, Any]
TABLE: Final = {case.name: case for case in CASES}


# ---------------------------------------------------------------------------------------------------- one process


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run that is wanted."""

    case: str
    tuned: Tuned
    workers: int
    seed: int
    phase: str


_text: Text | None = None


def begin_process(path: Path | None, length: int) -> None:
    """One thread, and the text in memory."""
    global _text
    torch.set_num_threads(1)
    _text = load_text(path, length=length)


def do(task: Task, budget: Budget) -> Run:
    """Run it; an error is a result too, since other methods need not suffer from it."""
    assert _text is not None
    try:
        run = run_trial(
            TABLE[task.case], task.tuned, num_workers=task.workers, seed=task.seed, budget=budget, text=_text
        )
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a method is stated in its row
        traceback.print_exc()
        run = {
            "case": task.case,
            "workers": task.workers,
            "seed": task.seed,
            "tuned": task.tuned.as_dict(),
            "loss": None,
            "curve": [],
            "error": f"{type(error).__name__}: {error}",
        }
    return {"phase": task.phase, **run}


# ---------------------------------------------------------------------------------------------------- all of them


@dataclass(slots=True, kw_only=True)
class Bench:
    """What has been run, and what follows from it."""

    pool: ProcessPoolExecutor
    budget: Budget
    seeds: Sequence[int]
    runs: list[Run] = field(default_factory=list)
    tried: dict[str, list[tuple[float, Tuned]]] = field(default_factory=dict)
    """By case: loss and settings of its sweep, best first."""

    def tune(self, cases: Iterable[Case], sweep_runs: int | None) -> None:
        """Sweep every case that has a sweep."""
        tasks = [
            Task(case=case.name, tuned=tuned, workers=case.workers or TUNED_WORKERS, seed=TUNING_SEED, phase="sweep")
            for case in cases
            for tuned in case.sweep[:sweep_runs]
        ]
        self._sort_into(self.tried, tasks)

    def repeat(self, cases: Iterable[Case]) -> None:
        """Every case with its best settings and the seeds that are reported; fewer of them beyond the headline."""
        self._do_all(
            Task(case=case.name, tuned=tuned, workers=case.workers or TUNED_WORKERS, seed=seed, phase="final")
            for case in cases
            for tuned in self._best(case, 1)
            for seed in (self.seeds if case.is_headline else self.seeds[:OTHER_SEEDS])
        )

    def enlarge(self, cases: Sequence[Case]) -> None:
        """The headline with more workers: the best settings of the sweep again, then the better ones with all seeds."""
        again: dict[str, list[tuple[float, Tuned]]] = {}
        tasks = [
            Task(case=case.name, tuned=tuned, workers=MORE_WORKERS, seed=TUNING_SEED, phase="sweep")
            for case in cases
            if case.base is None
            for tuned in self._best(case, TRIED_WITH_MORE)
        ]
        self._sort_into(again, tasks)
        self._do_all(
            Task(case=case.name, tuned=tuned, workers=MORE_WORKERS, seed=seed, phase="final")
            for case in cases
            for _, tuned in again.get(case.base or case.name, [])[:1]
            for seed in self.seeds
        )

    def _sort_into(self, tried: dict[str, list[tuple[float, Tuned]]], tasks: Sequence[Task]) -> None:
        for task, run in self._do(tasks):
            if run["loss"] is not None:
                tried.setdefault(task.case, []).append((run["loss"], task.tuned))
        for results in tried.values():
            results.sort(key=lambda result: result[0])

    def _best(self, case: Case, count: int) -> list[Tuned]:
        return [tuned for _, tuned in self.tried.get(case.base or case.name, [])[:count]]

    def _do_all(self, tasks: Iterable[Task]) -> None:
        for _ in self._do(list(tasks)):
            pass

    def _do(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Run]]:
        futures = {self.pool.submit(do, task, self.budget): task for task in tasks}
        for number, future in enumerate(as_completed(futures), start=1):
            task, run = futures[future], future.result()
            self.runs.append(run)
            outcome = f"{run['loss']:.4f}" if run["loss"] is not None else run.get("diverged") or run.get("error")
            print(
                f"[{task.phase} {number}/{len(tasks)}] {task.case}, M={task.workers}, seed {task.seed}, {task.tuned}:"
                f" {outcome} ({run.get('seconds', 0.0):.0f} s)",
                flush=True,
            )
            yield task, run


def chosen_cases(names: Sequence[str]) -> list[Case]:
    """The cases, and those that they are variants of.

    Raises:
        ValueError: there is no case of that name.
    """
    unknown = [name for name in names if name not in TABLE]
    if unknown:
        raise ValueError(f"no case {unknown[0]!r}; there are: {', '.join(TABLE)}")
    wanted = set(names) | {TABLE[name].base for name in names}
    return [case for case in CASES if case.name in wanted]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a third of the tokens, fewer cases, two seeds, no run with 8 workers"
    )
    parser.add_argument("--cases", help=f"only these, with commas: {', '.join(repr(name) for name in TABLE)}")
    parser.add_argument("--seeds", type=int, help="how many for the headline, 3 (with --quick 2) unless given")
    parser.add_argument("--text", type=Path, help="a text file or a directory instead of Python's standard library")
    parser.add_argument(
        "--processes", type=int, default=min(2, os.cpu_count() or 1), help="runs at once, of one thread"
    )
    parser.add_argument("--json", type=Path, help="write every run, the table and the claims here")
    parser.add_argument("--plot", type=Path, help="draw loss against bytes, and curves; needs matplotlib (extra: plot)")
    options = parser.parse_args(argv)
    options.seeds = options.seeds or (2 if options.quick else 3)
    if options.seeds < 1 or options.processes < 1:
        parser.error("--seeds and --processes must be at least 1")
    names = [name.strip() for name in options.cases.split(",")] if options.cases else []
    try:
        options.cases = chosen_cases(names or (QUICK_CASES if options.quick else list(TABLE)))
    except ValueError as error:
        parser.error(str(error))
    if options.plot:
        try:
            import matplotlib  # noqa: F401 - better now than after half an hour
        except ImportError:
            parser.error("--plot needs matplotlib: pip install '.[plot]'")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0, or 1 if a case has failed."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["defaults"]:
        return defaults.main(arguments[1:])
    options = parse(argv)
    # Read by the workers' libraries when they are loaded.
    os.environ["OMP_NUM_THREADS"] = "1"
    budget = QUICK_BUDGET if options.quick else Budget()
    text = load_text(options.text, length=budget.length)
    numel = budget.model.num_parameters()
    print(
        f"{text.description}: {len(text.train):,} bytes to train on, {len(text.held_out):,} held out;"
        f" {numel:,} parameters; {budget.num_steps * budget.tokens_per_step:,} tokens a worker in {budget.num_steps}"
        f" steps, after {budget.start_steps} common ones",
        flush=True,
    )
    started = time.perf_counter()
    with ProcessPoolExecutor(
        options.processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=begin_process,
        initargs=(options.text, budget.length),
    ) as pool:
        bench = Bench(pool=pool, budget=budget, seeds=range(options.seeds))
        bench.tune(options.cases, QUICK_SWEEP if options.quick else None)
        bench.repeat(options.cases)
        if not options.quick:
            bench.enlarge([case for case in options.cases if case.is_headline])
    seconds = time.perf_counter() - started
    final = [run for run in bench.runs if run["phase"] == "final"]
    rows = summarise(final, numel=numel, tokens_per_step=budget.tokens_per_step)
    claims = judge(rows)
    print_table(rows)
    print_claims(claims)
    failed = {run["case"]: run["error"] for run in bench.runs if "error" in run}
    for case, error in failed.items():
        print(f"  {case} could not run: {error}")
    print(f"\n{len(bench.runs)} runs in {seconds / 60:.1f} minutes")
    if options.json:
        figures = {
            "machine": {"cpu": platform.processor() or platform.machine(), "processes": options.processes},
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seconds": round(seconds, 1),
            "text": {
                "description": text.description,
                "digest": text.digest,
                "train_nbytes": len(text.train),
                "held_out_nbytes": len(text.held_out),
            },
            "budget": asdict(budget) | {"parameters": numel},
            "seeds": list(range(options.seeds)),
            "tuning_seed": TUNING_SEED,
            "table": as_dicts(rows),
            "claims": claims,
            "runs": bench.runs,
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plot:
        plot(options.plot, rows, final, tokens_per_step=budget.tokens_per_step)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
