# SPDX-License-Identifier: Apache-2.0
"""One run of a method as a user gets it; of which shape is the caller's (scripts/convergence/defaults.py)."""

from __future__ import annotations

import dataclasses
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from isthmus.collective.codec import NotFinite
from isthmus.optim.qsr import QSR
from isthmus.optim.registry import build_outer
from isthmus.optim.run_facts import RunFacts
from isthmus.optim.simulate import simulate
from scripts.convergence.cases import CASES
from scripts.convergence.codec_wire import CodecWire
from scripts.convergence.fleet import Architecture, Fleet, InnerSettings
from scripts.convergence.text import Reader
from scripts.convergence.trial import WORKERS, Budget, held_out_loss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isthmus.optim.fragments import FragmentTable
    from isthmus.optim.outer import Outer
    from scripts.convergence.text import Text

INNER_OF: Final = {case.type: case.inner for case in CASES if case.name == "demo"}
"""Those that refuse the inner optimizer of the shipped configurations, AdamW."""
BUDGET: Final = Budget(start_steps=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run that is wanted."""

    text: str
    method: str
    members: int
    h: int
    """H, inner steps between two exchanges of the same tensor."""
    rounds: int
    """How often each tensor is exchanged."""
    seed: int
    inner_lr: float


def fit(settings: Mapping[str, Any], table: FragmentTable, cell: Cell) -> tuple[Outer, RunFacts, int]:
    """The method for a run of about H times `rounds` inner steps, what it is told of the run, and how long that is.

    Raises:
        ValueError: it does not fit the model or the run.
    """
    given = dict(settings)
    type_ = str(given.pop("type"))
    if hasattr(build_outer(type_), "inner_steps"):
        given["inner_steps"] = cell.h
    outer = build_outer(type_, **given)
    facts = RunFacts(
        num_peers=cell.members, outer_steps=cell.rounds, peak_lr=cell.inner_lr, schedule="cosine", min_ratio=0.1
    )
    if isinstance(outer, QSR):  # rounds that grow: fewer of them, in no more inner steps
        for outer_steps in range(cell.rounds, 0, -1):
            facts = dataclasses.replace(facts, outer_steps=outer_steps)
            grown = outer.fitted(table, facts)
            if grown.total_steps is not None and grown.total_steps <= cell.h * cell.rounds:
                return grown, facts, grown.total_steps
    num_steps = cell.h * cell.rounds
    made = sum(1 for step in range(num_steps + 1) if outer.fitted(table, facts).plan(step))
    facts = dataclasses.replace(facts, outer_steps=max(1, made))
    return outer.fitted(table, facts), facts, num_steps


def run_cell(cell: Cell, settings: Mapping[str, Any], text: Text, budget: Budget = BUDGET) -> dict[str, Any]:
    """Train once.

    Args:
        cell: which run.
        settings: of the method, with its type.
        text: to read.
        budget: the size of the model, of a batch and of the held-out text.

    Returns:
        The cell with its loss, for JSON; None where it diverged or could not run, and why.
    """
    started = time.perf_counter()
    row = dataclasses.asdict(cell) | {"loss": None}
    architecture = Architecture(budget.model)
    try:
        outer, facts, num_steps = fit(settings, architecture.table, cell)
        inner = InnerSettings(
            total_steps=num_steps,
            warmup_steps=facts.warmup(num_steps),
            lr=cell.inner_lr,
            **INNER_OF.get(cell.method, {}),
        )
        # The last exchange lands too, as in a run; what the workers do until then reaches no anchor.
        lag = max((round_.delay for step in range(num_steps + 1) for round_ in outer.plan(step)), default=0)
        reader = Reader(
            text, seed=cell.seed, num_steps=num_steps + lag, batch_size=budget.batch_size, length=budget.length
        )
        trajectory = simulate(
            outer,
            table=architecture.table,
            initial=budget.model.initial_parameters(cell.seed),
            workers=WORKERS[: cell.members],
            workload=Fleet(architecture, rows=cell.members, inner=inner, batches=reader),
            num_inner_steps=num_steps + lag,
            batch_size=float(budget.batch_size),
            wire=CodecWire("int8"),
            records=False,
        )
        samples = text.held_out_samples(budget.held_out_samples, length=budget.length)
        row["loss"] = held_out_loss(architecture, trajectory, outer.fragments(architecture.table), samples)
        row |= {"steps": num_steps, "exchanges": trajectory.num_rounds}
    except (NotFinite, FloatingPointError) as error:
        row["diverged"] = str(error)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a method is stated in its cell
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"
    return row | {"seconds": round(time.perf_counter() - started, 1)}
