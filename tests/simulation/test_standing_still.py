# SPDX-License-Identifier: Apache-2.0
"""Trainers that stand still while their daemons live: the others go on as if these peers had never been there."""

from collections.abc import Callable

import pytest

from isthmus.collective.core.types import Instant, OuterStep, PeerRef
from isthmus.elastic.core.pauses import Pauses
from tests.simulation.broken_members import CountsBytesAsWork
from tests.simulation.broken_rounds import WaitsLongerAndLonger
from tests.simulation.broken_runs import PatchedCoordinator
from tests.simulation.parts import Parts
from tests.simulation.peer import PeerNode
from tests.simulation.stage import Stage
from tests.simulation.world import Violation

WINDOW_S = 60.0
LOOK_S = 0.05


class NoPauses(Pauses):
    def is_over(self, ref: PeerRef, outer_step: OuterStep, now: Instant) -> bool:
        return True


class ComesBackAtOnce(PatchedCoordinator):
    parts = (("_pauses", NoPauses),)


def _commits(num_peers: int, strike: Callable[[PeerNode], None], parts: Parts | None = None) -> int:
    """Commits in a window. The last peer is struck all the time, from half a window before it on."""
    stage = Stage(num_peers, stall_floor_s=20.0, parts=parts)
    stage.start()
    stage.until_active(*range(num_peers))
    stage.until_committed(5)
    node, begin = stage.peers[-1], stage.sim.world.now
    before = 0
    while stage.sim.world.now < begin + 1.5 * WINDOW_S:
        strike(node)
        stage.run(LOOK_S)
        if stage.sim.world.now < begin + 0.5 * WINDOW_S:
            before = len(stage.commits)
    return len(stage.commits) - before


def _healthy(node: PeerNode) -> None:
    pass


def _hang(node: PeerNode) -> None:
    node.hang(True)


def _hang_as_a_member(node: PeerNode) -> None:
    """It works until it is a member again."""
    assert node.machine is not None
    node.hang(node.machine.view is not None)


def test_a_peer_whose_trainer_hangs_is_awaited_once() -> None:
    assert _commits(4, _hang) >= 0.9 * _commits(3, _healthy)


def test_bytes_that_a_hung_peer_receives_are_no_work() -> None:
    with pytest.raises(Violation, match="awaited again"):
        _commits(4, _hang, Parts(member=CountsBytesAsWork))


def test_a_peer_that_works_until_it_is_a_member_again_costs_less_and_less() -> None:
    healthy = _commits(3, _healthy)
    assert _commits(4, _hang_as_a_member) >= 0.9 * healthy
    with pytest.raises(Violation, match="is back after"):
        _commits(4, _hang_as_a_member, Parts(coordinator=ComesBackAtOnce))


class ShortPauses(Pauses):
    def missed(self, ref: PeerRef, outer_step: OuterStep, now: Instant, *, waited_s: float = 0.0) -> float:
        return super().missed(ref, outer_step, now)


class WithoutLongPauses(PatchedCoordinator):
    parts = (("_pauses", ShortPauses),)


def _never_vote(node: PeerNode) -> None:
    node.hang_absorb(True)


def test_a_vote_that_never_comes_takes_a_tenth_of_the_others_time_at_most() -> None:
    healthy = _commits(3, _healthy)
    assert _commits(4, _never_vote) >= 0.9 * healthy
    assert _commits(4, _never_vote, Parts(coordinator=WithoutLongPauses)) < 0.9 * healthy


def _awaited_after_a_hang_of_all_s(parts: Parts | None = None) -> float:
    """All outer steps hang once and come back. For so long the next member that hangs is awaited then [s]."""
    stage = Stage(4, stall_floor_s=8.0, parts=parts)
    stage.start()
    stage.until_active(*range(4))
    stage.until_committed(5)
    for node in stage.peers:
        node.hang_absorb(True)
    stage.run(20.0)
    for node in stage.peers:
        node.hang_absorb(False)
    stage.until_active(*range(4))
    stage.until_committed(3)
    node, began = stage.peers[-1], stage.sim.world.now
    node.hang_absorb(True)
    while node.ref in {member.ref for member in stage.sim.checkers.history.members()}:
        stage.run(LOOK_S)
    return stage.sim.world.now - began


def test_a_hang_that_is_over_does_not_make_the_next_silent_member_awaited_longer() -> None:
    assert _awaited_after_a_hang_of_all_s() < 15.0
    assert _awaited_after_a_hang_of_all_s(Parts(coordinator=WaitsLongerAndLonger)) > 30.0
