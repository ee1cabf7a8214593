# SPDX-License-Identifier: Apache-2.0
"""The commands that run a peer, and those that talk to one.

Rules: a command says which flags it takes and in which order things happen; what is refused is refused before a console
is open. Must not know what makes a ticket or an address unfit, nor what a daemon does.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.trainer.cli.config import AsJson, ConfigFiles, Dir, resolve
from isthmus.trainer.cli.flags import (
    Advertise,
    AttachTo,
    Data,
    Device,
    IgnoreMemory,
    Insecure,
    Listen,
    LocalWorkers,
    MaxDownload,
    MaxUpload,
    MinPeers,
    Name,
    OuterSteps,
    OwnCopy,
    Peers,
    Rebuild,
    RebuildWithFew,
    Resume,
    Standby,
    Streams,
    TicketFile,
    Tls,
    Verbose,
    attached_loop,
    limit_flags,
    loop_flags,
    net_flags,
    node_flags,
    place_of,
    rebuild_rule_of,
    run_flags,
)
from isthmus.trainer.cli.refusals import (
    hint_at_expiry,
    joined_folder,
    peers_ticket,
    require_secure,
    standby_ticket,
    warn_of_insecurity,
)
from isthmus.trainer.cli.running import announcer, load_for_training, open_console, train
from isthmus.trainer.cli.support import RUNS_FOLDER, client_of
from isthmus.trainer.errors import ExitCode

if TYPE_CHECKING:
    from isthmus.trainer.config.sources import ResolvedConfig


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

    loop = attached_loop(attach)
    resolved = resolve(
        context,
        files=config,
        resume=resume,
        flags=run_flags(name, data, peers, min_peers, outer_steps)
        | loop_flags(loop)
        | node_flags(directory, local_workers, device, listen, advertise)
        | limit_flags(max_upload, max_download, ignore_memory=ignore_memory)
        | net_flags(tls, streams, insecure=insecure),
    )
    require_secure(resolved, insecure=insecure)
    rebuild_rule = rebuild_rule_of(rebuild=rebuild, with_few=rebuild_with_few, resume=resume)
    load_for_training(loop)
    with open_console(verbose=verbose) as console:
        warn_of_insecurity(resolved, insecure=insecure)
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
    decoded = peers_ticket("".join(ticket)) if ticket else None
    loop = attached_loop(attach)
    resolved = resolve(
        context,
        files=config,
        flags={"node.data": ("--data", place_of(data))}
        | node_flags(directory, local_workers, device, listen, advertise)
        | limit_flags(max_upload, max_download, ignore_memory=ignore_memory)
        | net_flags(tls, None, insecure=insecure),
    )
    if decoded is None:
        run_dir, addresses = joined_folder(resolved)
    else:
        run_dir, addresses = _run_dir(resolved, decoded.run_id), decoded.addresses
    require_secure(resolved, insecure=insecure, dialled=addresses)
    load_for_training(loop)
    with open_console(verbose=verbose) as console:
        warn_of_insecurity(resolved, insecure=insecure)
        if decoded is not None:
            hint_at_expiry(decoded)
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
        flags=run_flags(name, data, peers, min_peers, outer_steps)
        | node_flags(directory, None, None, listen, advertise)
        | net_flags(tls, streams, insecure=insecure),
    )
    require_secure(resolved, insecure=insecure)
    from isthmus.trainer.run.daemon import run_daemon

    rebuild_rule = rebuild_rule_of(rebuild=rebuild, with_few=rebuild_with_few, resume=resume)
    ticket = None if standby is None else standby_ticket(standby, resolved)
    with open_console(verbose=verbose) as console:
        warn_of_insecurity(resolved, insecure=insecure)
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
    from isthmus.trainer.cli.console import Console
    from isthmus.trainer.cli.leaving import follow
    from isthmus.trainer.run.control_messages import LeaveRequest, StopRequest

    client = client_of(directory)
    client.order(StopRequest() if now else LeaveRequest())
    with Console() as console:
        try:
            sentence = follow(client, console)
        except KeyboardInterrupt:
            console.log(
                "the peer goes on leaving; isthmus leave shows how far it is, isthmus leave --now does not wait"
            )
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


def _run_dir(resolved: "ResolvedConfig", name: str) -> Path:
    return (resolved.config.node.dir or RUNS_FOLDER / name).absolute()
