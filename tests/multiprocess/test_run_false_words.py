# SPDX-License-Identifier: Apache-2.0
"""Members that lie in their votes and words: each loses only itself, and commits go on."""

import signal
from itertools import pairwise
from pathlib import Path

import pytest

from isthmus.collective.core.round_times import SlowLimits
from isthmus.elastic.core.rebuild import EPOCHS_A_REBUILD, MOST_AHEAD
from isthmus.trainer.checkpoint.checkpoint import newest_usable
from tests.multiprocess.lies.beside import (
    THREE,
    assert_put_out,
    causes_of,
    coordinator_two_honest_and,
    interrupt,
    put_out,
    three_honest_and,
)
from tests.multiprocess.lies.in_words import FAR_STEP, LATE_S
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import (
    NEVER_LATE,
    at_once,
    is_frozen_between_checkpoints,
    lose_journal,
    running,
    until_rebuilt,
)

MOST_S = 8 * SlowLimits().floor_s
"""Of which three are what two failed rounds take. Time in which a process gets no processor is added."""

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def test_a_member_that_is_overruled_three_times_in_a_row_is_put_out(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "digest")
        assert_put_out(run, honest, liar, "another result")


def test_a_member_that_was_overruled_holds_no_state_for_a_coordinator_that_starts_again(tmp_path: Path) -> None:
    flags = (*THREE, "--members.durable", "true", "--checkpoint.every", "20")
    flags += ("--model.dim", "128", "--model.hidden_dim", "256")
    slowly = ("--max-upload", "100kB")  # the liar has no time to fetch what it was overruled with
    with running(tmp_path) as run:
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        honest = [run.join(*slowly), run.join(*slowly)]
        liar = run.join_as_liar("digest")
        run.until("overruled vote", lambda: bool(coordinator.events("lied")))
        at_once(*honest, coordinator)
        step = max(peer.step for peer in honest)
        num_commits = len(coordinator.events("commit_decided"))

        coordinator = run.coordinator(*flags, folder=coordinator.directory)
        run.wait_for_ticket()
        run.until("word to the liar", lambda: bool(liar.events("learner")))
        assert len(coordinator.events("commit_decided")) == num_commits
        honest = [run.join(folder=peer.directory) for peer in honest]
        liar.is_judged = True  # it goes on lying
        run.until_step(step + 3, *honest)
        liar.signal(signal.SIGKILL)
        interrupt(run, coordinator, *honest)
    assert_same_commits(*honest)


def test_a_member_that_does_not_sign_what_it_votes_for_is_put_out(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "unsigned")
        assert_put_out(run, honest, liar, "has not signed what it votes for")


@pytest.mark.parametrize("kind", ["told", "padding"])
def test_a_member_with_which_no_round_can_be_finished_is_put_out_and_commits_go_on(tmp_path: Path, kind: str) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, kind, *NEVER_LATE)
        run.until("the liar's work", lambda: bool(liar.commits()))
        (liar.directory / "mute").touch()
        for number in (1, 2):  # for the third time one would wait for minutes
            run.until("it to be out", lambda number=number: len(put_out(honest[0], liar)) >= number)
            run.until_step(honest[0].step + 5, *honest)
        assert not any(peer.events("learner") for peer in honest), "no honest member was put out"
        run.leave_all()
    assert_same_commits(*honest)


@pytest.mark.parametrize("kind", ["trickle", "withhold"])
def test_a_member_that_moves_and_brings_no_round_to_its_end_is_out_after_a_minute(tmp_path: Path, kind: str) -> None:
    """Before, a round lasted half an hour, and named nobody where parts were kept back that others had given."""
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, kind, liars=("--max-upload", "1GB"))
        founder = honest[0]
        run.until("the liar's work", lambda: bool(liar.commits()))
        run.until_step(founder.step + 3, *honest, liar)
        (liar.directory / "mute").touch()
        run.until("it to be out", lambda: bool(put_out(founder, liar)), timeout_s=MOST_S)
        dropped = [cause for cause in causes_of(founder) if "members could not finish" in cause]
        assert dropped[0].startswith(liar.peer_id), "nobody else was put out before it"
        (liar.directory / "mute").unlink()
        run.until_step(founder.step + 5, *honest)
        run.leave_all()
    assert_same_commits(*honest)


def _put_out_for_its_vote(founder: Process, liar: Process) -> list[float]:
    """When."""
    views = founder.events("view_decided")
    return [
        float(event["t_s"])
        for event in views
        if event["cause"].startswith(liar.peer_id) and "after most others" in event["cause"]
    ]


def test_a_member_that_votes_late_although_it_could_sooner_holds_the_others_up_once_and_then_pauses(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "late", "--members.stall-timeout", "3s")
        founder = honest[0]
        run.until("the liar's work", lambda: bool(liar.commits()))
        (liar.directory / "mute").touch()
        run.until("a long round", lambda: bool(_put_out_for_its_vote(founder, liar)))
        since = founder.events("view_decided")[-1]["t_s"]
        run.until_step(founder.step + 50, *honest)
        run.leave_all()
    late = _put_out_for_its_vote(founder, liar)
    at = [event["t_s"] for event in founder.events("commit_decided") if event["t_s"] >= since]
    views = founder.events("view_decided")

    def is_member(t_s: float) -> bool:
        return liar.peer_id in [event for event in views if event["t_s"] <= t_s][-1]["members"]

    long = [after - before for before, after in pairwise(at) if after - before > LATE_S / 2 and is_member(before)]
    assert len(long) <= len(late) - 1, "it holds nobody up while it pauses"
    assert all(after - before > 9 * LATE_S for before, after in pairwise(late)), "and it pauses nine times as long"
    assert_same_commits(*honest)


def test_a_member_that_says_of_every_newcomer_that_it_cannot_be_reached_sends_none_home(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "voice", *NEVER_LATE)
        run.until("the liar's work", lambda: bool(liar.commits()))
        (liar.directory / "mute").touch()
        newcomers = [run.join(), run.join()]
        for peer in newcomers:
            run.until("a newcomer's work", lambda peer=peer: bool(peer.commits()))
        run.until_step(honest[0].step + 20, *honest)
        for peer in newcomers:
            run.until_step(honest[0].step + 1, peer)
        assert not any(peer.events("learner") for peer in honest), "no honest member was put out"
        run.leave_all()
    assert_same_commits(*honest, *newcomers)


def test_a_donor_that_offers_a_state_of_the_far_future_keeps_no_newcomer_out(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "state")
        newcomers = [run.join(), run.join(), run.join()]
        for peer in newcomers:
            run.until("a newcomer's work", lambda peer=peer: bool(peer.commits()))
        run.until_step(honest[0].step + 5, *honest)
        liar.kill()  # it may hang by its own lie: it serves a newcomer the steps that it claims to have
        run.leave_all()
    assert max(assert_same_commits(*honest, *newcomers)) < FAR_STEP


def test_one_peer_that_alone_has_the_newest_state_after_a_power_cut_and_serves_nobody_is_not_awaited_for_ever(
    tmp_path: Path,
) -> None:
    flags = ("--checkpoint.every", "20", *NEVER_LATE)
    with running(tmp_path) as run:
        coordinator, honest, liar = coordinator_two_honest_and(run, "miser", *flags)
        run.until("checkpoints", lambda: all(peer.events("checkpoint") for peer in honest))
        # A peer that joined before the first commit saves that one, whatever `checkpoint.every` says.
        run.until_step(3, *honest)
        # Nobody commits any more, and the liar has written down what was committed.
        run.until("a moment between two", lambda: is_frozen_between_checkpoints(honest[0]))
        results = liar.directory / "results"
        run.until("the newest result", lambda: (results / f"step-{_newest(coordinator):08d}.result").exists())
        at_once(coordinator, *honest, liar)
        step = coordinator.events("commit_decided")[-1]["outer_step"]
        kept = max(saved.meta.outer_step for peer in honest if (saved := newest_usable(peer.directory)) is not None)
        assert kept < step
        for peer in honest:
            for path in (peer.directory / "results").iterdir():
                path.unlink()  # what one of them was about to write is lost as well
        (liar.directory / "mute").touch()

        coordinator = run.coordinator(*THREE, *flags, folder=coordinator.directory)
        run.wait_for_ticket()
        honest = [run.join(folder=peer.directory) for peer in honest]
        liar = run.join_as_liar("miser", folder=liar.directory)
        run.until("the run to go back", lambda: bool(coordinator.events("rolled_back")), timeout_s=150.0)
        (back,) = coordinator.events("rolled_back")
        run.until("work", lambda: all(peer.events("commit")[-1]["epoch"] >= back["epoch"] for peer in honest))
        liar.kill()
        interrupt(run, coordinator, *honest)
    said = [peer.console.with_suffix(".err").read_text().count("donor_dropped") for peer in honest]
    assert max(said) <= 6, "of a donor one line a minute"
    assert back["given_up"] > step, "it has made commits alone"
    assert back["outer_step"] == kept


def _newest(coordinator: Process) -> int:
    return int(coordinator.events("commit_decided")[-1]["outer_step"])


def test_a_member_that_names_the_highest_epoch_of_all_leaves_enough_of_them_to_a_coordinator_without_a_journal(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        coordinator, honest, liar = coordinator_two_honest_and(run, "epoch")
        run.until_step(3, *honest, liar)
        (liar.directory / "mute").touch()
        liar.is_judged = True
        for loss in range(2):
            lose_journal(coordinator)
            coordinator = run.coordinator("--rebuild", folder=coordinator.directory)
            until_rebuilt(run, coordinator, loss + 1)
            run.until_step(max(peer.step for peer in honest) + 3, *honest)
        interrupt(run, coordinator, *honest, liar)
    epochs = [int(event["epoch"]) for event in coordinator.events("rebuilt")]
    assert epochs[-1] < 2 * (MOST_AHEAD + 2 * EPOCHS_A_REBUILD), epochs
    assert_same_commits(*honest)


def test_a_member_that_brings_a_certificate_of_its_own_making_is_named_and_ends_no_coordinator(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        coordinator, honest, liar = coordinator_two_honest_and(run, "certificate")
        run.until_step(3, *honest)
        coordinator.kill()
        again = run.coordinator(*THREE, folder=coordinator.directory)
        step = honest[0].step
        run.until_step(step + 5, *honest, liar)
        interrupt(run, again, *honest, liar)
    named = again.events("lied")
    assert {event["of"] for event in named} == {liar.peer_id}
    assert len(named) == 2, "once by each start of the coordinator"
    assert "certificate of outer step 1000001 that nobody has made" in str(named[0]["cause"])
    assert_same_commits(*honest, liar)
