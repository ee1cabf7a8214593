# SPDX-License-Identifier: Apache-2.0
import pytest

from isthmus.elastic.donor.commit_log import MIN_ENTRIES, CommitLog
from isthmus.elastic.state.replica import CommitEntry, ResultChunk, RoundRecord


def _entry(outer_step, nbytes=100, digest=None):
    return CommitEntry(
        outer_step=outer_step,
        digest=digest or bytes([outer_step % 256]) * 32,
        rounds=(
            RoundRecord(
                codec="raw",
                weights=(("00" * 8, 1.0),),
                chunks=(ResultChunk(0, bytes(nbytes // 2)), ResultChunk(25, bytes(nbytes - nbytes // 2))),
            ),
        ),
    )


def test_newest_commits_are_kept_within_the_bound():
    log = CommitLog(350)
    for step in range(1, 11):
        log.append(_entry(step))
    assert log.span == range(8, 11)
    assert log.nbytes == 300
    assert log.get(7) is None
    assert log.get(9) == _entry(9)
    assert log.get(11) is None


def test_newest_two_stay_whatever_their_size():
    log = CommitLog(0)
    for step in range(1, 6):
        log.append(_entry(step, nbytes=10_000))
    assert log.span == range(4, 6)
    assert len(log.span) == MIN_ENTRIES


def test_gap_empties_the_log_because_a_learner_needs_an_unbroken_chain():
    log = CommitLog(10_000)
    log.append(_entry(1))
    log.append(_entry(2))
    log.append(_entry(5))
    assert log.span == range(5, 6)
    assert log.get(2) is None
    assert log.nbytes == 100


def test_same_commit_twice_is_kept_once():
    log = CommitLog(10_000)
    log.append(_entry(1))
    log.append(_entry(1))
    assert log.span == range(1, 2)
    assert log.nbytes == 100


def test_same_step_with_another_digest_starts_the_log_again():
    log = CommitLog(10_000)
    log.append(_entry(1))
    log.append(_entry(2))
    other = _entry(2, digest=b"o" * 32)
    log.append(other)
    assert log.span == range(2, 3)
    assert log.get(2) == other


def test_empty_log_has_no_span():
    log = CommitLog(100)
    assert log.span == range(0)
    assert log.get(0) is None


def test_negative_bound_is_refused():
    with pytest.raises(ValueError, match="max_nbytes"):
        CommitLog(-1)
