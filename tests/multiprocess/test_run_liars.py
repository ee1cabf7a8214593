# SPDX-License-Identifier: Apache-2.0
"""Members that lie about their work: each loses only itself, by name, and the run goes on."""

import math
import signal
from pathlib import Path
from statistics import fmean

import pytest

from isthmus.elastic.core.leases import count
from isthmus.elastic.core.records import LeaseRecord
from tests.multiprocess.run_harness import OPEN_END, Process, Run, assert_same_commits, read_journal, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

DIVERGED, INTEGRITY = 8, 9
SAMPLES_PER_ROUND = (3 + 3) * 2
"""Of the harness's runs: inner steps of a round, as many of its delay, and their batch."""
SANE_LOSS = 2 * math.log(256)
"""Of bytes: twice what a model has that knows nothing."""


def three_honest_and(run: Run, kind: str, *flags: str, after: int = 0) -> tuple[list[Process], Process]:
    """Three peers that are under way, and one that joins them and lies, after so many outer steps of theirs."""
    founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), "--eval.every", "1", *flags)
    run.wait_for_ticket()
    honest = [founder, run.join(), run.join()]
    run.until_step(after, *honest)
    liar = run.join_as_liar(kind)
    run.until_step(1, *honest)
    return honest, liar


def assert_put_out(run: Run, honest: list[Process], liar: Process, *words: str) -> None:
    """The liar ends, told what it did; the coordinator has named it three times; the others' state is sane."""
    liar.is_judged = True
    outcome = liar.outcome()
    assert outcome.code == INTEGRITY, run.story()
    for word in (liar.peer_id, "3 times in a row", *words):
        assert word in outcome.sentences[-1]
    run.until_step(honest[0].step + 5, *honest)
    run.leave_all()
    founder = honest[0]
    assert len(founder.events("lied", of=liar.peer_id)) == 3
    assert {event["of"] for event in founder.events("lied")} == {liar.peer_id}
    assert f"member_lied of={liar.peer_id}" in founder.console.with_suffix(".err").read_text()
    losses = [event["loss"] for peer in honest for event in peer.events("evaluate")]
    assert losses
    assert max(losses) < SANE_LOSS
    assert_same_commits(*honest)


def test_a_member_that_claims_a_huge_weight_and_sends_noise_is_put_out_and_the_loss_stays_sane(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "weight")
        assert_put_out(run, honest, liar, "claims weight", "its leases allow")


@pytest.mark.parametrize("num_honest", [2, 3])
def test_a_member_that_leases_all_samples_and_claims_them_is_put_out_and_the_loss_stays_sane(
    tmp_path: Path, num_honest: int
) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", str(OPEN_END), "--eval.every", "1")
        founder = run.found(*flags)
        run.wait_for_ticket()
        honest = [founder, *(run.join() for _ in range(num_honest - 1))]
        run.until_step(3, *honest)
        liar = run.join_as_liar("leased")
        liar.is_judged = True
        assert liar.outcome().code == INTEGRITY, run.story()
        assert "times as large as the others'" in liar.outcome().sentences[-1]
        run.until_step(founder.step + 5, *honest)
        run.leave_all()
    assert len(founder.events("lied", of=liar.peer_id)) == 3
    assert {event["of"] for event in founder.events("lied")} == {liar.peer_id}, "also where its part is most of a sum"
    assert max(event["loss"] for peer in honest for event in peer.events("evaluate")) < SANE_LOSS
    leases = [record for record in read_journal(founder.directory) if isinstance(record, LeaseRecord)]
    assert max(count(record.ranges) for record in leases) < 20 * SAMPLES_PER_ROUND
    assert_same_commits(*honest)


@pytest.mark.parametrize("kind", ["noise", "huge", "not_finite", "sum"])
def test_a_member_whose_numbers_would_spoil_the_mean_is_put_out_and_the_loss_stays_sane(
    tmp_path: Path, kind: str
) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, kind)
        assert_put_out(run, honest, liar, "times as large as the others'")


def test_a_member_that_sends_large_numbers_to_one_other_alone_makes_no_liar_of_that_one(tmp_path: Path) -> None:
    """Before, all others took the sum for that one's doing, and it was put out with 9."""
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "framing")
        founder, liar.is_judged = honest[0], True
        # It does so to the first member. That is another one when the first is out, and then it is at odds with two.
        run.until("two lies", lambda: len(founder.events("lied", of=liar.peer_id)) > 1)
        run.until_step(founder.step + 5, *honest)
        liar.signal(signal.SIGKILL)
        liar.outcome()  # perhaps it was out already
        run.leave_all()
    assert {event["of"] for event in founder.events("lied")} == {liar.peer_id}
    causes = [event["cause"] for event in founder.events("view_decided")]
    accused = [cause for cause in causes if "times as large as the others'" in cause]
    assert "are said to be" in accused[0], "one voice alone, that of the member that was to look like a liar"
    assert all(liar.peer_id in cause for cause in accused), accused
    assert max(event["loss"] for peer in honest for event in peer.events("evaluate")) < SANE_LOSS
    assert_same_commits(*honest)


def test_a_member_that_says_its_direction_is_a_million_times_as_long_ruins_nobody_else(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "length", "--outer.type", "decoupled")
        liar.is_judged = True
        assert liar.outcome().code in (DIVERGED, INTEGRITY), "by its own numbers, or because it is put out"
        run.until_step(honest[0].step + 5, *honest)
        run.leave_all()
    assert {event["of"] for event in honest[0].events("lied")} == {liar.peer_id}
    assert max(event["loss"] for peer in honest for event in peer.events("evaluate")) < SANE_LOSS
    assert_same_commits(*honest)


@pytest.mark.parametrize("kind", ["huge", "not_finite", "sum"])
def test_one_of_two_whose_numbers_would_spoil_the_mean_is_left_out_whenever_it_comes_back(
    tmp_path: Path, kind: str
) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "1", "--outer-steps", str(OPEN_END), "--eval.every", "1")
        founder = run.found(*flags)
        run.wait_for_ticket()
        run.until_step(3, founder)
        liar = run.join_as_liar(kind)
        liar.is_judged = True
        run.until("judgement", lambda: any("are said to be" in e["cause"] for e in founder.events("view_decided")))
        run.until_step(founder.step + 20, founder)
        liar.kill()
        run.leave_all()
    assert max(event["loss"] for event in founder.events("evaluate")) < SANE_LOSS


@pytest.mark.parametrize(("guard", "is_harmed"), [("trimmed", False), ("none", True)])
def test_a_member_that_works_against_the_others_harms_them_only_where_no_guard_is_on(
    tmp_path: Path, guard: str, is_harmed: bool
) -> None:
    with running(tmp_path) as run:
        flags = ("--outer.guard", guard, "--inner.schedule.type", "constant", "--members.equal_steps", "true")
        # There must be something to lose; and beside veterans a newcomer that is guarded against is an outlier.
        # Nobody is late: the part of one that hands in little is small.
        flags += ("--members.patience", "100")
        honest, liar = three_honest_and(run, "against", *flags, after=30 if is_harmed else 0)
        run.until("liar", lambda: bool(liar.commits()))
        began = honest[0].step

        def losses() -> list[float]:
            return [event["loss"] for event in honest[0].events("evaluate") if event["outer_step"] > began]

        if is_harmed:
            run.until("harm", lambda: max(losses(), default=0.0) > 1.2 * min(losses(), default=math.inf))
        else:
            run.until_step(began + 50, *honest, liar)
            assert fmean(losses()[-5:]) < 0.7 * fmean(losses()[:5]), losses()
        assert not honest[0].events("lied"), "a factor of 5 is no outlier to the coordinator"
        run.leave_all()
    assert_same_commits(*honest, liar)


def test_a_member_that_tells_everybody_another_weight_is_put_out_instead_of_halting_the_run(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "two_weights")
        assert_put_out(run, honest, liar, "says different weights to different members")


def test_a_member_that_gives_two_of_the_others_another_sum_is_put_out_instead_of_halting_the_run(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "two_results")
        assert_put_out(run, honest, liar, "gives different sums to different members")


def test_a_member_that_is_overruled_three_times_in_a_row_is_put_out(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "digest")
        assert_put_out(run, honest, liar, "another result")


def test_a_member_that_was_overruled_holds_no_state_for_a_coordinator_that_starts_again(tmp_path: Path) -> None:
    flags = ("--members.start_peers", "3", "--run.outer_steps", str(OPEN_END), "--members.durable", "true")
    flags += ("--checkpoint.every", "20", "--model.dim", "128", "--model.hidden_dim", "256")
    slowly = ("--max-upload", "400kB")  # the liar has no time to fetch what it was overruled with
    with running(tmp_path) as run:
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        honest = [run.join(*slowly), run.join(*slowly)]
        liar = run.join_as_liar("digest")
        run.until("overruled vote", lambda: bool(coordinator.events("lied")))
        for process in (*honest, coordinator):
            process.kill()
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
        for peer in honest:
            peer.signal(signal.SIGINT)
        run.until_ended(*honest)
        coordinator.signal(signal.SIGINT)
        run.until_ended(coordinator)
    assert_same_commits(*honest)


def test_a_member_that_does_not_sign_what_it_votes_for_is_put_out(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "unsigned")
        assert_put_out(run, honest, liar, "has not signed what it votes for")


def test_a_member_that_always_says_it_was_told_to_give_up_is_out_for_longer_and_longer_while_commits_go_on(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        honest, liar = three_honest_and(run, "told")
        run.until("the liar's work", lambda: bool(liar.commits()))
        (liar.directory / "mute").touch()
        for _ in range(3):
            num_out = len(put_out(honest[0], liar))
            run.until("it to be out", lambda num_out=num_out: len(put_out(honest[0], liar)) > num_out)
            run.until_step(honest[0].step + 5, *honest)
        assert not any(peer.events("learner") for peer in honest), "no honest member was put out"
        run.leave_all()
    assert_same_commits(*honest)


def put_out(founder: Process, peer: Process) -> list[str]:
    causes = [event["cause"] for event in founder.events("view_decided")]
    return [cause for cause in causes if f"{peer.peer_id} dropped: members could not finish" in cause]


def test_a_member_that_tells_others_different_links_costs_a_round_now_and_then_and_sends_nobody_home(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        honest, _ = three_honest_and(run, "two_surveys")
        founder = honest[0]
        run.until("failure", lambda: bool(plans_differed(founder)))
        newcomer = run.join()
        run.until_step(founder.step + 20, *honest)
        run.until_step(founder.step + 3, newcomer)
        most = 1 + math.log2(1 + founder.step / 64)
        assert len(plans_differed(founder)) <= most, "the others plan without a survey for 64 steps, 128, 256, ..."
        assert not any(peer.events("learner") for peer in honest), "no honest member was put out"
        run.leave_all()
    assert_same_commits(*honest, newcomer)


def plans_differed(founder: Process) -> list[str]:
    causes = [event["cause"] for event in founder.events("view_decided")]
    return [cause for cause in causes if "plan differently" in cause]


def test_a_member_that_brings_a_certificate_of_its_own_making_is_named_and_ends_no_coordinator(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--members.start_peers", "3", "--run.outer_steps", str(OPEN_END))
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        honest = [run.join(), run.join()]
        liar = run.join_as_liar("certificate")
        run.until_step(3, *honest)
        coordinator.kill()
        again = run.coordinator(*flags, folder=coordinator.directory)
        step = honest[0].step
        run.until_step(step + 5, *honest, liar)
        for peer in (*honest, liar):
            peer.signal(signal.SIGINT)
        run.until_ended(*honest, liar)
        again.signal(signal.SIGINT)
        run.until_ended(again)
    named = again.events("lied")
    assert {event["of"] for event in named} == {liar.peer_id}
    assert len(named) == 2, "once by each start of the coordinator"
    assert "certificate of outer step 1000001 that nobody has made" in str(named[0]["cause"])
    assert_same_commits(*honest, liar)
