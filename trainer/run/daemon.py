# SPDX-License-Identifier: Apache-2.0
"""A process from its first line to its exit code: a peer, a peer with the coordinator in it, or a coordinator alone.

    run_peer          folder, identity ─► terms (founded, or asked for) ─► text ─► listener ─► Peer
    run_coordinator   the same without a Peer; a standby waits before its listener accepts anybody

Rules: the first SIGINT or SIGTERM leaves in order, the second stops at once (interrupts.py). What a process is there
for is over when its part in the run is over and, where the coordinator lives, when everybody else has gone too.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import version

import msgspec
import torch

from isthmus.collective import AddressInUse
from isthmus.collective.core.address import candidates_of, is_wildcard, join_address, split_address
from isthmus.collective.core.types import Member
from isthmus.collective.transport import Channel, Hello, Listener, Purpose, connect
from isthmus.collective.transport.link import Caps
from isthmus.elastic.core.config import REBUILD_SALTS, RebuildRule
from isthmus.elastic.core.events import Finish
from isthmus.elastic.core.records import BarRecord
from isthmus.elastic.donor.donor import refuse
from isthmus.elastic.observation import ElasticEvent, RecordWritten
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.elastic.shell.notary import RunSealer
from isthmus.trainer.config.wiring import coordinator_config, tokens_per_sample
from isthmus.trainer.contact.admission import Gatekeeper, authority_of, hello_maker
from isthmus.trainer.contact.bouncer import Bouncer
from isthmus.trainer.contact.identity import PeerFolder
from isthmus.trainer.contact.office import Office
from isthmus.trainer.contact.reach import reachable_at
from isthmus.trainer.data.samples import samples_per_data_epoch
from isthmus.trainer.doctor.callback import CallBack
from isthmus.trainer.doctor.service import DoctorService, Surroundings
from isthmus.trainer.errors import ConfigError, EnvironmentFault, ExitCode, IsthmusError, leaves, operator_error
from isthmus.trainer.record.chronicle import Chronicle
from isthmus.trainer.record.events import FILE_NAME, EventLog
from isthmus.trainer.record.metrics import Metrics
from isthmus.trainer.record.metrics_server import MetricsServer
from isthmus.trainer.record.scoreboard import Scoreboard
from isthmus.trainer.record.status import Status
from isthmus.trainer.run.control_socket import ControlServer
from isthmus.trainer.run.coordination import Coordination
from isthmus.trainer.run.founding import Founded, remember_terms, save_standby_ticket
from isthmus.trainer.run.interrupts import Interrupts
from isthmus.trainer.run.options import CoordinatorOptions, Founding, Joining, PeerOptions, StandingBy
from isthmus.trainer.run.peer import Peer, PeerPlan
from isthmus.trainer.run.preparation import Start, prepare, wall_s
from isthmus.trainer.workers.devices import choose_device

log = logging.getLogger(__name__)

_FAREWELL_TIMEOUT_S = 20.0
"""How long a founder whose run is complete waits for the others to say goodbye."""
_POLL_S = 0.1
_MEMBER_DIAL_S = 3.0
"""For a member that is asked to dial somebody back."""


async def run_peer(options: PeerOptions) -> int:
    """Run a peer until its part in the run is over; returns the exit code.

    Raises:
        IsthmusError: what the operator must act on.
    """
    interrupts = Interrupts()
    return await interrupts.guard(_run(options, interrupts))


async def run_coordinator(options: CoordinatorOptions) -> int:
    """Run a coordinator without a peer until the run is complete and everybody has gone.

    Raises:
        IsthmusError: what the operator must act on.
    """
    interrupts = Interrupts()
    return await interrupts.guard(_run(options, interrupts))


async def _run(options: PeerOptions | CoordinatorOptions, interrupts: Interrupts) -> int:
    # The cores are the workers'. Two threads that fight for them make an addition of milliseconds last a third of a
    # second, on the event loop.
    torch.set_num_threads(1)
    if isinstance(options, PeerOptions):
        node = options.resolved.config.node
        if options.loop is None:
            choose_device(node.device, node.local_workers)
    with PeerFolder(options.run_dir) as folder:
        process = _Process(await prepare(options, folder))
        return await process.live(interrupts)


class _Process:
    """Everything that one process runs. Answers the command line too (`control_socket.Controlled`)."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._run_dir = start.options.run_dir
        self._coordinator: CoordinatorShell | None = None
        self._peer: Peer | None = None
        self._office: Office | None = None
        self._doctor: DoctorService | None = None
        self._call_back = CallBack()
        self._bouncer = Bouncer(start.security)
        self._is_closing = asyncio.Event()
        self._has_left = False
        """The peer's part is over; its coordinator goes on."""
        self._metrics = Metrics(run_id=start.terms.run_id, peer_id=start.me.peer_id)
        self._metrics_server: MetricsServer | None = None

    # -------------------------------------------------------------------------------- life

    async def live(self, interrupts: Interrupts) -> int:
        """The whole life; returns the exit code."""
        start = self._start
        config = start.config
        with contextlib.ExitStack() as stack:
            node, log_path = config.node, self._run_dir / FILE_NAME
            events = stack.enter_context(
                EventLog(log_path, start.me.peer_id, max_nbytes=node.events_nbytes, keep=node.events_keep)
            )
            self._board = Scoreboard(
                me=start.me,
                run_id=start.terms.run_id,
                config=config,
                metrics=self._metrics,
                clock=time.monotonic,
                coordinator=start.coordinators[0] if start.coordinators else None,
            )
            if isinstance(start.options, PeerOptions):
                start.options.watch(lambda: self._board.status(os.getpid()))
            interrupts.leave = self.leave
            if config.metrics_port is not None:
                server = MetricsServer(self._metrics, host=node.metrics_host, port=config.metrics_port)
                self._metrics_server = stack.enter_context(server)
                self._board.metrics_address = self._metrics_server.address
            chronicle = Chronicle(events, self._board)
            control = stack.enter_context(
                ControlServer(
                    self._run_dir,
                    self,
                    peer_id=start.me.peer_id,
                    run_id=start.terms.run_id,
                    metrics_address=self._board.metrics_address,
                )
            )
            return await self._serve(chronicle, control)

    async def _serve(self, chronicle: Chronicle, control: ControlServer) -> int:
        start = self._start
        listener = self._listener()
        with _address_errors():
            listener.bind()
        address = reachable_at(listener.address, advertise=start.config.node.advertise, seen_from=start.seen_from)
        coordinators = start.coordinators or self._coordinators(address)
        self._board.coordinator = coordinators[0]
        coordination = self._coordination(chronicle)
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(control.serve()), tasks.create_task(self._count(listener, chronicle))]
                try:
                    if coordination is not None:
                        self._coordinator = await coordination.open(
                            tasks,
                            address=address,
                            stands_by=isinstance(start.options.role, StandingBy),
                            closing=self._is_closing,
                        )
                        if self._coordinator is None:
                            return ExitCode.LEFT
                        for bar in self._coordinator.doors.bars.values():
                            self._bouncer.put_out(bar)
                        self._office = self._open_office(self._coordinator, coordinators)
                        helpers.append(tasks.create_task(coordination.run()))
                    if isinstance(start.options, PeerOptions):
                        self._peer = self._make_peer(chronicle, address, coordinators)
                    if self._coordinator is not None:
                        self._doctor = self._make_doctor(self._coordinator)
                    with _address_errors():
                        await listener.start()
                    self._announce(chronicle, listener.address, address)
                    code = await self._take_part()
                    if self._peer is None and self._coordinator is not None:
                        chronicle.stopped_coordinating(is_complete=self._coordinator.finished)
                    return code
                finally:
                    for task in helpers:
                        task.cancel()
                    if coordination is not None:
                        coordination.close()
        finally:
            await listener.close()

    def _coordinators(self, address: str) -> tuple[str, ...]:
        """Where the run's coordinators listen, this one first."""
        own = candidates_of(address)
        others = (other for other in self._start.config.coordinator.addresses if other not in own)
        return (address, *others)

    def _coordination(self, chronicle: Chronicle) -> Coordination | None:
        start, founded = self._start, self._start.founded
        if founded is None:
            return None
        position = None if founded.checkpoint is None else founded.checkpoint.meta
        config = coordinator_config(
            start.config,
            founded.terms.digest(),
            RunSealer(authority_of(founded.run), founded.run.run_id, lambda: start.security.authorities),
            authorities=founded.terms.authorities,
            rebuild_salt=secrets.randbelow(REBUILD_SALTS),
            first_index=0 if position is None else position.next_index,
            returned=() if position is None else position.returned,
        )
        rebuild = self._rebuild_rule(founded)
        if rebuild is not None:
            log.warning("rebuilding rule=%s; the run's peers are asked what they hold", rebuild.name)
        return Coordination(
            start.config.coordinator,
            config,
            run_id=founded.run.run_id,
            me=start.me,
            run_dir=self._run_dir,
            rebuild=rebuild,
            observe=lambda event: self._observe(event, chronicle),
        )

    def _observe(self, event: ElasticEvent, chronicle: Chronicle) -> None:
        chronicle.observe(event)
        match event:
            case RecordWritten(record=BarRecord(bar=bar)):
                self._bouncer.put_out(bar)
            case _:
                pass

    def _open_office(self, coordinator: CoordinatorShell, addresses: tuple[str, ...]) -> Office:
        start = self._start
        assert start.founded is not None, "a coordinator lives here"
        return Office(
            me=start.me,
            run=start.founded.run,
            addresses=addresses,
            fingerprint=start.security.server_fingerprint if start.security.is_served else b"",
            lifetime_s=start.config.members.ticket_lifetime_s,
            coordinator=coordinator,
            now_s=wall_s,
            program=self._program(),
        )

    def _program(self) -> tuple[str, ...] | None:
        """How a loop of one's own is started, if the run is one of loops: like the one here."""
        options = self._start.options
        if isinstance(options, PeerOptions) and options.loop is not None:
            return options.loop.facts.program
        return ("python", "LOOP.py") if self._start.config.is_loops else None

    def _rebuild_rule(self, founded: Founded) -> RebuildRule | None:
        role = self._start.options.role
        if isinstance(role, Founding) and role.rebuild is not None:
            return role.rebuild
        return RebuildRule.MAJORITY if founded.has_lost_its_journal else None

    def _make_peer(self, chronicle: Chronicle, address: str, coordinators: tuple[str, ...]) -> Peer:
        start = self._start
        assert isinstance(start.options, PeerOptions), "who trains is a peer"
        plan = PeerPlan(
            me=start.me,
            address=address,
            coordinators=coordinators,
            config=start.config,
            terms=start.terms,
            corpus=None if start.text is None else start.text.corpus,
            loop=start.options.loop,
            run_dir=self._run_dir,
            checkpoint=None if start.founded is None else start.founded.checkpoint,
            hello=hello_maker(start.me, start.terms.run_id),
            security=start.security,
            bouncer=self._bouncer,
        )
        return Peer(plan, chronicle)

    def _make_doctor(self, coordinator: CoordinatorShell) -> DoctorService:
        start, peer = self._start, self._peer
        node = start.config.node
        hello = hello_maker(start.me, start.terms.run_id)
        caps = Caps(upload=node.max_upload_bytes_per_s, download=node.max_download_bytes_per_s)

        async def dial(member: Member) -> Channel:
            return await connect(
                member.address,
                hello(Purpose.DIAL_BACK, 0, 1),
                timeout_s=_MEMBER_DIAL_S,
                security=start.security,
                expect=member.peer_id,
            )

        async def quiet() -> None:
            if peer is not None:
                await peer.donor.room_for(0)

        surroundings = Surroundings(
            me=start.me.peer_id,
            terms=start.terms,
            version=version("isthmus"),
            now_s=wall_s,
            members=lambda: coordinator.status().view.members,
            dial=dial,
            quiet=quiet,
            upload=caps.upload if peer is None else peer.communicator.upload_cap,
            download=caps.download if peer is None else peer.communicator.download_cap,
        )
        return DoctorService(surroundings, self._call_back)

    def _announce(self, chronicle: Chronicle, listening: str, address: str) -> None:
        start, inner = self._start, self._start.config.inner
        text, seq_len = start.text, tokens_per_sample(start.config.model)
        num_samples = None if text is None else samples_per_data_epoch(len(text.corpus.train), seq_len)
        chronicle.started(
            run_id=start.terms.run_id,
            address=address,
            num_parameters=0 if self._peer is None else self._peer.num_parameters,
            tokens_per_inner_step=inner.batch_size * seq_len,
            samples_per_data_epoch=num_samples,
        )
        is_open = is_wildcard(split_address(listening)[0])
        log.info(
            "listening on=%r address=%s run_id=%s tls=%s",
            "every interface" if is_open else listening,
            address,
            start.terms.run_id,
            start.security.mode,
        )
        if text is not None:
            chronicle.text_found(text)
        role, founded = start.options.role, start.founded
        if founded is None or isinstance(role, Joining):
            return
        remember_terms(start.folder, start.terms, listening)
        made = 0 if founded.checkpoint is None else founded.checkpoint.meta.outer_step
        if made >= start.config.run.outer_steps:
            log.info(
                "run_complete outer_step=%d; nothing is left to train, and with more steps isthmus up --resume %s "
                "--run.outer_steps MORE goes on",
                made,
                self._run_dir,
            )
            return
        assert self._office is not None, "a coordinator lives here"
        ticket = self._office.ticket()
        if start.config.coordinator.store == "etcd":
            save_standby_ticket(start.folder, ticket, founded.run.secret)
        role.announce_ticket(ticket, self._program())

    async def _take_part(self) -> int:
        if self._peer is None:
            await self._everybody_gone(timeout_s=None)
            return ExitCode.DONE
        finish = await self._run_peer(self._peer)
        log.info("finished code=%d reason=%r", finish.code, finish.reason)
        if self._coordinator is not None:
            is_complete = finish.code == ExitCode.DONE
            self._has_left = True
            self._is_closing.clear()  # that was about the peer; from now on it is about the coordinator
            await self._everybody_gone(timeout_s=_FAREWELL_TIMEOUT_S if is_complete else None)
        if finish.code not in (ExitCode.DONE, ExitCode.LEFT):
            raise _Ended(finish)
        return finish.code

    async def _run_peer(self, peer: Peer) -> Finish:
        try:
            return await peer.run()
        except (IsthmusError, ExceptionGroup) as error:
            if self._coordinator is not None:
                # The workers here are lost, the run is not: the others need the coordinator until they are done.
                cause = str(operator_error(error) or leaves(error)[0])
                log.error("peer_failed cause=%r; interrupt to end the coordinator too", cause)  # noqa: TRY400
                self._is_closing.clear()
                await self._everybody_gone(timeout_s=None)
            raise

    async def _everybody_gone(self, *, timeout_s: float | None) -> None:
        """Coordinate for as long as somebody is there, or until this process is asked to stop."""
        assert self._coordinator is not None
        others = len(self._coordinator.status().view.members)
        if others and timeout_s is None and self._peer is not None:
            log.info("still_coordinating members=%d; interrupt again to stop", others)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_over():  # noqa: ASYNC110 - a state of many parts, looked at ten times a second
                    await asyncio.sleep(_POLL_S)
                if self._coordinator.finished:
                    await self._coordinator.until_finished()  # the last goodbyes are on their way

    def _is_over(self) -> bool:
        assert self._coordinator is not None
        status = self._coordinator.status()
        if status.finished or self._is_closing.is_set():
            return True
        return self._peer is not None and not (status.view.members or status.learners)

    # -------------------------------------------------------------------------------- connections

    def _listener(self) -> Listener:
        start = self._start
        gatekeeper = Gatekeeper(
            start.me,
            start.terms,
            security=start.security,
            run=None if start.founded is None else start.founded.run,
            now_s=wall_s,
            coordinator=lambda: self._coordinator,
        )
        routes: dict[Purpose, Callable[[Channel], Awaitable[None]]] = {
            Purpose.STATE: self._donate,
            Purpose.CALLED: self._take_call,
            Purpose.DIAL_BACK: self._call_back.serve,
        }
        if start.founded is not None:
            routes |= {
                Purpose.CONTROL: self._coordinate,
                Purpose.ADMISSION: gatekeeper.admit,
                Purpose.DOCTOR: self._examine,
            }
        listener = Listener(
            self._address(), accept=gatekeeper.accept, routes=routes, bulk=self._adopt, security=start.security
        )
        self._bouncer.ends(listener.put_out)
        return listener

    def _address(self) -> str:
        """With the port of the last start, where the others look for the coordinator, unless told otherwise."""
        listen, founded = self._start.config.node.listen, self._start.founded
        if founded is not None and founded.address is not None and listen.endswith(":0"):
            return join_address(split_address(listen)[0], split_address(founded.address)[1])
        return listen

    async def _coordinate(self, channel: Channel) -> None:
        assert self._coordinator is not None, "nobody is let in before"
        await self._coordinator.serve(channel)

    async def _examine(self, channel: Channel) -> None:
        assert self._doctor is not None, "nobody is let in before"
        await self._doctor.serve(channel)

    async def _donate(self, channel: Channel) -> None:
        if self._peer is None:
            await refuse(channel, "a coordinator alone gives nothing")
            return
        await self._peer.donor.serve(channel)

    async def _take_call(self, channel: Channel) -> None:
        if self._peer is not None:
            await self._peer.callbacks.take(channel)

    def _adopt(self, sock: socket.socket, hello: Hello) -> None:
        if self._peer is None:
            sock.close()
            return
        self._peer.communicator.adopt(sock, hello)

    async def _count(self, listener: Listener, chronicle: Chronicle) -> None:
        while True:
            refused, served_nbytes = dict(listener.counters), 0
            if self._peer is not None:
                served_nbytes = self._peer.donor.bytes_served
                bulk = self._peer.communicator.refused
                refused |= {f"bulk: {reason}": count for reason, count in bulk.items()}
            if self._metrics_server is not None:
                refused |= self._metrics_server.refused
            chronicle.counted(refused=refused, served_nbytes=served_nbytes)
            await asyncio.sleep(1.0)

    # -------------------------------------------------------------------------------- being asked

    def status(self) -> Status:
        """How it is now."""
        farewell = None if self._peer is None else self._peer.farewell()
        if farewell is not None and self._has_left and self._coordinator is not None:
            now = self._coordinator.status()
            num_others = len({*(member.ref for member in now.view.members), *now.learners})
            farewell = msgspec.structs.replace(farewell, waits_for="others", num_others=num_others)
        links = () if self._peer is None else self._peer.communicator.links()
        coordination = None if self._office is None else self._office.status()
        status = self._board.status(os.getpid(), links)
        if self._peer is None and self._office is not None:
            status = self._office.of_its_own(status)
        return msgspec.structs.replace(status, leaving=farewell, coordination=coordination)

    def leave(self) -> None:
        """Begin to leave in order."""
        self._board.is_leaving = True
        self._is_closing.set()
        if self._peer is not None:
            self._peer.leave(now=False)

    def stop(self) -> None:
        """Leave at once, without handing anything in."""
        self._is_closing.set()
        if self._peer is not None:
            self._peer.leave(now=True)

    @property
    def office(self) -> Office | None:
        """Whom an operator asks about the run, where its coordinator lives."""
        return self._office


class _Ended(IsthmusError):
    """The run is over for this peer, and not in a good way."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.reason)
        self.exit_code = ExitCode(finish.code) if finish.code in list(ExitCode) else ExitCode.REFUSED  # type: ignore[misc]


@contextlib.contextmanager
def _address_errors() -> Iterator[None]:
    try:
        yield
    except AddressInUse as error:
        raise EnvironmentFault(str(error)) from error
    except ValueError as error:
        raise ConfigError(
            str(error), cure="name an address of this machine with --listen", key="node.listen"
        ) from error
