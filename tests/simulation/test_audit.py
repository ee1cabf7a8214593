# SPDX-License-Identifier: Apache-2.0
"""The audit and the simulator judge the same histories: what the checkers let pass is clean, what breaks is found."""

from collections.abc import Collection, Sequence

import pytest

from isthmus.collective.core.types import PeerId
from isthmus.elastic.audit import Audit, audit
from isthmus.elastic.audit.beginning import beginning_in
from isthmus.elastic.core.attendance import Attendance
from isthmus.elastic.core.closing import Closing
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.messages import LeaseRequest
from isthmus.elastic.core.records import CommittedPart
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.sessions import Session
from tests.simulation.broken_runs import PatchedCoordinator
from tests.simulation.marks import DEFENCES
from tests.simulation.mutants import MUTANTS
from tests.simulation.options import Options
from tests.simulation.parts import Parts
from tests.simulation.simulator import Simulator

NUM_BLOCKS, SEEDS_A_BLOCK = 8, 25


def audited(simulator: Simulator) -> Audit:
    return audit(simulator.coordinator.journal, samples_per_data_epoch=50)


def sentences(proved: Audit) -> list[str]:
    return [f"{finding.invariant} {finding.sentence}" for item in proved.verdicts for finding in item.findings]


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_no_seed_breaks_an_invariant_and_every_history_is_clean_and_adds_up(block: int) -> None:
    for seed in range(block * SEEDS_A_BLOCK, (block + 1) * SEEDS_A_BLOCK):
        simulator = Simulator(seed)
        outcome = simulator.run()
        assert outcome.violation is None, f"{outcome.violation}; replay: scripts/simulate --first {seed} --trace"
        assert not DEFENCES & set(outcome.counters), "honest peers ran into a defence against others"
        proved = audited(simulator)
        assert not sentences(proved), f"seed {seed}"
        from_snapshot = audit(simulator.coordinator.journal[simulator.coordinator.base :], samples_per_data_epoch=50)
        assert not sentences(from_snapshot), f"seed {seed}"
        assert from_snapshot.account.outer_step == proved.account.outer_step
        assert from_snapshot.samples.next_index == proved.samples.next_index
        assert from_snapshot.samples.num_leased == proved.samples.num_leased
        assert from_snapshot.samples.exactly_once
        account, samples = proved.account, proved.samples
        num_given_up = sum(item.num_commits for item in account.given_up)
        assert account.num_commits + num_given_up == outcome.num_commits
        assert account.num_views == outcome.num_views
        assert samples.exactly_once
        begins = next(filter(None, map(beginning_in, simulator.coordinator.journal)), None)
        used_before = 0
        if begins is not None:
            used_before = begins.position.next_index - sum(len(item) for item in begins.position.unconsumed)
        num_placed = samples.num_used_up + samples.num_leased + samples.num_free
        assert num_placed == samples.next_index - used_before
        assert account.is_rebuilt or samples.num_given == num_placed
        assert sum(share.num_samples for share in account.shares) == samples.num_used_up


# ------------------------------------------------------------------------------------------------------------- mutants


class NeverTakesLeasesBack(CoordinatorMachine):
    """What the dead own stays theirs."""

    def _start(self, config: CoordinatorConfig, state: RunState) -> None:
        super()._start(config, state)
        self._views.release_leases_of_strangers = lambda: None  # type: ignore[method-assign]


class ForgetsWhatIsOwned(Attendance):
    def wants_data(self, session: Session, request: LeaseRequest) -> None:
        self._state.leases._owned.clear()
        self._state.leases.next_index = 0
        super().wants_data(session, request)


class GrantsTheSameTwice(PatchedCoordinator):
    """The ledger forgets what is owned."""

    parts = (("_attendance", ForgetsWhatIsOwned),)


class LeavesTheLastOut(Closing):
    def _contributions(self, members: Sequence[Session], deviants: Collection[PeerId]) -> tuple[CommittedPart, ...]:
        *parts, last = super()._contributions(members, deviants)
        return (*parts, CommittedPart(members[0].ref, last.weight, last.num_tokens, ()))


class LeavesAMemberOut(PatchedCoordinator):
    """The last member's work is in the mean and not in the commit."""

    parts = (("_closing", LeavesTheLastOut),)


class LeavesOneOut(Attendance):
    def wants_data(self, session: Session, request: LeaseRequest) -> None:
        self._state.leases.next_index += 1
        super().wants_data(session, request)


class SkipsSamples(PatchedCoordinator):
    """Every grant of new samples leaves one out."""

    parts = (("_attendance", LeavesOneOut),)


BROKEN = {
    "lease_returned_twice": (MUTANTS["lease_returned_twice"].parts, "I7", "without owning them"),
    "lease_never_returned": (Parts(coordinator=NeverTakesLeasesBack), "I7", "gone by then, owns"),
    "lease_given_twice": (Parts(coordinator=GrantsTheSameTwice), "I7", "is given"),
    "member_left_out": (Parts(coordinator=LeavesAMemberOut), "I2", "lacks the work of its member"),
    "sample_skipped": (Parts(coordinator=SkipsSamples), "I7", "never were"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_coordinator_that_breaks_a_rule_of_the_journal_is_found(name: str) -> None:
    parts, invariant, said = BROKEN[name]
    for seed in range(100):
        simulator = Simulator(seed, options=Options.plain_of_seed(seed), parts=parts, check_machines=False)
        # The books of certificates would end the run before its journal is wrong.
        simulator.checkers.certificates.told = lambda message: None  # type: ignore[method-assign]
        simulator.run()
        found = sentences(audited(simulator))
        if found:
            assert any(item.startswith(invariant) and said in item for item in found), found
            return
    pytest.fail("no seed shows it")
