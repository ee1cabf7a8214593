# SPDX-License-Identifier: Apache-2.0
"""How a command runs a daemon: where its log lines and results go, what is shown meanwhile, what is said at the end."""

import asyncio
import contextlib
import dataclasses
import logging
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.trainer.cli.console import Console
from isthmus.trainer.cli.support import PROGRAM
from isthmus.trainer.errors import RESTARTABLE, EnvironmentFault, ExitCode, operator_error

if TYPE_CHECKING:
    from isthmus.trainer.contact.ticket import Ticket
    from isthmus.trainer.record.status import Status
    from isthmus.trainer.run.options import Announce, PeerOptions
    from isthmus.trainer.workers.loop import Loop


class _ConsoleHandler(logging.Handler):
    """Hands log lines to the console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """One record, one line (and a traceback if it has one)."""
        self._console.log(self.format(record))


@contextlib.contextmanager
def open_console(*, verbose: bool) -> Iterator[Console]:
    """stdout and stderr while the body runs. Warnings and news of the run are logged; with `verbose` all of ours."""
    root = logging.getLogger()
    with Console() as console:
        handler = _ConsoleHandler(console)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s %(message)s", "%H:%M:%S"))
        root.handlers[:] = [handler]
        root.setLevel(logging.WARNING)
        logging.getLogger(PROGRAM).setLevel(logging.DEBUG if verbose else logging.INFO)
        try:
            yield console
        finally:
            root.removeHandler(handler)


def load_for_training(loop: "Loop | None") -> None:
    """Load what a peer needs, and split its fork server off: before a console, or anything else, has a thread."""
    if loop is not None:  # it has processes of its own
        return
    import isthmus.trainer.run.daemon  # noqa: F401 - its torch is the workers' too
    from isthmus.trainer.workers.start import split_off

    split_off()


def train(options: "PeerOptions", console: Console) -> int:
    """Run a peer until its part in the run is over; returns the exit code.

    A live line tells how it is meanwhile; who has trained is told at the end how it went.

    Raises:
        IsthmusError: what the operator must act on.
    """
    from isthmus.trainer.record.summary import live_line
    from isthmus.trainer.run.daemon import run_daemon

    figures: list[Callable[[], Status]] = []

    def watch(status: "Callable[[], Status]") -> None:
        figures.append(status)
        if options.loop is None:  # else the terminal is the loop's
            console.watch(lambda: live_line(status()))

    code = int(ExitCode.UNEXPECTED)
    try:
        code = asyncio.run(run_daemon(dataclasses.replace(options, watch=watch)))
        return code
    except Exception as error:
        known = operator_error(error)
        code = code if known is None else int(known.exit_code)
        raise
    finally:
        if figures and (status := figures[0]()).num_commits:
            with contextlib.suppress(OSError):  # of a disk that has died
                console.result(_summary(options, status, code))


def announcer(console: Console, ticket_file: Path | None) -> "Announce":
    """Prints the line that others join with, and writes the ticket where it was asked for."""
    from isthmus.trainer.contact.ticket import encode_ticket, invitation

    def announce(ticket: "Ticket", program: tuple[str, ...] | None) -> None:
        console.result(invitation(ticket, program))
        if ticket_file is None:
            return
        from isthmus.trainer.files import write_atomically

        try:
            write_atomically(ticket_file, f"{encode_ticket(ticket)}\n".encode(), mode=0o600)
        except OSError as error:
            raise EnvironmentFault(
                f"the ticket cannot be written to {ticket_file}: {error.strerror}", cure="name another --ticket-file"
            ) from error

    return announce


def _summary(options: "PeerOptions", status: "Status", code: int) -> str:
    from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, CheckpointStore
    from isthmus.trainer.contact.ticket import loop_line
    from isthmus.trainer.record.summary import shown, summary
    from isthmus.trainer.run.options import Joining

    store = CheckpointStore(options.run_dir / FOLDER_NAME, keep=1)
    steps = store.steps()
    folder = shlex.quote(shown(options.run_dir))
    following = None
    if code == ExitCode.DONE:
        following = f"{PROGRAM} export --dir {folder}"
    elif code == ExitCode.LEFT or code in RESTARTABLE:
        # A founder's run goes on with the same words: the folder tells the rest.
        again = [PROGRAM, *sys.argv[1:]]
        if isinstance(options.role, Joining):
            again = [PROGRAM, "join", "--dir", shown(options.run_dir)]
        following = shlex.join(again)
        if options.loop is not None:
            own = again[: again.index("--attach")] if "--attach" in again else again
            following = loop_line(own, options.loop.facts.program)
    return summary(status, code, store.path_of(steps[-1]) if steps else None, following)
