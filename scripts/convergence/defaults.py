# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench convergence defaults`: every method as a user gets it, in runs of many shapes.

Nothing is tuned: a method has its defaults, H, and what `fitted` makes of the run. All start from first weights, with
the inner settings of the shipped configurations (AdamW, 2e-3, cosine) and int8 on the wire, on two texts that
no default was chosen with. Beside each method, with the same data:

    averaging    the workers' mean with the same exchanges, as Local SGD (learning rate 1, no momentum): every H inner
                 steps; in fragments or a round late where a method's exchanges are; where its rounds grow, as many
                 rounds in as many inner steps, of even length;
    alone        one worker that trains for as many inner steps.

The whole grid takes days on two cores. Choose a part of it:

    scripts/bench convergence defaults --methods diloco,streaming --members 4 --h 8,30 --rounds 10,40 --json FILE
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from isthmus.optim.registry import outer_types
from scripts.convergence.cell import BUDGET, Cell, fit, run_cell
from scripts.convergence.fleet import Architecture
from scripts.convergence.text import Text, installed_texts, load_text
from scripts.convergence.trial import WORKERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

AVERAGING: Final = "averaging"
ALONE: Final = "alone"
AS_RARE: Final = f"{AVERAGING}, as rare as qsr"
LATE: Final = f"{AVERAGING}, a round late"
STREAMED: Final = f"{AVERAGING}, by streaming's fragments"
DECOUPLED: Final = f"{AVERAGING}, by decoupled's fragments"
_MEAN: Final[Mapping[str, object]] = {"type": "diloco", "lr": 1.0, "momentum": 0.0}
BASELINES: Final[Mapping[str, Mapping[str, object]]] = {
    ALONE: _MEAN,
    AVERAGING: _MEAN,
    AS_RARE: _MEAN,
    LATE: {**_MEAN, "type": "delayed"},
    STREAMED: {**_MEAN, "type": "streaming"},
    DECOUPLED: {**_MEAN, "type": "decoupled", "embeddings": "."},  # all are merged by the mean, whatever their names
}
"""What is no method of its own, by the name of its cells."""
_COMPARED_WITH: Final = {
    "delayed": LATE,
    "eager": LATE,
    "co2": LATE,
    "qsr": AS_RARE,
    "autoloco": AS_RARE,
    "streaming": STREAMED,
    "decoupled": DECOUPLED,
}
MARGIN: Final = 0.005
"""How much worse than averaging a method may be."""

# ---------------------------------------------------------------------------------------------------- what is wanted


def settings_of(cell: Cell) -> Mapping[str, object]:
    """Of the method that a cell names."""
    return BASELINES.get(cell.method, {"type": cell.method})


def baseline_of(method: str) -> str:
    """The name of the averaging that a method is compared with."""
    return _COMPARED_WITH.get(method, AVERAGING)


def as_run(cell: Cell) -> Cell:
    """The same; if its rounds are to be as many as QSR's, with these and as many inner steps a round, rounded up."""
    if cell.method != AS_RARE:
        return cell
    _, facts, num_steps = fit({"type": "qsr"}, Architecture(BUDGET.model).table, cell)
    return dataclasses.replace(cell, h=-(-num_steps // facts.outer_steps), rounds=facts.outer_steps)


def cells_of(options: argparse.Namespace, texts: Sequence[str]) -> list[Cell]:
    """All of them, those that are done soon first."""
    methods = dict.fromkeys([*(baseline_of(method) for method in options.methods), *options.methods])
    cells = [
        Cell(text=text, method=method, members=members, h=h, rounds=rounds, seed=seed, inner_lr=options.inner_lr)
        for text, h, rounds, seed in itertools.product(texts, options.h, options.rounds, range(options.seeds))
        for method, members in [(ALONE, 1), *itertools.product(methods, options.members)]
    ]
    return sorted(cells, key=lambda cell: cell.h * cell.rounds)


def compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every cell of a method, with its losses and those beside it; the relative differences, None without both."""
    losses = {
        (row["text"], row["h"], row["rounds"], row["seed"], row["members"], row["method"]): row["loss"] for row in rows
    }
    table = []
    for row in rows:
        if row["method"] in BASELINES:
            continue
        shape = (row["text"], row["h"], row["rounds"], row["seed"])
        averaging = losses.get((*shape, row["members"], baseline_of(row["method"])))
        alone = losses.get((*shape, 1, ALONE))
        table.append(
            dict(row)
            | {
                "averaging": averaging,
                "alone": alone,
                "against_averaging": _relative(row["loss"], averaging),
                "against_alone": _relative(row["loss"], alone),
            }
        )
    return table


def _relative(loss: float | None, other: float | None) -> float | None:
    return None if loss is None or other is None else loss / other - 1.0


def summary(table: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line a method: in how many cells it is worse than averaging by more than the margin, and in which."""
    for method in dict.fromkeys(row["method"] for row in table):
        rows = [row for row in table if row["method"] == method]
        known = [row for row in rows if row["against_averaging"] is not None]
        lost = [row for row in rows if row not in known]
        bad = [row for row in known if row["against_averaging"] > MARGIN]
        figures = [100 * row["against_averaging"] for row in known]
        span = f"{min(figures):+.2f} to {max(figures):+.2f} %" if figures else "no figure"
        yield (
            f"{method:14} {span:20} against averaging; more than {100 * MARGIN:g} % worse in {len(bad)} of {len(rows)}"
            + (f"; {len(lost)} without a loss" if lost else "")
        )
        for row in sorted(bad, key=lambda row: -row["against_averaging"]) + lost:
            shown = "no loss" if row in lost else f"{100 * row['against_averaging']:+.2f} %"
            yield f"    {shown:9} {_shape(row)}"


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['text']}, M {row['members']}, H {row['h']}, {row['rounds']} rounds, seed {row['seed']}"


# ---------------------------------------------------------------------------------------------------- the command

_texts: dict[str, Text] = {}


def begin_process(paths: Mapping[str, Path]) -> None:
    """One thread, and the texts in memory."""
    torch.set_num_threads(1)
    _texts.update({name: load_text(path, length=BUDGET.length) for name, path in paths.items()})


def do(cell: Cell) -> dict[str, Any]:
    """Run one cell in a process that has begun."""
    return run_cell(as_run(cell), settings_of(cell), _texts[cell.text]) | {"h": cell.h, "rounds": cell.rounds}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options.

    Raises:
        SystemExit: on bad ones.
    """
    parser = argparse.ArgumentParser(
        prog="scripts/bench convergence defaults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--methods", default=",".join(outer_types()), help=f"with commas: {', '.join(outer_types())}")
    parser.add_argument("--members", type=_numbers, default=[2, 4, 8], help="M, up to 8")
    parser.add_argument("--h", type=_numbers, default=[8, 30, 100], help="inner steps of a round")
    parser.add_argument("--rounds", type=_numbers, default=[10, 40, 160])
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--inner-lr", type=float, default=2e-3, help="that of the shipped configurations")
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        help="a text file, a .jsonl file or a folder, as often as wanted, instead of those that are installed",
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="runs at once, of a thread")
    parser.add_argument("--json", type=Path, help="write every cell here, after each")
    options = parser.parse_args(argv)
    options.methods = [name.strip() for name in options.methods.split(",")]
    unknown = sorted(set(options.methods) - set(outer_types()))
    if unknown:
        parser.error(f"no method {unknown[0]!r}; there are: {', '.join(outer_types())}")
    positive = (*options.members, *options.h, *options.rounds, options.seeds, options.processes)
    if min(positive) < 1 or max(options.members) > len(WORKERS):
        parser.error(f"all numbers must be at least 1, and members at most {len(WORKERS)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 1 if a method is worse than averaging somewhere by more than the margin, or has no loss."""
    options = parse(argv)
    # Read by the workers' libraries when they are loaded.
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        paths = {path.stem: path for path in options.text or ()}
        paths = paths or installed_texts(Path(folder))
        cells = cells_of(options, list(paths))
        print(f"{len(cells)} runs on {', '.join(paths)}", flush=True)
        rows: list[dict[str, Any]] = []
        with concurrent.futures.ProcessPoolExecutor(
            options.processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=begin_process,
            initargs=(paths,),
        ) as pool:
            for row in pool.map(do, cells):
                rows.append(row)
                outcome = "no loss" if row["loss"] is None else f"{row['loss']:.4f}"
                print(f"[{len(rows)}/{len(cells)}] {row['method']}, {_shape(row)}: {outcome}", flush=True)
                if options.json:
                    _write(options, rows)
    table = compared(rows)
    print("\n".join(summary(table)))
    is_fine = all(row["against_averaging"] is not None and row["against_averaging"] <= MARGIN for row in table)
    return 0 if is_fine else 1


def _write(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    figures = {
        "torch": torch.__version__,
        "inner_lr": options.inner_lr,
        "margin": MARGIN,
        "baselines": [row for row in rows if row["method"] in BASELINES],
        "methods": compared(rows),
    }
    options.json.write_text(json.dumps(figures, indent=1) + "\n")
