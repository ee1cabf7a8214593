# SPDX-License-Identifier: Apache-2.0
"""A progress bar on a terminal, nothing where there is none.

Rules: draws on stderr only, at most ten times a second; what is logged meanwhile appears above the bar, whole. Must
not know what a step is made of.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

_REFRESHES_PER_S = 10


class Progress(Protocol):
    """Tells people how far it is."""

    def advance(self, *, outer_step: int, inner_step: int, world_size: int, loss: float | None) -> None:
        """The state now; may be called as often as one likes.

        Args:
            outer_step: committed exchanges.
            inner_step: inner steps since the last one.
            world_size: members of the view; 0 before the first.
            loss: newest training loss in nats a token, if there is one.
        """


class SilentProgress:
    """For pipes, files and services."""

    def advance(self, *, outer_step: int, inner_step: int, world_size: int, loss: float | None) -> None:
        """Says nothing."""


@contextlib.contextmanager
def open_progress(*, name: str, total_outer_steps: int, inner_steps: int) -> Iterator[Progress]:
    """A bar over the whole run while the body runs, if stderr is a terminal.

    Args:
        name: of the run.
        total_outer_steps: where the run ends.
        inner_steps: between two exchanges.
    """
    if not sys.stderr.isatty():
        yield SilentProgress()
        return
    # Only now: rich takes longer to import than the rest of the command line.
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with RichProgress(*columns, console=console, refresh_per_second=_REFRESHES_PER_S, transient=True) as bars:
        task = bars.add_task(name, total=total_outer_steps * inner_steps, note="starting")

        def draw(completed: int, note: str) -> None:
            bars.update(task, completed=completed, note=note)

        yield BarProgress(draw, total_outer_steps=total_outer_steps, inner_steps=inner_steps)


class BarProgress:
    """Turns the state of the training into a position and a note.

    Args:
        draw: takes the inner steps done and the note.
        total_outer_steps: where the run ends.
        inner_steps: between two exchanges.
    """

    def __init__(self, draw: Callable[[int, str], None], *, total_outer_steps: int, inner_steps: int) -> None:
        self._draw = draw
        self._total_outer_steps = total_outer_steps
        self._inner_steps = inner_steps

    def advance(self, *, outer_step: int, inner_step: int, world_size: int, loss: float | None) -> None:
        """See `Progress`."""
        note = f"step {outer_step}/{self._total_outer_steps} · {world_size} peer{'' if world_size == 1 else 's'}"
        if loss is not None:
            note += f" · loss {loss:.3f}"
        self._draw(outer_step * self._inner_steps + min(inner_step, self._inner_steps), note)
