# SPDX-License-Identifier: Apache-2.0
"""Histories of the collective layer with a name: each fault once on purpose, and every bug that seeds have found."""

from collections.abc import Callable

import pytest

from isthmus.collective.core.slices import SlicePlan, butterfly
from isthmus.collective.core.types import RoundKey
from tests.simulation.rounds.checker import CUT_IS_FOUND_S, MARGIN_S
from tests.simulation.rounds.network import End, Link, Network
from tests.simulation.rounds.operation import Operation
from tests.simulation.rounds.options import DIAL_TIMEOUT_S, INSTALL_GRACE_S, PLANS, ROUND_S, SILENCE_S, RoundOptions
from tests.simulation.rounds.parts import RoundParts
from tests.simulation.rounds.peer import Peer
from tests.simulation.rounds.simulator import RoundSimulator
from tests.simulation.rounds.values import OPEN, RESULT, Frame
from tests.simulation.world import Violation

CALM = RoundOptions(compute_s=(0.0, 0.0), latency_s=(0.02, 0.03), jitter_s=0.0, max_chunks_per_slice=3, distrust=0.0)


class Stage:
    """A calm world in which a scenario does one thing on purpose. The checker watches as ever."""

    def __init__(self, num_peers: int, *, parts: RoundParts | None = None, **options: object) -> None:
        if "plan" in options:
            options["plans"] = (options.pop("plan"),)
        self.sim = RoundSimulator(1, options=CALM.with_(num_peers=num_peers, **options), parts=parts)
        self.sim.start()
        self.peers = list(self.sim.peers.values())

    @property
    def network(self) -> Network:
        return self.sim.network

    def until(self, condition: Callable[[], bool], within_s: float) -> float:
        """Let things happen until it holds; how long that took. Fails if it does not within the time."""
        begin = self.sim.world.now
        assert self.sim.world.run_until(begin + within_s, stop=condition), f"did not happen within {within_s} s"
        return self.sim.world.now - begin

    def until_opened(self) -> list[Operation]:
        """The operations in flight when everybody has opened all of them."""

        def all_open() -> bool:
            running = [operation for peer in self.peers for operation in peer.rounds.values()]
            return len(running) == len(self.peers) * self.sim.options.num_operations and all(
                operation.machine.num_unopened == 0 for operation in running
            )

        self.until(all_open, 5.0)
        return [operation for peer in self.peers for operation in peer.rounds.values()]

    def until_committed(self, more: int = 1, within_s: float = 10.0) -> float:
        goal = self.sim.server.num_commits + more
        return self.until(lambda: self.sim.server.num_commits >= goal, within_s)

    def members(self) -> list[Peer]:
        return [self.sim.peers[member.peer_id] for member in self.sim.server.view.members]


@pytest.mark.parametrize("plan", PLANS)
def test_several_operations_of_any_plan_end_alike_at_all_members(plan: str) -> None:
    stage = Stage(5, num_operations=4, plans=(plan,) * 4)
    stage.until_committed(3)
    assert stage.sim.checker.counters["suspicions"] == 0


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("silently", [False, True])
def test_survivors_of_a_crash_in_mid_round_go_on_without_the_dead(plan: str, silently: bool) -> None:
    stage = Stage(4, plan=plan)
    stage.until_opened()
    stage.peers[2].crash(silently=silently)
    stage.until_committed(2, within_s=12.0)
    assert stage.peers[2] not in stage.members()


@pytest.mark.parametrize("plan", PLANS)
def test_hung_member_alone_is_blamed_and_every_operation_ends_in_time(plan: str) -> None:
    stage = Stage(5, plan=plan, frame_s=0.05, window=1)
    operations = stage.until_opened()
    hung = stage.peers[3]
    hung.pause(30.0)
    others = [operation for operation in operations if operation.peer is not hung]
    stage.until(lambda: all(operation.is_done for operation in others), SILENCE_S + MARGIN_S)
    assert all(operation.error is not None for operation in others)
    assert stage.sim.checker.blames
    assert all(blamed == {hung.peer_id} for blamed in stage.sim.checker.blames)
    stage.until_committed(1)
    assert hung not in stage.members()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", [(1, 2), (2, 1)])
def test_one_way_cut_ends_the_operation_in_time(plan: str, way: tuple[int, int]) -> None:
    stage = Stage(4, plan=plan)
    operations = stage.until_opened()
    stage.network.cut(*(stage.peers[index].peer_id for index in way))
    stage.until(lambda: all(operation.is_done for operation in operations), CUT_IS_FOUND_S + 1.0)


@pytest.mark.parametrize("plan", PLANS)
def test_late_member_costs_nobody_his_good_name(plan: str) -> None:
    """All wait for one that still computes, for five times as long as a silence may last; then it goes on at once."""
    stage = Stage(4, plan=plan)
    stage.until_committed()
    late = stage.peers[1]
    begin = late._begin
    late._begin = lambda step: late.later(5 * SILENCE_S, "late", begin, step)  # type: ignore[method-assign]
    assert stage.until_committed(2, within_s=20.0) > 5 * SILENCE_S
    assert stage.sim.checker.counters["suspicions"] == 0
    assert stage.sim.server.view.epoch == 0


def test_member_that_is_cut_off_before_it_has_opened_is_found_as_soon_as_one_that_hangs() -> None:
    """Its host does not answer; whether its process still computes does not matter."""
    stage = Stage(4)
    stage.until_committed()
    late = stage.peers[1]
    late._begin = lambda step: None  # type: ignore[method-assign]
    others = [peer for peer in stage.peers if peer is not late]
    stage.until(lambda: all(peer.rounds for peer in others), 5.0)
    for other in others:
        stage.network.cut(late.peer_id, other.peer_id)
        stage.network.cut(other.peer_id, late.peer_id)
    operations = [operation for peer in others for operation in peer.rounds.values()]
    stage.until(lambda: all(operation.is_done for operation in operations), SILENCE_S + MARGIN_S)
    assert stage.sim.checker.blames
    assert all(blamed == {late.peer_id} for blamed in stage.sim.checker.blames)


def test_link_that_breaks_in_mid_round_costs_no_retry() -> None:
    stage = Stage(3, plan="ring", num_streams=2)
    stage.until_opened()
    for one, other in ((0, 1), (1, 2), (0, 2)):
        stage.network.break_link(stage.peers[one].peer_id, stage.peers[other].peer_id)
    stage.until_committed()
    assert stage.sim.server.view.epoch == 0


def test_member_that_sends_corrupt_chunks_again_and_again_is_given_up() -> None:
    stage = Stage(3, corrupt=0.5)
    stage.until(lambda: stage.sim.checker.counters["suspicions"] > 0, 5.0)
    stage.network.healed = True
    stage.until_committed()
    assert stage.sim.checker.counters["corrupt frames found"] >= 3


# ------------------------------------------------------------------------ found by seeds


def lose_the_last_results(stage: Stage) -> None:
    """Each of two members ends one of two operations, and what it sent of that to the other is lost."""
    one, other = stage.peers
    plan = SlicePlan(bounds=(0, 2, 4), routes=butterfly(2))
    stage.sim.plan_of = lambda view, fragment: plan  # type: ignore[method-assign]
    ends_here = {str(one.peer_id): 0, str(other.peer_id): 1}
    send = stage.network.send

    def lose(link: Link, end: End, frame: Frame) -> None:
        if frame.kind == RESULT and frame.key is not None and frame.key.fragment == ends_here[end.site]:
            end.num_unread += 1  # the kernel has it, and the link takes it along
        else:
            send(link, end, frame)

    stage.network.send = lose  # type: ignore[method-assign]
    operations = {(item.peer, item.key.fragment): item for item in stage.until_opened()}
    stage.until(lambda: operations[one, 0].is_done and operations[other, 1].is_done, 5.0)
    stage.network.send = send  # type: ignore[method-assign]
    assert not operations[other, 0].is_done
    assert not operations[one, 1].is_done
    stage.network.break_link(one.peer_id, other.peer_id)


def test_result_that_was_lost_after_its_sender_had_ended_is_not_waited_for() -> None:
    """Each of two gives signs of life because of the round that the other has ended."""
    stage = Stage(2, num_operations=2, plans=("butterfly",) * 2, num_streams=1, window=100)
    lose_the_last_results(stage)
    stage.until_committed(1, within_s=3.0)
    assert not stage.sim.checker.blames


def test_that_loss_is_found_only_at_the_deadline_where_nobody_says_what_has_ended() -> None:
    parts = RoundParts(tells_ended=False)
    stage = Stage(2, parts=parts, num_operations=2, plans=("butterfly",) * 2, num_streams=1, window=100)
    lose_the_last_results(stage)
    with pytest.raises(Violation, match="stuck"):
        stage.until_committed(1, within_s=2 * ROUND_S)


def lose_an_opening_that_is_handed_on(stage: Stage) -> None:
    """The hub tells of it over a stream that breaks before the other member has come; chunks take the other stream."""
    hidden, other, hub = stage.peers
    send, post = stage.network.send, other._post

    def lose(link: Link, end: End, frame: Frame) -> None:
        if frame.kind == OPEN and frame.sender == hidden.ref and end.site == str(hub.peer_id):
            stage.network.send = send  # type: ignore[method-assign]
            stage.network.break_link(str(hub.peer_id), str(other.peer_id), link)
            other.later(0.5, "post", post, frame.key)
        else:
            send(link, end, frame)

    def wait(key: RoundKey) -> None:
        other._post = post  # type: ignore[method-assign]

    stage.network.send = lose  # type: ignore[method-assign]
    other._post = wait  # type: ignore[method-assign]


def test_opening_that_a_hub_has_handed_on_in_vain_is_asked_for_by_mending_the_link() -> None:
    """Who waited for it alone needed nothing of the hub's own: it did not mend the link, and waited to the deadline."""
    stage = Stage(3, num_hidden=2, num_streams=2, window=100)
    stage.until_committed()
    stage.until(lambda: stage.sim.world.now > stage.peers[1]._installed_at + INSTALL_GRACE_S, 5.0)
    stage.until_committed()
    lose_an_opening_that_is_handed_on(stage)
    stage.until_committed(2, within_s=5.0)
    assert not stage.sim.checker.blames


def test_dial_that_was_given_up_before_it_was_taken_was_no_contact() -> None:
    """Found by a benchmark: the acceptor was busy, then took what the dialler, busy itself by then, had closed."""
    stage = Stage(2, num_streams=1)
    dialler, acceptor = stage.peers
    stage.until(lambda: bool(dialler.rounds), 1.0)
    acceptor.pause(DIAL_TIMEOUT_S + 0.2)
    stage.until(lambda: any(bundle.is_pausing for bundle in dialler.bundles.values()), DIAL_TIMEOUT_S + 0.1)
    dialler.pause(1.5)
    stage.until_committed(1, within_s=3.0)
    assert stage.sim.checker.counters["suspicions"] == 0
