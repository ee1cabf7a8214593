# SPDX-License-Identifier: Apache-2.0
"""From single runs to the table, the orderings and the plot."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from scripts.convergence.cases import CASES, DATA_PARALLEL
from scripts.convergence.claims import CLAIMS, paired, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FP32_NBYTES: Final = 4
_LABEL_WIDTH: Final = 0.21
_LABEL_HEIGHT: Final = 0.022
"""Of an axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case with one number of workers."""

    case: str
    workers: int
    tuned: Mapping[str, float]
    losses: Mapping[int, float]
    """By seed."""
    loss: float
    """Mean over seeds."""
    spread: float
    """Half the range over seeds."""
    against_data_parallel: float | None
    """Relative, paired by seed."""
    payload_nbytes_per_token: float
    sent_nbytes_per_token: float
    payload_reduction: float
    """Against fp32 data parallel with as many workers, which sends its gradient in every step."""
    sent_reduction: float
    rounds: int
    dropped: int


def summarise(runs: Sequence[Mapping[str, Any]], *, numel: int, tokens_per_step: int) -> list[Row]:
    """One row for each case and number of workers, of its final runs.

    Args:
        runs: as `run_trial` gives them, those of sweeps left out.
        numel: parameters of the model.
        tokens_per_step: of one worker.
    """
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for run in runs:
        if run["loss"] is not None:
            groups.setdefault((run["case"], run["workers"]), []).append(run)
    losses = {key: {run["seed"]: run["loss"] for run in group} for key, group in groups.items()}
    rows = []
    for (case, workers), group in groups.items():
        own, baseline = losses[case, workers], losses.get((DATA_PARALLEL, workers), {})
        differences = paired(own, baseline)
        payload = mean(run["payload_nbytes_per_token"] for run in group)
        sent = mean(run["sent_nbytes_per_token"] for run in group)
        gradient = numel * FP32_NBYTES / tokens_per_step
        rows.append(
            Row(
                case=case,
                workers=workers,
                tuned=group[0]["tuned"],
                losses=dict(sorted(own.items())),
                loss=mean(own.values()),
                spread=spread(list(own.values())),
                against_data_parallel=mean(differences) if differences else None,
                payload_nbytes_per_token=payload,
                sent_nbytes_per_token=sent,
                payload_reduction=gradient / payload,
                sent_reduction=gradient * 2 * (workers - 1) / workers / sent if workers > 1 else 1.0,
                rounds=group[0]["rounds"],
                dropped=group[0]["dropped"],
            )
        )
    return rows


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every claim, for every number of workers that has both sides."""
    table = {(row.case, row.workers): row for row in rows}
    numbers = sorted({row.workers for row in rows})
    return [claim.judge(table, number) for claim in CLAIMS for number in numbers if _is_run(claim, table, number)]


def _is_run(claim: Any, table: Mapping[tuple[str, int], Row], number: int) -> bool:  # noqa: ANN401
    return (claim.left, number) in table and (claim.right, number) in table


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(row) for row in rows]


# --------------------------------------------------------------------------------------------------------- for people


def print_table(rows: Sequence[Row]) -> None:
    """One line a row, best first within a number of workers."""
    titles = f"{'loss':>16} {'to DP':>7} {'sent B/token':>13} {'less sent':>10} {'less payload':>13} {'rounds':>7}"
    print(f"\n{'method':22} {'M':>2} {titles}  settings")
    for row in sorted(rows, key=lambda row: (row.workers, row.loss)):
        to_dp = "" if row.against_data_parallel is None else f"{row.against_data_parallel:+.1%}"
        settings = ", ".join(f"{name} {value:g}" for name, value in row.tuned.items())
        loss = f"{row.loss:.4f} ± {row.spread:.4f}" if len(row.losses) > 1 else f"{row.loss:.4f}         "
        print(
            f"{row.case:22} {row.workers:2} {loss:>16} {to_dp:>7} {row.sent_nbytes_per_token:13.2f}"
            f" {row.sent_reduction:9.1f}x {row.payload_reduction:12.1f}x {row.rounds:7}  {settings}",
        )


def print_claims(found: Sequence[Mapping[str, Any]]) -> None:
    """What the papers say, and what was found."""
    print("\nclaims (difference in held-out loss, left to right, mean and half range over seeds):")
    for claim in found:
        if claim["holds"] is None:
            continue
        verdict = "holds" if claim["holds"] and claim["bytes_hold"] else "FAILS"
        print(
            f"  {verdict}  M={claim['workers']} {claim['claim']}:"
            f" {claim['left']} {claim['difference']:+.2%} ± {claim['spread']:.2%} to {claim['right']}"
            f" (allowed {claim['allowed']:.2%}), {_times(claim['bytes_ratio'])}"
            f"{'' if claim['bytes_hold'] else ', which is more than claimed'}"
        )


def _times(bytes_ratio: float) -> str:
    fewer = bytes_ratio <= 1.0
    return f"{1 / bytes_ratio if fewer else bytes_ratio:.3g}x {'fewer' if fewer else 'more'} bytes sent"


def plot(path: Path, rows: Sequence[Row], runs: Sequence[Mapping[str, Any]], *, tokens_per_step: int) -> None:
    """Held-out loss against bytes sent, a panel for each number of workers, and the curves of the headline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row.workers > 1]
    numbers = sorted({row.workers for row in rows})
    figure, axes = plt.subplots(
        1, len(numbers) + 1, figsize=(6.5 * (len(numbers) + 1), 6), layout="constrained", squeeze=False
    )
    for axis, number in zip(axes[0], numbers, strict=False):
        shown = sorted((row for row in rows if row.workers == number), key=lambda row: row.sent_nbytes_per_token)
        for row in shown:
            axis.errorbar(row.sent_nbytes_per_token, row.loss, yerr=row.spread, fmt="o", markersize=4, capsize=2)
        axis.set(
            xscale="log",
            xlabel="bytes sent by a worker for each token it trains on",
            ylabel="held-out loss (nats a byte)",
            title=f"{number} workers",
        )
        axis.margins(x=0.2)
        axis.grid(alpha=0.25)
        _label(axis, shown)
    _plot_curves(axes[0][-1], runs, numbers[0], tokens_per_step)
    figure.savefig(path, dpi=130)


def _label(axis: Any, rows: Sequence[Row]) -> None:  # noqa: ANN401
    """Names beside the points, each above the one below it where they would overlap."""
    (left, right), (bottom, top) = (math.log(limit) for limit in axis.get_xlim()), axis.get_ylim()
    placed: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: row.loss):
        x = (math.log(row.sent_nbytes_per_token) - left) / (right - left)
        y = (row.loss - bottom) / (top - bottom)
        for other_x, other_y in sorted(placed, key=lambda place: place[1]):
            if abs(x - other_x) < _LABEL_WIDTH and abs(y - other_y) < _LABEL_HEIGHT:
                y = other_y + _LABEL_HEIGHT
        placed.append((x, y))
        axis.annotate(
            row.case,
            (row.sent_nbytes_per_token, row.loss),
            xytext=(x + 0.02, y),
            textcoords="axes fraction",
            fontsize=7,
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "alpha": 0.5},
        )


def _plot_curves(axis: Any, runs: Sequence[Mapping[str, Any]], number: int, tokens_per_step: int) -> None:  # noqa: ANN401
    """Of the methods themselves; those of their variants would lie upon them."""
    methods = {case.name for case in CASES if case.base is None}
    styles = itertools.cycle((f"C{color}", line) for line in ("-", "--") for color in range(10))
    first_seed = min(run["seed"] for run in runs)
    for run in sorted(runs, key=lambda run: run["loss"] or 0.0):
        if (run["workers"], run["seed"]) == (number, first_seed) and run["case"] in methods and run["loss"] is not None:
            points = [(step * tokens_per_step, loss) for step, loss in run["curve"]]
            color, line = next(styles)
            axis.plot(*zip(*points, strict=True), label=run["case"], linewidth=1.1, color=color, linestyle=line)
    axis.set(
        xlabel="tokens of one worker",
        ylabel="held-out loss (nats a byte)",
        title=f"{number} workers, seed {first_seed}",
    )
    axis.legend(fontsize=6, ncols=2)
    axis.grid(alpha=0.25)
