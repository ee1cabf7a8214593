# SPDX-License-Identifier: Apache-2.0
"""`isthmus doctor`: what is looked at, in which order, and what needs what.

    this machine    device, memory, disk, files, bbr, listener, addresses
    with a ticket   coordinator, version, configuration, clock, path, being called, text, memory for the run

Rules: nothing is changed and nothing is left behind. Every check is told as soon as it is made. What fails ends only
what depends on it.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path as FilePath

from isthmus.collective.core.address import candidates_of, is_wildcard, join_address, split_address
from isthmus.collective.errors import CollectiveError
from isthmus.collective.transport.interfaces import is_loopback, own_interfaces
from isthmus.collective.transport.link import Caps
from isthmus.collective.transport.sockets import streams_for
from isthmus.trainer.config.sources import ResolvedConfig
from isthmus.trainer.contact.joining import stranger_security
from isthmus.trainer.contact.ticket import Ticket, TicketFault, TicketRefused, read_ticket
from isthmus.trainer.doctor import machine, network, run
from isthmus.trainer.doctor.callback import answering
from isthmus.trainer.doctor.messages import Facts
from isthmus.trainer.doctor.path import Path, TurnRefused, Unreached, reach
from isthmus.trainer.doctor.report import Check, fail, warn
from isthmus.trainer.doctor.transfer import MAX_STREAMS
from isthmus.trainer.errors import leaves
from isthmus.trainer.threads import in_thread

_BROKEN_CURE = "try again; if it breaks again, look at the network on the way"

_EASY = 0.25
"""Of what the line carries: with so much nothing is lost for want of room."""

Tell = Callable[[Check], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What the command line tells the doctor.

    Attributes:
        resolved: the configuration; of `[node]` only, if there is a ticket.
        run_dir: the folder that a run would use, absolute.
        ticket: as it was given; None to look at this machine alone.
    """

    resolved: ResolvedConfig
    run_dir: FilePath
    ticket: str | None


async def examine(options: DoctorOptions, tell: Tell) -> None:
    """Look at everything, and tell each check.

    Raises:
        ConfigError: the ticket's file cannot be read.
    """
    told: dict[str, Check] = {}

    def note(check: Check) -> None:
        told[check.name] = check
        tell(check)

    node = options.resolved.config.node
    note(await in_thread(machine.device, node.device, node.local_workers))
    note(machine.memory())
    note(await in_thread(machine.disk, options.run_dir))
    note(machine.files())
    note(machine.bbr())
    check, sock = machine.listening(node.listen)
    note(check)
    with contextlib.ExitStack() as stack:
        if sock is not None:
            stack.enter_context(contextlib.closing(sock))
            own = machine.own_address(node.listen, sock.getsockname()[1], advertise=node.advertise)
            is_open = is_wildcard(split_address(node.listen)[0])
            note(machine.addresses(own, node.advertise, is_open=is_open))
        if options.ticket is not None:
            await _Visit(options, note, told, sock).with_ticket(options.ticket)


class _Visit:
    """What is looked at with a ticket."""

    def __init__(self, options: DoctorOptions, tell: Tell, told: dict[str, Check], sock: socket.socket | None) -> None:
        self._resolved = options.resolved
        self._node = options.resolved.config.node
        self._tell = tell
        self._told = told
        self._sock = sock

    async def with_ticket(self, given: str) -> None:
        """All of it, or until nobody answers."""
        try:
            ticket = read_ticket(given)
            if ticket.secret:
                raise TicketRefused(
                    TicketFault.FOR_STANDBYS,
                    "the ticket is a standby's, and holds the run's secret",
                    cure="use the one that the coordinator printed",
                )
            security = stranger_security(ticket, self._resolved.config.net.tls)
        except TicketRefused as refused:
            self._tell(fail("ticket", refused.problem, refused.cure))
            return
        caps = Caps(upload=self._node.max_upload_bytes_per_s, download=self._node.max_download_bytes_per_s)
        try:
            async with reach(ticket, security, caps) as path:
                await self._look_around(ticket, path, is_encrypted=security is not None)
        except Unreached as nobody:
            self._tell(network.unreached(ticket, nobody.causes, now_s=time.time_ns() / 1e9))

    async def _look_around(self, ticket: Ticket, path: Path, *, is_encrypted: bool) -> None:
        facts: Facts | None = None
        async with self._whatever("coordinator"):
            facts = await path.facts()
        if facts is None:
            return
        self._tell(network.admits(ticket))
        self._tell(network.answers(path.address, facts.seen_from, {str(item.ip) for item in own_interfaces()}))
        self._tell(run.program(facts))
        check, config = await in_thread(run.adopted, self._resolved, facts)
        self._tell(check)
        async with self._whatever("path"):
            await self._measure(path, is_encrypted=is_encrypted)
        if self._sock is not None:
            async with self._whatever("called"):
                await self._be_called(path, self._sock, facts.seen_from)
        if config is not None:
            self._tell(await in_thread(run.text_of, config, facts))
            device = self._told["device"].facts
            free = device.get("free_bytes")
            gpu_free_nbytes = free if isinstance(free, int) else None
            self._tell(run.memory(config, on_gpu="num_gpus" in device, gpu_free_nbytes=gpu_free_nbytes))

    async def _measure(self, path: Path, *, is_encrypted: bool) -> None:
        trip = await path.trip()
        self._tell(network.clock(trip, is_encrypted=is_encrypted))
        self._tell(network.round_trip(trip))
        wanted = streams_for(trip.shortest_s, "bbr" if self._told["bbr"].level == "ok" else "cubic")
        num_streams = min(wanted, MAX_STREAMS)
        down = await path.download(num_streams)
        self._tell(network.rate("down", down, cap=self._node.max_download_bytes_per_s))
        up = await path.upload(num_streams)
        self._tell(network.rate("up", up, cap=self._node.max_upload_bytes_per_s))
        self._tell(network.path_mtu(up.path_mtu))
        if not down.bytes_per_s or not up.bytes_per_s:
            return
        # A full line loses packets by itself. What gets lost on the way shows beside it.
        easy_down = await path.download(1, most_bytes_per_s=_EASY * down.bytes_per_s)
        easy_up = await path.upload(1, most_bytes_per_s=_EASY * up.bytes_per_s)
        self._tell(network.loss(easy_down, easy_up))

    async def _be_called(self, path: Path, sock: socket.socket, seen_from: str) -> None:
        address = self._own_address(seen_from)
        own = await self._numeric(candidates_of(address))
        if not own:
            self._tell(warn("called", f"no resolver knows {address}", "name an address that there is in --advertise"))
            return
        async with answering(sock) as nonce:
            answer = await path.called_at(own, nonce)
        is_home = is_loopback(split_address(self._node.listen)[0])
        self._tell(network.called(answer, is_home=is_home))
        doubt = None
        if answer.member is not None:
            doubt = await path.doubt_member(answer.member.address, answer.member.peer_id)
        self._tell(network.member(answer, doubt))

    def _own_address(self, seen_from: str) -> str:
        port = 0 if self._sock is None else self._sock.getsockname()[1]
        seen = seen_from if is_wildcard(split_address(self._node.listen)[0]) else None
        return machine.own_address(self._node.listen, port, advertise=self._node.advertise, seen_from=seen)

    async def _numeric(self, addresses: tuple[str, ...]) -> list[str]:
        """Names, which the coordinator does not dial back, as what they stand for here."""
        found: list[str] = []
        for address in addresses:
            host, port = split_address(address)
            with contextlib.suppress(OSError):
                entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found.append(join_address(str(entries[0][4][0]), port))
        return list(dict.fromkeys(found))

    @contextlib.asynccontextmanager
    async def _whatever(self, name: str) -> AsyncIterator[None]:
        """A connection that breaks, or a coordinator without time, is a finding and ends this part only."""
        try:
            yield
        except* TurnRefused:
            self._tell(warn(name, "the coordinator has no time for this now", "try again in a minute"))
        except* CollectiveError as errors:
            self._tell(fail(name, f"the connection broke: {leaves(errors)[0]}", _BROKEN_CURE))
