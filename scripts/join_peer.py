#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One peer of `scripts/bench join` and `commit`: everything of a peer but its workers. It says in JSON what happens.

The daemon's own parts (communicator, outer state, round runner, membership, donor, journal) move a synthetic model;
where workers would train, the process sleeps, as a daemon does whose GPUs train. So on a machine with few cores the
peers do not take the processor from each other, which they never do in life, and what is measured is the exchange, the
transfer and their effect on each other. `t` is CLOCK_MONOTONIC, which all processes of a machine share.

    {"event": "listening", "t": ..., "address": ...}
    {"event": "catching_up" | "caught_up", "t": ..., "outer_step": ..., "nbytes": ..., "seconds": ...}
    {"event": "active", "t": ..., "outer_step": ...}
    {"event": "disturbed", "t": ..., "cause": ...}
    {"event": "committed", "t": t, "outer_step": ..., "handed_in": t, "voted": t, "weights": {...}, "digest": ...}
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.collective import BulkOptions, Communicator
from isthmus.collective.core.types import Incarnation, PeerId, PeerRef
from isthmus.collective.transport import Authority, Channel, Hello, HelloReply, Listener, Purpose, connect
from isthmus.collective.transport.certificates import peer_id_of_key
from isthmus.collective.transport.wire import PROTOCOL_VERSION
from isthmus.elastic.core.config import CoordinatorConfig, MemberConfig
from isthmus.elastic.core.events import RoundReady
from isthmus.elastic.core.member import MemberMachine
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.donor.donor import Donor
from isthmus.elastic.errors import NotAMember
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.observation import (
    BecameActive,
    BecameLearner,
    CatchUpEnded,
    CatchUpStarted,
    CertificateKept,
    Observation,
    RoundBroke,
    RoundStaged,
)
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.elastic.shell.member import Membership
from isthmus.elastic.shell.notary import PeerSigner, RunSealer
from isthmus.elastic.state.digest import Hasher
from isthmus.elastic.state.replica import CommitEntry
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.fragments import FragmentTable
from isthmus.optim.outer import Emitted
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.streaming import Streaming
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.engine.outer_step_runner import OuterStepRunner
from isthmus.trainer.engine.round_exchange import Payload, RoundExchange
from isthmus.trainer.threads import in_thread
from scripts.join_keepers import DiskKeeper, MemoryKeeper, NoKeys

RUN_ID = "bench-join"
TERMS = b"j" * 32
AUTHORITY = Authority(bytes(32))
STEP_S = 0.02
"""An inner step of a fresh member, after which it looks whether others wait for it."""


def key_of(number: int) -> Ed25519PrivateKey:
    """Of the peer with this number, the same in all processes."""
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32))


def peer_id_of(number: int) -> PeerId:
    """Its name."""
    return peer_id_of_key(key_of(number).public_key().public_bytes_raw())


def tell(event: str, **fields: Any) -> None:  # noqa: ANN401
    print(json.dumps({"event": event, "t": time.monotonic(), **fields}), flush=True)


def _first_parameters(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(99)).mul_(0.02)


class Peer:
    """See the module.

    Args:
        number: ours; number 0 coordinates too.
        host: where to listen.
        coordinator: its address; None for number 0.
        numel: parameters of the model, a multiple of `fragments`.
        fragments: layers that take turns (Streaming DiLoCo); 1 is DiLoCo.
        codec: of the exchange.
        inner_s: between two rounds.
        journal: file of number 0.
        heartbeat_timeout_s: of the coordinator.
        start_peers: with which the run begins.
        signs: whether votes and commits are signed and sealed.
        folder: where results and certificates are kept, in a folder of each peer; None: in memory, and nowhere.
    """

    def __init__(
        self,
        *,
        number: int,
        host: str,
        coordinator: str | None,
        numel: int,
        fragments: int,
        codec: str,
        inner_s: float,
        journal: str,
        heartbeat_timeout_s: float,
        start_peers: int = 3,
        signs: bool = True,
        folder: str | None = None,
    ) -> None:
        self._key, self._signs, self._start_peers = key_of(number), signs, start_peers
        self._me = PeerRef(peer_id_of(number), Incarnation(1))
        self._number, self._host, self._coordinator_at, self._inner_s = number, host, coordinator, inner_s
        self._journal, self._heartbeat_timeout_s = journal, heartbeat_timeout_s
        outer = DiLoCo(inner_steps=1)
        if fragments > 1:
            outer = Streaming(inner_steps=fragments, num_fragments=fragments, delay=0, keep=0.0)
        plan = OuterPlan(outer)
        table = FragmentTable.from_named_shapes(
            [(f"layer{index}", (numel // fragments,)) for index in range(fragments)]
        )
        self._hasher = Hasher(num_threads=2)
        self._state = OuterState(outer, outer.fragments(table), plan, self._hasher)
        self._log = CommitLog(8 * numel)
        self._communicator = Communicator(
            me=self._me, hello=self._bulk_hello, options=BulkOptions(), chunk_nbytes=1 << 20
        )
        self._keeper = MemoryKeeper(self._log)
        if folder is not None:
            self._keeper = DiskKeeper(self._log, Path(folder) / str(number), RUN_ID, self._state)
        self._voted = 0.0
        self._donor = Donor(self._state, self._log, exchanged=self._communicator.progress)
        self._payload = torch.randn(numel, generator=torch.Generator().manual_seed(number)).mul_(1e-3)
        self._runner = OuterStepRunner(
            communicator=self._communicator,
            state=self._state,
            keeper=self._keeper,
            exchanges=RoundExchange(self._communicator, codec=codec),
            initial_parameters=lambda: in_thread(_first_parameters, numel),
            on_exchanged=lambda _key, _stats: None,
        )

    async def run(self) -> None:
        """Take part until killed."""
        routes: dict[Purpose, Callable[[Channel], Awaitable[None]]] = {Purpose.STATE: self._donor.serve}
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            if self._coordinator_at is None:
                journal = Journal(Path(self._journal), run_id=RUN_ID)
                stack.callback(journal.close)
                coordinator = CoordinatorShell(self._terms(), journal)
                routes[Purpose.CONTROL] = coordinator.serve
                tasks.create_task(coordinator.run())
            listener = Listener(f"{self._host}:0", accept=self._accept, routes=routes, bulk=self._communicator.adopt)
            await listener.start()
            tell("listening", address=listener.address)
            membership = Membership(
                MemberMachine(
                    MemberConfig(heartbeat_interval_s=0.5),
                    self._me,
                    listener.address,
                    TERMS,
                    signer=PeerSigner(self._key, RUN_ID, lambda: (AUTHORITY.certificate,)) if self._signs else NoKeys(),
                ),
                coordinators=(self._coordinator_at or listener.address,),
                dial=self._dial,
                dial_donor=lambda member: self._dial(member.address, Purpose.STATE),
                runner=self._runner,
                replica=self._state,
                hasher=self._hasher,
                observe=self._observe,
            )
            if isinstance(self._keeper, DiskKeeper):
                tasks.create_task(self._keeper.run())
            tasks.create_task(self._train(membership))
            await membership.run()

    def _terms(self) -> CoordinatorConfig:
        return CoordinatorConfig(
            manifest_digest=TERMS,
            sealer=RunSealer(AUTHORITY, RUN_ID, lambda: (AUTHORITY.certificate,)) if self._signs else NoKeys(),
            outer_steps=1_000_000,
            start_peers=self._start_peers,
            min_peers=2,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            suspect_silence_s=1.0,
        )

    async def _train(self, membership: Membership) -> None:
        while True:
            await membership.activated()
            is_fresh = True
            with contextlib.suppress(NotAMember):
                while True:
                    await self._work(is_fresh=is_fresh)
                    await self._round(membership)
                    is_fresh = False

    async def _work(self, *, is_fresh: bool) -> None:
        """The inner steps; as in engine/training_loop.py, a fresh member hands in what it has if others wait."""
        if not is_fresh:
            await asyncio.sleep(self._inner_s)
            return
        for _ in range(int(self._inner_s / STEP_S)):
            if self._communicator.is_awaited():
                return
            await asyncio.sleep(STEP_S)

    async def _round(self, membership: Membership) -> None:
        held = self._state.held()
        assert held is not None, "active members hold a state"
        handed_in, weight = time.monotonic(), 100.0 + self._number
        (round_,) = self._state.next_rounds()
        place = self._state.places[round_.fragment]
        payload = self._payload[: self._state.fragments[place].numel]
        self._runner.offer([Payload(round_=round_, emitted=Emitted(payload=payload))])
        ready = RoundReady(outer_step=held.outer_step, fragment=place, weight=weight, num_tokens=1, consumed=())
        committed = await membership.commit_round(ready)
        entry = self._log.get(committed.held.outer_step)
        assert isinstance(entry, CommitEntry), "the newest commit is always kept, here in memory"
        tell(
            "committed",
            outer_step=committed.held.outer_step,
            handed_in=handed_in,
            voted=self._voted,
            weights=dict(entry.rounds[0].weights),
            digest=committed.held.digest.hex(),
        )

    def _observe(self, event: Observation) -> None:
        match event:
            case CatchUpStarted(outer_step=step):
                tell("catching_up", outer_step=step)
            case CatchUpEnded(outer_step=step, bytes=nbytes, seconds=seconds, cause=cause):
                tell("caught_up", outer_step=step, nbytes=nbytes, seconds=seconds, cause=cause)
            case BecameActive(outer_step=step, members=members):
                tell("active", outer_step=step, world_size=len(members))
            case RoundStaged():
                self._voted = time.monotonic()
            case CertificateKept(certificate=certificate) if isinstance(self._keeper, DiskKeeper):
                self._keeper.certified(certificate)
            case BecameLearner(cause=cause) | RoundBroke(cause=cause):
                tell("disturbed", cause=cause)
            case _:
                pass

    def _hello(self, purpose: Purpose, stream: int = 0, num_streams: int = 1) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id=RUN_ID,
            purpose=purpose,
            peer_id=self._me.peer_id,
            incarnation=self._me.incarnation,
            stream=stream,
            num_streams=num_streams,
        )

    def _bulk_hello(self, _peer: PeerRef, stream: int, num_streams: int) -> Hello:
        return self._hello(Purpose.BULK, stream, num_streams)

    def _accept(self, _hello: Hello) -> HelloReply:
        return HelloReply(accepted=True, peer_id=self._me.peer_id, incarnation=self._me.incarnation)

    async def _dial(self, address: str, purpose: Purpose) -> Channel:
        return await connect(address, self._hello(purpose), timeout_s=5.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(Peer(**json.loads(sys.argv[1])).run())
