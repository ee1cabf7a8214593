# SPDX-License-Identifier: Apache-2.0
"""The parts of the member's shell one by one: rounds, learner, desk, dialler, alarm."""

import asyncio
import inspect
import random

import msgspec
import pytest

from isthmus.collective.core.types import Member, RoundKey, View
from isthmus.collective.errors import HandshakeRefused, OperationAborted, PeerUnreachable, PlanMismatch
from isthmus.elastic.core.events import (
    AbortExchange,
    CatchUp,
    CaughtUp,
    ExchangeDone,
    ExchangeFailed,
    InstallView,
    StartExchange,
)
from isthmus.elastic.core.messages import Held, IndexRange, Vote
from isthmus.elastic.errors import NotAMember, RunFinished
from isthmus.elastic.observation import RoundAborted, ViewInstalled, ignore, round_fields
from isthmus.elastic.shell.alarm import Alarm
from isthmus.elastic.shell.desk import Committed, Desk
from isthmus.elastic.shell.dialler import LATER_CODE, Dialler, NobodyAnswers
from isthmus.elastic.shell.exchange import Exchanged, RunningExchange
from isthmus.elastic.shell.learner import Learner
from isthmus.elastic.wire import decode, encode
from tests.unit.elastic.harness import peer_id

VIEW = View(4, 7, b"d" * 32, (Member(peer_id(1), 1, "127.0.0.1:1"),))
KEY = RoundKey(4, 7, 0)
START = StartExchange(view=VIEW, key=KEY, weight=1.0)
HELD = Held(8, b"e" * 32)


class Runner:
    """A runner whose exchange ends as the test says."""

    def __init__(self):
        self.outcome = asyncio.get_running_loop().create_future()
        self.calls = []
        self.install_error = None

    async def install_view(self, view, survey_from):
        self.calls.append("view")
        if self.install_error is not None:
            raise self.install_error

    async def exchange(self, view, key, weight, told):
        self.calls.append("exchange")
        try:
            return await self.outcome
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # a thread still writes to staging
            self.calls.append("stopped")
            raise

    async def install_staged(self, key, held, *, final):
        self.calls.append("install")

    def discard_staged(self, key):
        self.calls.append("discard")

    async def found(self):
        self.calls.append("found")
        return HELD


class Watched:
    """Rounds with everything they tell."""

    def __init__(self, tasks):
        self.events, self.observed, self.spoiled = [], [], []
        self.runner = Runner()
        self.rounds = RunningExchange(
            self.runner,
            tasks,
            done=self.events.append,
            spoiled=self.spoiled.append,
            observe=self.observed.append,
            clock=asyncio.get_running_loop().time,
        )


async def _turns(number=5):
    for _ in range(number):
        await asyncio.sleep(0)


async def test_exchange_ends_with_one_event():
    async with asyncio.TaskGroup() as tasks:
        watched = Watched(tasks)
        watched.rounds.start(START)
        watched.runner.outcome.set_result(Exchanged(digest=b"x" * 32))
    assert watched.events == [ExchangeDone(key=KEY, digest=b"x" * 32)]


async def test_a_weight_that_no_vote_can_say_is_told_as_the_most_that_one_can():
    # Found before: one member that claimed 1e18 had the votes of all that had heard it refused, and their lines cut.
    async with asyncio.TaskGroup() as tasks:
        watched = Watched(tasks)
        watched.rounds.start(START)
        watched.runner.outcome.set_result(Exchanged(digest=b"x" * 32, weights=(3.0, 1e18)))
    (event,) = watched.events
    vote = Vote(key=KEY, digest=event.digest, weight=3.0, num_tokens=3, consumed=(), weights=event.weights)
    assert decode(msgspec.msgpack.Decoder(Vote), encode(vote)).weights == (3.0, 1e15)


@pytest.mark.parametrize(
    ("error", "suspects"),
    [
        (OperationAborted(KEY, "reset", [peer_id(2)]), (peer_id(2),)),
        (PlanMismatch("codec", "raw", "int8", peer_id(3)), (peer_id(3),)),
        (PeerUnreachable("127.0.0.1:1", "refused"), ()),
    ],
)
async def test_failed_exchange_names_its_suspects(error, suspects):
    async with asyncio.TaskGroup() as tasks:
        watched = Watched(tasks)
        watched.rounds.start(START)
        watched.runner.outcome.set_exception(error)
    (event,) = watched.events
    assert isinstance(event, ExchangeFailed)
    assert (event.key, event.suspects) == (KEY, suspects)


@pytest.mark.parametrize(
    "error",
    [OperationAborted(KEY, "gave up", told_by=peer_id(2)), PlanMismatch("plan", "a", "b", peer_id(3), peer_id(2))],
)
async def test_what_another_member_says_of_a_third_one_is_reported_as_told(error):
    async with asyncio.TaskGroup() as tasks:
        watched = Watched(tasks)
        watched.rounds.start(START)
        watched.runner.outcome.set_exception(error)
    (event,) = watched.events
    assert (event.told_by, event.differs) == (peer_id(2), False)


async def test_aborted_exchange_stays_silent_and_its_staging_is_forgotten_after_it_stopped():
    async with asyncio.TaskGroup() as tasks:
        watched = Watched(tasks)
        watched.rounds.start(START)
        await _turns()
        watched.rounds.void(KEY)
        await watched.rounds.abort(AbortExchange(key=KEY))
    assert watched.events == []
    assert watched.runner.calls == ["exchange", "stopped", "discard"]
    assert watched.observed[-1] == RoundAborted(**round_fields(KEY))


async def test_exchange_that_ends_while_its_abort_is_queued_stays_silent():
    async with asyncio.TaskGroup() as tasks:
        watched = Watched(tasks)
        watched.rounds.start(START)
        await _turns()
        watched.runner.outcome.set_result(Exchanged(digest=b"x" * 32))
        watched.rounds.void(KEY)
        await _turns(20)
        await watched.rounds.abort(AbortExchange(key=KEY))
    assert watched.events == []


async def test_exchange_that_was_aborted_before_its_turn_never_begins():
    async with asyncio.TaskGroup() as tasks:
        watched = Watched(tasks)
        watched.rounds.void(KEY)
        watched.rounds.start(START)
        await watched.rounds.abort(AbortExchange(key=KEY))
    assert watched.runner.calls == ["discard"]


async def test_view_with_missing_links_is_installed_and_the_fault_told():
    async with asyncio.TaskGroup() as tasks:
        watched = Watched(tasks)
        watched.runner.install_error = PeerUnreachable("127.0.0.1:1", "refused")
        await watched.rounds.install_view(InstallView(view=VIEW))
    (event,) = watched.observed
    assert isinstance(event, ViewInstalled)
    assert "refused" in event.cause


class Sync:
    """A catch-up that ends when the test says so."""

    def __init__(self):
        self.targets = []
        self.heard = []
        self.outcomes = []

    def aim(self, target, donors):
        self.targets.append(target)

    def heard_of(self, committed):
        self.heard.append(committed)

    async def run(self):
        self.outcomes.append(asyncio.get_running_loop().create_future())
        return await self.outcomes[-1]


def _learner(sync, tasks, events):
    clock = asyncio.get_running_loop().time
    told = {"done": events.append, "spoiled": events.append, "observe": ignore}
    return Learner(sync, Runner(), tasks, **told, clock=clock, borrow=_borrow_nothing)


async def _borrow_nothing(_donors):
    """As a peer that has all it wants."""


async def test_newer_catch_up_replaces_a_running_one_which_stays_silent():
    events, sync = [], Sync()
    async with asyncio.TaskGroup() as tasks:
        learner = _learner(sync, tasks, events)
        newer = Held(9, b"f" * 32)
        await learner.catch_up(CatchUp(target=HELD, donors=()))
        await _turns()
        await learner.catch_up(CatchUp(target=newer, donors=()))
        await _turns()
        sync.outcomes[1].set_result(newer)
    assert sync.outcomes[0].cancelled()
    assert sync.targets == [HELD, newer]
    assert events == [CaughtUp(held=newer)]


async def test_commits_are_passed_on_whether_a_catch_up_runs_or_begins_later():
    events, sync = [], Sync()
    async with asyncio.TaskGroup() as tasks:
        learner = _learner(sync, tasks, events)
        learner.heard_of(HELD)
        await learner.catch_up(CatchUp(target=HELD, donors=()))
        await _turns()
        learner.heard_of(Held(9, b"f" * 32))
        sync.outcomes[0].set_result(HELD)
        await _turns()
        learner.heard_of(Held(10, b"f" * 32))
    assert sync.heard == [HELD, Held(9, b"f" * 32), Held(10, b"f" * 32)]


async def test_founded_state_is_told_as_caught_up():
    events = []
    async with asyncio.TaskGroup() as tasks:
        await _learner(Sync(), tasks, events).found()
    assert events == [CaughtUp(held=HELD)]


# -------------------------------------------------------------------------------- desk


async def test_round_that_was_committed_before_the_membership_ended_is_told_as_committed():
    desk = Desk()
    desk.became_active(VIEW)
    outcome = Committed(key=KEY, view=VIEW, held=HELD, final=False)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(desk.round_outcome())
        await _turns()
        desk.demoted()  # the machine is ahead of the work
        assert desk.active_view is None
        desk.committed(outcome)
        desk.became_learner("dropped")
    assert waiting.result() == outcome


async def test_activation_that_is_over_already_is_not_told():
    desk = Desk()
    desk.demoted()
    desk.became_active(VIEW)
    assert desk.active_view is None
    desk.became_learner("dropped")
    desk.became_active(VIEW)
    assert await desk.activation() == VIEW


async def test_learner_hears_that_its_round_and_its_leases_are_void():
    desk, asked = Desk(), []
    async with asyncio.TaskGroup() as tasks:
        waits = [
            tasks.create_task(_raises(NotAMember, desk.round_outcome())),
            tasks.create_task(_raises(NotAMember, desk.leases(lambda: asked.append(1)))),
        ]
        await _turns()
        desk.demoted()
        desk.became_learner("dropped")
    assert [wait.result().reason for wait in waits] == ["dropped", "dropped"]
    assert asked == [1]


async def test_samples_that_nobody_waits_for_any_more_are_kept_for_the_next_and_not_after_the_membership():
    desk, asked = Desk(), []
    ranges = (IndexRange(0, 8),)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(desk.leases(lambda: asked.append(1)))
        await _turns()
        first.cancel()
        await _turns()
        desk.took_leases(ranges)
        assert await desk.leases(lambda: asked.append(2)) == ranges
        assert asked == [1]
        desk.took_leases(ranges)
        desk.demoted()
        desk.became_learner("dropped")
        again = tasks.create_task(desk.leases(lambda: asked.append(3)))
        await _turns()
        assert asked == [1, 3]
        desk.took_leases((IndexRange(8, 16),))
    assert again.result() == (IndexRange(8, 16),)


async def test_closed_desk_answers_all_that_wait_and_all_that_come():
    desk = Desk()
    over = RunFinished(6, "evicted")
    async with asyncio.TaskGroup() as tasks:
        wait = tasks.create_task(_raises(RunFinished, desk.activation()))
        await _turns()
        desk.close(over)
    assert wait.result() is over
    for question in (desk.activation(), desk.round_outcome(), desk.leases(lambda: None)):
        assert await _raises(RunFinished, question) is over


async def _raises(kind, work):
    with pytest.raises(kind) as caught:
        await work
    return caught.value


# -------------------------------------------------------------------------------- dialler, alarm


class Hosts:
    """What happens at each address; counts the dials."""

    def __init__(self, **answers):
        self.answers = answers
        self.dials = []

    async def dial(self, address, purpose):
        self.dials.append(address)
        answer = self.answers[address]
        if isinstance(answer, Exception):
            raise answer
        return await answer() if inspect.iscoroutinefunction(answer) else answer


def _dialler(hosts):
    return Dialler(list(hosts.answers), hosts.dial, clock=asyncio.get_running_loop().time, rng=random.Random(1))


GONE = PeerUnreachable("there", "refused")
NO = HandshakeRefused(5, "the ticket has expired")


async def test_first_address_that_answers_is_asked_first_from_then_on():
    hosts = Hosts(a=GONE, b=GONE, c="channel")
    dialler = _dialler(hosts)
    assert await dialler.connect(timeout_s=1.0) == ("c", "channel")
    await dialler.connect(timeout_s=1.0)
    assert hosts.dials == ["a", "b", "c", "c"]


async def test_refusal_counts_only_when_nobody_else_may_answer():
    hosts = Hosts(a=NO, b=GONE)
    with pytest.raises(NobodyAnswers) as caught:
        await _dialler(hosts).connect(timeout_s=0.2)
    assert set(caught.value.causes) == {"a", "b"}
    with pytest.raises(HandshakeRefused):
        await _dialler(Hosts(a=NO, b=NO)).connect(timeout_s=None)


async def test_refusal_for_now_is_none():
    with pytest.raises(NobodyAnswers):
        await _dialler(Hosts(a=HandshakeRefused(LATER_CODE, "no journal"), b=NO)).connect(timeout_s=0.2)


async def test_frozen_address_holds_up_no_other_and_is_let_go():
    gone = []

    async def freeze():
        try:
            await asyncio.Event().wait()
        finally:
            gone.append(True)

    hosts = Hosts(a=freeze, b="channel", c="never needed")
    began = asyncio.get_running_loop().time()
    assert await _dialler(hosts).connect(timeout_s=None) == ("b", "channel")
    assert asyncio.get_running_loop().time() - began < 3.0
    assert hosts.dials == ["a", "b"]
    assert gone == [True]


async def test_of_two_connections_that_come_in_the_same_instant_one_is_closed():
    class Connection:
        closed = False

        def close(self):
            self.closed = True

    one, other, both = Connection(), Connection(), asyncio.Event()

    async def first():
        await both.wait()
        return one

    async def second():
        both.set()
        return other

    _, chosen = await _dialler(Hosts(a=first, b=second)).connect(timeout_s=None)
    assert {connection: connection.closed for connection in (one, other)} == {
        one: chosen is not one,
        other: chosen is not other,
    }


async def test_pauses_between_dials_grow():
    hosts = Hosts(a=GONE)
    with pytest.raises(NobodyAnswers):
        await _dialler(hosts).connect(timeout_s=0.5)
    assert 3 <= len(hosts.dials) <= 7


async def test_connections_that_break_at_once_are_not_dialled_in_a_storm():
    hosts = Hosts(a="channel")
    dialler = _dialler(hosts)
    began = asyncio.get_running_loop().time()
    for _ in range(4):
        await dialler.connect(timeout_s=None)
    assert asyncio.get_running_loop().time() - began > 0.2


async def test_list_without_an_address_is_a_callers_error():
    with pytest.raises(ValueError, match="address"):
        _dialler(Hosts())


async def test_alarm_rings_at_its_deadline_and_not_when_it_is_only_woken():
    clock = asyncio.get_running_loop().time
    alarm = Alarm(clock)
    assert await alarm.sleep_until(clock() + 0.02)
    assert await alarm.sleep_until(clock() - 1.0)
    alarm.wake()
    assert not await alarm.sleep_until(None)
    alarm.wake()
    assert not await alarm.sleep_until(clock() + 60)
