# SPDX-License-Identifier: Apache-2.0
"""Members that lie in their numbers: each loses only itself, by name, and the run goes on."""

import math
import signal
from pathlib import Path
from statistics import fmean

import pytest

from isthmus.elastic.core.leases import count
from isthmus.elastic.core.records import LeaseRecord
from tests.multiprocess.lies.beside import (
    DIVERGED,
    INTEGRITY,
    SANE_LOSS,
    assert_put_out,
    causes_of,
    plans_differed,
    three_honest_and,
)
from tests.multiprocess.run_audit import assert_same_commits, read_journal
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

SAMPLES_PER_ROUND = (3 + 3) * 2
"""Of the harness's runs: inner steps of a round, as many of its delay, and their batch."""


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
    accused = [cause for cause in causes_of(founder) if "times as large as the others'" in cause]
    assert "are said to be" in accused[0], "one voice alone, that of the member that was to look like a liar"
    assert all(liar.peer_id in cause or "are said to be" in cause for cause in accused), "nobody else sent too much"
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
        flags += ("--members.patience", "100", *NEVER_LATE)
        honest, liar = three_honest_and(run, "against", *flags, after=30 if is_harmed else 0)
        run.until("liar", lambda: bool(liar.commits()))
        began = honest[0].step if is_harmed else 0

        def losses() -> list[float]:
            return [event["loss"] for event in honest[0].events("evaluate") if event["outer_step"] > began]

        if is_harmed:
            run.until("harm", lambda: max(losses(), default=0.0) > 1.2 * min(losses(), default=math.inf))
        else:
            run.until("a lower loss", lambda: len(losses()) > 9 and fmean(losses()[-5:]) < 0.7 * fmean(losses()[:5]))
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
