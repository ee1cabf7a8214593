# SPDX-License-Identifier: Apache-2.0
"""A loop's side of a session: what it answers, in which order, and what it leaves behind. The daemon is a script."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

import isthmus
from isthmus.trainer.attach import session as session_module
from isthmus.trainer.attach.session import Session, _Place
from isthmus.trainer.attach.tensors import LoopTensors
from isthmus.trainer.workers import ipc
from isthmus.trainer.workers.channel import DaemonGone
from isthmus.trainer.workers.loop import Loop, LoopEnd, end_of
from isthmus.trainer.workers.shared_buffer import SharedBuffer

STEP = ipc.Step(serial=3, inner_step=41, position=41.5, indices=(10, 11, 12, 13, 14))


class Script:
    """Stands in for the channel: gives these requests, keeps the replies."""

    def __init__(self, *requests: ipc.Request) -> None:
        self.requests = deque(requests)
        self.replies: list[ipc.Reply] = []
        self.is_closed = False

    def receive(self) -> ipc.Request:
        if not self.requests:
            raise DaemonGone
        return self.requests.popleft()

    def send(self, reply: ipc.Reply) -> None:
        self.replies.append(reply)

    def close(self) -> None:
        self.is_closed = True


Opener = Callable[..., tuple[Session, SimpleNamespace]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Makes a session that has begun, and what is around it."""

    def make(*requests: ipc.Request, rank: int = 0, size: int = 1) -> tuple[Session, SimpleNamespace]:
        script = Script(*requests)
        monkeypatch.setattr(session_module, "DaemonChannel", lambda *_args, **_kwargs: script)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        tensors = LoopTensors(model, optimizer, rank)
        mailbox = SharedBuffer.create(tensors.numel)
        place = _Place("socket", 0, 0, mailbox.fd, "join")
        session = Session(tensors, mailbox, place, None, rank=rank, size=size, tokens_per_sample=7)
        session._begin()
        return session, SimpleNamespace(script=script, model=model, optimizer=optimizer, mailbox=mailbox.tensor)

    return make


def _train(around: SimpleNamespace) -> float:
    around.optimizer.zero_grad()
    loss = around.model(torch.ones(4, 3)).square().mean()
    loss.backward()
    return loss.item()


def test_a_session_begins_with_the_runs_parameters_and_ends_when_the_run_does(opened: Opener) -> None:
    def requests() -> Iterator[ipc.Request]:
        yield ipc.Store(serial=1)
        yield ipc.Load(serial=2)
        yield STEP
        yield ipc.Store(serial=4)
        yield ipc.Stop(serial=5)

    session, around = opened(*requests())
    assert [type(reply) for reply in around.script.replies] == [ipc.Ready, ipc.Stored, ipc.Loaded]
    assert (session.inner_step, session.indices()) == (41, [10, 11, 12, 13, 14])
    seen = []
    for indices in session:
        seen.append(indices)
        loss = _train(around)
        session.report(torch.tensor(loss, requires_grad=True))
        around.optimizer.step()
    assert seen == [[10, 11, 12, 13, 14]]
    done, stored = around.script.replies[-2:]
    assert isinstance(done, ipc.StepDone)
    assert (done.serial, done.inner_step, done.num_tokens, done.lr) == (3, 41, 5 * 7, 0.5)
    assert done.loss == pytest.approx(loss)
    assert stored == ipc.Stored(serial=4, own_steps=1)
    parameters = torch.cat([param.detach().reshape(-1) for param in around.model.parameters()])
    assert torch.equal(around.mailbox, parameters)
    assert session.is_over
    session.close()


def test_what_a_load_says_of_the_optimizer_holds(opened: Opener) -> None:
    first = (STEP, ipc.Load(serial=4, kind="exp_avg", own_steps=9), ipc.Store(serial=5))
    session, around = opened(*first, ipc.Stop(serial=6))
    for _ in session:
        _train(around)
        around.optimizer.step()
        if not session.is_over:
            assert {float(state["step"]) for state in around.optimizer.state.values()} == {9.0}
    assert [reply.own_steps for reply in around.script.replies if isinstance(reply, ipc.Stored)] == [9]


def test_a_step_in_two_halves_lets_the_gradient_be_replaced_between_them(opened: Opener) -> None:
    halves = (ipc.Backward(serial=1, inner_step=1, position=1.5, indices=(0,)), ipc.Load(serial=2, kind="grad"))
    session, around = opened(*halves, ipc.Update(serial=3, inner_step=1, position=1.5), ipc.Stop(serial=4))
    around.optimizer.param_groups[0].update(weight_decay=0.0)
    before = around.model.weight.detach().clone()
    around.mailbox.fill_(-1.0)
    for _ in session:
        session.report(_train(around))
        around.optimizer.step()
    assert [type(reply) for reply in around.script.replies] == [ipc.Ready, ipc.BackwardDone, ipc.Loaded, ipc.StepDone]
    torch.testing.assert_close(around.model.weight.detach(), before + 0.5)  # Adam's first step has the size of its rate


def test_a_step_whose_gradient_does_not_come_back_is_none_and_the_next_begins_anew(opened: Opener) -> None:
    def backward(serial: int, inner_step: int) -> ipc.Backward:
        return ipc.Backward(serial=serial, inner_step=inner_step, position=0.5, indices=(inner_step,))

    lost = (backward(1, 1), ipc.Load(serial=2), backward(3, 5))  # after it was out of the run for a while
    whole = (ipc.Update(serial=4, inner_step=5, position=4.5), backward(5, 6), ipc.Stop(serial=6))
    session, around = opened(*lost, *whole)
    around.mailbox.fill_(2.0)
    seen, values = [], []
    for indices in session:
        seen.append(indices)
        session.report(_train(around))
        around.optimizer.step()
        values.append(around.model.weight.detach().clone())
    replies = [(type(reply), reply.serial) for reply in around.script.replies[1:]]
    assert replies == [
        (ipc.BackwardDone, 1),
        (ipc.Loaded, 2),
        (ipc.BackwardDone, 3),
        (ipc.StepDone, 4),
        (ipc.BackwardDone, 5),
    ]
    assert seen == [[1], [5], [6]]
    assert torch.equal(values[0], torch.full((2, 3), 2.0)), "as they were loaded"
    assert not torch.equal(values[1], values[0])
    assert torch.equal(values[2], values[1]), "the run is over: what it ended with stays"
    assert session._own_steps == 1


def test_a_closure_is_welcome_unless_gradients_are_exchanged(opened: Opener) -> None:
    session, around = opened(STEP, ipc.Stop(serial=4))
    around.optimizer.step(lambda: _train(around))
    assert session.is_over
    _, around = opened(ipc.Backward(serial=1, inner_step=1, position=1.5, indices=(0,)))
    for call in (lambda: around.optimizer.step(lambda: 0.0), lambda: around.optimizer.step(closure=lambda: 0.0)):
        with pytest.raises(ValueError, match="without a closure"):
            call()


def test_processes_share_the_samples_of_a_step(opened: Opener) -> None:
    sessions = [opened(STEP, rank=rank, size=2)[0] for rank in range(2)]
    shares = [session.indices() for session in sessions]
    assert sorted(shares[0] + shares[1]) == [10, 11, 12, 13, 14]
    assert abs(len(shares[0]) - len(shares[1])) <= 1


def test_after_the_session_the_optimizer_is_the_loops_alone(opened: Opener) -> None:
    session, around = opened(STEP, ipc.Stop(serial=4))
    with session:
        for _ in session:
            _train(around)
            around.optimizer.step()
    session.close()
    assert around.script.is_closed
    num_replies = len(around.script.replies)
    _train(around)
    around.optimizer.step()
    assert len(around.script.replies) == num_replies


@pytest.mark.parametrize("then", [STEP, ipc.Stop(serial=4)], ids=["goes on", "is over"])
def test_an_error_in_the_loop_comes_through_and_its_peer_leaves_at_once(opened: Opener, then: ipc.Request) -> None:
    session, around = opened(STEP, then)
    did: list[str] = []
    session._daemon = SimpleNamespace(
        coordinates=True,
        stop=lambda: did.append("stop"),
        wait=lambda: did.append("wait"),
        close=lambda: did.append("close"),
    )

    def fail() -> None:
        with session:
            _train(around)
            around.optimizer.step()
            raise KeyError("the loop's own")

    with pytest.raises(KeyError, match="the loop's own"):
        fail()
    assert did == ["stop", "close"]
    assert session.is_over
    assert around.script.is_closed
    num_replies = len(around.script.replies)
    around.optimizer.step()
    assert len(around.script.replies) == num_replies, "the optimizer is the loop's alone"


def test_a_daemon_that_is_gone_without_a_word_ends_the_session_with_an_error(opened: Opener) -> None:
    session, around = opened(STEP)
    _train(around)
    with pytest.raises(isthmus.RunEnded, match="isthmus join has ended"):
        around.optimizer.step()
    assert session.is_over


@pytest.mark.parametrize("command", ["leave --dir here", "", ["status"], None])
def test_a_command_that_neither_founds_nor_joins_is_refused(
    command: str | list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ISTHMUS_COMMAND", raising=False)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="founds a run with 'up' or joins one with 'join TICKET'"):
        isthmus.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), command)


def test_a_daemon_that_lives_on_without_the_loop_says_why_and_is_left_alone(opened: Opener, tmp_path: Path) -> None:
    session, around = opened(STEP)
    loop = Loop(folder=tmp_path, facts=SimpleNamespace(pid=os.getppid()))
    stopped: list[bool] = []
    session._place = msgspec.structs.replace(session._place, socket_path=str(tmp_path / "socket"))
    session._daemon = SimpleNamespace(is_running=lambda: True, stop=lambda: stopped.append(True), close=lambda: None)
    assert session._daemon_is_there()
    assert loop.give_up(LoopEnd(exit_code=10, cause="the values are not finite"))
    assert not session._daemon_is_there()
    _train(around)
    with session, pytest.raises(isthmus.RunEnded, match=r"^the values are not finite \(isthmus join") as ended:
        around.optimizer.step()
    assert ended.value.exit_code == 10
    assert not stopped


@pytest.mark.parametrize(
    ("coordinates", "now", "call"), [(True, False, "leave"), (True, True, "stop"), (False, False, "stop")]
)
def test_only_the_daemon_of_a_founders_loop_that_ends_early_in_order_is_not_stopped(
    opened: Opener, coordinates: bool, now: bool, call: str
) -> None:
    session, around = opened(STEP)
    calls: list[str] = []
    session._daemon = SimpleNamespace(
        coordinates=coordinates,
        wait_for_leave=lambda: calls.append("leave"),
        stop=lambda: calls.append("stop"),
        close=lambda: None,
    )
    session.close(now=now)
    assert calls == [call]
    said = [reply for reply in around.script.replies if isinstance(reply, ipc.WorkerFailed)]
    assert [reply.kind for reply in said] == (["loop_left"] if call == "leave" else [])


def test_what_the_daemon_of_a_loop_that_is_dead_would_say_is_said_to_nobody(tmp_path: Path) -> None:
    loop = Loop(folder=tmp_path, facts=SimpleNamespace(pid=os.getpid()))
    assert not loop.give_up(LoopEnd(exit_code=10, cause="the values are not finite"))
    assert end_of(tmp_path) is None
