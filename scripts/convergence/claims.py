# SPDX-License-Identifier: Apache-2.0
"""What the papers claim, each as a question to the table, beside which the bench prints what it found.

A comparison is paired: the relative difference of held-out loss, (left - right) / right, run by run of the same seed.
Its spread is half the range over seeds of that difference, or of the right side's own losses where a claim says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scripts.convergence.report import Row

    Rows = Mapping[tuple[str, int], Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """left <= right · (1 + at_most), or also not less than right · (1 - at_most)."""

    text: str
    left: str
    right: str
    at_most: float = 0.0
    or_spread: bool = False
    """Whether a difference within the spread over seeds of the right side counts as none."""
    is_two_sided: bool = False
    most_bytes: float | None = None
    """Sent by the left side, as a part of what the right side sends."""
    least_reduction: float | None = None
    """Of bytes sent by the left side, against fp32 data parallel."""
    source: str

    def judge(self, rows: Rows, num_workers: int) -> dict[str, Any]:
        """What was found with so many workers; `holds` is None where a side has no figures."""
        left, right = rows.get((self.left, num_workers)), rows.get((self.right, num_workers))
        found: dict[str, Any] = {
            "claim": self.text,
            "source": self.source,
            "left": self.left,
            "right": self.right,
            "workers": num_workers,
            "holds": None,
        }
        if left is None or right is None:
            return found
        differences = paired(left.losses, right.losses)
        if not differences:
            return found
        difference = mean(differences)
        allowed = self.at_most
        if self.or_spread:
            allowed = max(allowed, spread(list(right.losses.values())) / mean(right.losses.values()))
        bytes_ratio = left.sent_nbytes_per_token / right.sent_nbytes_per_token
        return found | {
            "difference": difference,
            "spread": spread(differences),
            "allowed": allowed,
            "seeds": len(differences),
            "bytes_ratio": bytes_ratio,
            "sent_reduction": left.sent_reduction,
            "payload_reduction": left.payload_reduction,
            "bytes_hold": (self.most_bytes is None or bytes_ratio <= self.most_bytes + _ROUNDING)
            and (self.least_reduction is None or left.sent_reduction >= self.least_reduction),
            "holds": abs(difference) <= allowed if self.is_two_sided else difference <= allowed,
        }


def paired(left: Mapping[int, float], right: Mapping[int, float]) -> list[float]:
    """Relative differences by seed, of the seeds that both have."""
    return [(left[seed] - right[seed]) / right[seed] for seed in sorted(left.keys() & right.keys())]


def spread(values: list[float]) -> float:
    """Half the range: what two or three values can say."""
    return (max(values) - min(values)) / 2


_ROUNDING: Final = 1e-9
_SCALING: Final = "2503.09799"

CLAIMS: Final = (
    Claim(text="data parallel is the floor", left="data_parallel", right="diloco", source=_SCALING),
    Claim(
        text="Streaming DiLoCo equals DiLoCo within 0.5 %",
        left="streaming",
        right="diloco",
        at_most=0.005,
        source="2501.18512",
    ),
    *(
        Claim(
            text=f"{codec} on the wire costs at most 0.3 %",
            left=f"{method} {codec}",
            right=method,
            at_most=0.003,
            source="2501.18512",
        )
        for method in ("diloco", "streaming")
        for codec in ("int8", "e3m0")
    ),
    Claim(
        text="SparseLoCo at 1.6 % density and 2 bits is no worse than DiLoCo, with 1000 times fewer bytes sent than DP",
        least_reduction=1000.0,
        left="sparseloco",
        right="diloco",
        or_spread=True,
        source="2508.15706",
    ),
    Claim(
        text="DES-LOC equals Local Adam within 0.5 % with half the bytes",
        most_bytes=0.5,
        left="desloc",
        right="local_adam",
        at_most=0.005,
        source="2505.22549",
    ),
    Claim(text="eager is better than delayed", left="eager", right="delayed", source="2502.12996"),
    Claim(
        text="eager is close to blocking (2.69 to 2.67)",
        left="eager",
        right="diloco",
        at_most=0.0075,
        source="2502.12996",
    ),
    Claim(text="delayed, even tuned, is worse than blocking", left="diloco", right="delayed", source="2502.12996"),
    *(
        Claim(
            text="10 % of rounds aborted and two workers away for a time: within the calm runs' spread",
            left=f"{method} churn",
            right=method,
            or_spread=True,
            source="this project",
        )
        for method in ("diloco", "streaming")
    ),
    Claim(text="four times H is worse", left="diloco", right="diloco H=60", source=_SCALING),
    Claim(
        text="MT-DAO matches or beats data parallel",
        left="mtdao",
        right="data_parallel",
        or_spread=True,
        source="2510.05361",
    ),
    Claim(
        text="NoLoCo converges like DiLoCo or better",
        left="noloco",
        right="diloco",
        or_spread=True,
        source="2506.10911",
    ),
    Claim(
        text="delayed Nesterov with uneven workers matches synchronous DiLoCo",
        left="async",
        right="diloco",
        or_spread=True,
        source="2401.09135",
    ),
    Claim(
        text="Decoupled DiLoCo matches data parallel",
        left="decoupled",
        right="data_parallel",
        or_spread=True,
        source="2604.21428",
    ),
    Claim(text="EDiT is no worse than DiLoCo", left="edit", right="diloco", or_spread=True, source="2412.07210"),
    Claim(
        text="CO2 hides a whole round at little cost (0.4 % in perplexity)",
        left="co2",
        right="diloco",
        at_most=0.004,
        source="2401.16265",
    ),
    Claim(
        text="DeMo matches data-parallel AdamW", left="demo", right="data_parallel", or_spread=True, source="2411.19870"
    ),
    Claim(text="PowerSGD loses little", left="powersgd", right="diloco", or_spread=True, source="1905.13727"),
    Claim(text="AutoLoCo is better than QSR", left="autoloco", right="qsr", source="AutoLoCo, 2026"),
    Claim(
        text="AutoLoCo is no worse than DiLoCo with fewer rounds",
        left="autoloco",
        right="diloco",
        or_spread=True,
        source="AutoLoCo, 2026",
    ),
)
