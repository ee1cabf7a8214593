# SPDX-License-Identifier: Apache-2.0
"""A worker that can allocate no more: it computes fewer samples at a time, or its peer ends with the cure."""

import contextlib
from pathlib import Path

import pytest

from tests.multiprocess.processes import Process, leave_memory
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, Run, broken_rounds, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

TRAINING_FAULT = 8
BATCH = 8
MODEL = ("--model.hidden_dim", "1024", "--model.seq_len", "256", "--inner.batch_size", str(BATCH))
"""One layer's activations of a sample are 1 MiB, of all eight 8 MiB."""
GIVES_MEMORY_BACK = ("env", "MALLOC_MMAP_THRESHOLD_=131072")
"""So that a step takes its memory from the kernel, and not from what the step before has left."""


def _squeeze(run: Run, peer: Process) -> None:
    """Give the worker no more memory, until it says so or is gone."""
    run.until_step(peer.step + 1, peer)
    (pid,) = peer.worker_pids()

    def is_squeezed() -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            leave_memory(pid, 1 << 18)  # lower each time: one look may find it in the middle of a step
        return pid not in peer.worker_pids()

    run.until("its end", is_squeezed)


def test_a_worker_without_memory_makes_way_for_one_that_computes_fewer_samples_at_a_time(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = (*MODEL, "--peers", "2", "--outer-steps", str(OPEN_END), *NEVER_LATE)
        founder = run.found(*flags, inside=GIVES_MEMORY_BACK)
        run.wait_for_ticket()
        other = run.join()
        run.until_step(2, founder, other)
        _squeeze(run, founder)
        run.until("other workers", lambda: len(founder.events("workers")) == 2)
        assert [event["micro_batch"] for event in founder.events("workers")] == [BATCH, BATCH // 2]
        (told,) = founder.events("fault", kind="out_of_memory")
        assert told["micro_batch"] == BATCH // 2
        assert "can't allocate memory" in told["cause"]
        run.until_step(founder.step + 3, founder, other)
        assert not broken_rounds(other), "nobody lost a round"
        run.leave_all()
    assert_same_commits(founder, other)


def test_where_the_operator_has_said_how_many_samples_the_peer_ends_and_says_what_would_help(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found(*MODEL, "--peers", "2", "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        other = run.join("--node.micro-batch", str(BATCH), inside=GIVES_MEMORY_BACK)
        run.until_step(2, founder, other)
        other.is_judged = True
        _squeeze(run, other)
        outcome = other.outcome()
        assert outcome.code == TRAINING_FAULT
        (sentence,) = outcome.sentences
        assert f"a micro-batch of {BATCH} samples does not fit into the memory of a worker" in sentence
        assert "take a smaller node.micro_batch" in sentence
        run.until_step(founder.step + 3, founder)
        run.leave_all()
