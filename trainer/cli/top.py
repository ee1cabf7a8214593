# SPDX-License-Identifier: Apache-2.0
"""The command that shows a peer while it runs, on a page of the terminal."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from isthmus.trainer.cli.config import Dir
from isthmus.trainer.cli.support import client_of
from isthmus.trainer.errors import ConfigError, EnvironmentFault, ExitCode

if TYPE_CHECKING:
    from isthmus.trainer.record.status import PeerStatus, Status

_ANSWER_S: Final = 2.0
"""Longer than this nobody waits for the next look."""


def top(directory: Dir = None) -> int:
    """Show this machine's peer on a page that follows it: loss, rounds, waits, peers and links. q ends it."""
    folder = client_of(directory).run_dir
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("isthmus top needs a terminal", cure="isthmus status prints the same figures once")
    try:
        from isthmus.trainer.cli.dashboard import Dashboard
    except ImportError as error:
        raise EnvironmentFault("textual is not installed", cure="pip install textual") from error
    from isthmus.trainer.run.control_socket import ControlClient

    def look() -> "tuple[Status, Sequence[PeerStatus]]":
        client = ControlClient(folder, timeout_s=_ANSWER_S)  # anew: the peer may have ended, or have come back
        return client.status(), client.peers()

    Dashboard(look).run()
    return int(ExitCode.DONE)
