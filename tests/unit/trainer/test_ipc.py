# SPDX-License-Identifier: Apache-2.0
"""Messages between daemon and workers."""

import subprocess
import sys

import msgspec
import pytest

from isthmus.trainer.workers import ipc

REQUESTS = [
    ipc.Load(serial=1, spans=((0, 4), (9, 12)), keep=0.5),
    ipc.Load(serial=2),
    ipc.Load(serial=2, kind="exp_avg_sq", own_steps=7),
    ipc.Step(serial=3, inner_step=7, position=7.5, indices=(5, 6, 2**40)),
    ipc.Backward(serial=3, inner_step=7, position=7.5, indices=(5,)),
    ipc.Update(serial=3, inner_step=7, position=7.5),
    ipc.Store(serial=4, spans=((3, 3),), kind="grad"),
    ipc.Keep(serial=5, place=2),
    ipc.Evaluate(serial=5),
    ipc.Evaluate(serial=5, batches=(2, 4), is_kept=True),
    ipc.Stop(serial=6),
]
REPLIES = [
    ipc.Ready(serial=0, local_rank=1, device="cpu", seconds=1.5),
    ipc.Loaded(serial=1, num_broken=2**40),
    ipc.BackwardDone(serial=2, loss=2.5, num_tokens=64),
    ipc.StepDone(serial=3, inner_step=7, loss=2.5, num_tokens=96, grad_norm=0.1, lr=1e-3, seconds=0.2),
    ipc.Stored(serial=4),
    ipc.Kept(serial=5, has_room=True, num_batches=8),
    ipc.Evaluated(serial=5, loss=2.25, num_tokens=64),
    ipc.WorkerFailed(serial=3, kind="training_fault", problem="loss nan", cure="lower inner.lr"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_reads_back_as_itself(request_: ipc.Request) -> None:
    assert ipc.decode_request(ipc.encode(request_)) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda message: type(message).__name__)
def test_a_reply_reads_back_as_itself(reply: ipc.Reply) -> None:
    assert ipc.decode_reply(ipc.encode(reply)) == reply


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "Load"},
        {"type": "Load", "serial": -1},
        {"type": "Load", "serial": 1, "keep": 1.5},
        {"type": "Load", "serial": 1, "keep": float("nan")},
        {"type": "Load", "serial": 1, "spans": [[0, -1]]},
        {"type": "Load", "serial": 1, "spans": [[0, 1, 2]]},
        {"type": "Load", "serial": 1, "extra": 1},
        {"type": "Load", "serial": 1, "kind": ""},
        {"type": "Load", "serial": 1, "kind": "m" * 65},
        {"type": "Load", "serial": 1, "own_steps": -1},
        {"type": "Store", "serial": 1, "kind": None},
        {"type": "Update", "serial": 1, "inner_step": 0, "position": 0.5},
        {"type": "Backward", "serial": 1, "inner_step": 1, "position": 0.5, "indices": []},
        {"type": "Step", "serial": 1, "inner_step": 0, "position": 0.5, "indices": [1]},
        {"type": "Step", "serial": 1, "inner_step": 1, "position": 0.5, "indices": []},
        {"type": "Step", "serial": 1, "inner_step": 1, "position": 0.5, "indices": [-1]},
        {"type": "Step", "serial": 1, "inner_step": 1, "position": -0.5, "indices": [1]},
        {"type": "Step", "serial": 1, "inner_step": 1, "indices": [1]},
        {
            "type": "Step",
            "serial": 1,
            "inner_step": 1,
            "position": 0.5,
            "indices": list(range(ipc.MAX_STEP_SAMPLES + 1)),
        },
        {"type": "Stored", "serial": 1},
        {"type": "Reboot", "serial": 1},
        {"serial": 1},
        [1, 2],
    ],
    ids=repr,
)
def test_what_is_no_request_is_refused(fields: object) -> None:
    with pytest.raises(ipc.MalformedMessage):
        ipc.decode_request(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("wire", [b"", b"\xc1", ipc.encode(REQUESTS[0])[:-1], ipc.encode(REQUESTS[0]) + b"\x00"])
def test_broken_bytes_are_refused(wire: bytes) -> None:
    with pytest.raises(ipc.MalformedMessage):
        ipc.decode_request(wire)


def test_messages_over_the_limit_are_refused_on_both_ends() -> None:
    indices = tuple(2**62 + number for number in range(ipc.MAX_MESSAGE_NBYTES // 9 + 1))
    with pytest.raises(ValueError, match="over the limit"):
        ipc.encode(ipc.Step(serial=1, inner_step=1, position=1.5, indices=indices))
    with pytest.raises(ipc.MalformedMessage):
        ipc.decode_reply(b"\x00" * (ipc.MAX_MESSAGE_NBYTES + 1))


def test_the_largest_step_fits() -> None:
    indices = tuple(2**62 + number for number in range(ipc.MAX_STEP_SAMPLES))
    step = ipc.Step(serial=1, inner_step=1, position=0.5, indices=indices)
    assert ipc.decode_request(ipc.encode(step)) == step


def test_importing_the_messages_does_not_import_torch() -> None:
    code = "import sys, isthmus.trainer.workers.ipc; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_importing_the_pool_does_not_import_what_only_workers_need() -> None:
    code = (
        "import sys, isthmus.trainer.workers.make_pool; "
        "sys.exit(any(m.startswith('torch.distributed.fsdp') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
