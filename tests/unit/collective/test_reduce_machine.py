"""The butterfly MEAN as a pure machine: who sends what, what is counted, what is refused."""

import pytest

from collective.core.reduce import (
    Accumulate,
    ChunkRefused,
    ContributionArrived,
    FinishChunk,
    Finished,
    InstallResult,
    LinkRenewed,
    MeanMachine,
    PeerOpened,
    ResultArrived,
    SendContribution,
    SendOpen,
    SendResult,
    SlicePlan,
)
from collective.core.types import Epoch, OuterStep, RoundKey

KEY = RoundKey(Epoch(1), OuterStep(0), 0)


def machine(rank=0, bounds=(0, 2, 4), eager_chunks=1):
    return MeanMachine(key=KEY, rank=rank, slices=SlicePlan(bounds=bounds), eager_chunks=eager_chunks)


def test_contributions_before_the_peer_has_opened_stay_within_the_credit():
    member = machine(bounds=(0, 2, 8), eager_chunks=2)
    assert member.start() == [SendOpen(1), SendContribution(1, 2), SendContribution(1, 3)]
    assert member.handle(PeerOpened(1)) == [SendContribution(1, chunk) for chunk in range(4, 8)]
    member.check_invariants()


def test_a_contribution_proves_that_its_sender_has_opened():
    member = machine()
    member.start()
    effects = member.handle(ContributionArrived(1, 0))
    assert SendContribution(1, 3) in effects
    assert member.has_opened(1)


def test_own_part_is_counted_with_the_first_that_arrives_and_the_result_goes_to_all():
    member = machine(bounds=(0, 1, 2, 3))
    member.start()
    assert member.handle(ContributionArrived(2, 0)) == [Accumulate(0, 0), Accumulate(0, 2)]
    assert member.handle(ContributionArrived(1, 0)) == [
        Accumulate(0, 1),
        FinishChunk(0),
        SendResult(1, 0),
        SendResult(2, 0),
    ]
    member.check_invariants()


def test_a_duplicate_contribution_is_dropped_and_counted():
    member = machine(bounds=(0, 1, 2, 3))
    member.start()
    member.handle(ContributionArrived(1, 0))
    assert member.handle(ContributionArrived(1, 0)) == []
    assert member.duplicates == 1
    member.check_invariants()


def test_finished_comes_once_and_only_when_everybody_has_opened():
    member = machine(bounds=(0, 1, 2, 2))
    member.start()
    member.handle(ContributionArrived(1, 0))
    member.handle(ResultArrived(1, 1))
    # Rank 2 owns nothing here, but its part of chunk 0 and its opening are still missing.
    assert member.waiting_for() == (2,)
    assert Finished() in member.handle(ContributionArrived(2, 0))
    assert member.handle(PeerOpened(2)) == []
    member.check_invariants()


def test_an_empty_buffer_is_finished_when_all_have_opened():
    member = machine(bounds=(0, 0, 0))
    assert member.start() == [SendOpen(1)]
    assert member.handle(PeerOpened(1)) == [Finished()]


def test_alone_in_the_view_everything_is_finished_at_once():
    member = machine(bounds=(0, 2))
    assert member.start() == [Accumulate(0, 0), FinishChunk(0), Accumulate(1, 0), FinishChunk(1), Finished()]
    member.check_invariants()


def test_a_renewed_link_gets_everything_again_that_may_have_been_lost():
    member = machine(bounds=(0, 2, 4), eager_chunks=1)
    member.start()
    member.handle(ContributionArrived(1, 0))
    member.handle(ResultArrived(1, 2))
    # Chunk 2 is back from its owner, so our part of it arrived; chunk 1 is not finished, so it has no result yet.
    assert member.handle(LinkRenewed(1)) == [SendOpen(1), SendContribution(1, 3), SendResult(1, 0)]
    assert member.handle(ResultArrived(1, 3)) == [InstallResult(3)]
    member.check_invariants()


@pytest.mark.parametrize(
    "event",
    [
        ContributionArrived(1, 2),
        ContributionArrived(1, 99),
        ContributionArrived(0, 0),
        ContributionArrived(7, 0),
        ResultArrived(1, 0),
        ResultArrived(1, 3),
        PeerOpened(2),
    ],
)
def test_what_the_plan_does_not_allow_is_refused_by_name_and_changes_nothing(event):
    member = machine()
    member.start()
    with pytest.raises(ChunkRefused) as refused:
        member.handle(event)
    assert refused.value.rank == event.rank
    assert member.waiting_for() == (1,)
    member.check_invariants()
