# SPDX-License-Identifier: Apache-2.0
import asyncio
import contextlib
import sqlite3
import threading

import msgspec
import pytest

from isthmus.collective.core.types import Incarnation, PeerRef
from isthmus.collective.errors import ConnectionLost
from isthmus.collective.transport import FrameType, Purpose, connect
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.doorkeeper import EVICTED
from isthmus.elastic.core.events import PutOut, UseTicket
from isthmus.elastic.core.messages import (
    CoordinatorMessage,
    Evicted,
    Heartbeat,
    Held,
    Join,
    LeaseGrant,
    LeaseRequest,
    NewView,
    Refused,
    Synced,
    Welcome,
)
from isthmus.elastic.core.records import BarRecord, Genesis, LeaseRecord, SnapshotRecord, TicketRecord, ViewRecord
from isthmus.elastic.errors import JournalUnwritable, Superseded
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.observation import PeerConnected, PeerDisconnected, RecordWritten
from isthmus.elastic.shell.alarm import HeldClock
from isthmus.elastic.shell.control import ControlConnection
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.elastic.wire import encode
from tests.unit.elastic.harness import RUN_ID, hello, listening, peer_id, until
from tests.unit.elastic.machines import KEYS

MANIFEST = b"m" * 32
STATE = Held(0, b"0" * 32)


class Client:
    """A peer by hand: says what it is told to, and hears."""

    def __init__(self, channel):
        self.channel = channel

    async def say(self, *messages):
        for message in messages:
            await self.channel.send(FrameType.CONTROL, encode(message), timeout_s=5.0)

    async def hear(self, kind):
        """The next message of this kind; others are passed over."""
        while True:
            frame = await self.channel.receive(timeout_s=5.0)
            message = msgspec.msgpack.decode(frame.payload, type=CoordinatorMessage)
            if isinstance(message, kind):
                return message

    async def cut_off(self):
        """Everything there is to hear until the connection ends."""
        with contextlib.suppress(ConnectionLost):
            while True:
                await self.channel.receive(timeout_s=5.0)

    async def become_member(self):
        await self.say(Join(address="127.0.0.1:1", manifest_digest=MANIFEST))
        await self.hear(Welcome)
        await self.say(Synced(held=STATE))
        return (await self.hear(NewView)).view


class Host:
    def __init__(self, shell, address, observed, counters):
        self.shell = shell
        self.address = address
        self.observed = observed
        self.counters = counters
        self.clients = []

    async def dial(self, number, incarnation=1):
        channel = await connect(self.address, hello(Purpose.CONTROL, number, incarnation), timeout_s=5.0)
        self.clients.append(channel)
        return Client(channel)

    def saw(self, kind):
        return [event for event in self.observed if isinstance(event, kind)]


@contextlib.asynccontextmanager
async def _hosting(store, *, compact_every=0, **config):
    observed = []
    shell = CoordinatorShell(
        CoordinatorConfig(manifest_digest=MANIFEST, sealer=KEYS.of_the_run, outer_steps=100, **config),
        store,
        compact_every=compact_every,
        observe=observed.append,
    )
    async with listening(1000, {Purpose.CONTROL: shell.serve}) as listener, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(shell.run())
        host = Host(shell, listener.address, observed, listener.counters)
        try:
            yield host
        finally:
            running.cancel()
            for channel in host.clients:
                channel.close()


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite", run_id=RUN_ID)
    yield journal
    journal.close()


async def test_first_peer_founds_and_is_a_member(journal):
    async with _hosting(journal) as host:
        client = await host.dial(1)
        await client.say(Join(address="127.0.0.1:1", manifest_digest=MANIFEST))
        while not (await client.hear(Welcome)).found:
            pass
        await client.say(Synced(held=STATE))
        view = (await client.hear(NewView)).view
        assert [member.peer_id for member in view.members] == [peer_id(1)]
        status = host.shell.status()
        assert status.view == view
        assert status.learners == ()
    assert [type(record) for record in journal.replay()] == [Genesis, ViewRecord]
    assert [event.record for event in host.saw(RecordWritten)] == journal.replay()


async def test_learners_are_counted_apart_from_members(journal):
    async with _hosting(journal) as host:
        await (await host.dial(1)).become_member()
        await (await host.dial(2)).say(Join(address="127.0.0.1:2", manifest_digest=MANIFEST))
        await until(lambda: host.shell.status().learners == (PeerRef(peer_id(2), 1),))
        assert host.shell.status().view.world_size == 1


async def test_record_is_durable_before_anybody_hears_of_it(tmp_path):
    """At the instant a message arrives, another connection to the same file already finds its record."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, run_id=RUN_ID)
    async with _hosting(journal) as host:
        client = await host.dial(1)
        view = await client.become_member()
        with contextlib.closing(sqlite3.connect(path)) as other:
            rows = other.execute("SELECT record FROM journal ORDER BY slot").fetchall()
        assert msgspec.msgpack.decode(rows[1][0], type=Genesis | ViewRecord).view == view
    journal.close()


async def test_a_snapshot_is_written_after_so_many_records_and_a_restart_begins_with_it(journal):
    async with _hosting(journal, compact_every=4) as host:
        client = await host.dial(1)
        view = await client.become_member()
        for serial in range(1, 6):
            await client.say(LeaseRequest(epoch=view.epoch, serial=serial, num_samples=2))
            await client.hear(LeaseGrant)
        told = [event.record for event in host.saw(RecordWritten)]
    kinds = [Genesis, ViewRecord, LeaseRecord, LeaseRecord, SnapshotRecord, *[LeaseRecord] * 3]
    assert [type(record) for record in told] == kinds
    assert [event.slot for event in host.saw(RecordWritten)] == list(range(8))
    assert journal.replay() == told[4:]
    async with _hosting(journal, compact_every=4) as host:
        assert host.shell.status().view == view
        assert host.shell.status().samples_leased == 10
        again = await host.dial(1)
        await again.say(Heartbeat(epoch=view.epoch, outer_step=view.outer_step, progress=1, blocked=False))
        await again.say(LeaseRequest(epoch=view.epoch, serial=5, num_samples=2))
        assert (await again.hear(LeaseGrant)).ranges == told[7].ranges
        await again.say(LeaseRequest(epoch=view.epoch, serial=6, num_samples=2))
        await again.hear(LeaseGrant)
        await until(lambda: len(host.saw(RecordWritten)) == 2)
        assert [type(event.record) for event in host.saw(RecordWritten)] == [LeaseRecord, SnapshotRecord]
    assert len(journal.replay()) == 1


class FullDisk:
    """A store that can keep `room` records and then raises, as the real one does on a full disk."""

    is_quick = True

    def __init__(self, journal, room):
        self.journal = journal
        self.room = room

    def append(self, record):
        if self.room == 0:
            raise JournalUnwritable(self.journal.path, "database or disk is full")
        self.room -= 1
        return self.journal.append(record)

    def replay(self):
        return self.journal.replay()

    def close(self):
        self.journal.close()


async def test_full_disk_stops_the_coordinator_and_nobody_hears_of_the_lost_record(journal):
    shell = CoordinatorShell(
        CoordinatorConfig(manifest_digest=MANIFEST, sealer=KEYS.of_the_run, outer_steps=9), FullDisk(journal, 1)
    )
    async with listening(1000, {Purpose.CONTROL: shell.serve}) as listener:
        channel = await connect(listener.address, hello(Purpose.CONTROL, 1), timeout_s=5.0)
        client, idle = Client(channel), await connect(listener.address, hello(Purpose.CONTROL, 2), timeout_s=5.0)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_raised(shell.run()))
            await client.say(Join(address="127.0.0.1:1", manifest_digest=MANIFEST))
            await client.hear(Welcome)
            await client.say(Synced(held=STATE))  # Genesis fits, the view does not
            with pytest.raises(ConnectionLost):
                await client.hear(NewView)
            with pytest.raises(ConnectionLost):
                await idle.receive(timeout_s=5.0)
        assert isinstance(running.result(), JournalUnwritable)
        late = await connect(listener.address, hello(Purpose.CONTROL, 3), timeout_s=5.0)
        with pytest.raises(ConnectionLost):
            await late.receive(timeout_s=5.0)
        for each in (channel, idle, late):
            each.close()
    assert [type(record) for record in journal.replay()] == [Genesis]


async def _raised(work):
    try:
        await work
    except (JournalUnwritable, Superseded) as error:
        return error


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"\x80" * 1000,
        b"\x91" * 100_000,
        encode(Welcome(epoch=1, target=None, donors=())),
        msgspec.msgpack.encode({"type": "Heartbeat", "epoch": 0, "outer_step": 0, "progress": -1, "blocked": False}),
        msgspec.msgpack.encode({"type": "Leave", "now": True, "extra": 1}),
        msgspec.msgpack.encode({"type": "Leave", "now": 2**63}),
        b"\x81\xa4type\xa5Le\xff\xfee",
    ],
    ids=["never used", "many maps", "deep", "a coordinator's", "negative", "unknown", "big", "no text"],
)
async def test_nonsense_closes_its_connection_and_nobody_elses(journal, payload):
    async with _hosting(journal) as host:
        good, bad = await host.dial(1), await host.dial(2)
        await good.become_member()
        await bad.channel.send(FrameType.CONTROL, payload, timeout_s=5.0)
        with pytest.raises(ConnectionLost):
            await bad.channel.receive(timeout_s=5.0)
        await until(lambda: len(host.saw(PeerDisconnected)) == 1)
        assert host.counters["control: message not understood"] == 1
        await good.say(LeaseRequest(epoch=host.shell.status().view.epoch, serial=1, num_samples=8))
        assert (await good.hear(LeaseGrant)).ranges[0].start == 0
    assert isinstance(journal.replay()[-1], LeaseRecord)


async def test_stranger_is_told_that_it_is_no_member(journal):
    async with _hosting(journal) as host:
        client = await host.dial(7)
        await client.say(Heartbeat(epoch=3, outer_step=9, progress=1, blocked=False))
        assert isinstance(await client.hear(Evicted), Evicted)


async def test_other_manifest_is_refused_with_an_exit_code(journal):
    async with _hosting(journal) as host:
        client = await host.dial(7)
        await client.say(Join(address="127.0.0.1:1", manifest_digest=b"o" * 32))
        assert (await client.hear(Refused)).code == 5


async def test_newer_connection_of_the_same_peer_replaces_the_older(journal):
    """The half-open connection of a peer that changed its network must not count as the peer's end."""
    async with _hosting(journal, reconnect_grace_s=0.05) as host:
        first = await host.dial(1)
        view = await first.become_member()
        second = await host.dial(1)
        await first.cut_off()
        await second.say(Heartbeat(epoch=view.epoch, outer_step=0, progress=1, blocked=False))
        await asyncio.sleep(0.2)  # four times the grace that a lost connection would have
        assert host.shell.status().view == view
        assert len(host.saw(PeerConnected)) == 2
        assert host.saw(PeerDisconnected) == []
        await second.say(LeaseRequest(epoch=view.epoch, serial=1, num_samples=8))
        await second.hear(LeaseGrant)


async def test_member_whose_connection_broke_is_given_up_after_its_grace(journal):
    async with _hosting(journal, reconnect_grace_s=0.05) as host:
        client = await host.dial(1)
        await client.become_member()
        client.channel.close()
        await until(lambda: host.shell.status().view.world_size == 0)
        assert len(host.saw(PeerDisconnected)) == 1


async def test_silent_member_is_given_up_by_the_clock_alone(journal):
    async with _hosting(journal, heartbeat_timeout_s=1.0) as host:
        client = await host.dial(1)
        await client.become_member()
        await until(lambda: host.shell.status().view.world_size == 0)


async def test_restarted_coordinator_knows_what_it_knew(tmp_path):
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, run_id=RUN_ID)
    async with _hosting(journal) as host:
        client = await host.dial(1)
        view = await client.become_member()
        await client.say(LeaseRequest(epoch=view.epoch, serial=1, num_samples=8))
        ranges = (await client.hear(LeaseGrant)).ranges
    journal.close()
    journal = Journal(path, run_id=RUN_ID)
    async with _hosting(journal) as host:
        status = host.shell.status()
        assert (status.view, status.samples_leased) == (view, 8)
        client = await host.dial(1)
        await client.say(Join(epoch=view.epoch, address="127.0.0.1:1", manifest_digest=MANIFEST, held=STATE))
        assert (await client.hear(NewView)).view == view
        await client.say(LeaseRequest(epoch=view.epoch, serial=1, num_samples=8))
        assert (await client.hear(LeaseGrant)).ranges == ranges  # the same request gets the same samples (I7)
    journal.close()


async def test_stopping_the_coordinator_is_not_held_against_the_members(tmp_path):
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, run_id=RUN_ID)
    async with _hosting(journal) as host:
        view = await (await host.dial(1)).become_member()
        num_records = len(journal.replay())
    assert len(journal.replay()) == num_records
    journal.close()
    journal = Journal(path, run_id=RUN_ID)
    async with _hosting(journal) as host:
        assert host.shell.status().view == view
    journal.close()


# -------------------------------------------------------------------------------- a store that takes its time


class SlowStore:
    """A store that writes in a thread, and only when it is let: as etcd without a leader."""

    is_quick = False

    def __init__(self, journal):
        self.journal = journal
        self.began = threading.Semaphore(0)
        self.may_write = threading.Semaphore(0)
        self.writing = threading.Lock()  # SQLite crashes where a connection is closed while a thread writes by it
        self.failure = None

    def append(self, record):
        self.began.release()
        assert self.may_write.acquire(timeout=20.0), "the test has forgotten this store"
        with self.writing:
            if self.failure is not None:
                raise self.failure
            return self.journal.append(record)

    def replay(self):
        return self.journal.replay()

    def close(self):
        with self.writing:
            self.failure = JournalUnwritable(self.journal.path, "it is closed")
        self.let(1000)

    def let(self, num_records):
        self.may_write.release(num_records)

    async def until_it_writes(self):
        await until(lambda: self.began.acquire(blocking=False))


@pytest.fixture
def slow(journal):
    store = SlowStore(journal)
    yield store
    store.close()


async def _hears_no(kind, client, seconds=0.2):
    """Nothing of this kind comes for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            pytest.fail(f"it has heard {await client.hear(kind)}")


async def test_nobody_hears_of_a_record_before_a_slow_store_has_it(journal, slow):
    async with _hosting(slow) as host:
        client = await host.dial(1)
        await client.say(Join(address="127.0.0.1:1", manifest_digest=MANIFEST))
        await client.hear(Welcome)
        await client.say(Synced(held=STATE))
        await slow.until_it_writes()
        await _hears_no(NewView, client)
        slow.let(1)
        await slow.until_it_writes()  # the genesis is written, the view is not
        await _hears_no(NewView, client)
        assert [type(record) for record in journal.replay()] == [Genesis]
        slow.let(1)
        view = (await client.hear(NewView)).view
        assert [type(record) for record in journal.replay()] == [Genesis, ViewRecord]
        assert host.shell.status().view == view


async def test_what_is_said_while_the_store_writes_is_answered_in_order_afterwards(slow):
    async with _hosting(slow) as host:
        slow.let(2)
        client = await host.dial(1)
        view = await client.become_member()
        other = await host.dial(2)
        await client.say(*(LeaseRequest(epoch=view.epoch, serial=serial, num_samples=8) for serial in (1, 2, 3)))
        await slow.until_it_writes()
        await other.say(Heartbeat(epoch=3, outer_step=9, progress=1, blocked=False))
        await _hears_no(Evicted, other)  # the loop runs, the machine does not
        slow.let(3)
        starts = [(await client.hear(LeaseGrant)).ranges[0].start for _ in range(3)]
        assert starts == [0, 8, 16]
        assert isinstance(await other.hear(Evicted), Evicted)


async def test_time_that_the_store_takes_is_held_against_nobody(slow):
    async with _hosting(slow, heartbeat_timeout_s=0.6, lateness_s=30.0) as host:
        slow.let(2)
        client = await host.dial(1)
        view = await client.become_member()
        await client.say(LeaseRequest(epoch=view.epoch, serial=1, num_samples=8))
        await slow.until_it_writes()
        await asyncio.sleep(1.5)  # more than twice the silence that a peer is allowed
        slow.let(1)
        await client.hear(LeaseGrant)
        await client.say(Heartbeat(epoch=view.epoch, outer_step=0, progress=1, blocked=False))
        assert host.shell.status().view == view
        slow.let(10)
        await until(lambda: host.shell.status().view.world_size == 0)  # its own silence counts as before


async def test_slow_store_that_fails_stops_the_coordinator_and_nobody_hears_anything(journal, slow):
    shell = CoordinatorShell(CoordinatorConfig(manifest_digest=MANIFEST, sealer=KEYS.of_the_run, outer_steps=9), slow)
    slow.let(1)
    async with listening(1000, {Purpose.CONTROL: shell.serve}) as listener:
        channel = await connect(listener.address, hello(Purpose.CONTROL, 1), timeout_s=5.0)
        client = Client(channel)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_raised(shell.run()))
            await client.say(Join(address="127.0.0.1:1", manifest_digest=MANIFEST))
            await client.hear(Welcome)
            await client.say(Synced(held=STATE))
            await slow.until_it_writes()
            await slow.until_it_writes()
            slow.failure = Superseded(journal.path, "127.0.0.1:2")
            slow.let(1)
            with pytest.raises(ConnectionLost):
                await client.hear(NewView)
        channel.close()
    assert isinstance(running.result(), Superseded)
    assert [type(record) for record in journal.replay()] == [Genesis]
    assert not shell.finished


async def test_coordinator_that_is_stopped_while_its_store_writes_ends_at_once(slow):
    async with asyncio.timeout(10), _hosting(slow) as host:
        client = await host.dial(1)
        await client.say(Join(address="127.0.0.1:1", manifest_digest=MANIFEST), Synced(held=STATE))
        await slow.until_it_writes()


async def test_events_beyond_the_bound_are_forgotten_and_counted(slow, monkeypatch):
    monkeypatch.setattr("isthmus.elastic.shell.coordinator._MAX_EVENTS", 3)
    async with _hosting(slow) as host:
        slow.let(2)
        client = await host.dial(1)
        view = await client.become_member()
        await client.say(*(LeaseRequest(epoch=view.epoch, serial=serial, num_samples=8) for serial in range(1, 8)))
        await slow.until_it_writes()
        await until(lambda: host.shell.status().counters.get("event_forgotten") == 3)
        slow.let(10)
        assert [(await client.hear(LeaseGrant)).serial for _ in range(4)] == [1, 2, 3, 4]
        await client.say(LeaseRequest(epoch=view.epoch, serial=5, num_samples=8))  # as the peers' timers do
        assert (await client.hear(LeaseGrant)).serial == 5


def test_held_clock_stands_still_until_everybody_has_let_go_and_never_goes_back():
    seconds = [100.0]
    clock = HeldClock(lambda: seconds[0])
    assert clock.now() == 100.0
    clock.hold()
    seconds[0] = 103.0
    clock.hold()
    seconds[0] = 104.0
    clock.release()
    assert clock.is_held
    assert clock.now() == 100.0
    seconds[0] = 110.0
    clock.release()
    assert not clock.is_held
    assert clock.now() == 100.0
    seconds[0] = 111.5
    assert clock.now() == 101.5


async def test_peers_that_are_sent_away_are_not_given_up_and_come_back(journal):
    async with _hosting(journal, reconnect_grace_s=0.05, heartbeat_timeout_s=1.0, lateness_s=30.0) as host:
        client = await host.dial(1)
        view = await client.become_member()
        host.shell.send_away("the journal cannot be reached")
        await client.cut_off()
        late = await host.dial(1)
        await late.cut_off()
        await asyncio.sleep(1.5)  # longer than the grace of a lost connection, and than a silence that is allowed
        assert host.shell.status().view == view
        host.shell.welcome()
        host.shell.welcome()
        again = await host.dial(1)
        await again.say(LeaseRequest(epoch=view.epoch, serial=1, num_samples=8))
        await again.hear(LeaseGrant)


# -------------------------------------------------------------------------------- the connection itself


class StuckChannel:
    """A channel whose other side reads nothing."""

    def __init__(self):
        self.closed = False
        self._gone = asyncio.Event()

    async def send(self, *_args, timeout_s, **_kwargs):
        await self._gone.wait()
        raise ConnectionLost("closed here")

    async def receive(self, *, timeout_s):
        await self._gone.wait()
        raise ConnectionLost("closed here")

    def close(self):
        self.closed = True
        self._gone.set()


async def test_side_that_does_not_read_is_disconnected_and_sending_never_waits():
    channel = StuckChannel()
    decoder = msgspec.msgpack.Decoder(CoordinatorMessage)
    connection = ControlConnection(channel, decoder, outbox_size=10)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(connection.run(lambda message: None))
        for _ in range(12):
            connection.send(Evicted(epoch=1, reason=""))
            await asyncio.sleep(0)
    assert "outbox full" in str(running.result())
    assert channel.closed
    connection.send(Evicted(epoch=1, reason=""))  # and later sends are quietly forgotten


async def test_flush_ends_at_its_deadline_when_nobody_reads():
    channel = StuckChannel()
    connection = ControlConnection(channel, msgspec.msgpack.Decoder(CoordinatorMessage))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(connection.run(lambda message: None))
        connection.send(Evicted(epoch=1, reason=""))
        async with asyncio.timeout(2):
            await connection.flush(0.05)
        connection.end("test over")


async def test_what_the_listener_of_messages_raises_ends_the_connection(journal):
    async def serve(channel):
        def explode(message):
            raise ValueError("a bug")

        with pytest.raises(ExceptionGroup) as caught:
            await ControlConnection(channel, msgspec.msgpack.Decoder(Heartbeat | Join)).run(explode)
        seen.append(caught.value.exceptions)

    seen = []
    async with listening(1, {Purpose.CONTROL: serve}) as listener:
        channel = await connect(listener.address, hello(Purpose.CONTROL, 2), timeout_s=5.0)
        await Client(channel).say(Heartbeat(epoch=0, outer_step=0, progress=0, blocked=False))
        with pytest.raises(ConnectionLost):
            await channel.receive(timeout_s=5.0)
        await until(lambda: bool(seen))
        channel.close()
    assert isinstance(seen[0][0], ValueError)


# ------------------------------------------------------------------------ orders


def order_to_evict(number, shell):
    return PutOut(
        peer_id=peer_id(number), incarnation=shell.newest_start(peer_id(number)), certificate=1, for_ever=False, at_s=1
    )


def order_to_use(number):
    return UseTicket(ticket_id=b"ticket 1", expires_at_s=10, used_by=peer_id(number), at_s=1, is_once=True)


async def test_an_order_is_answered_when_it_is_in_the_journal(journal):
    async with _hosting(journal) as host:
        assert await host.shell.order(order_to_use(1), timeout_s=5.0) is None
        (written,) = host.saw(RecordWritten)
        assert isinstance(written.record, TicketRecord)
        assert "has been used" in await host.shell.order(order_to_use(2), timeout_s=5.0)


async def test_whoever_is_put_out_hears_why_and_is_cut_off_at_once_in_all_its_starts(journal):
    async with _hosting(journal) as host:
        client, silent = await host.dial(1), await host.dial(1, incarnation=3)
        await client.become_member()
        assert host.shell.newest_start(peer_id(1)) == Incarnation(3)
        assert await host.shell.order(order_to_evict(1, host.shell), timeout_s=5.0) is None
        assert (await client.hear(Refused)).reason == EVICTED
        async with asyncio.timeout(1.0):
            await client.cut_off()
            await silent.cut_off()
        await until(lambda: host.shell.newest_start(peer_id(1)) is None)
        assert any(isinstance(event.record, BarRecord) for event in host.saw(RecordWritten))
        again = await host.dial(1)
        await again.say(Join(address="127.0.0.1:1", manifest_digest=MANIFEST))
        assert (await again.hear(Refused)).reason == EVICTED


async def test_whoever_is_put_out_and_does_not_read_is_cut_off_all_the_same():
    channel = StuckChannel()
    connection = ControlConnection(channel, msgspec.msgpack.Decoder(CoordinatorMessage))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(connection.run(lambda message: None))
        connection.send(Evicted(epoch=1, reason=""))
        async with asyncio.timeout(2):
            connection.finish("put out", within_s=0.05)
            await running
    assert "put out" in str(running.result())
    assert channel.closed


async def test_a_coordinator_that_stops_leaves_no_order_without_an_answer(slow):
    async with asyncio.TaskGroup() as tasks, _hosting(slow) as host:
        waiting = [tasks.create_task(host.shell.order(order_to_use(number), timeout_s=9.0)) for number in (1, 2)]
        await slow.until_it_writes()
    assert [one.result() for one in waiting] == ["the coordinator stops"] * 2
    assert "no time" in await host.shell.order(order_to_use(3), timeout_s=5.0)


async def test_an_order_whose_record_is_not_written_in_time_is_not_called_done(slow):
    async with _hosting(slow) as host:
        told = await host.shell.order(order_to_use(1), timeout_s=0.05)
        assert told == "the coordinator's journal has not been written for 0.05 s"
        slow.let(10)
