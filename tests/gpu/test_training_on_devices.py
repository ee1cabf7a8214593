# SPDX-License-Identifier: Apache-2.0
"""A worker's training on every device: values to the mailbox and back, and steps as plain PyTorch makes them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytest.importorskip("msgspec")
pytest.importorskip("blake3")

import msgspec

from isthmus.optim.fragments import FragmentTable
from isthmus.optim.inner import build_inner_optimizer
from isthmus.trainer.config.job import OptimizerJob, ScheduleJob, TrainingJob
from isthmus.trainer.data.samples import SampleSource
from isthmus.trainer.errors import TrainingFault
from isthmus.trainer.model.decoder import Decoder, ModelConfig
from isthmus.trainer.workers.inner_loop import InnerLoop
from isthmus.trainer.workers.shared_buffer import SharedBuffer

MODEL = ModelConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=96, max_seq_len=64)
TABLE = FragmentTable.from_named_shapes(MODEL.named_shapes())
TEXT = np.frombuffer(b"Peers come and go; the run goes on. " * 400, dtype=np.uint8)
TRAIN, HELD_OUT = TEXT[:12_000], TEXT[12_000:]
SEQ_LEN, BATCH = 64, 6
JOB = TrainingJob(
    model=MODEL,
    seq_len=SEQ_LEN,
    data_seed=3,
    optimizer=OptimizerJob(lr=1e-3),
    schedule=ScheduleJob(total_steps=100),
    micro_batch=4,
    precision="fp32",
    has_tf32=False,
)


@pytest.fixture
def mesh(device: torch.device, tmp_path: Path) -> Iterator[DeviceMesh]:
    """A peer of one worker: NCCL on a CUDA device, gloo on the CPU."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,
        device_id=device if device.type == "cuda" else None,
    )
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


@pytest.fixture
def mailbox(device: torch.device) -> Iterator[Tensor]:
    """As a daemon and its worker share it: locked in memory where the worker has a CUDA device."""
    buffer = SharedBuffer.create(TABLE.numel)
    if device.type == "cuda":
        buffer.pin()
    yield buffer.tensor
    buffer.close()


def begun(mesh: DeviceMesh, mailbox: Tensor, **settings: object) -> InnerLoop:
    loop = InnerLoop(msgspec.structs.replace(JOB, **settings), mesh=mesh, train=TRAIN, validation=HELD_OUT)
    mailbox.copy_(MODEL.initial_parameters(0))
    loop.load(mailbox)
    return loop


def stored(loop: InnerLoop, mailbox: Tensor, kind: str = "param") -> Tensor:
    mailbox.fill_(-7.0)
    loop.store(mailbox, kind=kind)
    return mailbox.clone()


def plain_losses(num_steps: int) -> list[float]:
    """Of a plain loop on the CPU in fp32."""
    decoder, weights = Decoder(MODEL), MODEL.initial_parameters(0)
    decoder.load_state_dict({spec.name: TABLE.view(weights, spec.name).clone() for spec in TABLE.specs})
    optimizer = build_inner_optimizer(decoder, type="adamw", lr=1e-3)
    samples, losses = SampleSource(TRAIN, SEQ_LEN, 3), []
    for number in range(num_steps):
        inputs, targets = samples.batch(range(BATCH * number, BATCH * (number + 1)))
        loss = decoder(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of(loop: InnerLoop, num_steps: int) -> list[float]:
    """Two steps are begun before the numbers of the first are read, as a worker does it."""
    batches = [range(BATCH * number, BATCH * (number + 1)) for number in range(num_steps)]
    steps = [loop.begin_step(batch, number) for number, batch in enumerate(batches, 1)]
    return [step.result().loss for step in steps]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_and_moments_go_to_the_mailbox_and_back_bit_by_bit(
    mesh: DeviceMesh, mailbox: Tensor, precision: str
) -> None:
    donor = begun(mesh, mailbox, precision=precision)
    assert torch.equal(stored(donor, mailbox), MODEL.initial_parameters(0))
    losses_of(donor, 2)
    values = {kind: stored(donor, mailbox, kind) for kind in ("param", "exp_avg", "exp_avg_sq")}
    newcomer = begun(mesh, mailbox, precision=precision)
    for kind, value in values.items():
        mailbox.copy_(value)
        newcomer.load(mailbox, kind=kind, own_steps=donor.own_steps)
    for kind, value in values.items():
        assert value.count_nonzero() > 0
        assert torch.equal(stored(newcomer, mailbox, kind), value)
    third = range(TABLE.numel // 3, TABLE.numel // 2)
    mailbox.zero_()
    donor.store(mailbox, [third])
    assert torch.equal(mailbox[third.start : third.stop], values["param"][third.start : third.stop])
    assert not mailbox[: third.start].any()
    assert not mailbox[third.stop :].any()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-4), ("bf16", 2e-2)])
def test_steps_are_those_of_plain_pytorch_on_the_cpu(
    mesh: DeviceMesh, mailbox: Tensor, precision: str, tolerance: float
) -> None:
    losses = losses_of(begun(mesh, mailbox, precision=precision), 8)
    assert losses == pytest.approx(plain_losses(8), rel=tolerance)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("kept", ["selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_that_are_computed_again_change_no_loss(
    mesh: DeviceMesh, mailbox: Tensor, kept: str, precision: str
) -> None:
    usual = losses_of(begun(mesh, mailbox, precision=precision), 4)
    again = losses_of(begun(mesh, mailbox, precision=precision, activation_checkpointing=kept), 4)
    assert again == pytest.approx(usual, rel=1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.timeout(300)
def test_compiled_blocks_change_no_loss(mesh: DeviceMesh, mailbox: Tensor) -> None:
    pytest.importorskip("triton")
    usual = losses_of(begun(mesh, mailbox), 4)
    assert losses_of(begun(mesh, mailbox, is_compiled=True), 4) == pytest.approx(usual, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_whose_loss_is_no_number_leaves_the_parameters_alone(
    mesh: DeviceMesh, mailbox: Tensor, precision: str
) -> None:
    loop = begun(mesh, mailbox, precision=precision)
    losses_of(loop, 1)
    mailbox.copy_(before := stored(loop, mailbox))
    mailbox[7] = float("nan")
    loop.load(mailbox)
    step = loop.begin_step(range(BATCH), 2)
    with pytest.raises(TrainingFault, match="inner step 2"):
        step.result()
    after = stored(loop, mailbox)
    assert after[7].isnan()
    after[7] = before[7]
    assert torch.equal(after, before)


def test_a_worker_judges_the_held_out_text_as_the_cpu_does(mesh: DeviceMesh, mailbox: Tensor) -> None:
    loop = begun(mesh, mailbox)
    losses_of(loop, 4)
    decoder, weights = Decoder(MODEL), stored(loop, mailbox)
    decoder.load_state_dict({spec.name: TABLE.view(weights, spec.name).clone() for spec in TABLE.specs})
    samples = [HELD_OUT[at : at + SEQ_LEN + 1] for at in range(0, len(HELD_OUT) - SEQ_LEN, SEQ_LEN)]
    tokens = torch.from_numpy(np.stack([sample for sample in samples if len(sample) == SEQ_LEN + 1]).astype(np.int64))
    with torch.no_grad():
        expected = decoder(tokens[:, :-1], tokens[:, 1:]).item()
    assert loop.judge.evaluate()[0] == pytest.approx(expected, rel=1e-3)
