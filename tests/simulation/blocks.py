# SPDX-License-Identifier: Apache-2.0
"""Many seeds: in blocks, on several processes, with one report that does not depend on how many.

A block is a range of seeds that one process runs. Blocks are added up in the order of their seeds, and the first one
with a violation ends the run: so the report names the lowest seed that breaks an invariant, however many processes
there are, and counts what was run up to it. Only the figures of time differ from run to run.
"""

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

from isthmus.trainer.workers.lifeline import die_with
from tests.simulation.mutants import MUTANTS
from tests.simulation.parts import Parts
from tests.simulation.rounds.mutants import ROUND_MUTANTS
from tests.simulation.rounds.simulator import RoundSimulator
from tests.simulation.simulator import Outcome, Simulator

SEEDS_A_BLOCK = 40
BLOCK_TIMEOUT_S = 1200.0
"""For one block, on however busy a machine. A seed has its own watchdog, in time of the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What to run a seed with: the protocol or the collective layer alone, the real one or a broken variant."""

    is_rounds: bool = False
    mutant: str | None = None

    def run(self, seed: int, *, has_echo: bool = False) -> Outcome:
        """One seed."""
        echo = print if has_echo else None
        if not self.is_rounds:
            return Simulator(seed, parts=MUTANTS[self.mutant].parts if self.mutant else Parts(), echo=echo).run()
        if self.mutant is None:
            return RoundSimulator(seed, echo=echo).run()
        broken = ROUND_MUTANTS[self.mutant]
        return RoundSimulator(seed, parts=broken.parts, focus=broken.focus, check_machines=False, echo=echo).run()


@dataclass(slots=True)
class Tally:
    """What came of some seeds, added up."""

    num_seeds: int = 0
    num_commits: int = 0
    num_views: int = 0
    num_events: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    violation: tuple[int, str, str] | None = None
    """Seed, invariant, and what is wrong."""

    def count(self, outcome: Outcome) -> None:
        """Add one seed."""
        self.num_seeds += 1
        self.num_commits += outcome.num_commits
        self.num_views += outcome.num_views
        self.num_events += outcome.num_events
        self.virtual_s += outcome.virtual_s
        self.counters.update(outcome.counters)
        self.ends[outcome.end] += 1
        if outcome.violation is not None:
            self.violation = (outcome.seed, outcome.violation.invariant, outcome.violation.what)

    def add(self, other: "Tally") -> None:
        """Add the block that follows."""
        self.num_seeds += other.num_seeds
        self.num_commits += other.num_commits
        self.num_views += other.num_views
        self.num_events += other.num_events
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.counters.update(other.counters)
        self.ends.update(other.ends)
        self.violation = other.violation


def run_seeds(kind: Kind, first: int, num_seeds: int, *, num_jobs: int | None = None) -> Tally:
    """These seeds, until the first violation.

    Args:
        num_jobs: processes; None for as many as there are processors to run on, 1 for this process alone.

    Raises:
        BrokenProcessPool: a process was killed.
        TimeoutError: a block took longer than `BLOCK_TIMEOUT_S`.
    """
    stop = first + num_seeds
    blocks = [(start, min(start + SEEDS_A_BLOCK, stop)) for start in range(first, stop, SEEDS_A_BLOCK)]
    num_jobs = min(num_jobs or len(os.sched_getaffinity(0)), len(blocks))
    total = Tally()
    results = (_run_block(kind, *block) for block in blocks) if num_jobs == 1 else _spread(kind, blocks, num_jobs)
    for tally in results:
        total.add(tally)
        if tally.violation is not None:
            break
    return total


def _spread(kind: Kind, blocks: list[tuple[int, int]], num_jobs: int) -> Iterator[Tally]:
    """The results of all blocks in their order, from several processes."""
    executor = ProcessPoolExecutor(
        num_jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    try:
        futures: list[Future[Tally]] = [executor.submit(_run_block, kind, *block) for block in blocks]
        for future in futures:
            yield future.result(timeout=BLOCK_TIMEOUT_S)
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(parent_pid: int) -> None:
    """In a new process: it works for the one that started it, and for nobody else."""
    if not die_with(parent_pid):
        os._exit(1)


def _run_block(kind: Kind, first: int, stop: int) -> Tally:
    tally, started = Tally(), time.process_time()
    gc.disable()  # a seed is one big cycle of objects that lives until its end: looking for garbage in it finds none
    try:
        for seed in range(first, stop):
            tally.count(kind.run(seed))
            if tally.violation is not None:
                break
    finally:
        gc.enable()
        gc.collect()
    tally.cpu_s = time.process_time() - started
    return tally
