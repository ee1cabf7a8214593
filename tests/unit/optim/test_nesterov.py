# SPDX-License-Identifier: Apache-2.0
"""The outer step: its bits, its memory, its arithmetic.

m ← μ·m + Δ;  θ ← θ - η·(Δ + μ·m): the outer optimizer of DiLoCo (arXiv:2311.08105).
"""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.optim import nesterov
from isthmus.optim.nesterov import nesterov_step

LR, MU = 0.7, 0.9
NUMEL = 2 * nesterov.TILE_NUMEL + 12345

# Runs in a process of its own, where ATEN_CPU_CAPABILITY can still choose the kernels. Inputs come from integers:
# torch.randn differs between CPUs.
DIGEST_SCRIPT = f"""
import hashlib, sys, torch
from isthmus.optim.nesterov import nesterov_step

torch.set_num_threads(int(sys.argv[1]))
index = torch.arange({NUMEL}, dtype=torch.int64)

def mixed(seed):
    return ((index * 2654435761 + seed * 40503) % 16777216).float() / 16777216.0 - 0.5

anchor, momentum = mixed(1), torch.zeros({NUMEL})
for step in range(3):
    delta = mixed(step + 2)
    delta[::7] *= 1e-38
    nesterov_step(anchor=anchor, momentum=momentum, delta=delta, lr={LR}, mu={MU},
                  anchor_out=anchor, momentum_out=momentum)
print(torch.backends.cpu.get_cpu_capability(), file=sys.stderr)
print(hashlib.sha256(anchor.numpy().tobytes() + momentum.numpy().tobytes()).hexdigest())
"""


def _mixed(seed: int) -> np.ndarray:
    index = np.arange(NUMEL, dtype=np.int64)
    return ((index * 2654435761 + seed * 40503) % 16777216).astype(np.float32) / np.float32(16777216) - np.float32(0.5)


def _numpy_digest(*, fused: bool) -> str:
    """The same three steps in numpy; `fused` rounds product and sum together, as an FMA does."""

    def multiply_add(x: np.ndarray, factor: float, y: np.ndarray) -> np.ndarray:
        if fused:  # the product of two floats is exact in double
            return (x.astype(np.float64) * np.float64(np.float32(factor)) + y).astype(np.float32)
        return x * np.float32(factor) + y

    anchor, momentum = _mixed(1), np.zeros(NUMEL, dtype=np.float32)
    for step in range(3):
        delta = _mixed(step + 2)
        delta[::7] *= np.float32(1e-38)
        momentum = multiply_add(momentum, MU, delta)
        anchor = anchor - multiply_add(momentum, MU, delta) * np.float32(LR)
    return hashlib.sha256(anchor.tobytes() + momentum.tobytes()).hexdigest()


@pytest.mark.parametrize(("capability", "num_threads"), [("default", 1), ("avx2", 2), ("avx512", 1), ("avx512", 2)])
def test_bits_are_those_of_separately_rounded_operations_on_every_cpu(capability, num_threads):
    levels = ("default", "avx2", "avx512")
    native = torch.backends.cpu.get_cpu_capability().lower()
    if capability != "default" and (native not in levels or levels.index(capability) > levels.index(native)):
        pytest.skip(f"this CPU offers {native}; torch would run instructions that it does not have")
    run = subprocess.run(
        [sys.executable, "-c", DIGEST_SCRIPT, str(num_threads)],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert run.stderr.split()[-1] == capability.upper()  # the variable did choose the kernels
    assert run.stdout.strip() == _numpy_digest(fused=False)


def test_the_digest_inputs_can_tell_fused_arithmetic():
    assert _numpy_digest(fused=True) != _numpy_digest(fused=False)


def _tensors(numel: int = 1000, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(3)]


def _step(anchor, momentum, delta, anchor_out, momentum_out, lr=LR, mu=MU):
    nesterov_step(
        anchor=anchor,
        momentum=momentum,
        delta=delta,
        lr=lr,
        mu=mu,
        anchor_out=anchor_out,
        momentum_out=momentum_out,
    )


def _out_of_place(anchor, momentum, delta):
    outputs = torch.full_like(anchor, torch.nan), torch.full_like(anchor, torch.nan)
    _step(anchor, momentum, delta, *outputs)
    return outputs


def test_it_agrees_with_torch_sgd_to_fp32_tolerance():
    anchor, momentum, _ = _tensors()
    momentum.zero_()
    param = torch.nn.Parameter(anchor.clone())
    reference = torch.optim.SGD([param], lr=LR, momentum=MU, nesterov=True)
    for seed in range(5):
        delta = _tensors(seed=seed)[2]
        param.grad = delta.clone()
        reference.step()
        _step(anchor, momentum, delta, anchor, momentum)
    torch.testing.assert_close(anchor, param.detach(), rtol=1e-5, atol=1e-6)


def test_gain_on_a_first_gradient_is_lr_times_one_plus_momentum():
    zero, one = torch.zeros(4, dtype=torch.float32), torch.ones(4)
    anchor, momentum = _out_of_place(zero, zero.clone(), one)
    torch.testing.assert_close(-anchor, torch.full((4,), LR * (1 + MU)))
    torch.testing.assert_close(momentum, one)


def test_gain_on_a_constant_gradient_tends_to_lr_over_one_minus_momentum():
    anchor, momentum, one = torch.zeros(4), torch.zeros(4), torch.ones(4)
    before = anchor.clone()
    for _ in range(300):
        before.copy_(anchor)
        _step(anchor, momentum, one, anchor, momentum)
    torch.testing.assert_close(before - anchor, torch.full((4,), LR / (1 - MU)), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("aliased", ["anchor_out=anchor", "momentum_out=momentum", "momentum_out=delta", "swapped"])
def test_outputs_may_be_the_inputs_themselves(aliased):
    anchor, momentum, delta = _tensors(nesterov.TILE_NUMEL + 3)
    expected = _out_of_place(anchor, momentum, delta)
    spare = torch.empty_like(anchor)
    outputs = {
        "anchor_out=anchor": (anchor, spare),
        "momentum_out=momentum": (spare, momentum),
        "momentum_out=delta": (spare, delta),
        "swapped": (delta, anchor),
    }[aliased]
    _step(anchor, momentum, delta, *outputs)
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[1], expected[1])


def test_out_of_place_leaves_every_input_untouched():
    inputs = _tensors()
    copies = [tensor.clone() for tensor in inputs]
    _out_of_place(*inputs)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


def test_partial_overlap_and_shared_outputs_are_refused():
    memory = torch.zeros(1500)
    anchor, momentum, delta = _tensors()
    with pytest.raises(ValueError, match="share memory"):
        _step(anchor, momentum, delta, delta, delta)
    with pytest.raises(ValueError, match="in part"):
        _step(memory[:1000], momentum, delta, memory[500:], torch.empty(1000))


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(999), torch.zeros(1000, dtype=torch.float64), torch.zeros(2000)[::2], torch.zeros(10, 100)],
    ids=["size", "dtype", "stride", "shape"],
)
def test_tensors_of_another_kind_are_refused(wrong):
    anchor, momentum, _ = _tensors()
    with pytest.raises(ValueError, match="contiguous fp32 CPU tensor"):
        _out_of_place(anchor, momentum, wrong)


class _LargestResult(TorchDispatchMode):
    """Largest tensor any operation made that is not one of the outputs given."""

    def __init__(self, given):
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.given:
            self.numel = max(self.numel, result.untyped_storage().nbytes() // 4)
        return result


def test_nothing_larger_than_a_tile_is_allocated():
    anchor, momentum, delta = _tensors(3 * nesterov.TILE_NUMEL)
    spare = torch.empty_like(anchor)
    with _LargestResult([anchor, momentum, delta, spare]) as largest:
        _step(anchor, momentum, delta, spare, delta)
    assert largest.numel == nesterov.TILE_NUMEL


def test_an_empty_fragment_is_a_step_of_nothing():
    empty = [torch.empty(0) for _ in range(5)]
    _step(*empty)
