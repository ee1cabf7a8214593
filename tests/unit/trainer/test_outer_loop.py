# SPDX-License-Identifier: Apache-2.0
"""Somebody's own loop on real communicators, against the simulator and against accidents."""

import itertools
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from isthmus.collective import BlockingCommunicator, CollectiveError, view_of
from isthmus.collective.api.standalone import peer_id_of
from isthmus.optim import ANCHOR, build_outer
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import GRAD, Emitted, Op, Outer, Round, Settled
from isthmus.optim.simulate import simulate
from isthmus.trainer import outer_engine
from isthmus.trainer.outer_engine import by_work
from isthmus.trainer.outer_loop import OuterLoop
from tests.unit.trainer.outer_rig import (
    LR,
    TABLE,
    CodecWire,
    Model,
    Rows,
    Saboteur,
    communicators,
    gradient,
    inner_steps,
    install,
    sgd,
    together,
)

DILOCO = build_outer("diloco", inner_steps=4)
STREAMING = build_outer("streaming", inner_steps=4, num_fragments=2, delay=1, keep=0.5)
DELAYED = build_outer("delayed", inner_steps=4)
DATA_PARALLEL = build_outer("data_parallel")


@pytest.fixture
def pair():
    with communicators(2) as opened:
        yield opened


def adamw(model):
    return torch.optim.AdamW(model.parameters() if isinstance(model, Model) else model, lr=LR, weight_decay=0.0)


def simulated(method, number, steps, *, build=None, states=(), **settings):
    workers = [peer_id_of(rank) for rank in range(number)]
    rows = Rows(build or (lambda params: torch.optim.SGD(params, lr=LR)), number, states)
    settings.setdefault("weigh", by_work)
    return simulate(
        method,
        table=TABLE,
        initial=Model().flat(),
        workers=workers,
        workload=rows,
        num_inner_steps=steps,
        **settings,
    )


def run(opened, method, steps, *, build=sgd, ranks=None, **settings):
    """All peers; (model, loop) of each after so many steps."""

    def work(rank, communicator):
        rank = rank if ranks is None else ranks[rank]
        model = Model(seed=rank)
        optimizer = build(model)
        with OuterLoop(model, optimizer, communicator, method, deadline_s=10.0, **settings) as loop:
            inner_steps(model, optimizer, rank, range(1, steps + 1))
            assert loop.shared_agrees()
        return model, loop

    return together(opened, work)


def assert_as_simulated(found, expected):
    for rank, (model, loop) in enumerate(found):
        torch.testing.assert_close(model.flat(), expected.values[peer_id_of(rank)], rtol=1e-5, atol=1e-6)
        assert loop.outer_step == expected.num_rounds > 0
        assert loop.num_dropped == len(expected.dropped)


# ------------------------------------------------------------------------------------------ the simulator's runs

METHODS = {
    "diloco": DILOCO,
    "streaming": STREAMING,
    "delayed": DELAYED,
    "eager": build_outer("eager", inner_steps=4),
    "noloco": build_outer("noloco", inner_steps=4),
    "sparseloco": build_outer("sparseloco", inner_steps=4, topk=2000),
    "demo": build_outer("demo", topk=2000),
    "data_parallel": DATA_PARALLEL,
    "local_adam": build_outer("local_adam", inner_steps=4),
}


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_every_peer_goes_where_the_simulator_says(name, number):
    method, build, states = METHODS[name], sgd, ()
    if name == "local_adam":
        build, states = adamw, ("exp_avg", "exp_avg_sq")
    expected = simulated(method, number, 18, build=adamw if states else None, states=states, wire=CodecWire())
    with communicators(number) as opened:
        found = run(opened, method, 18, build=build)
    assert_as_simulated(found, expected)


@dataclass(frozen=True)
class Watched:
    """A method, and what it is told about the work behind each payload."""

    inner: object
    seen: list

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def fitted(self, _table, _run=None):
        return self

    def __repr__(self):
        return repr(self.inner)

    def emit(self, round_, value, shared, private, work, *, out):
        self.seen.append((round_, work))
        return self.inner.emit(round_, value, shared, private, work, out=out)


@pytest.mark.parametrize("name", ["diloco", "delayed", "streaming"])
def test_a_method_hears_how_much_work_is_behind_its_payload(name):
    """Of rounds, of which some are aborted: since one last moved the values."""
    simulated_method, ours = Watched(METHODS[name], []), Watched(METHODS[name], [])
    simulated(simulated_method, 1, 18, aborted=lambda round_: round_.inner_step == 8, batch_size=3.0)
    with communicators(1) as (alone,):
        breaking = Saboteur(alone, breaks=payload_key(8), raises=True)
        run([breaking], ours, 18, batch_size=3.0)
    assert ours.seen == simulated_method.seen
    assert {3.0 * work.inner_steps for _, work in ours.seen} == {work.samples for _, work in ours.seen}
    assert len({work.samples for _, work in ours.seen}) > 1


def test_error_feedback_keeps_what_the_codec_lost_of_the_payload(pair):
    method = METHODS["sparseloco"]
    expected = simulated(method, 2, 8, wire=CodecWire())
    found = run(pair, method, 8)
    for rank, (_, loop) in enumerate(found):
        saved = loop.state_dict()["private"]
        (state,) = expected.states[peer_id_of(rank)].values()
        for name, tensor in state.private.items():
            torch.testing.assert_close(saved["param/0"][name], tensor, rtol=1e-4, atol=1e-5)
            assert tensor.abs().sum() > 0.0


def test_weights_are_samples(pair):
    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        method = build_outer("diloco", inner_steps=4, lr=1.0, momentum=0.0)
        with OuterLoop(model, optimizer, communicator, method, batch_size=1.0 + 2.0 * rank):
            model_before = model.flat()
            inner_steps(model, optimizer, rank, range(1, 4))
            model.set_gradient(gradient(peer_id_of(rank), 4, model.flat()))
            alone = model.flat() - LR * gradient(peer_id_of(rank), 4, model.flat())
            optimizer.step()
        assert not torch.equal(model_before, alone)
        return alone, model.flat()

    (first, together_), (second, _) = together(pair, work)
    torch.testing.assert_close(together_, 0.25 * first + 0.75 * second)


def test_parameters_in_bf16_and_a_lossy_codec_leave_shared_state_with_equal_bits(pair):
    def work(rank, communicator):
        model = Model(seed=rank).to(torch.bfloat16)
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, DILOCO, codec="int8") as loop:
            for step in range(1, 9):
                model.set_gradient(gradient(peer_id_of(rank), step, model.flat().float()).bfloat16())
                optimizer.step()
            assert model.flat().dtype == torch.bfloat16
            assert loop.outer_step == 2
            return loop.shared_agrees() and loop.parameters_agree()

    assert together(pair, work) == [True, True]


def test_alone_in_a_view_it_is_a_loop_of_one(pair):
    first = pair[0]
    first.install(view_of(1, [first.address]))
    expected = simulated(DILOCO, 1, 12)
    assert_as_simulated(run([first], DILOCO, 12), expected)


def test_more_rounds_than_may_travel_at_once_take_turns(pair, monkeypatch):
    monkeypatch.setattr(outer_engine, "_MAX_RUNNING", 2)
    method = build_outer("desloc", inner_steps=4, states=("exp_avg", "exp_avg_sq"), state_multiples=(1, 1))
    expected = simulated(method, 2, 8, build=adamw, states=("exp_avg", "exp_avg_sq"))
    assert_as_simulated(run(pair, method, 8, build=adamw), expected)


def test_a_round_with_delay_travels_while_the_loop_goes_on(pair):
    is_ahead = threading.Event()

    def work(rank, communicator):
        model = Model()
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, DELAYED, deadline_s=10.0) as loop:
            inner_steps(model, optimizer, rank, range(1, 4))
            if rank == 1:
                assert is_ahead.wait(10.0)  # here the other one has made three steps more, with a round under way
            inner_steps(model, optimizer, rank, range(4, 8))
            if rank == 0:
                is_ahead.set()
            inner_steps(model, optimizer, rank, range(8, 9))
            return loop.outer_step

    assert together(pair, work) == [2, 2]


# ------------------------------------------------------------------------------------------ accidents


def payload_key(round_step, place=0):
    """Whether a key is that of the payload of a round."""
    return lambda key: (key.outer_step, key.fragment) == (round_step, 3 * place)


def vote_key(round_step, place=0):
    return lambda key: (key.outer_step, key.fragment) == (round_step, 3 * place + 1)


@pytest.mark.parametrize("name", ["diloco", "delayed", "streaming", "data_parallel"])
def test_a_round_that_breaks_is_dropped_by_all_and_training_goes_on(pair, name):
    method = METHODS[name]
    broken = {round_ for round_ in method.plan(8) if round_.inner_step == 8}
    assert broken
    expected = simulated(method, 2, 18, aborted=lambda round_: round_ in broken)
    saboteurs = [pair[0], Saboteur(pair[1], breaks=payload_key(8))]
    found = run(saboteurs, method, 18)
    assert_as_simulated(found, expected)
    assert expected.dropped == list(broken)


def test_another_view_between_rounds_costs_nothing(pair):
    meeting = threading.Barrier(2, action=lambda: install(pair, 3), timeout=10.0)

    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, DILOCO, deadline_s=10.0) as loop:
            inner_steps(model, optimizer, rank, range(1, 7))
            meeting.wait()
            inner_steps(model, optimizer, rank, range(7, 19))
        return model, loop

    assert_as_simulated(together(pair, work), simulated(DILOCO, 2, 18))


@pytest.mark.parametrize("name", ["diloco", "delayed", "streaming", "data_parallel"])
def test_a_round_that_a_new_view_breaks_is_made_there(pair, name):
    """Peer 1 holds its part of the round of step 4 back until the view has changed on both."""
    method, has_emitted = METHODS[name], threading.Event()

    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, method, deadline_s=10.0) as loop:
            inner_steps(model, optimizer, rank, range(1, 4))
            if rank == 1:
                assert has_emitted.wait(10.0)
                install(pair, 1)
            else:
                threading.Timer(0.1, has_emitted.set).start()  # by then it has emitted, and waits or goes on
            inner_steps(model, optimizer, rank, range(4, 19))
        return model, loop

    assert_as_simulated(together(pair, work), simulated(method, 2, 18))


@pytest.mark.parametrize("emits", [False, True])
def test_who_has_gone_on_does_not_keep_others_waiting_in_a_new_view(pair, emits):
    """Peer 1 loses the votes of the round of step 8, and finds a new view: it would make the round again there.

    Peer 0 may find that view while it emits that of step 12, which then begins there.
    """
    is_emitting, is_installed = threading.Event(), threading.Event()
    num_emitted = itertools.count(1)

    def weigh(peer, work):
        if emits and peer == peer_id_of(0) and next(num_emitted) == 3:
            is_emitting.set()
            assert is_installed.wait(10.0)
        return by_work(peer, work)

    def install_both(_error):
        assert not emits or is_emitting.wait(10.0)
        install(pair, 1)
        is_installed.set()

    saboteurs = [pair[0], Saboteur(pair[1], mishears=vote_key(8))]

    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        settings = {"deadline_s": 15.0, "on_abort": install_both, "weigh": weigh}
        with OuterLoop(model, optimizer, communicator, DILOCO, **settings) as loop:
            started = time.monotonic()
            inner_steps(model, optimizer, rank, range(1, 17))
            assert loop.shared_agrees()
            return loop.num_dropped, loop.outer_step, time.monotonic() - started

    (_, first_step, _), (dropped, second_step, seconds) = together(saboteurs, work)
    assert first_step == second_step == 4
    assert dropped == 1
    assert seconds < 15.0, "nobody waited for a deadline"


def test_a_round_that_is_settled_late_is_refused_in_the_view_that_came_meanwhile(pair):
    """Peer 0 has all votes of the round of step 4 when the view changes; peer 1 lost them, and makes it again there."""
    method = build_outer("streaming", inner_steps=4, num_fragments=2, delay=3, keep=0.5)
    meeting = threading.Barrier(2, action=lambda: install(pair, 1), timeout=10.0)
    saboteurs = [pair[0], Saboteur(pair[1], mishears=vote_key(4))]

    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, method, deadline_s=15.0) as loop:
            inner_steps(model, optimizer, rank, range(1, 5))
            voted = [flight.exchange._rows.exception(10.0) is None for flight in loop._engine._in_flight]
            meeting.wait()
            started = time.monotonic()
            inner_steps(model, optimizer, rank, range(5, 17))
            assert loop.shared_agrees()
            return voted, loop.num_dropped, time.monotonic() - started

    (voted, dropped, _), (heard, lost, seconds) = together(saboteurs, work)
    assert (voted, heard) == ([True, True], [True, False])
    assert (dropped, lost) == (0, 1)
    assert seconds < 15.0, "nobody waited for a deadline"


@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_those_who_live_go_on_in_a_view_without_the_dead(name):
    """With the very round that somebody did not live to see."""
    method, dead = METHODS[name], peer_id_of(2)
    expected = simulated(method, 3, 24, leaves={8: [dead]})  # with what it would have emitted there
    with communicators(3) as opened:
        addresses = [communicator.address for communicator in opened]

        def work(rank, communicator):
            def go_on_without(error):
                living = {n: a for n, a in enumerate(addresses) if peer_id_of(n) not in error.suspects}
                communicator.install(view_of(1, living))

            model = Model(seed=rank)
            optimizer = sgd(model)
            with OuterLoop(model, optimizer, communicator, method, deadline_s=10.0, on_abort=go_on_without) as loop:
                inner_steps(model, optimizer, rank, range(1, 8))
                if rank == 2:
                    communicator.close()
                    return None
                inner_steps(model, optimizer, rank, range(8, 25))
                assert loop.shared_agrees()
                assert communicator.view.world_size == 2
                return model, loop

        *survivors, gone = together(opened, work)
    assert gone is None
    assert_as_simulated(survivors, expected)


@pytest.mark.parametrize("name", ["diloco", "streaming", "data_parallel"])
def test_who_misses_a_round_that_others_absorbed_is_repaired_by_the_next(pair, name):
    method = METHODS[name]
    saboteurs = [pair[0], Saboteur(pair[1], mishears=vote_key(8))]

    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        digests = []
        with OuterLoop(model, optimizer, communicator, method, deadline_s=10.0) as loop:
            for step in range(1, 25):
                inner_steps(model, optimizer, rank, [step])
                digests.append((step, loop.outer_step, loop.shared_digest(), loop._values.digest()))
            return loop.num_dropped, digests, loop.outer_step

    (first_dropped, first, outer_step), (second_dropped, second, _) = together(saboteurs, work)
    assert (first_dropped, second_dropped) == (0, 1)
    assert outer_step == simulated(method, 2, 24).num_rounds
    differing = [a[0] for a, b in zip(first, second, strict=True) if a[1:3] != b[1:3]]
    assert differing
    assert 8 <= differing[0] <= 9
    assert differing[-1] < 13
    if name == "data_parallel":  # what it keeps equal is the parameters
        assert [a[3] == b[3] for a, b in zip(first, second, strict=True)].count(False) == 1


def test_who_is_repaired_goes_on_from_the_anchor_as_a_joiner_does(pair):
    """In streaming: the fragment whose round comes next blends, the other one begins at the anchor."""
    saboteurs = [pair[0], Saboteur(pair[1], mishears=vote_key(8))]

    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, STREAMING, deadline_s=10.0) as loop:
            inner_steps(model, optimizer, rank, range(1, 11))
            behind = loop.outer_step
            inner_steps(model, optimizer, rank, range(11, 12))
            anchor, own = loop.shared_parameters(), dict(model.named_parameters())
            return behind, loop.outer_step, {name for name in anchor if torch.equal(anchor[name], own[name])}

    (ahead, first_step, differs), (behind, second_step, equal) = together(saboteurs, work)
    assert (ahead, behind, first_step, second_step) == (4, 3, 5, 5)
    assert not differs
    assert equal == {f"layers.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")}


def test_a_parameter_that_only_some_peers_use_gets_the_mean_gradient_on_all(pair):
    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, DATA_PARALLEL, deadline_s=10.0) as loop:
            model.set_gradient(torch.ones(TABLE.numel))
            if rank == 1:
                model.layers[1].weight.grad = None
            optimizer.step()
            assert loop.parameters_agree()
            return model.layers[1].weight.grad.clone(), model.layers[0].weight.grad.clone()

    for unused, used in together(pair, work):
        assert torch.equal(unused, torch.full_like(unused, 0.5))
        assert torch.equal(used, torch.ones_like(used))


@dataclass(frozen=True)
class Stubborn(Outer):
    """Averages gradients, but uses its own where that fails."""

    def fragments(self, table):
        return (table.whole(GRAD),)

    def init(self, _fragment, value):
        return {}

    def plan(self, inner_step):
        gradient = FragmentKey(kind=GRAD, index=0)
        return (Round(fragment=gradient, op=Op.MEAN, inner_step=inner_step, keeps_value=True),)

    def emit(self, _round, value, _shared, _private, _work, *, out):
        return Emitted(payload=out.copy_(value))

    def step(self, _round, _result, shared, *, out=None):
        return shared

    def settle(self, outcome, *, out=None):
        if outcome.result is None:
            return Settled.untouched(outcome.private)
        return Settled.replaced(outcome.private, outcome.result.value)


def test_gradients_used_alone_do_not_part_the_peers_for_good(pair):
    saboteurs = [pair[0], Saboteur(pair[1], breaks=payload_key(3))]

    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = adamw(model)
        agreed = []
        with OuterLoop(model, optimizer, communicator, Stubborn(), deadline_s=10.0) as loop:
            for step in range(1, 8):
                inner_steps(model, optimizer, rank, [step])
                agreed.append(loop.parameters_agree())
            moments = torch.cat([optimizer.state[param]["exp_avg"].view(-1) for param in model.trained()])
            return agreed, loop.num_dropped, moments

    first, second = together(saboteurs, work)
    assert first[:2] == second[:2] == ([True, True, False, True, True, True, True], 1)
    assert torch.equal(first[2], second[2])


def test_numbers_that_are_not_finite_take_no_part(pair):
    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        method = build_outer("diloco", inner_steps=2, lr=1.0, momentum=0.0)
        with OuterLoop(model, optimizer, communicator, method, deadline_s=10.0) as loop:
            model.set_gradient(gradient(peer_id_of(rank), 1, model.flat()))
            optimizer.step()
            model.set_gradient(torch.full((TABLE.numel,), float("nan") if rank == 1 else 0.0))
            before = model.flat()
            optimizer.step()
            return before, model.flat(), loop.shared_agrees(), loop.num_dropped

    (healthy, first, agrees, dropped), (_, second, _, _) = together(pair, work)
    torch.testing.assert_close(first, healthy)
    assert torch.equal(first, second)
    assert agrees
    assert dropped == 0


def test_a_peer_that_stands_still_costs_the_others_no_more_than_the_deadline(pair):
    is_done, deadline_s = threading.Event(), 2.0  # in which both must also come at the beginning

    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, DILOCO, deadline_s=deadline_s) as loop:
            if rank == 1:
                assert is_done.wait(30.0)
                return 0.0, 0
            started = time.monotonic()
            inner_steps(model, optimizer, rank, range(1, 9))
            is_done.set()
            return time.monotonic() - started, loop.num_dropped

    (seconds, dropped), _ = together(pair, work)
    assert dropped == 2
    assert seconds < 2 * dropped * deadline_s, "each is waited for once, and the machine may be busy"


# ------------------------------------------------------------------------------------------ entering and leaving


@pytest.mark.parametrize(
    ("differ", "fault"),
    [
        (lambda rank: {"method": build_outer("diloco", inner_steps=4 + rank)}, "another method"),
        (lambda rank: {"codec": ("int8", "bf16")[rank]}, "another method, codec"),
        (lambda rank: {"broadcast_parameters": bool(rank)}, "another broadcast_parameters"),
        (lambda rank: {"broadcast_parameters": False}, "other parameters: seed"),
        (lambda rank: {"model": Model() if rank else torch.nn.Linear(3, 3)}, "build the same model"),
    ],
)
def test_members_that_differ_are_told_what_and_how_to_cure_it(pair, differ, fault):
    def work(rank, communicator):
        given = {"model": Model(seed=rank), "method": DILOCO, **differ(rank)}
        model, method = given.pop("model"), given.pop("method")
        with pytest.raises(ValueError, match=fault), OuterLoop(model, sgd(model), communicator, method, **given):
            pass

    together(pair, work)


def test_equal_parameters_need_no_broadcast(pair):
    def work(rank, communicator):
        model = Model(seed=5)
        with OuterLoop(model, sgd(model), communicator, DILOCO, broadcast_parameters=False) as loop:
            assert loop.parameters_agree()
            assert torch.equal(model.flat(), Model(seed=5).flat())

    together(pair, work)


def test_a_view_serves_one_loop(pair):
    run(pair, DILOCO, 4)

    def again(rank, communicator):
        model = Model()
        with pytest.raises(CollectiveError) as caught, OuterLoop(model, sgd(model), communicator, DILOCO):
            pass
        return caught.value.__notes__

    assert "none may have used it before" in together(pair, again)[0][0]
    install(pair, 1)
    run(pair, DILOCO, 4)


def test_without_a_view_that_holds_this_peer_nobody_enters(pair):
    model = Model()
    with BlockingCommunicator(2) as third:
        with pytest.raises(ValueError, match="no view is installed"), OuterLoop(model, sgd(model), third, DILOCO):
            pass
        third.install(pair[0].view)
        with pytest.raises(ValueError, match="no member"), OuterLoop(model, sgd(model), third, DILOCO):
            pass


def test_what_cannot_be_is_refused_at_once(pair):
    model = Model()
    with pytest.raises(ValueError, match="trains no parameter"):
        OuterLoop(model, sgd(Model()), pair[0], DILOCO)
    with pytest.raises(ValueError, match="batch_size"):
        OuterLoop(model, sgd(model), pair[0], DILOCO, batch_size=0.0)
    with pytest.raises(ValueError, match="no codec"), OuterLoop(model, sgd(model), pair[0], DILOCO, codec="int9"):
        pass
    with pytest.raises(ValueError, match="deadline_s"), OuterLoop(model, sgd(model), pair[0], DILOCO, deadline_s=0.0):
        pass


def test_a_state_that_the_inner_optimizer_does_not_keep_is_named(pair):
    def work(rank, communicator):
        model = Model()
        optimizer = torch.optim.SGD(model.trained(), lr=LR, momentum=0.9)
        method = build_outer("local_adam", inner_steps=2)
        loop = OuterLoop(model, optimizer, communicator, method, deadline_s=5.0)
        with loop, pytest.raises(ValueError, match=r"SGD keeps no 'exp_avg'; it keeps momentum_buffer"):
            inner_steps(model, optimizer, rank, range(1, 3))

    together(pair, work)


def test_a_closure_is_welcome_unless_gradients_are_exchanged():
    with communicators(1) as (alone,):
        model = Model()
        optimizer = sgd(model)
        model.set_gradient(torch.ones(TABLE.numel))
        with OuterLoop(model, optimizer, alone, DILOCO) as loop:
            assert optimizer.step(lambda: 3.0) == 3.0
            assert loop.inner_step == 1
        install([alone], 1)
        with OuterLoop(model, optimizer, alone, DATA_PARALLEL), pytest.raises(ValueError, match="bare"):
            optimizer.step(lambda: 3.0)


def test_after_the_context_the_optimizer_is_as_it_was(pair):
    before = threading.active_count()

    def work(rank, communicator):
        model = Model()
        optimizer = sgd(model)
        loop = OuterLoop(model, optimizer, communicator, DELAYED)

        def fails():
            with loop:
                inner_steps(model, optimizer, rank, range(1, 6))
                raise KeyError

        with pytest.raises(KeyError):
            fails()
        inner_steps(model, optimizer, rank, range(6, 9))
        assert loop.inner_step == 5
        with pytest.raises(RuntimeError, match="inside the with"):
            loop.parameters_agree()

    together(pair, work)
    assert threading.active_count() == before


# ------------------------------------------------------------------------------------------ what it tells, checkpoints


def test_the_shared_parameters_are_the_anchor_and_agree_where_the_peers_own_do_not(pair):
    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, DILOCO) as loop:
            inner_steps(model, optimizer, rank, range(1, 5))
            agreed = [loop.parameters_agree()]
            inner_steps(model, optimizer, rank, range(5, 7))
            agreed += [loop.parameters_agree(), loop.shared_agrees()]
            shared = loop.shared_parameters()
            model.load_state_dict(shared, strict=False)
            agreed += [loop.parameters_agree()]
            anchor = loop.state_dict()["shared"]["param/0"][ANCHOR]
            assert torch.equal(model.flat(), anchor)
            return agreed

    assert together(pair, work) == [[True, False, True, True]] * 2


@pytest.mark.parametrize("name", ["diloco", "delayed", "streaming", "sparseloco", "data_parallel"])
def test_a_run_from_a_checkpoint_is_the_run_that_was_not_interrupted(name, tmp_path):
    """Saved in the middle of rounds under way: after 9 of 18 steps."""
    method = METHODS[name]
    expected = simulated(method, 2, 18, wire=CodecWire())

    def begin(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        with OuterLoop(model, optimizer, communicator, method, deadline_s=10.0) as loop:
            inner_steps(model, optimizer, rank, range(1, 10))
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loop": loop.state_dict()}
            torch.save(saved, tmp_path / f"{rank}.pt")
            with pytest.raises(RuntimeError, match="before the with"):
                loop.load_state_dict(saved["loop"])

    def go_on(rank, communicator):
        model = Model(seed=7 + rank)
        optimizer = sgd(model)
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loop = OuterLoop(model, optimizer, communicator, method, deadline_s=10.0)
        loop.load_state_dict(saved["loop"])
        with loop:
            inner_steps(model, optimizer, rank, range(10, 19))
            assert loop.shared_agrees()
        return model, loop

    with communicators(2) as opened:
        together(opened, begin)
    with communicators(2) as opened:
        found = together(opened, go_on)
    assert_as_simulated(found, expected)


def test_a_loop_that_was_left_goes_on_where_it_was_in_another_view(pair):
    install_next = threading.Barrier(2, action=lambda: install(pair, 1), timeout=10.0)

    def work(rank, communicator):
        model = Model(seed=rank)
        optimizer = sgd(model)
        loop = OuterLoop(model, optimizer, communicator, DELAYED, deadline_s=10.0)
        with loop:
            inner_steps(model, optimizer, rank, range(1, 10))
        install_next.wait()
        with loop:
            inner_steps(model, optimizer, rank, range(10, 19))
        return model, loop

    assert_as_simulated(together(pair, work), simulated(DELAYED, 2, 18))


def test_checkpoints_that_do_not_fit_are_refused(pair):
    ((_, loop), _) = run(pair, DILOCO, 4)
    saved = loop.state_dict()
    model = Model()
    with pytest.raises(ValueError, match="the checkpoint's private state"):
        OuterLoop(model, sgd(model), pair[0], DELAYED).load_state_dict(saved)
    small = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="the checkpoint's shared state"):
        OuterLoop(small, sgd(small), pair[0], DILOCO).load_state_dict(saved)
    install(pair, 1)

    def work(rank, communicator):
        model = Model()
        loop = OuterLoop(model, sgd(model), communicator, DILOCO)
        if rank == 1:
            loop.load_state_dict(saved)
        with pytest.raises(ValueError, match="a checkpoint or none"), loop:
            pass

    together(pair, work)
    install(pair, 2)

    def other_moment(rank, communicator):
        model = Model()
        loop = OuterLoop(model, sgd(model), communicator, DILOCO)
        loop.load_state_dict(saved | {"history": [rank + 1, 5]})
        with pytest.raises(ValueError, match="a checkpoint of another moment"), loop:
            pass

    together(pair, other_moment)
