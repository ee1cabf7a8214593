# SPDX-License-Identifier: Apache-2.0
"""The command that shows a peer's figures in an experiment tracker."""

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from isthmus.trainer.cli.support import choose_folder
from isthmus.trainer.errors import ExitCode, NothingRuns

if TYPE_CHECKING:
    from isthmus.trainer.record.figures import Figures
    from isthmus.trainer.record.tracking import Tracker

_LOOK_S: Final = 1.0


class To(StrEnum):
    """The trackers."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


def track(
    directory: Annotated[Path | None, typer.Option("--dir", help="A peer's folder.", show_default=False)] = None,
    to: Annotated[
        To, typer.Option("--to", help="The tracker; its library is an extra: isthmus[wandb] and so on.")
    ] = To.TENSORBOARD,
    project: Annotated[str, typer.Option("--project", help="Where wandb or trackio shows it.")] = "isthmus",
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for TensorBoard; DIR/tensorboard.", show_default=False)
    ] = None,
) -> int:
    """Show a peer's figures in TensorBoard, Weights & Biases or Trackio, until it ends. Prints the last outer step."""
    from isthmus.trainer.record.event_log import FILE_NAME, has_events
    from isthmus.trainer.record.tracking import Hosted, TensorBoard, Track
    from isthmus.trainer.run.control_socket import is_running

    folder = choose_folder(directory, holding=FILE_NAME, or_else=NothingRuns, prefer=is_running)
    if not has_events(folder / FILE_NAME):
        raise NothingRuns(f"no peer has ever run in {folder}", cure="name the folder of one with --dir")

    def tracker(figures: "Figures") -> "Tracker":
        if to is To.TENSORBOARD:
            return TensorBoard(out or folder / "tensorboard")
        return Hosted(str(to), project, figures)

    following = Track(folder, tracker)
    try:
        while True:
            runs = is_running(folder)  # looked at before the log is: what it writes last is not missed
            following.tell()
            if not runs:
                break
            time.sleep(_LOOK_S)
    finally:
        following.close()
    print(following.outer_step)
    return int(ExitCode.DONE)
