# SPDX-License-Identifier: Apache-2.0
"""A process from its first line to its exit code: a peer, a peer with the coordinator in it, or a coordinator alone.

    a peer           folder, identity ─► terms (founded, or asked for) ─► text ─► port ─► [coordinator] ─► Peer ─► open
    a coordinator    the same without a Peer; a standby waits before its port accepts anybody

Rules: the first SIGINT or SIGTERM leaves in order, the second stops at once (interrupts.py). What a process is there
for is over when its part in the run is over and, where the coordinator lives, when everybody else has gone too.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import shlex
from pathlib import Path

import msgspec
import torch

from isthmus.collective.core.address import candidates_of, is_wildcard, split_address
from isthmus.elastic.core.events import Finish
from isthmus.trainer.config.outer_method import pace_of
from isthmus.trainer.config.wiring import fragment_table, tokens_per_sample
from isthmus.trainer.contact.bouncer import Bouncer
from isthmus.trainer.contact.identity import PeerFolder
from isthmus.trainer.contact.office import Office
from isthmus.trainer.contact.reach import Reach
from isthmus.trainer.data.samples import samples_per_data_epoch
from isthmus.trainer.errors import ExitCode, IsthmusError, leaves, operator_error
from isthmus.trainer.files import open_private
from isthmus.trainer.record.chronicle import Chronicle
from isthmus.trainer.record.event_log import FILE_NAME, EventLog
from isthmus.trainer.record.events import Coordinated, CoordinatorEnded, Counted, Failed, LeaveAsked, Started
from isthmus.trainer.record.figures import BLANK, Figures
from isthmus.trainer.record.metrics import Metrics
from isthmus.trainer.record.metrics_server import MetricsServer
from isthmus.trainer.record.page import make_application
from isthmus.trainer.record.status import PeerStatus, Status, members_of
from isthmus.trainer.record.summary import shown
from isthmus.trainer.record.translation import text_found
from isthmus.trainer.run.connections import Reception
from isthmus.trainer.run.control_socket import ControlServer
from isthmus.trainer.run.founding import remember_terms, save_standby_ticket
from isthmus.trainer.run.interrupts import Interrupts
from isthmus.trainer.run.options import CoordinatorOptions, Joining, PeerOptions
from isthmus.trainer.run.peer import Peer
from isthmus.trainer.run.preparation import Start, prepare
from isthmus.trainer.run.seat import Seat
from isthmus.trainer.workers.devices import choose_device
from isthmus.trainer.workers.loop import Loop, LoopEnd

log = logging.getLogger(__name__)

_FAREWELL_TIMEOUT_S = 20.0
"""How long a founder whose run is complete waits for the others to say goodbye."""
_LOG_NAME = "daemon.log"
"""In the folder of a process that has outlived its loop: what it would have said on the loop's terminal."""


async def run_daemon(options: PeerOptions | CoordinatorOptions) -> int:
    """Run a peer until its part in the run is over, or a coordinator alone until the run is complete and everybody has
    gone; returns the exit code. A coordinator that is stopped before has left.

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
        self._bouncer = Bouncer(start.security)
        self._metrics_server: MetricsServer | None = None
        self._seat: Seat | None = None
        self._peer: Peer | None = None
        self._has_left = False
        """The peer's part is over; its coordinator goes on."""
        self._shown: tuple[Status, tuple[PeerStatus, ...]]
        """What the page in a browser shows, of this second: its threads must not look by themselves."""

    # -------------------------------------------------------------------------------- life

    async def live(self, interrupts: Interrupts) -> int:
        """The whole life; returns the exit code."""
        start, run_dir = self._start, self._start.options.run_dir
        config, node = start.config, start.config.node
        with contextlib.ExitStack() as stack:
            events = stack.enter_context(
                EventLog(run_dir / FILE_NAME, start.me.peer_id, max_nbytes=node.events_nbytes, keep=node.events_keep)
            )
            self._chronicle = chronicle = Chronicle(events, self._first_figures())
            self._shown = chronicle.status(), ()
            if isinstance(start.options, PeerOptions):
                start.options.watch(chronicle.status)
            interrupts.leave = self.leave
            if config.metrics_port is not None:
                application = make_application(Metrics(lambda: chronicle.figures), lambda: self._shown)
                server = MetricsServer(application, host=node.metrics_host, port=config.metrics_port)
                self._metrics_server = stack.enter_context(server)
            control = stack.enter_context(
                ControlServer(
                    run_dir,
                    self,
                    peer_id=start.me.peer_id,
                    run_id=start.terms.run_id,
                    metrics_address=self._metrics_address,
                )
            )
            try:
                return await self._serve(chronicle, control)
            except Exception as error:
                self._tell_failure(chronicle, error)
                raise

    @staticmethod
    def _tell_failure(chronicle: Chronicle, error: Exception) -> None:
        """So that the folder knows how its process has ended, unless it has been told of this end already."""
        known = operator_error(error)
        code = int(ExitCode.UNEXPECTED if known is None else known.exit_code)
        if chronicle.figures.code != code:
            chronicle.emit(Failed(code=code, cause=str(leaves(error)[0]) if known is None else known.problem))

    def _first_figures(self) -> Figures:
        start, config = self._start, self._start.config
        return msgspec.structs.replace(
            BLANK,
            run_id=start.terms.run_id,
            peer_id=start.me.peer_id,
            incarnation=start.me.incarnation,
            pid=os.getpid(),
            total_outer_steps=config.run.outer_steps,
            inner_steps_per_round=pace_of(config).longest_stretch,
            coordinator=start.coordinators[0] if start.coordinators else None,
        )

    @property
    def _metrics_address(self) -> str | None:
        return None if self._metrics_server is None else self._metrics_server.address

    async def _serve(self, chronicle: Chronicle, control: ControlServer) -> int:
        reception = Reception(
            self._start, self._bouncer, lambda: None if self._seat is None else self._seat.coordinator
        )
        listening = reception.bind()
        reach = Reach(listening, advertise=self._start.config.node.advertise, seen_from=self._start.seen_from)
        coordinators = self._start.coordinators or self._coordinators(reach.first)
        self._start = start = dataclasses.replace(self._start, coordinators=coordinators)
        self._seat = seat = self._make_seat(chronicle)
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(control.serve()), tasks.create_task(self._count(reception, chronicle))]
                try:
                    if seat is not None:
                        if not await seat.open(tasks, reach.first, lambda: self._coordinators(reach.now())):
                            return ExitCode.LEFT
                        helpers.append(tasks.create_task(seat.run()))
                    if isinstance(start.options, PeerOptions):
                        self._peer = Peer(start, reach, self._bouncer, chronicle)
                        reception.serve(self._peer.connections, self._peer.donor)
                    listening = await reception.open()
                    self._announce(chronicle, listening, reach.now())
                    code = await self._take_part()
                    if self._peer is None and seat is not None and seat.coordinator is not None:
                        chronicle.emit(CoordinatorEnded(complete=seat.coordinator.finished))
                    return code
                finally:
                    for task in helpers:
                        task.cancel()
                    if seat is not None:
                        seat.close()
        finally:
            await reception.close()

    def _coordinators(self, address: str) -> tuple[str, ...]:
        """Where the run's coordinators listen, this one first."""
        own = candidates_of(address)
        others = (other for other in self._start.config.coordinator.addresses if other not in own)
        return (address, *others)

    def _make_seat(self, chronicle: Chronicle) -> Seat | None:
        founded = self._start.founded
        if founded is None:
            return None
        seat = Seat(self._start, founded, self._bouncer, chronicle.observe)
        if seat.rebuild is not None:
            log.warning("rebuilding rule=%s; the run's peers are asked what they hold", seat.rebuild.name)
        return seat

    def _announce(self, chronicle: Chronicle, listening: str, address: str) -> None:
        start, inner = self._start, self._start.config.inner
        text, seq_len = start.text, tokens_per_sample(start.config.model)
        lengths = () if text is None else text.corpus.shard_lengths
        num_samples = sum(samples_per_data_epoch(length, seq_len) for length in lengths) or None
        started = Started(
            run_id=start.terms.run_id,
            address=address,
            num_parameters=0 if self._peer is None else fragment_table(start.config.model).numel,
            tokens_per_inner_step=inner.batch_size * seq_len,
            samples_per_data_epoch=num_samples,
        )
        chronicle.emit(started)
        is_open = is_wildcard(split_address(listening)[0])
        log.info(
            "listening on=%r address=%s run_id=%s tls=%s page=%s",
            "every interface" if is_open else listening,
            address,
            start.terms.run_id,
            start.security.mode,
            None if self._metrics_address is None else f"http://{self._metrics_address}/",
        )
        if text is not None:
            chronicle.emit(text_found(text))
        role, founded = start.options.role, start.founded
        if founded is None or isinstance(role, Joining):
            return
        remember_terms(start.folder, start.terms, listening, began_with=founded.began_with)
        made = 0 if founded.checkpoint is None else founded.checkpoint.meta.outer_step
        if made >= start.config.run.outer_steps:
            log.info(
                "run_complete outer_step=%d; nothing is left to train, and with more steps isthmus up --resume %s "
                "--run.outer_steps MORE goes on",
                made,
                start.options.run_dir,
            )
            return
        assert self.office is not None, "a coordinator lives here"
        ticket = self.office.ticket()
        if start.config.coordinator.store == "etcd":
            save_standby_ticket(start.folder, ticket, founded.run.secret)
        role.announce_ticket(ticket, self.office.program)

    async def _take_part(self) -> int:
        if self._peer is None:
            await self._everybody_gone(timeout_s=None)
            assert self._seat is not None, "a coordinator lives here"
            is_complete = self._seat.coordinator is not None and self._seat.coordinator.finished
            return ExitCode.DONE if is_complete else ExitCode.LEFT
        finish = await self._run_peer(self._peer)
        log.info("finished code=%d reason=%r", finish.code, finish.reason)
        if self._seat is not None:
            is_complete = finish.code == ExitCode.DONE
            self._has_left = True
            self._seat.closing.clear()  # that was about the peer; from now on it is about the coordinator
            owner = None if is_complete or self._goes_on_for_others(finish) else self._start.loop
            await self._everybody_gone(timeout_s=_FAREWELL_TIMEOUT_S if is_complete else None, owner=owner)
        if finish.code not in (ExitCode.DONE, ExitCode.LEFT):
            raise _Ended(finish)
        return finish.code

    async def _run_peer(self, peer: Peer) -> Finish:
        try:
            return await peer.run()
        except (IsthmusError, ExceptionGroup) as error:
            known = operator_error(error)
            cause, code = str(known or leaves(error)[0]), ExitCode.UNEXPECTED if known is None else known.exit_code
            # A loop must not stand in its step meanwhile. Found before: one did, without a deadline; and the process of
            # one that was dead coordinated on, so that nobody could start it again in its folder.
            if self._seat is not None and self._outlives_loop(LoopEnd(exit_code=code, cause=cause)):
                # The workers here are lost, the run is not: the others need the coordinator until they are done.
                log.error("peer_failed cause=%r; interrupt to end the coordinator too", cause)  # noqa: TRY400
                self._seat.closing.clear()
                await self._everybody_gone(timeout_s=None)
            raise

    def _goes_on_for_others(self, finish: Finish) -> bool:
        """Whether the loop has ended before the run, others are there, and the loop knows that they are cared for."""
        if self._peer is None or not self._peer.has_lost_loop or not self._num_others:
            return False
        folder = shown(self._start.options.run_dir)
        cause = (
            f"the loop has ended before its run ({finish.reason}); process {os.getpid()} coordinates the others until "
            f"they end, and its log is {os.path.join(folder, _LOG_NAME)}; "
            f"isthmus leave --now --dir {shlex.quote(folder)} ends it"
        )
        return self._outlives_loop(LoopEnd(exit_code=finish.code, cause=cause))

    def _outlives_loop(self, end: LoopEnd) -> bool:
        """Whether this process may go on without its loop, if it has one; that is told, and lets go of its terminal."""
        loop = self._start.loop
        if loop is None:
            return True
        if not loop.give_up(end):
            return False
        _write_to(self._start.options.run_dir / _LOG_NAME)
        return True

    async def _everybody_gone(self, *, timeout_s: float | None, owner: Loop | None = None) -> None:
        """Coordinate for as long as somebody is there, and the owner; or until this process is asked to stop."""
        assert self._seat is not None, "a coordinator lives here"
        assert self._seat.coordinator is not None, "it was opened"
        others = len(self._seat.coordinator.status().view.members)
        if others and timeout_s is None and self._peer is not None:
            log.info("still_coordinating members=%d; interrupt again to stop", others)
        await self._seat.everybody_gone(has_peer=self._peer is not None, timeout_s=timeout_s, owner=owner)

    async def _count(self, reception: Reception, chronicle: Chronicle) -> None:
        while True:
            refused = reception.refused()
            if self._metrics_server is not None:
                refused |= self._metrics_server.refused
            served_nbytes = 0 if self._peer is None else self._peer.donor.bytes_served
            chronicle.emit(Counted(refused=refused, state_served_bytes=served_nbytes))
            if self._peer is None and self._seat is not None and self._seat.coordinator is not None:
                view = self._seat.coordinator.status().view
                members = tuple(member.peer_id for member in view.members)
                chronicle.emit(Coordinated(epoch=view.epoch, outer_step=view.outer_step, members=members))
            self._shown = self.status(), self.peers()
            await asyncio.sleep(1.0)

    # -------------------------------------------------------------------------------- being asked

    def status(self) -> Status:
        """How it is now."""
        peer, office = self._peer, self.office
        leaving = None if peer is None else peer.farewell.status()
        if leaving is not None and self._has_left and self._seat is not None:
            leaving = msgspec.structs.replace(leaving, waits_for="others", num_others=self._num_others)
        status = self._chronicle.status(() if peer is None else peer.connections.communicator.links())
        if peer is None and office is not None:
            status = office.of_its_own(status)
        coordination = None if office is None else office.status()
        address = self._metrics_address
        return msgspec.structs.replace(status, leaving=leaving, coordination=coordination, metrics_address=address)

    def peers(self) -> tuple[PeerStatus, ...]:
        """Who is in the run, as far as this process knows."""
        return members_of(self.status()) if self.office is None else self.office.peers()

    def leave(self) -> None:
        """Begin to leave in order."""
        self._chronicle.emit(LeaveAsked())
        self._go(now=False)

    def stop(self) -> None:
        """Leave at once, without handing anything in."""
        self._go(now=True)

    def _go(self, *, now: bool) -> None:
        if self._seat is not None:
            self._seat.closing.set()
        if self._peer is not None:
            self._peer.farewell.leave(now=now)

    @property
    def _num_others(self) -> int:
        """How many are in the run, once this process's peer has left it."""
        if self._seat is None or self._seat.coordinator is None:
            return 0
        now = self._seat.coordinator.status()
        return len({*(member.ref for member in now.view.members), *now.learners})

    @property
    def office(self) -> Office | None:
        """Whom an operator asks about the run, where its coordinator lives."""
        return None if self._seat is None else self._seat.office


def _write_to(path: Path) -> None:
    """Write there from now on. Else the loop's pipe would stay open, and its reader would wait for this process."""
    try:
        file = open_private(path, "ab")
    except OSError:
        file = open(os.devnull, "ab")  # noqa: SIM115 - closed below
    with file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


class _Ended(IsthmusError):
    """The run is over for this peer, and not in a good way."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.reason)
        self.exit_code = ExitCode(finish.code) if finish.code in list(ExitCode) else ExitCode.REFUSED  # type: ignore[misc]
