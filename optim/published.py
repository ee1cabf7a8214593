# SPDX-License-Identifier: Apache-2.0
"""What methods cost in loss, by those who published it: differences from data parallel.

Each says in which setting it was found and how its source was read: [T] in the paper's own text, [C] in reference
code, [S] in a secondary account, [M] from memory. Where nothing is published, or only a claim without figures, the loss
is None.

Rules: facts and their sources; nothing is measured here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """How much higher a published loss is than data parallel's (cross entropy, nats a token)."""

    loss: float | None
    """None: no source gives a figure."""
    setting: str
    """Where the figure holds; or what the sources say instead."""
    peers: int | None = None
    """How many took part there; None: not told."""
    source: str = ""
    """arXiv id or name of the paper."""
    evidence: str = ""
    """One of T, C, S and M, see the module."""


_SCALING_LAWS: Final = {
    35e6: (3.485, {1: 3.482, 2: 3.508, 4: 3.554, 8: 3.621}),
    180e6: (2.950, {1: 2.943, 2: 2.957, 4: 2.981, 8: 3.019}),
    550e6: (2.653, {1: 2.645, 2: 2.657, 4: 2.673, 8: 2.698}),
    1.3e9: (2.460, {1: 2.451, 2: 2.464, 4: 2.472, 8: 2.493}),
    2.4e9: (2.326, {1: 2.317, 2: 2.323, 4: 2.332, 8: 2.351}),
    4e9: (2.224, {1: 2.219, 2: 2.220, 4: 2.230}),
    10e9: (2.090, {1: 2.086, 2: 2.086, 4: 2.096}),
}
"""Parameters: (loss of data parallel, loss of DiLoCo by number of peers), H 30: arXiv:2503.09799."""

_STREAMING: Final = {
    30: {35e6: 0.02, 100e6: 0.02, 300e6: 0.01, 500e6: 0.00, 1e9: -0.01},
    100: {35e6: 0.05, 100e6: 0.03, 300e6: 0.03, 500e6: 0.02, 1e9: 0.01, 4e9: 0.01},
}
"""H: parameters: loss above data parallel, 2 peers, e3m0: arXiv:2501.18512."""

DILOCO_500: Final = Penalty(loss=0.0787, setting="215M, 100 rounds", source="AutoLoCo", evidence="S")
QSR: Final = Penalty(loss=0.1560, setting="215M, 41 rounds", source="AutoLoCo", evidence="S")
AUTOLOCO: Final = Penalty(loss=0.0609, setting="215M, 73 rounds", source="AutoLoCo", evidence="S")
EAGER: Final = Penalty(loss=0.02, setting="500M and 1B", source="2502.12996", evidence="T")
DELAYED: Final = Penalty(loss=0.06, setting="500M, with a lower lr; +0.34 untuned", source="2502.12996", evidence="T")
SPARSELOCO: Final = Penalty(loss=None, setting="claimed better than DiLoCo at 512M", source="2508.15706", evidence="S")
DESLOC: Final = Penalty(
    loss=None, setting="in-context average 51.6, data parallel 53.8, 1.7B", source="2505.22549", evidence="S"
)
LOCAL_ADAM: Final = Penalty(
    loss=None, setting="in-context average 51.8, data parallel 53.8, 1.7B", source="2505.22549", evidence="S"
)
NOLOCO: Final = Penalty(loss=None, setting="claimed up to 4% faster than DiLoCo", source="2506.10911", evidence="S")
DECOUPLED: Final = Penalty(
    loss=None, setting="claimed to match data parallel up to 9B", source="2604.21428", evidence="S"
)


def of_diloco(size: int, peers: int, codec: str) -> Penalty:
    """DiLoCo's, at the nearest size and the nearest number of peers that was trained at it.

    Args:
        size: parameters.
        peers: M.
        codec: what the run sends; the figures are of fp32.
    """
    nearest = min(_SCALING_LAWS, key=lambda other: abs(math.log(other / size)))
    baseline, losses = _SCALING_LAWS[nearest]
    count = min(losses, key=lambda other: (abs(other - peers), other))
    return Penalty(
        loss=round(losses[count] - baseline, 3),
        setting=_short(nearest) + ("" if codec == "raw" else ", raw"),
        peers=count,
        source="2503.09799",
        evidence="T",
    )


def of_streaming(size: int, inner_steps: int, codec: str) -> Penalty:
    """Streaming DiLoCo's, at the nearest size.

    Args:
        size: parameters.
        inner_steps: H, 30 or 100.
        codec: what the run sends; the figures are of e3m0.
    """
    # int8 has no figures of its own; it is the finer codec, and the paper's finer ones did not differ.
    nearest = min(_STREAMING[inner_steps], key=lambda other: abs(math.log(other / size)))
    return Penalty(
        loss=_STREAMING[inner_steps][nearest],
        setting=_short(nearest) + ("" if codec == "e3m0" else ", e3m0"),
        peers=2,
        source="2501.18512",
        evidence="T",
    )


def _short(size: float) -> str:
    return f"{size / 1e9:g}B" if size >= 1e9 else f"{size / 1e6:g}M"
