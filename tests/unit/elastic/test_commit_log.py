# SPDX-License-Identifier: Apache-2.0
import pytest

from isthmus.elastic.donor.commit_log import MIN_ENTRIES, CommitLog
from isthmus.elastic.state.replica import CommitEntry, ResultChunk, RoundRecord


class _Stored:
    def __init__(self, entry):
        self.outer_step, self.digest, self.nbytes = entry.outer_step, entry.digest, entry.nbytes


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
    assert log.memory_nbytes == 300
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
    assert log.memory_nbytes == 100


def test_same_commit_twice_is_kept_once():
    log = CommitLog(10_000)
    log.append(_entry(1))
    log.append(_entry(1))
    assert log.span == range(1, 2)
    assert log.memory_nbytes == 100


def test_same_step_with_another_digest_starts_the_log_again():
    log = CommitLog(10_000)
    log.append(_entry(1))
    log.append(_entry(2))
    other = _entry(2, digest=b"o" * 32)
    log.append(other)
    assert log.span == range(2, 3)
    assert log.get(2) == other


def test_what_the_disk_holds_costs_no_memory_and_stays_whatever_the_bound():
    log = CommitLog(0)
    for step in range(1, 6):
        log.append(_entry(step))
        log.stored(_Stored(_entry(step)))
    assert log.span == range(1, 6)
    assert log.memory_nbytes == 0
    assert log.sizes_from(3) == (100, 100, 100)
    assert log.get(2).digest == _entry(2).digest


def test_of_what_the_disk_has_refused_only_the_newest_two_stay_and_the_older_lead_nowhere():
    log = CommitLog(0)
    for step in range(1, 4):
        log.append(_Stored(_entry(step)))
    for step in range(4, 6):
        log.append(_entry(step))
    assert log.span == range(1, 6)
    log.append(_entry(6))
    assert log.span == range(5, 7)


def test_a_stored_result_of_another_history_takes_no_place():
    log = CommitLog(100)
    log.append(_entry(1))
    log.stored(_Stored(_entry(1, digest=b"o" * 32)))
    log.stored(_Stored(_entry(2)))
    assert log.get(1) == _entry(1)
    assert log.span == range(1, 2)


def test_what_is_about_to_be_removed_is_offered_no_more():
    log = CommitLog(0)
    for step in range(1, 6):
        log.append(_Stored(_entry(step)))
    log.forget_before(4)
    assert log.span == range(4, 6)
    assert log.get(3) is None
    log.forget_before(9)
    assert log.span == range(0)


@pytest.mark.parametrize(("max_nbytes", "first"), [(0, 6), (99, 6), (100, 5), (350, 3), (10_000, 1)])
def test_results_that_are_together_within_a_bound_begin_at_this_step(max_nbytes, first):
    log = CommitLog(10_000)
    for step in range(1, 6):
        log.append(_entry(step))
    assert log.first_within(max_nbytes) == first


def test_empty_log_has_no_span():
    log = CommitLog(100)
    assert log.span == range(0)
    assert log.get(0) is None


def test_negative_bound_is_refused():
    with pytest.raises(ValueError, match="max_nbytes"):
        CommitLog(-1)
