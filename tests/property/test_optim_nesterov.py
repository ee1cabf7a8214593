# SPDX-License-Identifier: Apache-2.0
"""The tiled outer step against the plain formula, in numpy."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.optim import nesterov
from isthmus.optim.nesterov import nesterov_step


@settings(deadline=None)  # machines are slow at times; pytest bounds the whole
@given(
    numel=st.integers(0, 300),
    tile_numel=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
    lr=st.floats(0.01, 2.0),
    mu=st.floats(0.0, 0.999),
    exponent=st.integers(-40, 30),
    output=st.sampled_from(["separate", "momentum is delta", "in place"]),
)
def test_any_tiling_and_aliasing_gives_the_bits_of_the_formula(numel, tile_numel, seed, lr, mu, exponent, output):
    random = np.random.default_rng(seed)
    anchor, momentum, delta = (random.standard_normal(numel) * 10.0**exponent for _ in range(3))
    a, m, d = (x.astype(np.float32) for x in (anchor, momentum, delta))
    new_m = m * np.float32(mu) + d
    new_a = a - (new_m * np.float32(mu) + d) * np.float32(lr)
    inputs = [torch.from_numpy(x.copy()) for x in (a, m, d)]
    anchor_out, momentum_out = {
        "separate": (torch.empty(numel), torch.empty(numel)),
        "momentum is delta": (torch.empty(numel), inputs[2]),
        "in place": (inputs[0], inputs[1]),
    }[output]
    whole_tile, nesterov.TILE_NUMEL = nesterov.TILE_NUMEL, tile_numel
    try:
        nesterov_step(
            anchor=inputs[0],
            momentum=inputs[1],
            delta=inputs[2],
            lr=lr,
            mu=mu,
            anchor_out=anchor_out,
            momentum_out=momentum_out,
        )
    finally:
        nesterov.TILE_NUMEL = whole_tile
    assert anchor_out.numpy().tobytes() == new_a.tobytes()
    assert momentum_out.numpy().tobytes() == new_m.tobytes()
