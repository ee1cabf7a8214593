# SPDX-License-Identifier: Apache-2.0
"""What the command line tells a daemon. Frozen; everything in it has been checked as far as it can be without acting.

Must not know how flags are spelled (`trainer.cli.app`), nor what the daemon does with them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isthmus.elastic.core.config import RebuildRule
from isthmus.trainer.config.sources import ResolvedConfig
from isthmus.trainer.contact.ticket import Ticket
from isthmus.trainer.record.status import Status
from isthmus.trainer.workers.loop import Loop

Announce = Callable[[Ticket, tuple[str, ...] | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding:
    """This process decides what the run is.

    Attributes:
        announce_ticket: called once, as soon as others can join, with the ticket and how a loop is started, if the run
            is one of loops (see `invitation`). Must not block for long.
        resume_from: a run's folder or one checkpoint to start from, or the URL of one; None starts anew, or goes on
            where the journal in `run_dir` ends.
        rebuild: the journal of the run in `run_dir` is lost: make it anew from its peers' certificates, by this rule.
            None goes on with what is there.
    """

    announce_ticket: Announce
    resume_from: str | None = None
    rebuild: RebuildRule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Somebody else has decided; `PeerOptions.resolved` counts for `[node]`, and `adopt` checks the rest.

    Attributes:
        ticket: decoded; may have expired. None: the run that `run_dir` joined last, as one of its peers.
    """

    ticket: Ticket | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingBy:
    """Another process coordinates; this one takes over when that one is gone.

    Attributes:
        ticket: a standby's, decoded.
        announce_ticket: as in `Founding`, when this process coordinates.
    """

    ticket: Ticket
    announce_ticket: Announce


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """For `trainer.run.daemon.run_daemon`: a peer.

    Attributes:
        resolved: the configuration; of a joiner, call `resolved.adopt(manifest)` when the manifest is there.
        run_dir: this peer's folder, absolute; created by the daemon.
        role: who decides what the run is.
        watch: called once, with what tells how this peer is; any thread may call that, also after the end.
        loop: who trains here, if it is a loop of one's own.
    """

    resolved: ResolvedConfig
    run_dir: Path
    role: Founding | Joining
    loop: Loop | None = None
    watch: Callable[[Callable[[], Status]], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """For `trainer.run.daemon.run_daemon`: a coordinator without a peer. Fields as in `PeerOptions`."""

    resolved: ResolvedConfig
    run_dir: Path
    role: Founding | StandingBy
