# SPDX-License-Identifier: Apache-2.0
"""A round as a pure machine: who sends what, what is counted, what is refused. Schedules: tests/property."""

import pytest

from isthmus.collective.core import slices as trees
from isthmus.collective.core.round_machine import RoundMachine
from isthmus.collective.core.round_words import (
    Accumulate,
    ChunkRefused,
    FinishChunk,
    Finished,
    InstallResult,
    LinkRenewed,
    PartArrived,
    PeerOpened,
    ResultArrived,
    SendOpen,
    SendPart,
    SendResult,
)
from isthmus.collective.core.slices import SlicePlan
from isthmus.collective.core.types import Epoch, OuterStep, RoundKey

KEY = RoundKey(Epoch(1), OuterStep(0), 0)


def machine(rank=0, bounds=(0, 2, 4), eager_chunks=1, routes=None):
    """Of a butterfly, unless `routes` says otherwise."""
    slices = SlicePlan(bounds=bounds, routes=routes or trees.butterfly(len(bounds) - 1))
    return RoundMachine(key=KEY, rank=rank, slices=slices, eager_chunks=eager_chunks)


# ------------------------------------------------------------------------------------ the butterfly


def test_parts_before_the_peer_has_opened_stay_within_the_credit():
    member = machine(bounds=(0, 2, 8), eager_chunks=2)
    assert member.start() == [SendOpen(1), SendPart(1, 2), SendPart(1, 3)]
    assert member.handle(PeerOpened(1)) == [SendPart(1, chunk) for chunk in range(4, 8)]
    member.check_invariants()


def test_without_credit_nothing_is_sent_ahead():
    member = machine(bounds=(0, 2, 4), eager_chunks=0)
    assert member.start() == [SendOpen(1)]
    assert member.handle(PeerOpened(1)) == [SendPart(1, 2), SendPart(1, 3)]


def test_a_part_proves_that_its_sender_has_opened():
    member = machine()
    member.start()
    effects = member.handle(PartArrived(1, 0))
    assert SendPart(1, 3) in effects
    assert member.has_opened(1)


def test_parts_are_added_as_they_come_and_the_result_goes_to_all():
    member = machine(bounds=(0, 1, 2, 3))
    member.start()
    assert member.handle(PartArrived(2, 0)) == [Accumulate(0, 2)]
    assert member.handle(PartArrived(1, 0)) == [
        Accumulate(0, 1),
        FinishChunk(0),
        SendResult(1, 0),
        SendResult(2, 0),
    ]
    member.check_invariants()


def test_a_chunk_is_finished_only_when_all_have_opened_since_the_weights_are_not_known_before():
    """Rank 2 has no part in slice 0, but its weight counts."""
    lone = trees.Route(root=0, up=(-1, 0, -1), down=(-1, 0, 0))
    member = machine(bounds=(0, 1), routes=(lone,))
    member.start()
    assert member.handle(PartArrived(1, 0)) == [Accumulate(0, 1)]
    assert member.handle(PeerOpened(2)) == [FinishChunk(0), SendResult(1, 0), SendResult(2, 0), Finished()]
    member.check_invariants()


def test_a_duplicate_part_is_dropped():
    member = machine(bounds=(0, 1, 2, 3))
    member.start()
    member.handle(PartArrived(1, 0))
    assert member.handle(PartArrived(1, 0)) == []
    member.check_invariants()


def test_a_duplicate_result_is_dropped():
    member = machine()
    member.start()
    assert member.handle(ResultArrived(1, 2))[-1] == InstallResult(2)
    assert member.handle(ResultArrived(1, 2)) == []
    assert not member.wants_result(1, 2)
    member.check_invariants()


def test_finished_comes_once_and_only_when_everybody_has_opened():
    member = machine(bounds=(0, 1, 2, 2))
    member.start()
    member.handle(PartArrived(1, 0))
    member.handle(ResultArrived(1, 1))
    # Rank 2 is the root of nothing here, but its part of chunk 0 and its opening are still missing.
    assert member.waiting_for() == (2,)
    assert Finished() in member.handle(PartArrived(2, 0))
    assert member.handle(PeerOpened(2)) == []
    member.check_invariants()


def test_an_empty_buffer_is_finished_when_all_have_opened():
    member = machine(bounds=(0, 0, 0))
    assert member.start() == [SendOpen(1)]
    assert member.handle(PeerOpened(1)) == [Finished()]


def test_alone_in_the_view_everything_is_finished_at_once():
    member = machine(bounds=(0, 2))
    assert member.start() == [FinishChunk(0), FinishChunk(1), Finished()]
    member.check_invariants()


def test_a_renewed_link_gets_everything_again_that_may_have_been_lost():
    member = machine(bounds=(0, 2, 4), eager_chunks=1)
    member.start()
    member.handle(PartArrived(1, 0))
    member.handle(ResultArrived(1, 2))
    # Chunk 2 is back from its root, so our part of it arrived; chunk 1 is not finished, so it has no result yet.
    assert set(member.handle(LinkRenewed(1))) == {SendOpen(1), SendPart(1, 3), SendResult(1, 0)}
    assert member.handle(ResultArrived(1, 3)) == [InstallResult(3)]
    member.check_invariants()


def test_a_renewed_link_does_not_get_twice_what_still_waits_for_the_credit():
    member = machine(bounds=(0, 0, 3), eager_chunks=1)
    assert member.start() == [SendOpen(1), SendPart(1, 0)]
    assert member.handle(LinkRenewed(1)) == [SendOpen(1), SendPart(1, 0)]
    assert member.handle(PeerOpened(1)) == [SendPart(1, 1), SendPart(1, 2)]
    member.check_invariants()


@pytest.mark.parametrize(
    "event",
    [
        PartArrived(1, 2),
        PartArrived(1, 99),
        PartArrived(1, -2),
        PartArrived(0, 0),
        PartArrived(7, 0),
        ResultArrived(1, 0),
        ResultArrived(0, 2),
        PeerOpened(2),
        PeerOpened(-1),
        LinkRenewed(0),
    ],
)
def test_what_the_plan_does_not_allow_is_refused_by_name_and_changes_nothing(event):
    member = machine()
    member.start()
    with pytest.raises(ChunkRefused) as refused:
        member.handle(event)
    assert refused.value.rank == event.rank
    assert member.waiting_for() == (1,)
    assert not member.has_opened(1)
    member.check_invariants()


def test_a_result_before_our_own_part_was_handed_up_is_refused():
    """In a ring, rank 1 adds the part of rank 0 to its own before it hands both on."""
    member = machine(rank=1, bounds=(0, 0, 0, 1), routes=trees.ring((0, 1, 2)))
    member.start()
    with pytest.raises(ChunkRefused, match="before our part"):
        member.handle(ResultArrived(0, 0))
    assert not member.has_opened(0)
    member.check_invariants()


@pytest.mark.parametrize(("rank", "eager_chunks"), [(-1, 1), (2, 1), (0, -1)])
def test_a_place_outside_the_view_and_a_negative_credit_are_refused(rank, eager_chunks):
    with pytest.raises(ValueError, match="eager chunks"):
        machine(rank=rank, eager_chunks=eager_chunks)


# ------------------------------------------------------------------------------------ other trees


def test_between_leaf_and_root_parts_are_added_and_handed_up_and_results_down():
    path = trees.Route(root=2, up=(1, 2, -1), down=(1, 2, -1))
    middle = machine(rank=1, bounds=(0, 1), routes=(path,), eager_chunks=4)
    assert middle.start() == [SendOpen(0), SendOpen(2)]
    assert not middle.sends_own_part(0)
    assert not middle.adds_for(0, 0)
    assert machine(rank=2, bounds=(0, 1), routes=(path,)).adds_for(1, 0)
    assert not middle.is_into_root(0, 0)
    assert middle.is_into_root(1, 0)
    assert middle.handle(PartArrived(0, 0)) == [Accumulate(0, 0), SendPart(2, 0)]
    assert middle.wants_result(2, 0)
    assert not middle.wants_result(0, 0)
    assert middle.handle(ResultArrived(2, 0)) == [InstallResult(0), SendResult(0, 0), Finished()]
    middle.check_invariants()


def test_a_gather_gives_at_once_what_is_ours_within_the_credit():
    member = machine(rank=0, bounds=(0, 3, 4), routes=trees.gather(2), eager_chunks=2)
    assert set(member.start()) == {SendOpen(1), *(FinishChunk(chunk) for chunk in range(3))} | {
        SendResult(1, 0),
        SendResult(1, 1),
    }
    assert member.handle(ResultArrived(1, 3)) == [SendResult(1, 2), InstallResult(3), Finished()]
    member.check_invariants()


def test_a_broadcast_has_one_giver():
    root = machine(rank=1, bounds=(0, 1), routes=trees.broadcast(1, 3))
    assert root.start() == [SendOpen(0), SendOpen(2), FinishChunk(0), SendResult(0, 0), SendResult(2, 0)]
    assert root.waiting_for() == (0, 2)
    leaf = machine(rank=0, bounds=(0, 1), routes=trees.broadcast(1, 3))
    assert leaf.start() == [SendOpen(1), SendOpen(2)]
    assert leaf.handle(ResultArrived(1, 0)) == [InstallResult(0)]
    assert leaf.handle(PeerOpened(2)) == [Finished()]
    with pytest.raises(ChunkRefused, match="not for us to add"):
        leaf.handle(PartArrived(2, 0))


# ------------------------------------------------------------------------------------ who owes what


def test_a_member_that_only_owes_results_need_not_move_while_a_third_one_is_missing():
    member = machine(bounds=(0, 1, 2, 3))
    member.start()
    member.handle(PeerOpened(1))
    assert member.needs(1)
    assert member.owes_own_parts(1)
    member.handle(PartArrived(1, 0))
    assert member.needs(1)  # the result of chunk 1, for which it waits for rank 2 as well
    assert not member.owes_own_parts(1)


def test_a_giver_of_its_own_data_owes_it_at_once():
    member = machine(rank=0, bounds=(0, 1, 2), routes=trees.gather(2))
    member.start()
    assert member.owes_own_parts(1)
    member.handle(ResultArrived(1, 1))
    assert not member.owes_own_parts(1)
    assert not member.needs(1)


def test_a_member_between_leaf_and_root_owes_nothing_that_depends_on_it_alone():
    path = trees.Route(root=2, up=(1, 2, -1), down=(1, 2, -1))
    root = machine(rank=2, bounds=(0, 1), routes=(path,))
    root.start()
    assert root.needs(1)
    assert not root.owes_own_parts(1)
    assert machine(rank=1, bounds=(0, 1), routes=(path,)).owes_own_parts(0)
