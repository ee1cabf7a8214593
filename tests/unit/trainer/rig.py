# SPDX-License-Identifier: Apache-2.0
"""Parts of a peer without processes: a small outer state, and communicators on loopback in one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

import torch
from torch import Tensor

from isthmus.collective import BulkOptions, Communicator
from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.collective.transport import Hello, HelloReply, Listener, Purpose
from isthmus.collective.transport.wire import PROTOCOL_VERSION
from isthmus.elastic.core.messages import Held
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.state.digest import Hasher, digest_of
from isthmus.elastic.state.replica import CommitEntry, ResultChunk, RoundRecord
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.fragments import Fragment, FragmentTable
from isthmus.optim.outer import Emitted, Outer
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.engine.outer_step_runner import OuterStepRunner
from isthmus.trainer.engine.round_exchange import Payload, RoundExchange
from isthmus.trainer.engine.round_records import result_of
from isthmus.trainer.engine.state_version import Version
from isthmus.trainer.threads import in_thread

NUMEL = 1000
CHUNK_NBYTES = 2048


def whole(numel: int = NUMEL) -> Fragment:
    return FragmentTable.from_named_shapes([("weight", (numel,))]).whole()


def numbers(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def hasher() -> Hasher:
    return Hasher(num_threads=1, chunk_nbytes=CHUNK_NBYTES)


def outer_state(
    hasher: Hasher, outer: Outer | None = None, numel: int = NUMEL, table: FragmentTable | None = None
) -> OuterState:
    outer = outer or DiLoCo(inner_steps=4)
    fragments = (whole(numel),) if table is None else outer.fragments(table)
    return OuterState(outer, fragments, OuterPlan(outer), hasher)


def recorded(mean: Tensor, weights: Mapping[str, float]) -> RoundRecord:
    """What is kept of a round whose mean travelled as it is."""
    given = tuple((PeerId(peer), weight) for peer, weight in weights.items() if weight > 0.0)
    return RoundRecord("raw", given, chunks=(ResultChunk(0, mean.numpy().tobytes()),))


async def stage_mean(state: OuterState, mean: Tensor, weights: Mapping[str, float]) -> Held:
    """Stage the outer step whose one round has this mean."""
    (round_,) = state.next_rounds()
    buffer = state.mean_buffer(round_)
    buffer.copy_(mean)
    record = recorded(mean, weights)
    digest = await state.stage([(result_of(record, buffer), record)])
    return Held(OuterStep(state.live.manifest.outer_step + 1), digest)


def entry_of(held: Held, *records: RoundRecord) -> CommitEntry:
    """What is kept of the commit that made `held`."""
    return CommitEntry(held.outer_step, held.digest, records)


def has_the_bits_of_its_manifest(version: Version) -> bool:
    """Whether every chunk still is what was hashed when the version was made."""
    return all(
        digest_of(version.chunk(number, chunk)) == digest
        for number, tensor in enumerate(version.manifest.tensors)
        for chunk, digest in enumerate(tensor.chunk_digests)
    )


class Log(CommitLog):
    """Keeps results for learners, and nothing on a disk."""

    def founded(self, held: Held) -> None:
        pass

    async def before_vote(self, key: RoundKey, entry: CommitEntry) -> None:
        pass

    def committed(self, previous: bytes, entry: CommitEntry) -> None:
        self.append(entry)


class Site:
    """One peer's half of rounds: listener, communicator, state, mailbox."""

    def __init__(
        self,
        number: int,
        hasher: Hasher,
        *,
        outer: Outer | None = None,
        codec: str = "raw",
        table: FragmentTable | None = None,
    ) -> None:
        numel = NUMEL if table is None else table.numel
        self.outer = outer or DiLoCo(inner_steps=4)
        self.me = PeerRef(PeerId(f"{number:016x}"), Incarnation(1))
        self.mailbox = numbers(number, numel)
        self.state = outer_state(hasher, self.outer, numel, table)
        self.log = Log(1 << 20)
        self.exchanged: list[RoundKey] = []
        self.communicator = Communicator(
            me=self.me, hello=self._hello, chunk_nbytes=2048, options=BulkOptions(install_grace_s=5.0)
        )
        self.listener = Listener(
            "127.0.0.1:0",
            accept=lambda _: HelloReply(accepted=True, peer_id=self.me.peer_id, incarnation=self.me.incarnation),
            routes={},
            bulk=self.communicator.adopt,
        )
        self.runner = OuterStepRunner(
            communicator=self.communicator,
            state=self.state,
            keeper=self.log,
            exchanges=RoundExchange(self.communicator, codec=codec),
            initial_parameters=lambda: in_thread(numbers, 99, numel),
            on_exchanged=lambda key, _: self.exchanged.append(key),
        )

    def offer(self) -> None:
        """Give the mailbox to the next outer step, as much of it as its fragment has elements."""
        (round_,) = self.state.next_rounds()
        numel = self.state.fragments[self.state.places[round_.fragment]].numel
        self.runner.offer([Payload(round_=round_, emitted=Emitted(payload=self.mailbox[:numel]))])

    @property
    def member(self) -> Member:
        return Member(self.me.peer_id, self.me.incarnation, self.listener.address)

    async def close(self) -> None:
        await self.communicator.close()
        await self.listener.close()

    def _hello(self, _peer: PeerRef, stream: int, num_streams: int) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id="run",
            purpose=Purpose.BULK,
            peer_id=self.me.peer_id,
            incarnation=self.me.incarnation,
            stream=stream,
            num_streams=num_streams,
        )


def view_of(sites: Sequence[Site], epoch: int = 1, outer_step: int = 0) -> View:
    return View(Epoch(epoch), OuterStep(outer_step), b"", tuple(site.member for site in sites))


@contextlib.asynccontextmanager
async def sites_of_a_new_run(
    count: int,
    hasher: Hasher,
    *,
    outers: Sequence[Outer] = (),
    codec: str = "raw",
    table: FragmentTable | None = None,
) -> AsyncIterator[list[Site]]:
    """Peers that hold the same founded state and are members of view 1."""
    sites = [
        Site(number, hasher, outer=outers[number] if outers else None, codec=codec, table=table)
        for number in range(count)
    ]
    try:
        for site in sites:
            await site.listener.start()
            await site.runner.found()
        view = view_of(sites)
        await asyncio.gather(*(site.runner.install_view(view) for site in sites))
        yield sites
    finally:
        for site in sites:
            await site.close()
