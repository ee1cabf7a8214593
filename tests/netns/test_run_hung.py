# SPDX-License-Identifier: Apache-2.0
"""Peers that stand still behind a beating heart: the others pay for it once.

Each is on a machine of its own, behind a line that takes most of a round's time. Side by side on few processors three
peers would also pay for what the fourth computes: it follows the commits, which is a tenth of all work there.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.chaoslab.mute import MUTE
from scripts.wanlink.wan import Wan
from tests.multiprocess.processes import LEFT, Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import OPEN_END, Run, now_s, running, wall_s
from tests.netns.machines import MARKS, why_no_wan

_IMPOSSIBLE = why_no_wan()
pytestmark = [*MARKS, pytest.mark.timeout(600), pytest.mark.skipif(_IMPOSSIBLE is not None, reason=str(_IMPOSSIBLE))]

FLAGS = ("--peers", "3", "--outer-steps", str(OPEN_END), "--members.heartbeat_timeout", "60s")
DELAY_MS = 25.0
"""Of every link, in each direction."""
SETTLED_S = 30.0
"""After a hang: by then the others are to be as fast as if the hung peer had never been there."""
WINDOW_S = 5.0
BESIDE = 0.5
"""Of what three healthy peers do: 0.9 and more on a quiet machine, and other tests run beside this one. With a wait in
every round it was 0.1 to 0.25."""


def test_a_hung_worker_costs_the_others_one_wait_and_is_replaced(tmp_path: Path) -> None:
    with _four_machines() as (one, two, three, four), running(tmp_path) as run:
        founder = run.found(*FLAGS, inside=one)
        run.wait_for_ticket()
        others = [run.join(inside=two), run.join(inside=three)]
        run.until_step(10, founder, *others)
        before = _rate(run, founder, now_s())
        late = run.join(
            "--node.hang_timeout", "100s", inside=four
        )  # after the windows in which the others are looked at
        run.until_step(founder.step + 10, founder, late)
        all_four = _rate(run, founder, now_s())

        (worker,) = late.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        hung_at = now_s()
        run.until("excuse", lambda: bool(late.events("excused")))
        beside = _fastest(run, founder, hung_at + SETTLED_S, windows=10, wanted=BESIDE * before)
        causes = [event["cause"] for event in founder.events("view_decided") if wall_s(event) > hung_at]
        views = [cause for cause in causes if late.peer_id in cause]
        # One, unless it was excused already when its worker was stopped. With a wait in every round dozens.
        assert len(views) <= 2, views

        run.until("other workers", lambda: bool(late.events("fault", kind="worker_hung")))
        (fault,) = late.events("fault", kind="worker_hung")
        assert fault["local_ranks"] == [0]
        assert "worker 0 is stopped" in fault["cause"]
        step = late.step
        run.until("work in a commit", lambda: late.step > step)
        assert late.worker_pids() != [worker]
        assert not late.events("learner"), "it was never put out"
        said = late.console.with_suffix(".err").read_text()
        assert said.count("worker_hung") == 1

        late.signal(signal.SIGINT)
        assert run.until_ended(late) == [LEFT]
        after = _rate(run, founder, now_s())
        print(
            f"three {before:.2f} and {after:.2f}, four {all_four:.2f}, three beside a hung one {beside:.2f} commits/s"
        )
        assert beside >= BESIDE * min(before, after)
        run.leave_all()
    assert_same_commits(founder, *others, late)
    audit = Audit.of(read_journal(founder.directory))  # no sample twice
    assert late.peer_id in audit.members_at(late.step)


def test_a_member_that_does_not_vote_costs_the_others_little(tmp_path: Path) -> None:
    with _four_machines() as (one, two, three, four), running(tmp_path) as run:
        founder = run.found(*FLAGS, inside=one)
        run.wait_for_ticket()
        honest = [founder, run.join(inside=two), run.join(inside=three)]
        run.until_step(10, *honest)
        before = _rate(run, founder, now_s())
        mute = run.join_as_liar("mute", inside=four)
        run.until_step(founder.step + 10, founder, mute)
        (mute.directory / MUTE).touch()
        run.until("it is out", lambda: any("has not voted" in event["cause"] for event in mute.events("learner")))
        out_at = now_s()
        beside = _fastest(run, founder, out_at, windows=8, wanted=BESIDE * before)
        mute.signal(signal.SIGINT)
        run.until_ended(mute)
        after = _rate(run, founder, now_s())
        print(f"three {before:.2f} and {after:.2f}, beside one that does not vote {beside:.2f} commits/s")
        assert beside >= BESIDE * min(before, after)
        assert not any(peer.events("learner") for peer in honest)
        said = [re.search(r"has not voted.*stays out for (\d+) s", event["cause"]) for event in mute.events("learner")]
        pauses_s = [int(found[1]) for found in said if found]
        assert min(pauses_s) >= 9 * 20
        causes = [
            event["cause"] for event in founder.events("view_decided") if 0 < wall_s(event) - out_at < min(pauses_s)
        ]
        assert not [cause for cause in causes if f"{mute.peer_id} joined" in cause]
        run.leave_all()
    assert_same_commits(*honest, mute)


@contextlib.contextmanager
def _four_machines() -> Iterator[list[list[str]]]:
    """What goes before a command on each of them."""
    with Wan(peers=4) as wan:
        wan.set_link("*", "*", delay_ms=DELAY_MS)
        yield [wan.command(peer, []) for peer in range(4)]


def _rate(run: Run, founder: Process, since: float, window_s: float = WINDOW_S) -> float:
    """Commits a second in the window that begins then; waits until it is over."""
    until = since + window_s
    run.until("end of the window", lambda: now_s() >= until)
    return sum(since <= wall_s(event) < until for event in founder.events("commit")) / window_s


def _fastest(run: Run, founder: Process, since: float, *, windows: int, wanted: float) -> float:
    """The highest rate of these windows, one after the other, until one is as high as wanted: others may be busy."""
    best = 0.0
    for number in range(windows):
        best = max(best, _rate(run, founder, since + number * WINDOW_S))
        if best >= wanted:
            break
    return best
