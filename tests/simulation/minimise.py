# SPDX-License-Identifier: Apache-2.0
"""The smallest history that still breaks the same invariant: fault classes off, fewer peers, shorter, fewer strikes.

Options are drawn apart from what happens, and every fault class has chance of its own, so much stays as it was when
one thing is taken away. Where the history does change, a few other seeds of the world are tried with the same options.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.simulation.mutants import MUTANTS
from tests.simulation.options import Options
from tests.simulation.parts import Parts
from tests.simulation.scenario import Expected, Scenario, changed, story_of
from tests.simulation.simulator import Outcome, Simulator

NUM_WORLDS = 6
"""How many seeds are tried with the same options."""
SHORTEST_S = 2.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Options and a seed that break an invariant, and what came of them."""

    options: Options
    outcome: Outcome
    story: list[str]

    @property
    def invariant(self) -> str:
        assert self.outcome.violation is not None
        return self.outcome.violation.invariant

    def scenario(self, mutant: str | None) -> Scenario:
        """What is written to a file, and replayed with `--scenario`."""
        assert self.outcome.violation is not None
        return Scenario(
            title=f"seed {self.outcome.seed} violates {self.invariant}",
            why=self.outcome.violation.what,
            seed=self.outcome.seed,
            mutant=mutant or "",
            options={name: list(v) if isinstance(v, tuple) else v for name, v in changed(self.options).items()},
            expect=Expected(violation=self.invariant, story=self.story),
        )


def minimise(seed: int, mutant: str | None = None, say: Callable[[str], None] = lambda line: None) -> Failure | None:
    """Take away what this seed does not need for its violation. None if it breaks no invariant."""
    parts = MUTANTS[mutant].parts if mutant else Parts()
    smallest = _fails(Options.of_seed(seed), [seed], parts)
    before = None
    while smallest is not None and smallest is not before:
        before = smallest
        for shrink in _shrinkings(smallest.options):
            options = shrink(smallest)
            if options is None or options == smallest.options:
                continue
            first = smallest.outcome.seed
            found = _fails(options, range(first, first + NUM_WORLDS), parts, smallest.invariant)
            if found is not None:
                smallest = found
                say(f"{len(changed(options)):3d} options, {options.num_peers} peers, {options.safety_s:.1f} s")
    return smallest


def _fails(options: Options, seeds: Iterable[int], parts: Parts, invariant: str | None = None) -> Failure | None:
    """The first of these worlds in which the invariant (any, if none is named) is violated."""
    for seed in seeds:
        sim = Simulator(seed, options=options, parts=parts)
        outcome = sim.run()
        if outcome.violation is not None and invariant in (None, outcome.violation.invariant):
            return Failure(options, outcome, story_of(sim.coordinator.journal))
    return None


def _shrinkings(options: Options) -> Iterator[Callable[[Failure], Options | None]]:
    """Ways to something smaller, each tried once on the smallest failure so far."""
    plain = Options()
    for name in changed(options):
        if name not in ("num_peers", "safety_s", "max_strikes"):
            yield lambda failure, name=name: failure.options.with_(**{name: getattr(plain, name)})  # type: ignore[misc]
    yield _halve_strikes
    yield _one_strike_less
    yield _fewer_peers
    yield lambda failure: failure.options.with_(safety_s=max(SHORTEST_S, failure.options.safety_s / 2))


def _fewer_peers(failure: Failure) -> Options | None:
    options = failure.options
    num_peers = options.num_peers - 1
    if num_peers < 1:
        return None
    return options.with_(
        num_peers=num_peers,
        num_late=min(options.num_late, num_peers - 1),
        min_peers=min(options.min_peers, num_peers),
        start_peers=min(options.start_peers, num_peers),
    )


def _halve_strikes(failure: Failure) -> Options | None:
    num_strikes = _num_strikes(failure)
    return failure.options.with_(max_strikes=num_strikes // 2) if num_strikes else None


def _one_strike_less(failure: Failure) -> Options | None:
    num_strikes = _num_strikes(failure)
    return failure.options.with_(max_strikes=num_strikes - 1) if num_strikes else None


def _num_strikes(failure: Failure) -> int:
    return sum(number for mark, number in failure.outcome.counters.items() if mark.startswith("fault: "))
