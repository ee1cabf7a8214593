# SPDX-License-Identifier: Apache-2.0
"""A whole run in one event loop: a coordinator with its journal, and peers that really sum numbers.

Control and state connections are real TCP over loopback. Only the exchange itself is a rendezvous in memory, which
adds up what the members of a view put in; it fails when one of them is dead, as the real one does.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isthmus.collective.core.types import Incarnation, Member, PeerId, PeerRef, RoundKey, View
from isthmus.collective.errors import OperationAborted
from isthmus.collective.transport import Channel, Purpose, connect
from isthmus.elastic.core.config import CoordinatorConfig, MemberConfig
from isthmus.elastic.core.events import Finish, RoundReady
from isthmus.elastic.core.member import MemberMachine
from isthmus.elastic.core.messages import Held, IndexRange
from isthmus.elastic.core.records import CommitRecord, Record
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.donor.donor import Donor
from isthmus.elastic.errors import JournalUnwritable, NotAMember, RunFinished
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.elastic.shell.exchange import Exchanged
from isthmus.elastic.shell.member import Membership
from isthmus.elastic.shell.whereabouts import Locate
from isthmus.elastic.state.digest import Hasher
from isthmus.elastic.state.wire import Pace
from tests.keys import Keys
from tests.unit.elastic.harness import RUN_ID, NumberReplica, entry_of, hello, listening, peer_id

if TYPE_CHECKING:
    from isthmus.elastic.observation import Observation

MANIFEST_DIGEST = b"m" * 32
KEYS = Keys()
NUMEL = 200
SAMPLES = 4
MEMBER_CONFIG = MemberConfig(
    heartbeat_interval_s=0.1, resend_interval_s=0.1, catch_up_retry_s=0.05, farewell_timeout_s=3.0
)


def contribution(peer: PeerId, outer_step: int) -> np.ndarray:
    """What this peer adds in the round that starts from this step."""
    return np.random.default_rng([int(peer, 16), outer_step]).integers(-(2**12), 2**12, NUMEL)


class Rendezvous:
    """The exchange: everybody gets the sum of what all members of the view put in."""

    def __init__(self) -> None:
        self._rooms: dict[RoundKey, dict[PeerRef, np.ndarray]] = {}
        self._changed = asyncio.Condition()
        self.dead: set[PeerRef] = set()

    async def sum(self, view: View, key: RoundKey, me: PeerRef, numbers: np.ndarray) -> np.ndarray:
        members = [member.ref for member in view.members]
        async with self._changed:
            room = self._rooms.setdefault(key, {})
            assert me not in room, f"{me} put into {key} twice"
            room[me] = numbers.copy()
            self._changed.notify_all()
            await self._changed.wait_for(lambda: all(ref in room or ref in self.dead for ref in members))
            lost = [ref for ref in members if ref not in room]
        if lost:
            raise OperationAborted(key, "a member is dead", [ref.peer_id for ref in lost])
        return np.sum([room[ref] for ref in members], axis=0)

    def newest_room(self) -> dict[PeerRef, np.ndarray]:
        return self._rooms[max(self._rooms)]

    async def kill(self, ref: PeerRef) -> None:
        async with self._changed:
            self.dead.add(ref)
            self._changed.notify_all()


class NumberRunner:
    """isthmus.elastic.shell.exchange.RoundRunner over a NumberReplica."""

    def __init__(self, me: PeerRef, replica: NumberReplica, log: CommitLog, rendezvous: Rendezvous) -> None:
        self.me = me
        self.replica = replica
        self.log = log
        self.rendezvous = rendezvous
        self.payload = np.zeros(NUMEL, np.int64)
        self.views: list[View] = []
        self.num_aborted = 0
        self.spoil = 0
        self._staged = None
        self._total = None

    @property
    def is_staged(self) -> bool:
        return self._staged is not None

    async def found(self) -> Held:
        return self.replica.found()

    async def install_view(self, view: View, survey_from: int = 0) -> None:
        self.views.append(view)

    async def meet(self, member: Member) -> str | None:
        return None

    async def exchange(self, view: View, key: RoundKey, weight: float, told: tuple[float, ...] = ()) -> Exchanged:
        assert weight > 0
        assert self._staged is None, "the last round was neither installed nor discarded"
        self.replica.unwanted = None
        total = await self.rendezvous.sum(view, key, self.me, self.payload)
        self._total, self._staged = total + self.spoil, self.replica.staged(total + self.spoil)
        self.spoil = 0
        return Exchanged(digest=self._staged[1].digest, weights=told or (weight,) * view.world_size)

    async def install_staged(self, key: RoundKey, held: Held, *, final: bool) -> None:
        assert self._staged is not None
        assert self.replica.install(self._staged) == held
        self.log.append(entry_of(held, self._total))
        self._staged = None

    def discard_staged(self, key: RoundKey) -> None:
        self.num_aborted += 1
        self.replica.unwanted = self._staged or self.replica.unwanted
        self._staged = None


class Peer:
    """One start of a peer: listener for learners, membership, and a trainer that goes as far as it may."""

    def __init__(
        self, number: int, coordinators: list[str], hasher: Hasher, rendezvous: Rendezvous, *, incarnation: int = 1
    ) -> None:
        self.number = number
        self.me = PeerRef(peer_id(number), Incarnation(incarnation))
        self.coordinators = coordinators
        self.hasher = hasher
        self.rendezvous = rendezvous
        self.replica = NumberReplica(hasher, NUMEL)
        self.log = CommitLog(1 << 20)
        self.runner = NumberRunner(self.me, self.replica, self.log, rendezvous)
        self.observed: list[Observation] = []
        self.membership: Membership | None = None
        self.commits: list[Held] = []
        self.consumed: list[IndexRange] = []
        self.lost: list[str] = []
        self.finish: Finish | None = None
        self.first_contact_timeout_s = 10.0
        self.locate: Locate | None = None
        self.manifest_digest = MANIFEST_DIGEST
        self.ready_at = -1
        """The step whose round it has samples for and may not hand in yet."""
        self._limit = 0
        self._moved = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def step(self) -> int:
        held = self.replica.held()
        return -1 if held is None else held.outer_step

    @property
    def is_active(self) -> bool:
        return self.membership is not None and self.membership.active_view is not None

    async def run(self) -> None:
        donor = Donor(self.replica, self.log)
        async with listening(self.number, {Purpose.STATE: donor.serve}, incarnation=self.me.incarnation) as listener:
            self.membership = Membership(
                self._machine(listener.address),
                coordinators=self.coordinators,
                dial=self._dial,
                dial_donor=lambda member: self._dial(member.address, Purpose.STATE),
                runner=self.runner,
                replica=self.replica,
                hasher=self.hasher,
                observe=self.observed.append,
                pace=Pace(patience_s=1.0),
                locate=self.locate,
                first_contact_timeout_s=self.first_contact_timeout_s,
                rng=random.Random(self.number),
            )
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(self._train())
                self.finish = await self.membership.run()
                training.cancel()

    def _machine(self, address: str) -> MemberMachine:
        held = self.replica.held()
        return MemberMachine(
            MEMBER_CONFIG, self.me, address, self.manifest_digest, held, signer=KEYS.of(self.me.peer_id)
        )

    async def allow(self, outer_step: int) -> None:
        """The trainer may hand in rounds until this step is committed."""
        async with self._moved:
            self._limit = outer_step
            self._moved.notify_all()

    async def _dial(self, address: str, purpose: Purpose) -> Channel:
        return await connect(address, hello(purpose, self.number, self.me.incarnation), timeout_s=2.0)

    async def _train(self) -> None:
        with contextlib.suppress(RunFinished):
            while True:
                await self.membership.activated()
                try:
                    await self._rounds()
                except NotAMember as error:
                    self.lost.append(error.reason)

    async def _rounds(self) -> None:
        while True:
            step = self.step
            ranges = await self.membership.take_leases(SAMPLES)
            self.ready_at = step
            async with self._moved:
                await self._moved.wait_for(lambda step=step: self._limit > step)
            self.runner.payload = contribution(self.me.peer_id, step)
            ready = RoundReady(outer_step=step, fragment=0, weight=1.0, num_tokens=SAMPLES, consumed=ranges)
            committed = await self.membership.commit_round(ready)
            assert committed.held == self.replica.held()
            assert committed.view.holds(self.me)
            self.commits.append(committed.held)
            self.consumed.extend(ranges)


class CoordinatorHost:
    """One start of the coordinator at a fixed address, with its journal."""

    def __init__(self, path: Path, address: str = "127.0.0.1:0", *, outer_steps: int = 10_000, **config) -> None:
        self.path = path
        self.address = address
        defaults = {"heartbeat_timeout_s": 2.0, "suspect_silence_s": 0.5, "reconnect_grace_s": 0.3}
        defaults |= {"recover_grace_s": 5.0, "report_window_s": 0.05, "resend_interval_s": 0.1}
        self.config = CoordinatorConfig(
            manifest_digest=MANIFEST_DIGEST, sealer=KEYS.of_the_run, outer_steps=outer_steps, **(defaults | config)
        )
        self.observed: list[Observation] = []
        self.shell: CoordinatorShell
        self.journal: Journal
        self._stack: contextlib.AsyncExitStack
        self._task: asyncio.Task[None]

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        self.journal = Journal(self.path, run_id=RUN_ID)
        self.shell = CoordinatorShell(self.config, self.journal, observe=self.observed.append)
        self._stack = contextlib.AsyncExitStack()
        routes = {Purpose.CONTROL: self.shell.serve}
        listener = await self._stack.enter_async_context(listening(1000, routes, address=self.address))
        self.address = listener.address
        self._task = tasks.create_task(self._run())

    async def _run(self) -> None:
        with contextlib.suppress(JournalUnwritable):
            await self.shell.run()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._stack.aclose()
        self.journal.close()


class Run:
    """A coordinator and its peers; every peer is a task that the test may kill."""

    def __init__(self, host: CoordinatorHost, hasher: Hasher, tasks: asyncio.TaskGroup) -> None:
        self.host = host
        self.hasher = hasher
        self.tasks = tasks
        self.rendezvous = Rendezvous()
        self.peers: list[Peer] = []
        self._running: list[tuple[Peer, asyncio.Task[None]]] = []

    def peer(self, number: int, *, incarnation: int = 1) -> Peer:
        """A peer that is not started yet."""
        return Peer(number, [self.host.address], self.hasher, self.rendezvous, incarnation=incarnation)

    def start(self, *peers: Peer) -> None:
        for peer in peers:
            self.peers.append(peer)
            self._running.append((peer, self.tasks.create_task(peer.run())))

    async def kill(self, peer: Peer) -> None:
        """As SIGKILL: no farewell, connections reset."""
        self.peers.remove(peer)
        task = next(task for running, task in self._running if running is peer)
        task.cancel()
        await asyncio.wait([task])
        await self.rendezvous.kill(peer.me)

    async def allow(self, outer_step: int) -> None:
        for peer in self.peers:
            await peer.allow(outer_step)

    async def reach(self, outer_step: int, timeout_s: float = 20.0) -> None:
        """All peers hold exactly this step, and those that are members are ready for the next."""
        await self.allow(outer_step)
        async with asyncio.timeout(timeout_s):
            while not all(  # noqa: ASYNC110 - of many peers
                peer.step == outer_step and (peer.ready_at == outer_step or not peer.is_active) for peer in self.peers
            ):
                await asyncio.sleep(0.005)

    async def admit(self, *newcomers: Peer, timeout_s: float = 20.0) -> None:
        """Commit one step after the other until the newcomers are members and everybody holds the same step."""
        async with asyncio.timeout(timeout_s):
            while not all(peer.is_active for peer in newcomers):
                await asyncio.sleep(0.02)
                members = [peer for peer in self.peers if peer.is_active]
                step = 1 + max((peer.step for peer in members), default=-1)
                if len(members) >= self.host.config.min_peers:
                    await self.allow(step)  # newcomers too: one may be admitted before this step is committed
                    while any(peer.step < step for peer in members):  # noqa: ASYNC110 - of many peers
                        await asyncio.sleep(0.005)
        await self.reach(max(peer.step for peer in self.peers) + 1)

    async def gather(self, *peers: Peer) -> int:
        """Start these peers and commit until all of them are members. Returns the step they hold."""
        self.start(*peers)
        await self.admit(*peers)
        return peers[0].step

    async def end(self) -> None:
        for peer, task in self._running:
            if peer.finish is None:  # who is closing its listener is left to it
                task.cancel()
        await asyncio.gather(*(task for _, task in self._running), return_exceptions=True)


@contextlib.asynccontextmanager
async def running(host: CoordinatorHost, hasher: Hasher) -> AsyncIterator[Run]:
    async with asyncio.TaskGroup() as tasks:
        await host.start(tasks)
        run = Run(host, hasher, tasks)
        try:
            yield run
        finally:
            await run.end()
            await host.stop()


def audit(records: list[Record], peers: list[Peer]) -> int:
    """Recompute the run from its journal and compare with what the peers hold. Returns the newest step.

    I1: all peers hold the bits that the journal names. I2: every contribution is in exactly once. I3: no step is
    missing. I7: no sample is in two commits.
    """
    anchor = np.arange(NUMEL, dtype=np.int64)
    step, samples = 0, []
    digests = {}
    for record in records:
        if isinstance(record, CommitRecord):
            assert record.outer_step == step + 1
            for item in record.contributions:
                anchor = anchor + contribution(item.ref.peer_id, step)
                samples += [index for piece in item.consumed for index in range(piece.start, piece.stop)]
            step = record.outer_step
            digests[step] = record.digest
    assert len(samples) == len(set(samples)), "a sample was trained twice"
    for peer in peers:
        assert all(digests[held.outer_step] == held.digest for held in peer.commits), "a committed step was lost"
        steps = [held.outer_step for held in peer.commits]
        assert steps == sorted(set(steps)), "a step was taken twice or back"
        held = peer.replica.held()
        assert held is not None
        assert held.digest == digests.get(held.outer_step, held.digest)
        if held.outer_step == step:
            assert (peer.replica.tensors["anchor"] == anchor).all()
    return step
