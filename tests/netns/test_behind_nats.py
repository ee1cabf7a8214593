# SPDX-License-Identifier: Apache-2.0
"""Two peers behind two NATs and one outside: neither of the two can dial the other, and all are in every round."""

import json
import shutil
from pathlib import Path

import pytest

from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, broken_rounds, running
from tests.netns.machines import MARKS, two_behind_nats

pytestmark = [
    *MARKS,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("iptables") is None, reason="a NAT needs iptables"),
]
FLAGS = ("--outer-steps", str(OPEN_END), "--members.grace", "2s", "--outer.inner-steps", "40")
"""Some commits a second: a donor keeps seven of so small a model, and asking a donor in vain takes its time."""


def views_of(peer: Process) -> list[tuple[int, int]]:
    """How many members each view had, and how many pairs of them had no link."""
    return [(len(event["members"]), len(event["apart"])) for event in peer.events("view")]


def test_two_peers_behind_nats_train_with_one_outside_and_none_of_them_loses_a_round(tmp_path: Path) -> None:
    with two_behind_nats() as (outside, one, other), running(tmp_path) as run:
        founder = run.found(*FLAGS, inside=outside.inside)
        run.wait_for_ticket()
        peers = [run.join(inside=one.inside), run.join(inside=other.inside)]
        run.until("view of three", lambda: any(size == 3 for size, _ in views_of(founder)))
        since = founder.step
        run.until_step(since + 10, founder, *peers)
        run.until("view of three", lambda: views_of(founder)[-1] == (3, 1))
        assert not broken_rounds(founder)

        def links() -> dict[str, tuple[str | None, bool]]:
            told = json.loads(run.told("status", "--json", "--dir", str(peers[0].directory)))
            return {member["peer_id"]: (member["host"], member["is_apart"]) for member in told["members"]}

        # Who stands still for longer than the grace is not in the view for a moment.
        expected = {founder.peer_id: ("203.0.113.1", False), peers[1].peer_id: (None, True)}
        run.until("links", lambda: expected.items() <= links().items())

        founder.kill()  # the only one that both reach, and the coordinator
        back = run.found(*FLAGS, folder=founder.directory, inside=outside.inside)
        views = len(views_of(back))
        run.until("return", lambda: len(views_of(back)) > views and views_of(back)[-1] == (3, 1))
        since = max(peer.step for peer in (back, *peers))
        run.until_step(since + 10, back, *peers)
        run.until("view of three", lambda: views_of(back)[-1] == (3, 1))
        run.leave_all()
    assert_same_commits(founder, *peers)
