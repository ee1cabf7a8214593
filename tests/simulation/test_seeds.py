"""Seeds of the swarm: the real protocol breaks no invariant, every mutant does, and a seed is one history."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.simulator import Simulator

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_BLOCKS, SEEDS_A_BLOCK = 8, 50


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_no_seed_breaks_an_invariant(block: int) -> None:
    for seed in range(block * SEEDS_A_BLOCK, (block + 1) * SEEDS_A_BLOCK):
        violation = Simulator(seed).run().violation
        assert violation is None, f"{violation}; replay: scripts/simulate --first {seed} --trace"


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_every_mutant_is_caught_within_300_seeds(name: str) -> None:
    outcomes = (Simulator(seed, parts=MUTANTS[name].parts).run() for seed in range(300))
    caught = next((outcome for outcome in outcomes if outcome.violation is not None), None)
    assert caught is not None, f"nothing notices that {MUTANTS[name].what}"


def test_same_seed_gives_the_same_trace() -> None:
    first, second = Simulator(11).run(), Simulator(11).run()
    assert first.num_events > 100
    assert (first.trace_hash, first.num_events, first.virtual_s) == (
        second.trace_hash,
        second.num_events,
        second.virtual_s,
    )
    assert Simulator(12).run().trace_hash != first.trace_hash


def test_violation_ends_the_command_with_code_1_and_says_how_to_replay_it() -> None:
    command = [sys.executable, "-m", "tests.simulation.cli", "--seeds", "20", "--mutant", "no_commit_round"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Replay: scripts/simulate --first" in done.stdout


def test_simulator_starts_without_torch() -> None:
    code = "import sys, tests.simulation.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
