# SPDX-License-Identifier: Apache-2.0
"""Seeds of the round simulator: the real machine breaks no invariant, every mutant does, and a seed is one history."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.rounds.mutants import ROUND_MUTANTS
from tests.simulation.rounds.options import PLANS, RoundOptions
from tests.simulation.rounds.simulator import RoundSimulator

ROOT = Path(__file__).resolve().parents[3]
NUM_BLOCKS, SEEDS_A_BLOCK = 4, 200
SEEDS_A_MUTANT = 150


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_no_seed_of_the_collective_layer_breaks_an_invariant(block: int) -> None:
    for seed in range(block * SEEDS_A_BLOCK, (block + 1) * SEEDS_A_BLOCK):
        violation = RoundSimulator(seed).run().violation
        assert violation is None, f"{violation}; replay: scripts/simulate --rounds --first {seed} --trace"


# fmt: off
CAUGHT_BY = {
    "counts_idle_time": 27, "ends_before_it_hands_on": 1, "finishes_unopened": 3,
    "forgives_nothing": 64, "forwards_partial_sums": 5, "hands_on_only_once": 3,
    "mends_no_link_of_a_hub": 50, "minds_no_jam": 16,
    "minds_no_silence": 5, "no_credit": 3, "no_fence": 4, "no_sign_of_life": 17, "opens_only_once": 12,
    "returns_spent_credit": 20, "sends_nothing_again": 7, "silent_about_ended": 10,
}
# fmt: on
"""As in tests/simulation/test_seeds.py: where to begin to look."""


@pytest.mark.parametrize("name", sorted(ROUND_MUTANTS))
def test_every_mutant_of_the_collective_layer_is_caught_within_150_seeds(name: str) -> None:
    mutant = ROUND_MUTANTS[name]
    outcomes = (
        RoundSimulator(seed, parts=mutant.parts, focus=mutant.focus, check_machines=False).run()
        for seed in (CAUGHT_BY.get(name, 0), *range(SEEDS_A_MUTANT))
    )
    caught = next((outcome for outcome in outcomes if outcome.violation is not None), None)
    assert caught is not None, f"nothing notices that {mutant.what}"
    assert caught.violation is not None
    assert caught.violation.invariant in ("I2", "I4", "I9"), f"{caught.violation}: the simulator itself fell over"


def test_same_seed_of_the_collective_layer_gives_the_same_trace() -> None:
    first, second = RoundSimulator(11).run(), RoundSimulator(11).run()
    assert first.num_events > 100
    assert (first.trace_hash, first.num_events) == (second.trace_hash, second.num_events)
    assert RoundSimulator(12).run().trace_hash != first.trace_hash


def test_seeds_meet_every_plan_and_every_fault() -> None:
    sims = [RoundSimulator(seed) for seed in range(60)]
    drawn: list[RoundOptions] = [sim.options for sim in sims]
    assert {plan for options in drawn for plan in options.plans} == set(PLANS)
    assert {options.num_operations for options in drawn} == {1, 2, 3, 4}
    counters = [sim.run().counters for sim in sims[:30]]
    for what in ("corrupt frames found", "suspicions", "held back", "finished"):
        assert sum(item.get(what, 0) for item in counters) > 0, f"no seed has met: {what}"


def test_violation_in_the_collective_layer_ends_the_command_and_says_how_to_replay_it() -> None:
    command = [sys.executable, "-m", "tests.simulation.cli", "--rounds", "--seeds", "20", "--mutant", "no_fence"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "--trace --rounds --mutant no_fence" in done.stdout
