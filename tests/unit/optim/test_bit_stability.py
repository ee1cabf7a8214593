# SPDX-License-Identifier: Apache-2.0
"""I1 on unlike machines: from the same results all make the same bits, whatever the CPU and its threads.

And those of the outer step are the bits of operations that are rounded one by one.
"""

import hashlib

import numpy as np
import pytest

from isthmus.optim import outer_types
from tests.unit.optim import bits


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    return bits.digests()


@pytest.mark.parametrize(("capability", "num_threads"), [("default", 1), ("avx2", 2)])
def test_an_unlike_machine_makes_the_same_bits(ours, capability, num_threads):
    known = bits.CAPABILITIES
    native = bits.native()
    if capability != "default" and (native not in known or known.index(capability) > known.index(native)):
        pytest.skip(f"this CPU offers {native}; torch would run instructions that it does not have")
    theirs = bits.digests_on(capability, num_threads)
    assert set(theirs) >= set(outer_types())
    may_differ = "fused and vectorised"
    if capability == "default" and theirs[may_differ] == ours[may_differ]:
        pytest.skip("this processor has one kind of vector unit only")
    assert {name for name in theirs if theirs[name] != ours[name]} <= {may_differ}


def _mixed(seed: int) -> np.ndarray:
    index = np.arange(bits.NESTEROV_NUMEL, dtype=np.int64)
    return ((index * 2654435761 + seed * 40503) % 16777216).astype(np.float32) / np.float32(16777216) - np.float32(0.5)


def _numpy_digest(*, fused: bool) -> str:
    """The same steps in numpy; `fused` rounds product and sum together, as an FMA does."""

    def multiply_add(x: np.ndarray, factor: float, y: np.ndarray) -> np.ndarray:
        if fused:  # the product of two floats is exact in double
            return (x.astype(np.float64) * np.float64(np.float32(factor)) + y).astype(np.float32)
        return x * np.float32(factor) + y

    anchor, momentum = _mixed(1), np.zeros(bits.NESTEROV_NUMEL, dtype=np.float32)
    for step in range(bits.NESTEROV_STEPS):
        delta = _mixed(step + 2)
        delta[::7] *= np.float32(1e-38)
        momentum = multiply_add(momentum, bits.MU, delta)
        anchor = anchor - multiply_add(momentum, bits.MU, delta) * np.float32(bits.LR)
    return hashlib.sha256(anchor.tobytes() + momentum.tobytes()).hexdigest()


def test_an_outer_step_has_the_bits_of_operations_that_are_rounded_one_by_one(ours):
    assert ours["nesterov"] == _numpy_digest(fused=False)
    assert ours["nesterov"] != _numpy_digest(fused=True), "these inputs can tell fused arithmetic"
