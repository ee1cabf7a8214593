# SPDX-License-Identifier: Apache-2.0
"""What members compute for themselves from the same bytes, as digests: an unlike machine has to find the same.

ATEN_CPU_CAPABILITY chooses torch's kernels before its first operation, so each machine is a process of its own. There
is one for all that is to be compared, because to import torch takes longer than all of it. Inputs come from whole
numbers, for torch.randn differs between CPUs.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import torch

from isthmus.collective.codec import codec_named, codec_names
from isthmus.optim import FragmentTable, Op, Outcome, Result, RunFacts, build_outer, outer_types
from isthmus.optim.lowrank import decompress, first_q, orthonormalise, warm_start
from isthmus.optim.nesterov import TILE_NUMEL, nesterov_step
from isthmus.optim.outer import digest_of
from isthmus.optim.robust import clip_around, guarded_mean

CAPABILITIES = ["default", "avx2", "avx512"]
"""In the order of their age; a processor that has one has those before it."""


def native() -> str:
    """What torch has chosen in this process."""
    return torch.backends.cpu.get_cpu_capability().lower()


def digests_on(capability: str, num_threads: int) -> dict[str, str]:
    """Those of `digests()` in a process that uses these instructions and threads, and the oldest of MKL."""
    run = subprocess.run(
        [sys.executable, "-c", f"from tests.unit.optim.bits import show; show({num_threads})"],
        env=os.environ
        | {"ATEN_CPU_CAPABILITY": capability, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
        | {"OMP_WAIT_POLICY": "PASSIVE"}  # else threads that wait for each other take a busy processor's time
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    used, found = json.loads(run.stdout)
    assert used == capability, "the variable did not choose the kernels"
    return found


def show(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    print(json.dumps([native(), digests()]))


def digests() -> dict[str, str]:
    """By what was computed; `fused and vectorised` alone may differ."""
    return {
        "fused and vectorised": fused_and_vectorised(),
        "nesterov": nesterov(),
        "guards": guards(),
        "low rank": low_rank(),
        "codecs": codecs(),
        **{name: method(name) for name in outer_types()},
    }


def mixed(numel: int, seed: int) -> torch.Tensor:
    """Numbers from -0.5 to 0.5."""
    index = torch.arange(numel, dtype=torch.int64)
    return ((index * 2654435761 + seed * 40503) % 16777216).float() / 16777216.0 - 0.5


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def fused_and_vectorised() -> str:
    """If these agree, the settings have changed nothing."""
    values = first_q(3001, 3, 5)
    return digest(torch.add(values[:, 0], values[:, 1], alpha=0.1), values.sum())


NESTEROV_NUMEL, NESTEROV_STEPS = 2 * TILE_NUMEL + 12345, 3
LR, MU = 0.7, 0.9


def nesterov() -> str:
    anchor, momentum = mixed(NESTEROV_NUMEL, 1), torch.zeros(NESTEROV_NUMEL)
    for step in range(NESTEROV_STEPS):
        delta = mixed(NESTEROV_NUMEL, step + 2)
        delta[::7] *= 1e-38
        nesterov_step(
            anchor=anchor, momentum=momentum, delta=delta, lr=LR, mu=MU, anchor_out=anchor, momentum_out=momentum
        )
    return digest(anchor, momentum)


def guards() -> str:
    numel = 300_001
    rows = torch.stack([mixed(numel, row) for row in range(9)])
    rows[4] *= -100.0
    rows[:, ::7] = 0.0
    weights = tuple(1.0 + row / 7.0 for row in range(9))
    result = Result(value=rows, members=tuple("abcdefghi"), weight_sum=sum(weights), weights=weights)
    means = [guarded_mean(guard, result, out=torch.empty(numel)) for guard in ("norm", "trimmed")]
    return digest(*means, clip_around(rows[0] * 0.1, result, out=torch.empty(numel)))


def low_rank() -> str:
    q = first_q(3000, 9, 5)
    p = orthonormalise(first_q(1001, 9, 6))
    return digest(q, p, decompress(p, q, torch.empty(1001, 3000)), warm_start(torch.zeros(50, 3), 2))


def codecs() -> str:
    """But for topk, whose levels are sums, which only the one who sends them computes."""
    values = first_q(70_001, 1, 9).view(-1)
    values = values * values * values
    found = []
    for codec in (codec_named(name) for name in codec_names() if not name.startswith("topk")):
        wire = codec.encode(values, torch.empty(codec.wire_nbytes(len(values)), dtype=torch.uint8))
        # What is decoded are bytes that come from whole numbers alone, so that only decoding is compared.
        any_bytes = first_q(len(wire), 1, 3).view(-1).mul(128).floor().add(128).to(torch.uint8)
        out = torch.empty(len(values))
        codec.decode(any_bytes, out)
        found += [wire, torch.where(torch.isfinite(out), out, 0.0)]
    return digest(*found)


TABLE = FragmentTable.from_named_shapes(
    [("embed.weight", (320, 64)), *((f"layers.{n}.w", (192, 128)) for n in range(6)), ("norm", (131,))]
)
RUN = RunFacts(num_peers=3, outer_steps=12, peak_lr=0.001, schedule="cosine")
FALLING = {"alpha": 0.01, "inner_steps": 200}
SETTINGS = {
    "qsr": FALLING,
    "autoloco": FALLING,
    # Two rounds that send everything, then three that do not.
    "sparseloco": {"inner_steps": 30, "dense_steps": 60},
    "powersgd": {"inner_steps": 100, "dense_steps": 200},
}
MEMBERS = ("ash", "birch", "cedar")


def method(name: str) -> str:
    """Steps and settles with results that are given, as a worker without a contribution does: payloads are each
    worker's own and may be rounded as they like."""
    outer = build_outer(name, **SETTINGS.get(name, {})).fitted(TABLE, RUN)
    fragments = {fragment.key: fragment for fragment in outer.fragments(TABLE)}
    shared, private = {}, {}
    for key, fragment in fragments.items():
        value = mixed(fragment.numel, 1)
        shared[key] = outer.init(fragment, value)
        private[key] = outer.init_private(fragment, shared[key], value)
    found, inner_step, left = hashlib.sha256(), 0, 5
    while left > 0:
        for round_ in outer.plan(inner_step)[:3]:
            key = round_.fragment
            result = given(round_, round_.numel or fragments[key].numel, inner_step)
            before = shared[key]
            shared[key] = outer.step(round_, result, before)
            found.update(digest_of(shared[key]).encode())
            if not round_.keeps_value:
                result = dataclasses.replace(result, value=torch.empty(0))
            outcome = Outcome(
                round_=round_,
                result=result,
                contribution=None,
                before=before,
                after=shared[key],
                private=private[key],
            )
            settled = outer.settle(outcome)
            private[key] = settled.private
            if settled.target is not None:
                found.update(settled.target.numpy().tobytes())
            left -= 1
        inner_step += 1
    return found.hexdigest()


def given(round_, numel, inner_step) -> Result:
    """What the three members get of a round."""
    if round_.op is Op.GATHER:
        value = torch.stack([mixed(numel, inner_step + row) for row in range(3)])
        value[:, ::3] = 0.0
    else:
        value = mixed(numel, inner_step)
        value[::7] *= 1e-38
    notes = tuple((0.3 + row,) * round_.num_notes for row in range(3))
    return Result(value=value, members=MEMBERS, weight_sum=6.0, weights=(1.0, 2.0, 3.0), notes=notes)
