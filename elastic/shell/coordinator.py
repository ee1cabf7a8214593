# SPDX-License-Identifier: Apache-2.0
"""The coordinator's shell: its machine, its journal, and the control connections of the peers.

Rules:
* Effects are carried out in order, those of one event before the next event is handled: nobody can hear of a record
  that is not durable. A quick store writes at once (0.2 ms); another one writes in a thread of its own, and what is
  said meanwhile waits in a bounded queue. What finds it full is forgotten: the peers' timers say everything again.
* The machine's time stands still while the store is at work or peers are sent away: it can neither hear nor speak
  then, and a store that was away for a minute must not cost anybody its membership.
* Sends never wait: a peer that does not read is disconnected, the machine goes on.
* Now and then, between two events, a snapshot is written, so that a restart need not read all that ever happened. The
  machine does not know of it: it decides nothing.
* If the journal cannot be written, the machine's memory is ahead of it: all connections are closed, `run` raises, and
  nobody hears anything more. Crash only: a restart replays the journal.
* A peer's identity comes from its handshake. A newer connection of the same start of a peer replaces the older one.

It decides nothing: that is elastic/core/coordinator.py. It knows no tensors and no addresses.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import msgspec

from isthmus.collective.core.types import Incarnation, Instant, OuterStep, PeerId, PeerRef, View
from isthmus.collective.errors import ConnectionLost, StreamBroken
from isthmus.collective.transport import Channel
from isthmus.elastic.core.config import CoordinatorConfig, RebuildRule
from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.doors import Doors
from isthmus.elastic.core.events import (
    Answered,
    CoordinatorEffect,
    CoordinatorEvent,
    Disconnect,
    Expose,
    Order,
    Ordered,
    PeerConnectionLost,
    PeerSaid,
    Persist,
    Resign,
    SendToPeer,
    Tick,
)
from isthmus.elastic.core.messages import PeerMessage
from isthmus.elastic.core.records import Record, SnapshotRecord
from isthmus.elastic.errors import JournalOutdated
from isthmus.elastic.journal.store import Store, pack
from isthmus.elastic.observation import Lied, Observe, PeerConnected, PeerDisconnected, RecordWritten, ignore
from isthmus.elastic.shell.alarm import Alarm, HeldClock
from isthmus.elastic.shell.control import ControlConnection

_log = logging.getLogger(__name__)

_STORY_LENGTH = 20
"""Events that are told when the machine fails."""

_MAX_EVENTS = 4096
"""Events that wait for the store: a second's heartbeats of every session there can be, four times."""

_FLUSH_TIMEOUT_S = 5.0
"""For the last words to each peer, when the run is over."""

_LAST_WORD_S = 0.3
"""For telling a peer that it is put out, before its connection ends."""

_PEER_MESSAGES: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatus:
    """What the coordinator knows, for people. It may be ahead of the journal by the event that is being carried out."""

    view: View
    """Epoch, members, and the committed outer step and digest."""
    learners: tuple[PeerRef, ...]
    """Peers that are connected and no members."""
    excused: tuple[PeerRef, ...]
    """Late members that the round goes on without."""
    voted: tuple[PeerId, ...]
    """Members whose vote on the round in progress is here."""
    addresses: dict[PeerRef, str]
    """Where peers say that others reach them."""
    samples_leased: int
    """Sample indices that are given out and not consumed by a commit yet."""
    finished: bool
    """The run has ended and everybody has gone."""
    is_rebuilding: bool
    """The journal is lost; the peers' certificates are awaited."""
    counters: dict[str, int]
    """What was dropped and who was given up, by reason."""


class CoordinatorShell:
    """Runs a CoordinatorMachine. Everything happens on the event loop's thread.

    Args:
        config: rules of the run.
        store: the journal; replayed here, closed by the caller.
        rebuild: if the journal is empty it was lost, and is made anew from the peers' certificates by this rule. None
            for a run that may be a new one; a peer that brings a certificate proves that it is not.
        compact_every: a snapshot is written after so many records; 0: never.
        observe: told of every record and connection.
        clock: monotonic seconds.

    Raises:
        JournalCorrupted: the journal cannot be replayed.
        JournalUnwritable: the store cannot be read now.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        *,
        rebuild: RebuildRule | None = None,
        compact_every: int = 0,
        observe: Observe = ignore,
        clock: Callable[[], Instant] = time.monotonic,
    ) -> None:
        self._store = store
        self._observe = observe
        self._time = HeldClock(clock)
        self._time.hold()  # whoever was a member has its full grace, however long the journal is
        self._compact_every = compact_every
        self._num_since_snapshot = 0
        records = self._counted(store.replay())
        self._machine = CoordinatorMachine.recover(config, records, self._time.now(), rebuild=rebuild)
        self._time.release()
        self._events: deque[CoordinatorEvent] = deque()
        self._effects: deque[CoordinatorEffect] = deque()  # of the event handled last, not carried out yet
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")  # starts no thread for a quick store
        self._is_writing = False
        self._counters: Counter[str] = Counter()
        self.is_away = False
        """Whether peers are sent away."""
        self._connections: dict[PeerRef, ControlConnection[PeerMessage]] = {}
        self._alarm = Alarm(self._time.now)
        self._asked: dict[int, asyncio.Future[str | None]] = {}
        self._serial = 0
        self._over = asyncio.Event()
        self._failure: Exception | None = None
        self._stopped = False

    # -------------------------------------------------------------------------------- the outside

    async def serve(self, channel: Channel) -> None:
        """Talk with one peer until its connection ends. The route for CONTROL connections of the listener.

        Raises:
            RemoteProtocolError, StreamBroken: the peer sent something that is no message; its connection is closed.
        """
        ref = channel.hello.ref
        if self._stopped or self.is_away:
            channel.close()
            return
        connection: ControlConnection[PeerMessage] = ControlConnection(channel, _PEER_MESSAGES)
        older = self._connections.pop(ref, None)
        if older is not None:
            older.end("replaced by a newer connection of the same peer")
        self._connections[ref] = connection
        self._observe(PeerConnected(of=ref.peer_id, incarnation=ref.incarnation))
        cause: Exception = ConnectionLost("closed here")
        try:
            cause = await connection.run(partial(self._heard, ref))
        finally:
            # Of a connection that was replaced the machine never hears: its peer is there.
            if self._connections.get(ref) is connection:
                del self._connections[ref]
                self._observe(PeerDisconnected(of=ref.peer_id, incarnation=ref.incarnation, cause=str(cause)))
                self._feed(PeerConnectionLost(sender=ref))
        if not isinstance(cause, ConnectionLost) or isinstance(cause, StreamBroken):
            raise cause

    async def run(self) -> None:
        """Keep the machine's time until cancelled.

        Raises:
            JournalUnwritable: a record could not be made durable; the process should end with exit code 3.
            Superseded: another coordinator has taken the run over.
            JournalOutdated: a peer has proved that the journal is an old copy; exit code 9.
            Exception: whatever else went wrong inside; it is a bug of ours.
        """
        try:
            while self._failure is None:
                deadline = None if self._time.is_held else self._machine.next_deadline()
                if await self._alarm.sleep_until(deadline):
                    self._feed(Tick())
            raise self._failure
        finally:
            self._stop("the coordinator stops")
            self._writer.shutdown(wait=False)  # who closes the store ends an append that is under way

    def send_away(self, cause: str) -> None:
        """Let all peers look for another coordinator: there may be one, and this one cannot know.

        It is not held against them: the machine does not hear of it. `welcome` ends it.
        """
        if not self.is_away:
            self.is_away = True
            self._time.hold()
        connections, self._connections = self._connections, {}
        for ref, connection in connections.items():
            connection.end(cause)
            self._observe(PeerDisconnected(of=ref.peer_id, incarnation=ref.incarnation, cause=cause))

    def welcome(self) -> None:
        """Take connections again."""
        if self.is_away:
            self.is_away = False
            self._time.release()
            self._alarm.wake()

    async def order(self, order: Order, *, timeout_s: float) -> str | None:
        """Carry out an order; returns when it is in the journal. None, or why it was not done or may not have been."""
        self._serial += 1
        asked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._asked[self._serial] = asked
        if not self._feed(Ordered(serial=self._serial, order=order)):
            self._asked.pop(self._serial, None)
            return "the coordinator has no time for it now"
        try:
            async with asyncio.timeout(timeout_s):
                return await asked
        except TimeoutError:
            return f"the coordinator's journal has not been written for {timeout_s:g} s"
        finally:
            self._asked = {serial: other for serial, other in self._asked.items() if other is not asked}

    def newest_start(self, peer_id: PeerId) -> Incarnation | None:
        """The newest start of a peer that is connected, whatever it has said so far; None if none is."""
        starts = [ref.incarnation for ref in self._connections if ref.peer_id == peer_id]
        return max(starts, default=None)

    @property
    def doors(self) -> Doors:
        """Who is kept out, and which tickets are void. It may be ahead of the journal by one event."""
        return self._machine.state.doors

    async def until_finished(self) -> None:
        """Wait until the run has ended, everybody has gone, and the last words are sent."""
        await self._over.wait()
        for connection in list(self._connections.values()):
            await connection.flush(_FLUSH_TIMEOUT_S)

    @property
    def finished(self) -> bool:
        """Whether the run has ended, everybody has gone, and all of that is in the journal."""
        is_settled = not self._is_writing and not self._effects and self._failure is None
        return is_settled and self._machine.finished

    @property
    def outer_step(self) -> OuterStep:
        """The newest committed outer step."""
        return self._machine.state.view.outer_step

    def status(self) -> CoordinatorStatus:
        """A snapshot for people."""
        state = self._machine.state
        return CoordinatorStatus(
            view=state.view,
            learners=tuple(ref for ref in self._connections if not state.view.holds(ref)),
            excused=tuple(state.excused),
            voted=self._machine.voted,
            addresses=self._machine.addresses(),
            samples_leased=sum(len(piece) for ref in state.leases.owners() for piece in state.leases.owned_by(ref)),
            finished=self.finished,
            is_rebuilding=self._machine.is_rebuilding,
            counters=dict(self._machine.counters + self._counters),
        )

    # -------------------------------------------------------------------------------- the machine

    def _heard(self, sender: PeerRef, message: PeerMessage) -> None:
        self._feed(PeerSaid(sender=sender, message=message))

    def _feed(self, event: CoordinatorEvent) -> bool:
        """Whether the event will be handled."""
        if self._stopped:
            return False
        if len(self._events) >= _MAX_EVENTS:
            self._counters["event_forgotten"] += 1
            return False
        self._events.append(event)
        self._go_on()
        return True

    def _go_on(self) -> None:
        """Handle event after event, until none is left or a record is on its way to the store."""
        try:
            while not self._is_writing and not self._stopped:
                if self._effects:
                    self._carry_out(self._effects.popleft())
                elif self._is_snapshot_due:
                    self._write_snapshot(self._machine.state.snapshot())
                elif self._events:
                    self._effects.extend(self._machine.handle(self._events.popleft(), self._time.now()))
                else:
                    break
        except Exception as error:  # noqa: BLE001 - run() raises it
            self._fail(error)
        if self.finished:
            self._over.set()
        self._alarm.wake()

    @property
    def _is_snapshot_due(self) -> bool:
        has_begun = self._machine.state.committed is not None
        return has_begun and 0 < self._compact_every <= self._num_since_snapshot

    def _write_snapshot(self, record: SnapshotRecord) -> None:
        nbytes = len(pack(record))
        if nbytes <= self._store.longest_nbytes:
            self._persist(record)
        else:
            _log.warning("journal_not_compacted cause='a snapshot has %d bytes'; it is longer than it need be", nbytes)
            self._num_since_snapshot = 0

    def _counted(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            self._count(record)
            yield record

    def _count(self, record: Record) -> None:
        self._num_since_snapshot = 0 if isinstance(record, SnapshotRecord) else self._num_since_snapshot + 1

    def _fail(self, error: Exception) -> None:
        """A machine that raised, or is ahead of its journal, must not be asked again, and nobody may hear of it."""
        story = list(self._machine.story)[-_STORY_LENGTH:]
        _log.error("coordinator_failed cause=%r story=%r", error, story)
        self._failure = error
        self._stop("the coordinator failed")

    def _stop(self, cause: str) -> None:
        """No more events: that connections break because we stop must not be held against the peers."""
        self._stopped = True
        for connection in self._connections.values():
            connection.end(cause)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(cause)
        self._asked.clear()

    def _carry_out(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Persist(record=record):
                self._persist(record)
            case SendToPeer(to=ref, message=message):
                connection = self._connections.get(ref)
                if connection is not None:
                    connection.send(message)
            case Disconnect(peer_id=peer_id, up_to=up_to):
                for ref, connection in self._connections.items():
                    if ref.peer_id == peer_id and ref.incarnation <= up_to:
                        connection.finish("put out", within_s=_LAST_WORD_S)
            case Answered(serial=serial, refusal=refusal):
                asked = self._asked.pop(serial, None)
                if asked is not None and not asked.done():
                    asked.set_result(refusal)
            case Resign(reason=reason):
                raise JournalOutdated(reason)
            case Expose(ref=ref, outer_step=step, cause=cause):
                self._observe(Lied(of=ref.peer_id, incarnation=ref.incarnation, outer_step=step, cause=cause))
            case _:
                assert_never(effect)

    def _persist(self, record: Record) -> None:
        self._time.hold()
        if self._store.is_quick:
            self._written(record, self._store.append(record))
            return
        self._is_writing = True
        writing = asyncio.get_running_loop().run_in_executor(self._writer, self._store.append, record)
        writing.add_done_callback(partial(self._on_written, record))

    def _on_written(self, record: Record, writing: asyncio.Future[int]) -> None:
        self._is_writing = False
        if writing.cancelled():
            return  # the loop is ending
        try:
            slot = writing.result()  # also where nobody wants it any more: an error must have been looked at
            if not self._stopped:
                self._written(record, slot)
        except Exception as error:  # noqa: BLE001 - run() raises it
            if not self._stopped:
                self._fail(error)
        self._go_on()

    def _written(self, record: Record, slot: int) -> None:
        self._time.release()
        self._count(record)
        self._observe(RecordWritten(slot=slot, record=record))
