# SPDX-License-Identifier: Apache-2.0
"""The flags of the commands that run a peer, and what each one says: keys of the configuration, or how a run begins.

Rules: a flag that is not given says nothing; a flag that stands for a key is named beside it, so that a mistake in the
value is told as the flag's. Must not know which command takes which flag, nor what a value has to fit.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.trainer.config.values import is_url
from isthmus.trainer.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.elastic.core.config import RebuildRule
    from isthmus.trainer.workers.loop import Loop

LocalWorkers = Annotated[int | None, typer.Option(help="Worker processes, one a GPU.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", show_default=False)]
Listen = Annotated[
    str | None,
    typer.Option(
        help="host:port to listen on; 127.0.0.1:0 keeps the peer at home. Default: a free port, on every interface.",
        show_default=False,
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(help="host:port where others reach this peer too (a forwarded port, a name).", show_default=False),
]
Name = Annotated[str | None, typer.Option(help="Name of the run.", show_default=False)]
OwnCopy = Annotated[
    str | None, typer.Option("--data", help="Where this machine has the run's text: path or URL.", show_default=False)
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text to train on: path, or URL of a prepared one. Default: Python's sources.", show_default=False
    ),
]
Peers = Annotated[int | None, typer.Option(help="Start when so many are there.", show_default=False)]
MinPeers = Annotated[int | None, typer.Option(help="Go on with no fewer.", show_default=False)]
OuterSteps = Annotated[int | None, typer.Option(help="Exchanges until the end.", show_default=False)]
Tls = Annotated[
    str | None, typer.Option(help="What is encrypted: auto (what leaves a machine), on, off.", show_default=False)
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Encrypt nothing, not even beyond this machine.")]
Streams = Annotated[
    int | None, typer.Option(help="TCP connections for each pair of peers. Default: by distance.", show_default=False)
]
MaxUpload = Annotated[
    str | None,
    typer.Option(
        help="Cap of what exchanges and state for joiners send together, as 20mbit or 6MB.", show_default=False
    ),
]
MaxDownload = Annotated[
    str | None,
    typer.Option(help="Cap of what exchanges receive; the state is fetched as fast as it comes.", show_default=False),
]
AttachTo = Annotated[
    Path | None,
    typer.Option("--attach", help="A training loop of one's own; isthmus.attach says which.", hidden=True),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log everything.")]
IgnoreMemory = Annotated[
    bool, typer.Option("--ignore-memory", help="Begin even if memory or disk seem to be too small for the run.")
]
TicketFile = Annotated[
    Path | None, typer.Option("--ticket-file", help="Also write the ticket here (0600).", show_default=False)
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", help="Start from a peer's folder or one checkpoint, or the URL of one.", show_default=False
    ),
]
Standby = Annotated[
    str | None,
    typer.Option(
        "--standby",
        help="Take over when the run's coordinator is gone: its standby ticket, or @FILE that holds it.",
        show_default=False,
    ),
]
Rebuild = Annotated[
    bool,
    typer.Option(
        "--rebuild",
        help="The journal is lost: make it anew from the peers' certificates. --dir is the coordinator's or a peer's.",
    ),
]
RebuildWithFew = Annotated[
    bool,
    typer.Option("--rebuild-with-few", help="The same with half of the last members or fewer: nobody else will come."),
]

# --------------------------------------------------------------------------------------------- the configuration's keys


def run_flags(
    name: str | None, data: str | None, peers: int | None, min_peers: int | None, outer_steps: int | None
) -> dict[str, tuple[str, object]]:
    """What a founder says of the run."""
    return {
        "run.name": ("--name", name),
        "node.data" if data is not None and is_url(data) else "data.path": ("--data", place_of(data)),
        "members.start_peers": ("--peers", peers),
        "members.min_peers": ("--min-peers", min_peers),
        "run.outer_steps": ("--outer-steps", outer_steps),
    }


def loop_flags(loop: "Loop | None") -> dict[str, tuple[str, object]]:
    """What a founder's loop says of the run."""
    if loop is None:
        return {}
    facts = loop.facts
    told: dict[str, object] = {
        "model.type": "loop",
        "model.parameters": json.dumps(facts.parameters),
        "model.seq_len": facts.tokens_per_sample,
        "inner.type": "loop",
        "inner.states": json.dumps(facts.states),
    }
    return {key: ("isthmus.attach", value) for key, value in told.items()}


def node_flags(
    directory: Path | None,
    local_workers: int | None,
    device: str | None,
    listen: str | None,
    advertise: str | None,
) -> dict[str, tuple[str, object]]:
    """Where a process lives, what it computes with, and how it is reached."""
    return {
        "node.dir": ("--dir", directory),
        "node.local_workers": ("--local-workers", local_workers),
        "node.device": ("--device", device),
        "node.listen": ("--listen", listen),
        "node.advertise": ("--advertise", advertise),
    }


def limit_flags(
    max_upload: str | None, max_download: str | None, *, ignore_memory: bool = False
) -> dict[str, tuple[str, object]]:
    """What a peer that trains may take of its line and of its memory."""
    return {
        "node.max_upload": ("--max-upload", max_upload),
        "node.max_download": ("--max-download", max_download),
        "node.ignore_memory": ("--ignore-memory", "true" if ignore_memory else None),
    }


def net_flags(tls: str | None, streams: int | None, *, insecure: bool) -> dict[str, tuple[str, object]]:
    """How connections are made; `--insecure` alone is `--tls off`."""
    return {
        "net.tls": ("--insecure", "off") if insecure and tls is None else ("--tls", tls),
        "net.num_streams": ("--streams", streams),
    }


def place_of(data: str | None) -> str | None:
    """A path as every process finds it; a URL as it is."""
    return data if data is None or is_url(data) else str(Path(data).absolute())


# ----------------------------------------------------------------------------------------------------- how a run begins


def attached_loop(folder: Path | None) -> "Loop | None":
    """The loop of one's own that has started this command, if one did.

    Raises:
        EnvironmentFault: the folder tells of none that runs.
    """
    if folder is None:
        return None
    from isthmus.trainer.workers.loop import find_loop

    return find_loop(folder)


def rebuild_rule_of(*, rebuild: bool, with_few: bool, resume: str | None) -> "RebuildRule | None":
    """What `--rebuild` and `--rebuild-with-few` say of a journal that is lost; None if neither is given.

    Raises:
        ConfigError: `--resume` is given too.
    """
    from isthmus.elastic.core.config import RebuildRule

    if not rebuild and not with_few:
        return None
    if resume is not None:
        raise ConfigError(
            "--resume begins a new run from a checkpoint, --rebuild goes on with the one whose journal is lost",
            cure="give one of them",
        )
    return RebuildRule.INSIST if with_few else RebuildRule.MAJORITY
