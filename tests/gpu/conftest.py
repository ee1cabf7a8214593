# SPDX-License-Identifier: Apache-2.0
"""Each of these tests runs on the CPU, and on a CUDA device if there is one."""

import pytest
import torch

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
    ],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test computes; with its number, as a tensor there says it."""
    return torch.empty(0, device=request.param).device
