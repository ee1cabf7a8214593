# SPDX-License-Identifier: Apache-2.0
"""Several real peers train one model: their anchors stay equal, whoever dies, freezes or comes late."""

import json
import os
import re
import signal
import statistics
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from isthmus.trainer.record.event_log import FILE_NAME, read_events
from isthmus.trainer.record.events import event_of
from isthmus.trainer.record.figures import BLANK, as_of, fold
from tests.multiprocess.processes import Event, Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, broken_rounds, now_s, running, wall_s

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def test_three_peers_one_with_two_workers_hold_the_same_anchor_after_every_commit(tmp_path: Path) -> None:
    last = 12
    with running(tmp_path) as run:
        flags = ["--outer.codec", "e3m0", "--inner.type", "muon", "--members.quorum", "1", "--members.patience", "100"]
        flags += ["--members.equal_steps", "true", "--eval.every", "1"]
        founder = run.found("--peers", "3", "--outer-steps", str(last), *flags)
        run.wait_for_ticket()
        joiners = [run.join("--local-workers", "2"), run.join()]
        assert run.until_ended(founder, *joiners) == [0, 0, 0]
    assert len(set(assert_same_commits(founder, *joiners).values())) == last
    assert len(joiners[0].events("workers")[0]["devices"]) == 2
    for peer in (founder, *joiners):
        assert sorted(peer.commits()) == list(range(1, last + 1))
        assert [event["final"] for event in peer.events("commit")] == [False] * (last - 1) + [True]
        # Until all three are members the view changes within a round. Who hears of that first ends it for the others.
        assert broken_rounds(peer) == []
    audit = Audit.of(read_journal(founder.directory))
    assert all(len(record.contributions) == 3 for record in audit.commits)
    tokens = [contribution.num_tokens for record in audit.commits[1:] for contribution in record.contributions]
    assert set(tokens) == {3 * 2 * 32}  # inner steps, batch, tokens of a sample
    # Every anchor was judged once, in turn, on the text that all have: by a peer of two workers as by others.
    judged = [[event["outer_step"] for event in peer.events("evaluate")] for peer in (founder, *joiners)]
    assert sorted(step for steps in judged for step in steps) == list(range(1, last + 1))
    assert [len(steps) for steps in judged] == [last // 3] * 3


def test_what_a_peer_wrote_down_gives_the_figures_that_its_status_shows_at_its_end(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", str(OPEN_END), "--checkpoint.every", "2", "--eval.every", "1")
        founder = run.found(*flags)
        run.wait_for_ticket()
        other = run.join()
        run.until_step(5, founder, other)
        left = run.command("leave", "--dir", str(founder.directory))
        assert "its process coordinates another peer" in left.out  # and so it answers still
        status = json.loads(run.told("status", "--json", "--dir", str(founder.directory)))
        run.leave_all()
    figures = BLANK
    for event in map(event_of, read_events(founder.directory / FILE_NAME)):
        if event is not None and event.t_s <= status["uptime_s"]:
            figures = fold(figures, event)
    of_no_event = ("pid", "incarnation", "total_outer_steps", "inner_steps_per_round")
    figures = as_of(replace(figures, **{name: status[name] for name in of_no_event}), status["uptime_s"])
    replayed = json.loads(msgspec.json.encode(figures))
    unfiled = {"phase", "inner_step", "num_inner_steps", "tokens", "tokens_per_s", "train_loss", "step"}
    of_the_moment = {"leaving", "coordination", "metrics_address"}
    for name in status.keys() - unfiled - of_the_moment - {"members"}:
        assert replayed[name] == status[name], name
    of_links = {"host", "is_dialled", "round_trip_ms", "is_coordinator"}
    members = [{name: value for name, value in member.items() if name not in of_links} for member in status["members"]]
    assert members == [{name: member[name] for name in members[0]} for member in replayed["members"]]
    assert (status["num_commits"] >= 5, status["checkpoint_outer_step"] >= 4, len(members)) == (True, True, 2)


def test_survivors_of_a_sigkill_commit_again_long_before_its_silence_tells_and_inherit_its_samples(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        flags = (*NEVER_LATE, "--members.equal_steps", "true", "--members.patience", "100")
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), "--outer.inner_steps", "12", *flags)
        run.wait_for_ticket()
        victim, survivor = run.join(), run.join()
        run.until_step(6, founder, victim, survivor)
        killed_at = now_s()
        victim.kill()
        calm_s = _calm_round_s(founder)
        run.until("commit without the victim", lambda: len(_members(founder)) == 2)
        run.until_step(founder.step + 15, founder, survivor)
        run.leave_all()
    decided = [event for event in founder.events("commit_decided") if victim.peer_id not in event["members"]]
    first_after = min(wall_s(event) for event in decided if wall_s(event) > killed_at)
    assert first_after - killed_at < calm_s + 30.0  # by its silence it would be sixty
    assert_same_commits(founder, victim, survivor)
    assert sorted(survivor.commits()) == list(range(1, survivor.step + 1))
    audit = Audit.of(read_journal(founder.directory))  # nothing is consumed twice
    inherited = audit.returned[victim.peer_id]
    assert inherited
    assert inherited <= set(audit.consumed)
    assert all(victim.peer_id not in audit.members_at(audit.consumed[index]) for index in inherited)


def test_a_frozen_peer_is_put_out_and_comes_back_as_a_learner(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--members.heartbeat_interval", "500ms", "--members.heartbeat_timeout", "5s", "--members.grace", "1h"]
        founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), *flags)
        run.wait_for_ticket()
        victim, other = run.join(), run.join()
        run.until_step(5, founder, victim, other)
        frozen = [victim.popen.pid, *victim.worker_pids()]
        assert len(frozen) == 2
        frozen_at = now_s()
        _signal_all(frozen, signal.SIGSTOP)

        def views_without() -> list[Event]:
            decided = [event for event in founder.events("view_decided") if wall_s(event) > frozen_at]
            return [event for event in decided if victim.peer_id not in event["members"]]

        run.until("view without the frozen peer", lambda: bool(views_without()))
        assert re.search("silent|does not hear", views_without()[0]["cause"]), views_without()[0]
        step = founder.step
        run.until_step(step + 5, founder, other)
        _signal_all(frozen, signal.SIGCONT)
        run.until("its own commits again", lambda: sum(number > step + 5 for number in victim.commits()) >= 5)
        assert [victim.popen.pid, *victim.worker_pids()] == frozen
        run.leave_all()
    assert len(victim.events("learner")) >= 1
    assert_same_commits(founder, victim, other)
    assert set(range(step + 2, step + 6)).isdisjoint(victim.commits())  # the others' own while it was away
    assert sorted(founder.commits()) == list(range(1, founder.step + 1))
    Audit.of(read_journal(founder.directory))


def test_a_late_joiner_enters_at_a_commit_boundary_with_the_members_state_and_nobody_waits(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--members.equal_steps", "true", "--members.patience", "100", *NEVER_LATE)
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END), *flags)
        run.wait_for_ticket()
        other = run.join()
        run.until_step(3, founder, other)
        late = run.join()
        run.until_step(1, late)
        run.until_step(late.step + 5, founder, other, late)
        run.leave_all()
    digests = assert_same_commits(founder, other, late)
    entry = late.events("join")[0]
    entered_at = entry["outer_step"]
    assert entered_at >= 3
    assert len(entry["members"]) == 3
    # It held what the members held when it entered, and committed with them from there on.
    caught_up = [event for event in late.events("catch_up") if event["t_s"] <= entry["t_s"]][-1]
    assert (caught_up["outer_step"], caught_up["digest"]) == (entered_at, digests[entered_at])
    assert min(late.commits()) == entered_at + 1
    # Nobody stood still for it, but for what its first inner steps took it.
    first = next(event for event in late.events("trained") if event["outer_step"] == entered_at + 1)
    for member in (founder, other):
        waits = {event["outer_step"]: event["wait_s"] for event in member.events("trained")}
        assert waits[entered_at + 1] < 10.0 + 3 * first["train_s"]
        assert broken_rounds(member) == []
    # And its work counts, from its first round on.
    audit = Audit.of(read_journal(founder.directory))
    assert late.peer_id not in audit.members_at(entered_at)
    for outer_step in range(entered_at + 1, entered_at + 5):
        assert late.peer_id in audit.members_at(outer_step)
    tokens = {event["outer_step"]: event["tokens"] for event in late.events("trained")}
    assert tokens[entered_at + 2] == 3 * 2 * 32


def test_a_late_joiner_may_begin_with_a_donors_moments_and_then_need_not_warm_up(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", str(OPEN_END), "--inner.schedule.warmup_steps", "4")
        founder = run.found(*flags, "--inner.moments", "donor")
        run.wait_for_ticket()
        other = run.join()
        run.until_step(4, founder, other)
        late = run.join("--node.local_workers", "2")
        run.until_step(1, late)
        run.until_step(late.step + 3, founder, other, late)
        run.leave_all()
    assert_same_commits(founder, other, late)
    said = late.console.with_suffix(".err").read_text()
    assert re.search(r"moments_borrowed own_steps=([1-9]\d*)", said), said
    assert min(late.commits()) > 4


def _members(founder: Process) -> list[str]:
    """Of the newest commit."""
    decided = founder.events("commit_decided")
    return decided[-1]["members"] if decided else []


def _calm_round_s(founder: Process) -> float:
    times = [wall_s(event) for event in founder.events("commit")]
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def test_a_tracker_follows_a_peer_to_its_end(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--outer-steps", "12")
        run.until_step(2, founder)
        tracker = run.start("track", folder=founder.directory)
        assert run.until_ended(founder, tracker) == [0, 0]
    assert tracker.console.read_text() == "12\n"
    assert list(founder.directory.glob("tensorboard/events.out.tfevents.*"))
