# SPDX-License-Identifier: Apache-2.0
"""The training loop of one worker that is alone; several workers are in tests/multiprocess/workers."""

from collections.abc import Iterator
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.optim.fragments import FragmentTable
from isthmus.optim.inner import InnerType, build_inner_optimizer, state_names
from isthmus.trainer.config.job import OptimizerJob, ScheduleJob, TrainingJob
from isthmus.trainer.data.samples import SampleSource, validation_batches
from isthmus.trainer.errors import ConfigError, TrainingFault
from isthmus.trainer.model.decoder import Decoder, ModelConfig
from isthmus.trainer.model.evaluate import evaluate
from isthmus.trainer.workers import judge
from isthmus.trainer.workers.inner_loop import InnerLoop
from isthmus.trainer.workers.loader import shares

MODEL = ModelConfig(dim=8, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=12, max_seq_len=8)
TABLE = FragmentTable.from_named_shapes(MODEL.named_shapes())
TEXT = np.frombuffer(b"Peers come and go; the run goes on. " * 40, dtype=np.uint8)
TRAIN, VALIDATION = TEXT[:1000], TEXT[1000:]
JOB = TrainingJob(
    model=MODEL,
    seq_len=8,
    data_seed=3,
    optimizer=OptimizerJob(lr=1e-2),
    schedule=ScheduleJob(type="cosine", total_steps=20, warmup_steps=3),
    micro_batch=4,
    eval_batch=3,
    num_eval_batches=4,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _loop(mesh: DeviceMesh, job: TrainingJob = JOB, weights: Tensor | None = None) -> InnerLoop:
    loop = InnerLoop(job, mesh=mesh, train=TRAIN, validation=VALIDATION)
    loop.load(MODEL.initial_parameters(0) if weights is None else weights)
    return loop


def _stored(loop: InnerLoop, kind: str = "param") -> Tensor:
    mailbox = torch.full((TABLE.numel,), torch.nan)
    loop.store(mailbox, kind=kind)
    return mailbox


def _plain_decoder(weights: Tensor) -> Decoder:
    decoder = Decoder(MODEL)
    decoder.load_state_dict({spec.name: TABLE.view(weights, spec.name).clone() for spec in TABLE.specs})
    return decoder


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_samples", [1, 2, 6, 7])
def test_shares_cover_a_batch_once_and_differ_by_one_at_most(num_samples: int, num_workers: int) -> None:
    parts = shares(num_samples, num_workers)
    assert [position for part in parts for position in part] == list(range(num_samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts[0]) == max(map(len, parts))


@pytest.mark.parametrize("type_", get_args(InnerType))
def test_steps_equal_plain_pytorch(mesh: DeviceMesh, type_: InnerType) -> None:
    optimizer_job = OptimizerJob(type=type_, lr=1e-2)
    loop = _loop(mesh, msgspec.structs.replace(JOB, micro_batch=100, optimizer=optimizer_job))
    decoder = _plain_decoder(MODEL.initial_parameters(0))
    optimizer = build_inner_optimizer(decoder, type=type_, lr=1e-2)
    samples = SampleSource(TRAIN, 8, 3)
    for inner_step in range(1, 5):
        indices = range(6 * inner_step, 6 * inner_step + 6)
        result = loop.step(indices, inner_step)
        inputs, targets = samples.batch(indices)
        loss = decoder(inputs, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = result.lr
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert result.num_tokens == 48
    expected = torch.cat([p.detach().flatten() for p in decoder.parameters()])
    torch.testing.assert_close(_stored(loop), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5])
def test_the_size_of_a_micro_batch_does_not_change_the_step(mesh: DeviceMesh, micro_batch: int) -> None:
    sgd = OptimizerJob(type="sgd", lr=1.0)
    whole = _loop(mesh, msgspec.structs.replace(JOB, micro_batch=5, optimizer=sgd))
    parts = _loop(mesh, msgspec.structs.replace(JOB, micro_batch=micro_batch, optimizer=sgd))
    one, other = whole.step(range(5), 9), parts.step(range(5), 9)
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    torch.testing.assert_close(_stored(parts), _stored(whole), rtol=1e-5, atol=1e-7)


def test_the_learning_rate_follows_the_global_inner_step(mesh: DeviceMesh) -> None:
    loop = _loop(mesh)
    assert [loop.step([0], inner_step).lr for inner_step in range(1, 5)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert loop.step([0], 21).lr == pytest.approx(0.001)


def test_who_comes_in_the_middle_of_a_run_warms_up_as_the_run_did(mesh: DeviceMesh) -> None:
    settled, fresh = _loop(mesh), _loop(mesh)
    for inner_step in range(1, 8):
        settled.step([0], inner_step)
    rates = [(fresh.step([0], inner_step).lr, settled.step([0], inner_step).lr) for inner_step in range(8, 14)]
    assert [own for own, _ in rates[:3]] == pytest.approx([0.0025, 0.005, 0.0075])
    assert all(own == usual for own, usual in rates[3:])


def test_who_begins_with_anothers_moments_goes_on_as_the_other_would(mesh: DeviceMesh) -> None:
    donor = _loop(mesh)
    for inner_step in range(1, 8):
        donor.step(range(inner_step, inner_step + 3), inner_step)
    newcomer = _loop(mesh, weights=_stored(donor))
    for name in state_names("adamw"):
        mailbox = _stored(donor, name)
        assert mailbox.count_nonzero() > 0
        newcomer.load(mailbox, kind=name, own_steps=donor.own_steps)
    assert newcomer.own_steps == 7
    assert newcomer.step(range(30, 33), 8).lr == donor.step(range(30, 33), 8).lr, "it need not warm up"
    assert torch.equal(_stored(newcomer), _stored(donor))
    fresh = _loop(mesh, weights=_stored(donor))
    fresh.step(range(33, 36), 9)
    donor.step(range(33, 36), 9)
    assert not torch.equal(_stored(fresh), _stored(donor))


MANY_MOMENTS = OptimizerJob(type="adopt", lr=1e-2, betas=(0.9, 0.99, 0.999), omegas=(0.3, 0.6))
OPTIMIZERS = [*(OptimizerJob(type=type_, lr=1e-2) for type_ in get_args(InnerType)), MANY_MOMENTS]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda job: f"{job.type} {job.betas}")
def test_all_that_an_optimizer_keeps_can_be_taken_out_and_put_into_another(
    mesh: DeviceMesh, optimizer: OptimizerJob
) -> None:
    job = msgspec.structs.replace(JOB, optimizer=optimizer)
    donor = _loop(mesh, job)
    for inner_step in range(1, 5):
        donor.step(range(inner_step, inner_step + 3), inner_step)
    newcomer = _loop(mesh, job, weights=_stored(donor))
    kinds = state_names(optimizer.type, optimizer.betas)
    for kind in kinds:
        state = _stored(donor, kind)
        assert state.count_nonzero() > 0
        newcomer.load(state, kind=kind, own_steps=donor.own_steps)
        assert torch.equal(_stored(newcomer, kind), state), kind
    for inner_step in range(5, 7):
        for loop in (donor, newcomer):
            loop.step(range(30 + inner_step, 33 + inner_step), inner_step)
        # Without the count of steps, which SGD does not keep, a newcomer warms up, and would not be equal.
        if kinds:
            assert all(torch.equal(_stored(newcomer, kind), _stored(donor, kind)) for kind in ("param", *kinds))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda job: f"{job.type} {job.betas}")
def test_what_there_is_not_yet_is_zero_and_taking_it_out_and_in_changes_no_step(
    mesh: DeviceMesh, optimizer: OptimizerJob
) -> None:
    job = msgspec.structs.replace(JOB, optimizer=optimizer)
    touched, plain = _loop(mesh, job), _loop(mesh, job)
    for kind in (*state_names(optimizer.type, optimizer.betas), "grad"):
        state = _stored(touched, kind)
        assert torch.equal(state, torch.zeros(TABLE.numel))
        touched.load(state, kind=kind)
    for inner_step in range(1, 3):
        assert touched.step(range(4), inner_step).lr == plain.step(range(4), inner_step).lr
    assert torch.equal(_stored(touched), _stored(plain))


def test_a_part_of_a_state_is_blended_alone_and_the_steps_count_on(mesh: DeviceMesh) -> None:
    loop = _loop(mesh)
    loop.step(range(4), 1)
    before, part = _stored(loop, "exp_avg"), range(100, 300)
    before[150] = torch.nan
    loop.load(before, kind="exp_avg")
    assert loop.load(torch.ones(TABLE.numel), (part,), kind="exp_avg", keep=0.25) == 1
    after, expected = _stored(loop, "exp_avg"), before.clone()
    expected[100:300] = before[100:300] * 0.25 + 0.75
    expected[150] = 1.0
    assert torch.equal(after, expected)
    mailbox = torch.full((TABLE.numel,), 7.0)
    loop.store(mailbox, (part,), kind="exp_avg")
    assert torch.equal(mailbox[part], after[part])
    assert (mailbox[:100] == 7.0).all()
    assert (mailbox[300:] == 7.0).all()
    assert loop.own_steps == 1


def test_muon_keeps_its_own_for_hidden_matrices_and_adamws_for_the_rest(mesh: DeviceMesh) -> None:
    loop = _loop(mesh, msgspec.structs.replace(JOB, optimizer=OptimizerJob(type="muon", lr=1e-2)))
    loop.step(range(4), 1)
    momentum, second = _stored(loop, "momentum_buffer"), _stored(loop, "exp_avg_sq")
    for spec in TABLE.specs:
        is_hidden = len(spec.shape) == 2 and spec.name != "embedding.weight"
        assert TABLE.view(momentum, spec.name).any() == is_hidden, spec.name
        assert TABLE.view(second, spec.name).any() != is_hidden, spec.name
    loop.load(torch.ones(TABLE.numel), kind="momentum_buffer")
    assert torch.equal(_stored(loop, "momentum_buffer"), (momentum != 0.0).float())


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        (
            "sgd",
            "exp_avg",
            "inner.type = 'sgd' does not keep; take another outer, or inner.type adamw or adopt or muon",
        ),
        ("adamw", "velocity", r"'adamw' does not keep \(it keeps exp_avg, exp_avg_sq\); take another outer$"),
        ("adamw", "exp_avg_1", "take another outer, or inner.type adopt$"),
        ("adopt", "exp_avg_1", r"\(it keeps exp_avg, exp_avg_sq\); give inner.betas a rate for each first moment"),
    ],
)
def test_what_the_inner_optimizer_does_not_keep_is_the_operators_fault(
    mesh: DeviceMesh, optimizer: InnerType, kind: str, message: str
) -> None:
    loop = _loop(mesh, msgspec.structs.replace(JOB, optimizer=OptimizerJob(type=optimizer, lr=1e-2)))
    for act in (loop.load, loop.store):
        with pytest.raises(ConfigError, match=message) as caught:
            act(torch.zeros(TABLE.numel), kind=kind)
        assert caught.value.key == "outer"
    OptimizerJob(type=optimizer, lr=1e-2).require_kinds(("param", "grad", *state_names(optimizer)))


# ----------------------------------------------------------------------------------------- rounds of the gradient


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda job: f"{job.type} {job.betas}")
def test_a_step_is_a_backward_pass_and_an_update_bit_for_bit(mesh: DeviceMesh, optimizer: OptimizerJob) -> None:
    job = msgspec.structs.replace(JOB, optimizer=optimizer)
    whole, halves = _loop(mesh, job), _loop(mesh, job)
    for inner_step in range(1, 4):
        done = whole.step(range(5), inner_step)
        halves.backward(range(5), inner_step)
        gradient = _stored(halves, "grad")
        assert gradient.count_nonzero() > 0
        if inner_step > 1:
            halves.load(gradient, kind="grad")
        again = halves.update(inner_step)
        assert (again.loss, again.num_tokens, again.grad_norm, again.lr) == (
            done.loss,
            done.num_tokens,
            done.grad_norm,
            done.lr,
        )
        assert torch.equal(_stored(halves), _stored(whole))


def test_a_gradient_is_clipped_before_others_see_it_and_theirs_is_not_clipped_again(mesh: DeviceMesh) -> None:
    sgd = OptimizerJob(type="sgd", lr=1.0, weight_decay=0.0)
    schedule = ScheduleJob(total_steps=9)
    loop = _loop(mesh, msgspec.structs.replace(JOB, optimizer=sgd, schedule=schedule, grad_clip=1e-2))
    loop.backward(range(4), 1)
    assert torch.linalg.vector_norm(_stored(loop, "grad")).item() == pytest.approx(1e-2, rel=1e-3)
    before, theirs = _stored(loop), torch.full((TABLE.numel,), 0.5)
    loop.load(theirs, kind="grad")
    assert loop.update(1).grad_norm > 0.1, "that of its own, before it was clipped"
    assert torch.equal(_stored(loop), before - 0.5), "plain SGD follows it as it is"


def test_a_gradient_that_is_not_finite_reaches_no_parameter_whoever_made_it(mesh: DeviceMesh) -> None:
    loop = _loop(mesh)
    loop.backward(range(4), 3)
    before, theirs = _stored(loop), torch.zeros(TABLE.numel)
    theirs[5] = torch.inf
    loop.load(theirs, kind="grad")
    with pytest.raises(TrainingFault, match="inner step 3: norm of the peers' common gradient inf"):
        loop.update(3)
    assert torch.equal(_stored(loop), before)
    assert loop.step(range(4), 4).loss < 6.0


def test_a_gradient_is_used_once_and_for_its_own_step(mesh: DeviceMesh) -> None:
    loop = _loop(mesh)
    with pytest.raises(RuntimeError, match="no gradient for inner step 1"):
        loop.update(1)
    loop.backward(range(4), 1)
    loop.update(1)
    with pytest.raises(RuntimeError, match="no gradient for inner step 1"):
        loop.update(1)
    loop.backward(range(4), 2)
    with pytest.raises(RuntimeError, match="no gradient for inner step 3"):
        loop.update(3)


def test_a_gradient_that_was_given_up_leaves_no_trace(mesh: DeviceMesh) -> None:
    given_up, plain = _loop(mesh), _loop(mesh)
    given_up.backward(range(8, 12), 1)
    given_up.load(torch.ones(TABLE.numel), kind="grad")
    for loop in (given_up, plain):
        loop.step(range(4), 1)
    assert torch.equal(_stored(given_up), _stored(plain))


def test_the_gradient_can_be_read_where_it_is_computed_in_bf16(mesh: DeviceMesh) -> None:
    loop = _loop(mesh, msgspec.structs.replace(JOB, precision="bf16"))
    loop.backward(range(4), 1)
    assert _stored(loop, "grad").count_nonzero() > 0


def test_the_gradient_is_clipped_and_its_norm_told_unclipped(mesh: DeviceMesh) -> None:
    job = msgspec.structs.replace(
        JOB,
        optimizer=OptimizerJob(type="sgd", lr=1.0, weight_decay=0.0),
        schedule=ScheduleJob(total_steps=1),
        grad_clip=1e-2,
    )
    loop = _loop(mesh, job)
    before = _stored(loop)
    result = loop.step(range(4), 1)
    assert result.grad_norm > 0.1
    assert torch.linalg.vector_norm(_stored(loop) - before).item() == pytest.approx(1e-2, rel=1e-3)


def test_a_loss_that_is_not_finite_is_a_fault_and_moves_nothing(mesh: DeviceMesh) -> None:
    weights = MODEL.initial_parameters(0)
    weights[5] = torch.inf
    loop = _loop(mesh, weights=weights)
    with pytest.raises(TrainingFault, match="inner step 3: loss nan"):
        loop.step(range(4), 3)
    assert torch.equal(_stored(loop), weights)
    loop.load(MODEL.initial_parameters(0))
    assert loop.step(range(4), 3).loss < 6.0


def test_an_evaluation_equals_that_of_an_unsharded_decoder(mesh: DeviceMesh) -> None:
    expected = evaluate(_plain_decoder(MODEL.initial_parameters(0)), validation_batches(VALIDATION, 8, 3, 4))
    loss, num_tokens = _loop(mesh).judge.evaluate()
    assert loss == pytest.approx(expected, rel=1e-6)
    assert num_tokens == 96


def test_a_load_after_an_evaluation_is_seen_by_the_next_one(mesh: DeviceMesh) -> None:
    loop = _loop(mesh)
    first = loop.judge.evaluate()
    loop.load(torch.zeros(TABLE.numel))
    assert loop.judge.evaluate()[0] == pytest.approx(np.log(256.0), rel=1e-6)
    loop.load(MODEL.initial_parameters(0))
    assert loop.judge.evaluate() == first


@pytest.mark.parametrize("is_given", [False, True])
def test_a_copy_is_judged_in_parts_while_training_goes_on_and_takes_nothing_from_it(
    mesh: DeviceMesh, is_given: bool
) -> None:
    weights = MODEL.initial_parameters(0)
    expected, num_tokens = _loop(mesh).judge.evaluate()
    judging, plain = _loop(mesh), _loop(mesh)
    if is_given:  # the workers have others by then
        for loop in (judging, plain):
            loop.load(MODEL.initial_parameters(1))
    assert judging.judge.keep(weights if is_given else None)
    parts = []
    for number in range(judging.judge.num_batches):
        assert judging.step(range(4), number + 1).loss == plain.step(range(4), number + 1).loss
        judging.backward(range(4, 8), number + 1)  # a gradient that waits is not lost either
        plain.backward(range(4, 8), number + 1)
        parts.append(judging.judge.evaluate(range(number, number + 1), is_kept=True))
        judging.update(number + 1)
        plain.update(number + 1)
    assert torch.equal(_stored(judging), _stored(plain))
    assert not torch.equal(_stored(judging), weights)
    assert sum(tokens for _, tokens in parts) == num_tokens
    assert sum(loss * tokens for loss, tokens in parts) / num_tokens == pytest.approx(expected, rel=1e-9)
    with pytest.raises(RuntimeError, match="kept"):  # with its last batch it was let go of
        judging.judge.evaluate(range(1), is_kept=True)


def test_where_there_is_no_room_nothing_is_kept(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = _loop(mesh)
    assert loop.judge.keep(None)
    monkeypatch.setattr(judge, "spare_nbytes", lambda device: 4 * TABLE.numel - 1)
    assert not loop.judge.keep(None)
    with pytest.raises(RuntimeError, match="kept"):
        loop.judge.evaluate(range(1), is_kept=True)


def test_a_part_can_be_blended_and_stored_alone(mesh: DeviceMesh) -> None:
    loop = _loop(mesh)
    before = _stored(loop)
    part = range(100, 300)
    loop.load(torch.ones(TABLE.numel), (part,), keep=0.25)
    after = _stored(loop)
    assert torch.equal(after[100:300], before[100:300] * 0.25 + torch.tensor(0.75))
    assert torch.equal(after[300:], before[300:])
    mailbox = torch.zeros(TABLE.numel)
    loop.store(mailbox, (part,))
    assert torch.equal(mailbox[part], after[part])
    assert not mailbox[300:].any()


def test_bf16_computes_in_bf16_and_keeps_fp32(mesh: DeviceMesh) -> None:
    loop = _loop(mesh, msgspec.structs.replace(JOB, precision="bf16"))
    assert torch.equal(_stored(loop), MODEL.initial_parameters(0))
    exact = _loop(mesh).step(range(4), 1).loss
    rounded = loop.step(range(4), 1).loss
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)


def test_nothing_is_trained_before_weights_have_come(mesh: DeviceMesh) -> None:
    loop = InnerLoop(JOB, mesh=mesh, train=TRAIN, validation=VALIDATION)
    mailbox = MODEL.initial_parameters(0)
    for act in (
        lambda: loop.judge,
        lambda: loop.step([0], 1),
        lambda: loop.backward([0], 1),
        lambda: loop.store(mailbox),
    ):
        with pytest.raises(RuntimeError, match="no values before the first load"):
            act()
    for partial in ({"keep": 0.5}, {"ranges": (range(3),)}):
        with pytest.raises(RuntimeError, match="the first load must replace all parameters"):
            loop.load(mailbox, **partial)


def test_a_step_without_samples_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="a step needs samples"):
        _loop(mesh).step([], 1)
