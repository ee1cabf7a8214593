# SPDX-License-Identifier: Apache-2.0
"""A peer's figures in an experiment tracker: TensorBoard, Weights & Biases or Trackio, by way of its event log.

The tracker's library runs in a process of its own (`isthmus track`), so that nothing it does reaches the run: it reads
the events that are written anyway, also while the peer runs, and tells what they say. The step is the outer step. Names
are the field's:

    loss, eval_loss            mean, nats a token: of this peer's work in the commit; of the anchor on held-out text
    eval_bpb                   the latter in bits a byte
    tps                        tokens a second of this peer, waits included
    tokens, inner_step         of this peer so far
    train_s, wait_s            seconds of the round's inner steps, and for which the workers stood still
    exchange_s, sent_mb, received_mb    of the newest exchange; megabytes so far
    peers                      members of the view

Must not know the network or a run that is not written down.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from isthmus.elastic.observation import Event
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.record import events
from isthmus.trainer.record.event_log import FILE_NAME, EventReader
from isthmus.trainer.record.events import event_of
from isthmus.trainer.record.figures import BLANK, Figures, fold

_MEGABYTE: Final = 1e6
_TENSORBOARD_FILES: Final = "events.out.tfevents.*"

Values = Mapping[str, float]


class Tracker(Protocol):
    """Where figures go."""

    def log(self, outer_step: int, values: Values) -> None:
        """Figures of an outer step. A run that went back comes to a step again."""
        ...

    def close(self) -> None:
        """All is told."""
        ...


class Track:
    """Follows one peer's log. `tell` hands on what has come since.

    Args:
        folder: the peer's.
        open_tracker: called with the first figures, when it is known which run and peer they are of.
    """

    def __init__(self, folder: Path, open_tracker: Callable[[Figures], Tracker]) -> None:
        self._reader = EventReader(folder / FILE_NAME)
        self._figures = BLANK
        self._tokens = 0
        self._open_tracker = open_tracker
        self._tracker: Tracker | None = None
        self.outer_step = 0
        """The newest that was told."""

    def tell(self) -> None:
        """Hand on what the log says since the last call.

        Raises:
            OSError: a file cannot be read.
            EnvironmentFault: the tracker's library is not installed.
        """
        for line in self._reader.new():
            event = event_of(line)
            if event is None:
                continue
            self._figures = fold(self._figures, event)
            for outer_step, values in self._points(event):
                if self._tracker is None:
                    self._tracker = self._open_tracker(self._figures)
                self.outer_step = outer_step
                self._tracker.log(outer_step, values)

    def close(self) -> None:
        """End; idempotent."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _points(self, event: Event) -> Iterator[tuple[int, Values]]:
        match event:
            case events.Trained():
                self._tokens += event.tokens
                seconds = event.train_s + event.wait_s
                values: dict[str, float | None] = {
                    "loss": event.loss,
                    "tps": event.tokens / seconds if seconds > 0 else None,
                    "tokens": self._tokens,
                    "inner_step": event.inner_step,
                    "train_s": event.train_s,
                    "wait_s": event.wait_s,
                    "exchange_s": None if self._figures.exchange is None else self._figures.exchange.seconds,
                    "sent_mb": self._figures.sent_bytes / _MEGABYTE,
                    "received_mb": self._figures.received_bytes / _MEGABYTE,
                    "peers": event.world_size,
                }
                yield event.outer_step, {name: float(value) for name, value in values.items() if value is not None}
            case events.Evaluate(loss=loss, bits_per_byte=bits) if loss is not None:
                yield event.outer_step, {"eval_loss": loss} | ({} if bits is None else {"eval_bpb": bits})
            case _:
                return


# ---------------------------------------------------------------------------------------------------------- trackers


class TensorBoard:
    """Event files in a folder: `tensorboard --logdir FOLDER` shows them. Those of an earlier call are written anew.

    Args:
        folder: made if need be.

    Raises:
        EnvironmentFault: tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("tensorboard") from error
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob(_TENSORBOARD_FILES):
                old.unlink()
            self._writer: Any = SummaryWriter(folder)
        except OSError as error:
            raise EnvironmentFault(
                f"{folder} cannot be written: {error.strerror}", cure="name another folder with --out"
            ) from error

    def log(self, outer_step: int, values: Values) -> None:
        """See Tracker."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, outer_step)

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class Hosted:
    """Weights & Biases, or Trackio, whose library has the same face. Each call is a run of its own there.

    Args:
        library: "wandb" or "trackio".
        project: where it is shown.
        figures: of the peer; its run's id is the group.

    Raises:
        EnvironmentFault: the library is not installed, or does not begin: nobody is logged in, or its host is silent.
    """

    def __init__(self, library: str, project: str, figures: Figures) -> None:
        from importlib import import_module

        try:
            self._library: Any = import_module(library)
        except ImportError as error:
            raise _not_installed(library) from error
        name = f"{figures.run_id} {figures.peer_id[:4]}"
        config = {"run_id": figures.run_id, "peer": figures.peer_id}
        try:
            self._library.init(project=project, name=name, group=figures.run_id, config=config)
        except Exception as error:
            cause = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            raise EnvironmentFault(
                f"{library} does not begin: {cause}",
                cure="see to that, or track to tensorboard, which is on this machine",
            ) from error
        if hasattr(self._library, "define_metric"):  # a step may come again
            self._library.define_metric("*", step_metric="outer_step")

    def log(self, outer_step: int, values: Values) -> None:
        """See Tracker."""
        self._library.log({"outer_step": outer_step, **values})

    def close(self) -> None:
        """See Tracker."""
        self._library.finish()


def _not_installed(library: str) -> EnvironmentFault:
    return EnvironmentFault(f"{library} is not installed", cure=f"pip install {library}")
