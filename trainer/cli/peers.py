# SPDX-License-Identifier: Apache-2.0
"""The commands that run a peer, and those that talk to one."""

import asyncio
import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.collective.core.address import candidates_of
from isthmus.trainer.cli.config import AsJson, ConfigFiles, Dir, resolve
from isthmus.trainer.cli.running import announcer, load_for_training, open_console, train
from isthmus.trainer.cli.support import RUNS_FOLDER, choose_folder, client_of, is_loopback
from isthmus.trainer.config.values import is_url
from isthmus.trainer.errors import ConfigError, ExitCode, NothingRuns

if TYPE_CHECKING:
    from isthmus.elastic.core.config import RebuildRule
    from isthmus.trainer.config.sources import ResolvedConfig
    from isthmus.trainer.contact.ticket import Ticket
    from isthmus.trainer.workers.loop import Loop

log = logging.getLogger(__name__)

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
    typer.Option(
        "--rebuild-with-few", help="The same with fewer than half of the last members: nobody else will come."
    ),
]


def up(
    context: typer.Context,
    config: ConfigFiles = None,
    name: Name = None,
    data: Data = None,
    directory: Dir = None,
    resume: Resume = None,
    peers: Peers = None,
    min_peers: MinPeers = None,
    outer_steps: OuterSteps = None,
    local_workers: LocalWorkers = None,
    device: Device = None,
    ignore_memory: IgnoreMemory = False,
    listen: Listen = None,
    advertise: Advertise = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    streams: Streams = None,
    tls: Tls = None,
    insecure: Insecure = False,
    ticket_file: TicketFile = None,
    rebuild: Rebuild = False,
    rebuild_with_few: RebuildWithFew = False,
    attach: AttachTo = None,
    verbose: Verbose = False,
) -> int:
    """Found a run and train in it. Prints the ticket with which others join."""
    from isthmus.trainer.run.options import Founding, PeerOptions

    loop = _loop(attach)
    resolved = resolve(
        context,
        files=config,
        resume=resume,
        flags=_run_flags(name, data, peers, min_peers, outer_steps)
        | _loop_flags(loop)
        | _node_flags(directory, local_workers, device, listen, advertise)
        | _line_flags(max_upload, max_download)
        | {"node.ignore_memory": ("--ignore-memory", "true" if ignore_memory else None)}
        | _net_flags(tls, streams, insecure=insecure),
    )
    _require_secure(resolved, insecure=insecure)
    rebuild_rule = _rebuild_rule(rebuild=rebuild, with_few=rebuild_with_few, resume=resume)
    load_for_training(loop)
    with open_console(verbose=verbose) as console:
        _warn_of_insecurity(resolved, insecure=insecure)
        role = Founding(announce_ticket=announcer(console, ticket_file), resume_from=resume, rebuild=rebuild_rule)
        run_dir = _run_dir(resolved, resolved.config.run.name)
        return train(PeerOptions(resolved=resolved, run_dir=run_dir, role=role, loop=loop), console)


def join(
    context: typer.Context,
    ticket: Annotated[
        list[str] | None,
        typer.Argument(
            help="The ticket, @FILE that holds it, or - for standard input. Without one this folder's peer comes back "
            "to its run.",
            show_default=False,
        ),
    ] = None,
    config: ConfigFiles = None,
    data: OwnCopy = None,
    directory: Dir = None,
    local_workers: LocalWorkers = None,
    device: Device = None,
    ignore_memory: IgnoreMemory = False,
    listen: Listen = None,
    advertise: Advertise = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    tls: Tls = None,
    insecure: Insecure = False,
    attach: AttachTo = None,
    verbose: Verbose = False,
) -> int:
    """Join a run with its ticket and train in it."""
    from isthmus.trainer.run.options import Joining, PeerOptions

    # A ticket that was pasted with line breaks or spaces in it comes as several arguments.
    decoded = _peers_ticket("".join(ticket)) if ticket else None
    loop = _loop(attach)
    resolved = resolve(
        context,
        files=config,
        flags={"node.data": ("--data", place_of(data))}
        | _node_flags(directory, local_workers, device, listen, advertise)
        | _line_flags(max_upload, max_download)
        | {"node.ignore_memory": ("--ignore-memory", "true" if ignore_memory else None)}
        | _net_flags(tls, None, insecure=insecure),
    )
    if decoded is None:
        run_dir, addresses = _joined_folder(resolved)
    else:
        run_dir, addresses = _run_dir(resolved, decoded.run_id), decoded.addresses
    _require_secure(resolved, insecure=insecure, dialled=addresses)
    load_for_training(loop)
    with open_console(verbose=verbose) as console:
        _warn_of_insecurity(resolved, insecure=insecure)
        if decoded is not None:
            _hint_at_expiry(decoded)
        options = PeerOptions(resolved=resolved, run_dir=run_dir, role=Joining(ticket=decoded), loop=loop)
        return train(options, console)


def coordinator(
    context: typer.Context,
    config: ConfigFiles = None,
    name: Name = None,
    data: Data = None,
    directory: Dir = None,
    resume: Resume = None,
    standby: Standby = None,
    peers: Peers = None,
    min_peers: MinPeers = None,
    outer_steps: OuterSteps = None,
    listen: Listen = None,
    advertise: Advertise = None,
    streams: Streams = None,
    tls: Tls = None,
    insecure: Insecure = False,
    ticket_file: TicketFile = None,
    rebuild: Rebuild = False,
    rebuild_with_few: RebuildWithFew = False,
    verbose: Verbose = False,
) -> int:
    """Found a run without training in it: membership and decisions only. Prints the ticket."""
    from isthmus.trainer.run.options import CoordinatorOptions, Founding, StandingBy

    resolved = resolve(
        context,
        files=config,
        resume=resume,
        flags=_run_flags(name, data, peers, min_peers, outer_steps)
        | _node_flags(directory, None, None, listen, advertise)
        | _net_flags(tls, streams, insecure=insecure),
    )
    _require_secure(resolved, insecure=insecure)
    from isthmus.trainer.run.daemon import run_daemon

    rebuild_rule = _rebuild_rule(rebuild=rebuild, with_few=rebuild_with_few, resume=resume)
    ticket = None if standby is None else _standby_ticket(standby, resolved)
    with open_console(verbose=verbose) as console:
        _warn_of_insecurity(resolved, insecure=insecure)
        announce = announcer(console, ticket_file)
        role: Founding | StandingBy = Founding(announce_ticket=announce, resume_from=resume, rebuild=rebuild_rule)
        folder = resolved.config.run.name
        if ticket is not None:
            role = StandingBy(ticket=ticket, announce_ticket=announce)
            folder = f"{ticket.run_id}-standby"
        options = CoordinatorOptions(resolved=resolved, run_dir=_run_dir(resolved, folder), role=role)
        return asyncio.run(run_daemon(options))


def leave(
    directory: Dir = None,
    now: Annotated[bool, typer.Option("--now", help="Stop at once; the steps since the last commit are lost.")] = False,
) -> int:
    """Let this machine's peer hand in its work and leave the run. Ctrl-C ends this command, not the leaving."""
    from isthmus.trainer.cli.leaving import follow, say_on_stderr
    from isthmus.trainer.run.control_messages import LeaveRequest, StopRequest

    client = client_of(directory)
    client.order(StopRequest() if now else LeaveRequest())
    try:
        sentence = follow(client, say_on_stderr)
    except KeyboardInterrupt:
        say_on_stderr("the peer goes on leaving; isthmus leave shows how far it is, isthmus leave --now does not wait")
        raise
    if sentence is not None:
        print(sentence)
    return int(ExitCode.DONE)


def status(directory: Dir = None, as_json: AsJson = False) -> int:
    """How this machine's peer is doing, or how it ended."""
    import msgspec

    from isthmus.trainer.record.status import render_status

    current = client_of(directory).status()
    print(msgspec.json.encode(current).decode() if as_json else render_status(current))
    return int(ExitCode.DONE)


def _rebuild_rule(*, rebuild: bool, with_few: bool, resume: str | None) -> "RebuildRule | None":
    from isthmus.elastic.core.config import RebuildRule

    if not rebuild and not with_few:
        return None
    if resume is not None:
        raise ConfigError(
            "--resume begins a new run from a checkpoint, --rebuild goes on with the one whose journal is lost",
            cure="give one of them",
        )
    return RebuildRule.INSIST if with_few else RebuildRule.MAJORITY


def _run_flags(
    name: str | None, data: str | None, peers: int | None, min_peers: int | None, outer_steps: int | None
) -> dict[str, tuple[str, object]]:
    return {
        "run.name": ("--name", name),
        "node.data" if data is not None and is_url(data) else "data.path": ("--data", place_of(data)),
        "members.start_peers": ("--peers", peers),
        "members.min_peers": ("--min-peers", min_peers),
        "run.outer_steps": ("--outer-steps", outer_steps),
    }


def _loop(folder: Path | None) -> "Loop | None":
    """The loop of one's own that has started this command, if one did."""
    if folder is None:
        return None
    from isthmus.trainer.workers.loop import find_loop

    return find_loop(folder)


def _loop_flags(loop: "Loop | None") -> dict[str, tuple[str, object]]:
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


def _node_flags(
    directory: Path | None,
    local_workers: int | None,
    device: str | None,
    listen: str | None,
    advertise: str | None,
) -> dict[str, tuple[str, object]]:
    return {
        "node.dir": ("--dir", directory),
        "node.local_workers": ("--local-workers", local_workers),
        "node.device": ("--device", device),
        "node.listen": ("--listen", listen),
        "node.advertise": ("--advertise", advertise),
    }


def _line_flags(max_upload: str | None, max_download: str | None) -> dict[str, tuple[str, object]]:
    return {
        "node.max_upload": ("--max-upload", max_upload),
        "node.max_download": ("--max-download", max_download),
    }


def _net_flags(tls: str | None, streams: int | None, *, insecure: bool) -> dict[str, tuple[str, object]]:
    return {
        "net.tls": ("--insecure", "off") if insecure and tls is None else ("--tls", tls),
        "net.num_streams": ("--streams", streams),
    }


def _peers_ticket(given: str) -> "Ticket":
    """The ticket of a peer."""
    from isthmus.trainer.contact.ticket import TicketFault, TicketRefused, read_ticket

    ticket = read_ticket(given)
    if ticket.secret:
        raise TicketRefused(
            TicketFault.FOR_STANDBYS,
            "this ticket is for standby coordinators and holds the run's secret",
            cure="join with the ticket that the coordinator printed",
        )
    return ticket


def _joined_folder(resolved: "ResolvedConfig") -> tuple[Path, tuple[str, ...]]:
    """The folder of a peer that comes back, and where the coordinators of its run may be."""
    from isthmus.trainer.files import MEMBERSHIP_NAME
    from isthmus.trainer.run.founding import recall_membership

    try:
        folder = choose_folder(resolved.config.node.dir, holding=MEMBERSHIP_NAME, or_else=NothingRuns).absolute()
    except NothingRuns as nothing:
        raise ConfigError(
            f"there is no ticket, and under {RUNS_FOLDER}/ no peer that could come back without one",
            cure="join with the ticket that the coordinator printed, or name the peer's folder with --dir",
        ) from nothing
    kept = recall_membership(folder)
    return folder, () if kept is None else kept.coordinators


def _hint_at_expiry(ticket: "Ticket") -> None:
    from isthmus.trainer.contact.ticket import expiry_hint

    if (hint := expiry_hint(ticket, now_s=datetime.now(UTC).timestamp())) is not None:
        log.warning("ticket_old hint=%r; if the coordinator refuses it, ask for a new one", hint)


def _standby_ticket(given: str, resolved: "ResolvedConfig") -> "Ticket":
    """The ticket of a standby that could really take over."""
    from isthmus.trainer.contact.ticket import TicketFault, TicketRefused, read_ticket

    ticket, config = read_ticket(given), resolved.config
    if not ticket.secret:
        raise TicketRefused(
            TicketFault.FOR_PEERS,
            "this ticket lets peers in, and a standby needs more",
            cure="give the file standby.ticket of the coordinator's folder",
        )
    if config.coordinator.store == "sqlite":
        raise ConfigError(
            "a standby needs the run's journal, and coordinator.store sqlite is a file of one coordinator",
            cure='say store = "etcd" in [coordinator], as the run\'s coordinator does',
            key="coordinator.store",
            origin=resolved.origins["coordinator.store"],
        )
    address = config.node.advertise or config.node.listen
    if not any(address in candidates_of(known) for known in ticket.addresses):
        raise ConfigError(
            f"peers look for coordinators at {', '.join(ticket.addresses)}, and not at {address}",
            cure="say one of these with --listen or --advertise, or found the run with more coordinator.addresses",
            key="node.listen",
            origin=resolved.origins["node.listen"],
        )
    return ticket


def _require_secure(resolved: "ResolvedConfig", *, insecure: bool, dialled: Sequence[str] = ()) -> None:
    """Nothing leaves this machine unencrypted unless the operator insists. `dialled`: the ticket's addresses."""
    config, origin = resolved.config, resolved.origins["net.tls"]
    if config.net.tls != "off":
        if insecure:
            raise ConfigError(
                f"--insecure contradicts net.tls {config.net.tls} from {origin}",
                cure="leave one of them out",
                key="net.tls",
                origin=origin,
            )
        return
    named = [("the ticket's address", one) for address in dialled for one in candidates_of(address)]
    named += [("node.advertise", config.node.advertise or ""), ("node.listen", config.node.listen)]
    for name, address in named:
        if address and not is_loopback(address) and not insecure:
            raise ConfigError(
                f"{name} {address} is beyond this machine, and net.tls from {origin} says to encrypt nothing",
                cure="leave the encryption on, stay on this machine with --listen 127.0.0.1:0, or add --insecure if "
                "the network is your own (a VPN, say)",
                key="net.tls",
                origin=origin,
            )


def _warn_of_insecurity(resolved: "ResolvedConfig", *, insecure: bool) -> None:
    if insecure:
        log.warning(
            "not_encrypted listen=%s; whoever is on the way can read, change and join: leave out --insecure unless the "
            "network is your own",
            resolved.config.node.listen,
        )


def _run_dir(resolved: "ResolvedConfig", name: str) -> Path:
    return (resolved.config.node.dir or RUNS_FOLDER / name).absolute()


def place_of(data: str | None) -> str | None:
    """A path as every process finds it; a URL as it is."""
    return data if data is None or is_url(data) else str(Path(data).absolute())
