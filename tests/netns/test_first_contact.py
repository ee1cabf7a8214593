# SPDX-License-Identifier: Apache-2.0
"""Machines with addresses of their own: `up` on one, the line that it prints on the others, nothing else typed."""

import json
from pathlib import Path

import pytest

from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, Run, broken_rounds, make_folder, running
from tests.netns.machines import MARKS, World, two_machines

TINY_LOOP = (str(Path(__file__).parents[1] / "multiprocess" / "attached.py"),)

pytestmark = [*MARKS, pytest.mark.timeout(600)]


def test_two_machines_that_know_no_address_train_together(tmp_path: Path) -> None:
    with two_machines() as (left, right), running(tmp_path) as run:
        founder = run.found("--outer-steps", str(OPEN_END), "--members.grace", "2s", inside=left.inside)
        run.wait_for_ticket()
        joiner = run.join(inside=right.inside)
        run.until_step(5, founder, joiner)
        run.leave_all()
    assert_same_commits(founder, joiner)


def test_loops_of_peoples_own_on_two_machines_train_together(tmp_path: Path) -> None:
    with two_machines() as (left, right), running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", "6", "--outer.inner-steps", "5")
        founder = run.found_loop(*flags, program=TINY_LOOP, inside=left.inside)
        run.wait_for_ticket()
        joiner = run.join_loop(program=TINY_LOOP, inside=right.inside)
        assert run.until_ended(founder, joiner) == [0, 0], run.story()
    assert set(assert_same_commits(founder, joiner)) == set(range(1, 7))


def _paths(run: Run, peer: Process) -> dict[str, str]:
    """Where its links lead or come from, by the other peer, as `isthmus status` has it."""
    told = json.loads(run.told("status", "--json", "--dir", str(peer.directory)))
    return {member["peer_id"]: member["host"] for member in told["members"] if not member["is_me"]}


def test_machines_that_share_different_networks_find_the_way_to_each_of_the_others(tmp_path: Path) -> None:
    """One has an interface that leads nowhere, and one sees the founder over IPv6 only."""
    with World() as world, running(tmp_path) as run:
        first = world.machine(ab="10.9.0.1/24", ac="fd00:9::1/64")
        second = world.machine(nowhere="172.31.5.1/24", ab="10.9.0.2/24", bc="10.8.0.2/24")
        third = world.machine(bc="10.8.0.3/24", ac="fd00:9::3/64")
        founder = run.found("--outer-steps", str(OPEN_END), "--members.grace", "2s", inside=first.inside)
        run.wait_for_ticket()
        peers = [run.join(inside=second.inside), run.join(inside=third.inside)]
        run.until_step(5, founder, *peers)
        ways = [
            {peers[0].peer_id: "10.9.0.2", peers[1].peer_id: "fd00:9::3"},
            {founder.peer_id: "10.9.0.1", peers[1].peer_id: "10.8.0.3"},
            {founder.peer_id: "fd00:9::1", peers[0].peer_id: "10.8.0.2"},
        ]
        # A machine that stands still for longer than the grace is not in the view for a moment.
        run.until("every link", lambda: [_paths(run, peer) for peer in (founder, *peers)] == ways)

        peers[1].kill()
        step = founder.step
        back = run.join(folder=peers[1].directory, inside=third.inside)
        run.until("return", lambda: max(back.commits(), default=0) > step + 5)
        run.leave_all()
    assert_same_commits(founder, *peers)


@pytest.mark.parametrize("id_begins", ["00", "ff"], ids=["it would dial", "it would be dialled"])
def test_a_peer_that_can_dial_and_cannot_be_dialled_is_a_member(tmp_path: Path, id_begins: str) -> None:
    with two_machines() as (left, right), running(tmp_path) as run:
        founder = run.found("--outer-steps", str(OPEN_END), "--members.grace", "2s", inside=left.inside)
        run.wait_for_ticket()
        folder = make_folder(tmp_path / "joiner", id_begins=id_begins)
        joiner = run.join("--listen", "127.0.0.1:0", folder=folder, inside=right.inside)
        run.until_step(5, founder, joiner)
        assert not broken_rounds(founder)

        joiner.kill()
        step = founder.step
        back = run.join("--listen", "127.0.0.1:0", folder=folder, inside=right.inside)
        run.until("return", lambda: max(back.commits(), default=0) > step + 5)
        run.leave_all()
    assert_same_commits(founder, back)
