"""The coordinator's shell: its machine, its journal, and the control connections of the peers.

Rules:
* Effects are carried out in order. `Persist` is synchronous (0.2 ms): nobody can hear of a record that is not on disk.
* Sends never wait: a peer that does not read is disconnected, the machine goes on.
* If the journal cannot be written, the machine's memory is ahead of the disk: all connections are closed, `run`
  raises, and nobody hears anything more. Crash only: a restart replays the journal.
* A peer's identity comes from its handshake. A newer connection of the same start of a peer replaces the older one.

It decides nothing: that is elastic/core/coordinator.py. It knows no tensors and no addresses.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from collective.core.types import Instant, OuterStep, PeerRef, View
from collective.errors import ConnectionLost
from collective.transport import Channel
from elastic.alarm import Alarm
from elastic.control import ControlConnection
from elastic.core.config import CoordinatorConfig, RebuildRule
from elastic.core.coordinator import CoordinatorMachine
from elastic.core.events import (
    CoordinatorEffect,
    CoordinatorEvent,
    PeerConnectionLost,
    PeerSaid,
    Persist,
    Resign,
    SendToPeer,
    Tick,
)
from elastic.core.messages import PeerMessage
from elastic.errors import JournalOutdated
from elastic.journal import Store
from elastic.observation import Observe, PeerConnected, PeerDisconnected, RecordWritten, ignore

_log = logging.getLogger(__name__)

_STORY_LENGTH = 20
"""Events that are told when the machine fails."""

_PEER_MESSAGES: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatus:
    """What the coordinator knows, for people."""

    view: View
    """Epoch, members, and the committed outer step and digest."""
    learners: tuple[PeerRef, ...]
    """Peers that are connected and no members."""
    samples_leased: int
    """Sample indices that are given out and not consumed by a commit yet."""
    next_index: int
    """First sample index that was never given out."""
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
        observe: told of every record and connection.
        clock: monotonic seconds.

    Raises:
        JournalCorrupted: the journal cannot be replayed.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        *,
        rebuild: RebuildRule | None = None,
        observe: Observe = ignore,
        clock: Callable[[], Instant] = time.monotonic,
    ) -> None:
        self._store = store
        self._observe = observe
        self._clock = clock
        self._machine = CoordinatorMachine.recover(config, store.replay(), clock(), rebuild=rebuild)
        self._connections: dict[PeerRef, ControlConnection[PeerMessage]] = {}
        self._alarm = Alarm(clock)
        self._over = asyncio.Event()
        self._failure: Exception | None = None
        self._stopped = False

    # -------------------------------------------------------------------------------- the outside

    async def serve(self, channel: Channel) -> None:
        """Talk with one peer until its connection ends. The route for CONTROL connections of the listener.

        Raises:
            RemoteProtocolError: the peer sent something that is no message; its connection is closed.
        """
        ref = channel.hello.ref
        if self._stopped:
            channel.close()
            return
        connection: ControlConnection[PeerMessage] = ControlConnection(channel, _PEER_MESSAGES)
        older = self._connections.pop(ref, None)
        if older is not None:
            older.end("replaced by a newer connection of the same peer")
        self._connections[ref] = connection
        self._observe(PeerConnected(ref=ref))
        cause: Exception = ConnectionLost("closed here")
        try:
            cause = await connection.run(lambda message: self._feed(PeerSaid(sender=ref, message=message)))
        finally:
            # Of a connection that was replaced the machine never hears: its peer is there.
            if self._connections.get(ref) is connection:
                del self._connections[ref]
                self._observe(PeerDisconnected(ref=ref, cause=str(cause)))
                self._feed(PeerConnectionLost(sender=ref))
        if not isinstance(cause, ConnectionLost):
            raise cause

    async def run(self) -> None:
        """Keep the machine's time until cancelled.

        Raises:
            JournalUnwritable: a record could not be made durable; the process should end with exit code 3.
            JournalOutdated: a peer has proved that the journal is an old copy; exit code 9.
            Exception: whatever else went wrong inside; it is a bug of ours.
        """
        try:
            while self._failure is None:
                if await self._alarm.sleep_until(self._machine.next_deadline()):
                    self._feed(Tick())
            raise self._failure
        finally:
            self._stop("the coordinator stops")

    async def until_finished(self, *, flush_timeout_s: float = 5.0) -> None:
        """Wait until the run has ended, everybody has gone, and the last words are sent."""
        await self._over.wait()
        for connection in list(self._connections.values()):
            await connection.flush(flush_timeout_s)

    @property
    def finished(self) -> bool:
        """Whether the run has ended and everybody has gone."""
        return self._machine.finished

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
            samples_leased=sum(len(piece) for ref in state.leases.owners() for piece in state.leases.owned_by(ref)),
            next_index=state.leases.next_index,
            finished=self.finished,
            is_rebuilding=self._machine.is_rebuilding,
            counters=dict(self._machine.counters),
        )

    # -------------------------------------------------------------------------------- the machine

    def _feed(self, event: CoordinatorEvent) -> None:
        if self._stopped:
            return
        try:
            self._carry_out(self._machine.handle(event, self._clock()))
        except Exception as error:  # noqa: BLE001 - run() raises it
            # A machine that raised, or is ahead of its journal, must not be asked again, and nobody may hear of it.
            story = list(self._machine.story)[-_STORY_LENGTH:]
            _log.error("coordinator_failed cause=%r story=%r", error, story)
            self._failure = error
            self._stop("the coordinator failed")
        if self._machine.finished:
            self._over.set()
        self._alarm.wake()

    def _stop(self, cause: str) -> None:
        """No more events: that connections break because we stop must not be held against the peers."""
        self._stopped = True
        for connection in self._connections.values():
            connection.end(cause)

    def _carry_out(self, effects: Sequence[CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case Persist(record=record):
                    slot = self._store.append(record)
                    self._observe(RecordWritten(slot=slot, record=record))
                case SendToPeer(to=ref, message=message):
                    connection = self._connections.get(ref)
                    if connection is not None:
                        connection.send(message)
                case Resign(reason=reason):
                    raise JournalOutdated(reason)
                case _:
                    assert_never(effect)
