# SPDX-License-Identifier: Apache-2.0
"""I1 on unlike machines: from the same results every method makes the same bits, whatever the CPU and its threads."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from isthmus.optim import outer_types

CAPABILITIES = ["default", "avx2", "avx512"]

# Runs in a process of its own, where ATEN_CPU_CAPABILITY can still choose the kernels. Steps and settles with results
# that are given, as a worker without a contribution does: payloads are each worker's own and may be rounded as they
# like. Results come from whole numbers, for torch.randn differs between CPUs.
SCRIPT = """
import dataclasses, hashlib, json, sys, torch
from isthmus.optim import FragmentTable, Op, Outcome, Result, RunFacts, build_outer, outer_types
from isthmus.optim.outer import digest_of

torch.set_num_threads(int(sys.argv[1]))
SHAPES = [("embed.weight", (320, 64))] + [(f"layers.{n}.w", (192, 128)) for n in range(6)] + [("norm", (131,))]
TABLE = FragmentTable.from_named_shapes(SHAPES)
MEMBERS = ("ash", "birch", "cedar")
FALLING = {"alpha": 0.01, "inner_steps": 200}
SETTINGS = {"qsr": FALLING, "autoloco": FALLING}
RUN = RunFacts(num_peers=3, outer_steps=12, peak_lr=0.001, schedule="cosine")

def mixed(numel, seed):
    index = torch.arange(numel, dtype=torch.int64)
    return ((index * 2654435761 + seed * 40503) % 16777216).float() / 16777216.0 - 0.5

def replayed(name):
    outer = build_outer(name, **SETTINGS.get(name, {})).fitted(TABLE, RUN)
    fragments = {fragment.key: fragment for fragment in outer.fragments(TABLE)}
    shared, private = {}, {}
    for key, fragment in fragments.items():
        value = mixed(fragment.numel, 1)
        shared[key] = outer.init(fragment, value)
        private[key] = outer.init_private(fragment, shared[key], value)
    digest, inner_step, left = hashlib.sha256(), 0, 5
    while left:
        for round_ in outer.plan(inner_step)[:3]:
            numel = round_.numel or fragments[round_.fragment].numel
            if round_.op is Op.GATHER:
                value = torch.stack([mixed(numel, inner_step + row) for row in range(3)])
                value[:, ::3] = 0.0
            else:
                value = mixed(numel, inner_step)
                value[::7] *= 1e-38
            result = Result(value=value, members=MEMBERS, weight_sum=6.0, weights=(1.0, 2.0, 3.0),
                            notes=tuple((0.3 + row,) * round_.num_notes for row in range(3)))
            key, before = round_.fragment, shared[round_.fragment]
            shared[key] = outer.step(round_, result, before)
            digest.update(digest_of(shared[key]).encode())
            if not round_.keeps_value:
                result = dataclasses.replace(result, value=torch.empty(0))
            settled = outer.settle(Outcome(round_=round_, result=result, contribution=None, before=before,
                                           after=shared[key], private=private[key]))
            private[key] = settled.private
            if settled.target is not None:
                digest.update(settled.target.numpy().tobytes())
            left -= left > 0
        inner_step += 1
    return digest.hexdigest()

print(torch.backends.cpu.get_cpu_capability(), file=sys.stderr)
print(json.dumps({name: replayed(name) for name in outer_types()}))
"""


@functools.cache
def digests(capability, num_threads):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(num_threads)],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert run.stderr.split()[-1] == capability.upper()  # the variable did choose the kernels
    return json.loads(run.stdout)


@pytest.mark.parametrize(("capability", "num_threads"), [("avx2", 1), ("avx512", 1), ("default", 2)])
def test_every_method_makes_the_same_bits(capability, num_threads):
    native = torch.backends.cpu.get_cpu_capability().lower()
    if capability != "default" and (native not in CAPABILITIES or capability > native):
        pytest.skip(f"this CPU offers {native}; torch would run instructions that it does not have")
    expected = digests("default", 1)
    assert set(expected) == set(outer_types())
    assert digests(capability, num_threads) == expected
