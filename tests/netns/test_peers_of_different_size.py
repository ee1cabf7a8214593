# SPDX-License-Identifier: Apache-2.0
"""Three machines of different size in one run: a slow one makes fewer inner steps, and nobody is left behind."""

import statistics
from pathlib import Path

import pytest

from scripts.bench_sizes import throttled
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, running
from tests.multiprocess.test_run_audit import audited
from tests.netns.machines import MARKS, World

pytestmark = [*MARKS, pytest.mark.timeout(600)]

INNER_STEPS, BATCH, SEQ_LEN = 12, 2, 32
ALL = INNER_STEPS * BATCH * SEQ_LEN
"""Tokens of a round in which no inner step is left out."""
NUM_LATEST = 3


def _latest(peer: Process) -> float:
    """Tokens of its latest rounds; the median."""
    rounds = [event["tokens"] for event in peer.events("trained")][-NUM_LATEST:]
    return statistics.median(rounds) if len(rounds) == NUM_LATEST else ALL


def test_a_slow_machine_makes_fewer_steps_for_as_long_as_it_is_slow_and_all_commit_the_same(tmp_path: Path) -> None:
    with World() as world, running(tmp_path) as run:
        left, middle, right = (world.machine(lan=f"10.9.0.{number}/24") for number in (1, 2, 3))
        flags = ("--peers", "3", "--outer-steps", str(OPEN_END), "--outer.inner-steps", str(INNER_STEPS), *NEVER_LATE)
        founder = run.found(*flags, inside=left.inside)
        run.wait_for_ticket()
        wide = run.join("--local-workers", "2", inside=middle.inside)
        slow = run.join("--node.micro-batch", "1", inside=right.inside)
        run.until_step(2, founder, wide, slow)
        fewest = float(ALL)

        def is_slowest() -> bool:
            nonlocal fewest
            latest = _latest(slow)
            fewest = min(fewest, latest)
            # The others' rounds are short, too, while the machine is busy with something else.
            return latest <= 0.6 * ALL and latest < max(_latest(founder), _latest(wide))

        with throttled(slow.worker_pids(), 0.05):
            run.until("fewer steps than others make", is_slowest)
        run.until("more steps again", lambda: _latest(slow) >= 1.3 * fewest)
        assert not slow.events("learner"), "it was never put out"
        run.leave_all()
        audited(run, founder, wide, slow)
    assert_same_commits(founder, wide, slow)
    parts = [part for record in Audit.of(read_journal(founder.directory)).commits for part in record.contributions]
    least = min((part for part in parts if part.ref.peer_id == slow.peer_id), key=lambda part: part.num_tokens)
    assert least.num_tokens <= 0.6 * ALL
    assert least.weight == least.num_tokens, "its work weighs by its tokens"
