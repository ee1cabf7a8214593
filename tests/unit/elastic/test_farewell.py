# SPDX-License-Identifier: Apache-2.0
"""How a peer goes: until when it waits for a boundary or an answer, and which exit code it ends with."""

import pytest

from isthmus.elastic.core.events import LeaveRequested
from isthmus.elastic.core.exit_codes import DONE, LEFT
from isthmus.elastic.core.farewell import Farewell
from isthmus.elastic.core.messages import Leave

TIMEOUT_S = 3.0


class Surroundings:
    """Whether a commit boundary is ahead."""

    def __init__(self) -> None:
        self.boundary_ahead = True
        self.farewell = Farewell(TIMEOUT_S, lambda: self.boundary_ahead)


@pytest.fixture
def around() -> Surroundings:
    return Surroundings()


def test_a_boundary_that_is_ahead_is_awaited_without_limit(around: Surroundings) -> None:
    assert around.farewell.request(LeaveRequested(now=False), 10.0)
    assert around.farewell.word == Leave(now=False)
    assert not around.farewell.is_overdue(1e9)


def test_time_runs_once_no_boundary_is_ahead_and_stops_when_there_is_one_again(around: Surroundings) -> None:
    around.farewell.request(LeaveRequested(now=False), 10.0)
    around.boundary_ahead = False
    around.farewell.limit(20.0)
    around.farewell.limit(22.0)  # being told again does not begin anew
    assert not around.farewell.is_overdue(22.9)
    assert around.farewell.is_overdue(23.0)
    around.farewell.await_boundary()
    assert not around.farewell.is_overdue(1e9)


def test_who_wants_to_go_at_once_waits_for_the_answer_only(around: Surroundings) -> None:
    around.farewell.request(LeaveRequested(now=True), 10.0)
    around.farewell.await_boundary()
    assert around.farewell.is_overdue(13.0)


def test_a_hasty_request_replaces_a_patient_one_and_never_the_reverse(around: Surroundings) -> None:
    assert around.farewell.request(LeaveRequested(now=False), 10.0)
    assert not around.farewell.request(LeaveRequested(now=False), 11.0)
    assert around.farewell.request(LeaveRequested(now=True), 12.0)
    assert not around.farewell.request(LeaveRequested(now=False), 13.0)
    assert around.farewell.word == Leave(now=True)
    assert around.farewell.is_overdue(15.0)


def test_the_last_commit_ends_the_run_for_this_peer_once_and_without_a_reason(around: Surroundings) -> None:
    assert around.farewell.bid(10.0)
    assert not around.farewell.bid(11.0)
    assert around.farewell.is_overdue(13.0)
    assert around.farewell.end("left at outer step 4").code == DONE


def test_who_leaves_before_the_end_says_why(around: Surroundings) -> None:
    around.farewell.request(LeaveRequested(now=False), 10.0)
    finish = around.farewell.end("left at outer step 4")
    assert (finish.code, finish.reason) == (LEFT, "left at outer step 4")
