# SPDX-License-Identifier: Apache-2.0
"""The awaitable face of this package: install a view, then run operations among its members.

Rules: one event loop, one thread. `install` and the rounds are the only places where connections are made; nothing
runs in the background but the sockets' callbacks and, for a moment after a view was installed, `look_ahead`. Any number
of operations with different keys may be in flight.
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isthmus.collective.codec import BLOCK_NUMEL
from isthmus.collective.core.bucket import TokenBucket
from isthmus.collective.core.link_table import LinkTable
from isthmus.collective.core.survey import Observation, table_of
from isthmus.collective.core.types import Member, PeerId, PeerRef, RoundKey, View
from isthmus.collective.errors import OperationAborted, RoundRefused
from isthmus.collective.links.measurements import LinkMeter, LinkReport
from isthmus.collective.links.mesh import Mesh, linked_members
from isthmus.collective.rounds.buffers import Record
from isthmus.collective.rounds.engine import Engine
from isthmus.collective.rounds.operations import (
    Reducible,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    exchange,
)
from isthmus.collective.rounds.options import BulkOptions, RoundStats
from isthmus.collective.rounds.runner import Runner
from isthmus.collective.rounds.tensors import Array
from isthmus.collective.rounds.workplace import Workplace
from isthmus.collective.transport.hello import MAX_STREAMS, Hello
from isthmus.collective.transport.link import Caps
from isthmus.collective.transport.memory import BufferPool, give_back_to_system
from isthmus.collective.transport.security import Security

log = logging.getLogger(__name__)

MEET_S = 6.0
"""For a link with a peer that may become a member: one dial that nobody answers, and its pause."""

_MEET_LOOK_S = 0.05
_PROBE_S = 0.4
"""Longest time that a survey sends padding, or waits for a look ahead; a quarter of a suspicious silence if shorter."""


class Communicator:
    """Operations on tensors among the members of the installed view.

    What all of them share. `key` names the operation, the same on all members, and is used once; its epoch is the
    installed view's. A tensor is a contiguous torch tensor (CPU, or CUDA through pinned memory) or numpy array of a
    dtype of `collective.rounds.buffers.DTYPES`; it is borrowed until the operation ends and not a moment longer. After
    an error inputs are untouched, in place too, and separate outputs are undefined. Errors: `OperationAborted` (a
    member broke or stood still, or a newer view was installed: post again in the next view), `PlanMismatch` (a member
    posted other terms; all see it), `NonFiniteInput` (our numbers), `RoundRefused` (the key is not for now),
    `ValueError` (the arguments). `deadline_s` ends the patience for the whole operation; default `Patience.round_s`.

    Args:
        me: this start of this peer.
        hello: makes the hello for (peer, stream, num_streams) of a connection that we dial.
        num_streams: TCP connections that we dial to each peer with a larger id; None for one to a near peer and more
            where the path is long.
        chunk_nbytes: longest chunk on the wire, a multiple of 2048; up to four times as much in memory, where a codec
            makes it that short. Must be equal on all peers.
        options: see BulkOptions.
        security: encrypts the connections that we dial; None encrypts nothing. Accepted ones are the listener's.
    """

    def __init__(
        self,
        *,
        me: PeerRef,
        hello: Callable[[PeerRef, int, int], Hello],
        num_streams: int | None = None,
        chunk_nbytes: int = 2 << 20,
        options: BulkOptions | None = None,
        security: Security | None = None,
    ) -> None:
        if chunk_nbytes <= 0 or chunk_nbytes % (8 * BLOCK_NUMEL):
            raise ValueError(f"chunk_nbytes must be a multiple of {8 * BLOCK_NUMEL}, not {chunk_nbytes}")
        if num_streams is not None and not 1 <= num_streams <= MAX_STREAMS:
            raise ValueError(f"num_streams must be from 1 to {MAX_STREAMS}, not {num_streams}")
        self.me = me
        self.address: str | None = None
        """Where others reach us, for whoever listens on our behalf to note."""
        self._options = options or BulkOptions()
        self._engine = Engine(
            chunk_nbytes=chunk_nbytes,
            eager_chunks=self._options.eager_chunks,
            max_rounds_ahead=self._options.max_rounds_ahead,
        )
        self._caps = Caps(upload=self._options.max_upload, download=self._options.max_download)
        self._mesh = Mesh(
            me=me,
            hello=hello,
            num_streams=num_streams,
            chunk_nbytes=chunk_nbytes,
            owner=self._engine,
            sockets=self._options.sockets,
            security=security,
            caps=self._caps,
            refusals=self._engine.refusals,
        )
        self._meter = LinkMeter(self._mesh.bundles)
        self._runner = Runner(
            me, engine=self._engine, mesh=self._mesh, meter=self._meter, patience=self._options.patience
        )
        self._workplace = Workplace(chunk_nbytes=chunk_nbytes, pool=BufferPool())
        self._looking_ahead: asyncio.Task[None] | None = None

    @property
    def upload_cap(self) -> TokenBucket | None:
        """What all bulk links together may send; who sends beside them takes from it too."""
        return self._caps.upload

    @property
    def download_cap(self) -> TokenBucket | None:
        """What all bulk links together may receive."""
        return self._caps.download

    # -------------------------------------------------------------------------------- views

    @property
    def view(self) -> View | None:
        """The installed view."""
        return self._engine.view

    def key(self, outer_step: int, fragment: int = 0) -> RoundKey:
        """A key in the installed view. Raises RuntimeError before the first one."""
        if self.view is None:
            raise RuntimeError("no view is installed; await install(view) first")
        return RoundKey(self.view.epoch, outer_step, fragment)  # type: ignore[arg-type] # plain numbers are welcome

    def adopt(self, sock: socket.socket, hello: Hello) -> None:
        """Take an accepted BULK connection for good. One that cannot be meant for us is closed and counted."""
        self._mesh.adopt(sock, hello)

    def put_out(self, peer_id: PeerId) -> None:
        """End the connections of a peer that is not wanted any more; that none is opened anew is `security`'s part."""
        self._mesh.put_out(peer_id)

    async def install(self, view: View) -> None:
        """Make this view current: end rounds of older ones, keep links to members that stay, drop and dial others.

        Waits at most `install_grace_s` for the dials; a member that cannot be reached is the first round's finding.

        Raises:
            ValueError: the view is older than the installed one.
        """
        installed = self._engine.view
        if installed is not None and view.epoch < installed.epoch:
            raise ValueError(f"view {view.epoch} is older than the installed {installed.epoch}")
        self._end_looking_ahead()
        self._mesh.prepare(view)
        self._engine.install(view, self._mesh.bundles)
        self._workplace.install(frozenset(view.apart))
        give_back_to_system()  # what the links of former members have held
        log.info("view_installed epoch=%d world_size=%d", view.epoch, view.world_size)
        await self._mesh.connect(self._options.install_grace_s)

    async def meet(self, member: Member) -> str | None:
        """Make a link with a peer that a view may name later, or wait for its call, beside rounds that run.

        Returns:
            None if there is a link, else why not, after `MEET_S` at most.
        """
        bundle = self._mesh.meet(member)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEET_S):
                while not bundle.closed and not bundle.is_whole:
                    await bundle.repair()
                    await asyncio.sleep(_MEET_LOOK_S)
        if bundle.closed:
            return "its place was needed for another peer"
        return None if bundle.is_whole else bundle.cause or "it has not called"

    def on_call_wanted(self, called: Callable[[PeerRef, str], None]) -> None:
        """`called` is told when a peer that we have a link with wants to be called, and at which address."""
        self._engine.call_wanted = called

    def ask_for_call(self, ref: PeerRef) -> bool:
        """Ask a peer to call us for its state. False if there is no link with it."""
        bundle = self._mesh.bundles.get(ref)
        if bundle is None or not bundle.is_connected:
            return False
        bundle.ask_for_call()
        return True

    def calls_us(self, ref: PeerRef) -> bool:
        """Whether there is a link with this peer, and it was the peer that opened it."""
        bundle = self._mesh.bundles.get(ref)
        return bundle is not None and bundle.is_connected and not bundle.is_dialler

    def look_ahead(self, *, turn_s: float | None = None) -> None:
        """Begin to measure the links to members that are new, so that `survey` need not when it is waited for.

        Call it on all members when a view is installed and the links are idle for a while. Runs in the background until
        they are measured, a survey begins, or the next view is installed.

        Args:
            turn_s: how long each member sends padding, one after another, five turns at most; None: as long as it takes
                to find the speed of the path, from 0.4 to 1.2 s.
        """
        self._end_looking_ahead()
        rank = None if self.view is None else self.view.rank_of(self.me.peer_id)
        if self.view is not None and rank is not None:
            others = linked_members(self.view, self.me)
            self._looking_ahead = asyncio.get_running_loop().create_task(self._look_ahead(others, rank, turn_s))

    async def _look_ahead(self, others: Sequence[Member], rank: int, turn_s: float | None) -> None:
        """Between rounds nobody else dials what `install` had no time for, as over a long path with TLS."""
        connect_s = self._options.patience.first_contact_s
        async with asyncio.TaskGroup() as tasks:
            dialling = tasks.create_task(self._mesh.connect(connect_s))
            await self._meter.look_ahead(others, rank, turn_s, connect_s=connect_s)
            dialling.cancel()

    def _end_looking_ahead(self) -> None:
        if self._looking_ahead is not None:
            self._looking_ahead.cancel()
            self._looking_ahead = None

    async def close(self) -> None:
        """End all rounds and connections."""
        self._end_looking_ahead()
        for round_ in self._engine.under_way():
            round_.fail(OperationAborted(round_.key, "the communicator was closed"))
        self._mesh.close()

    # -------------------------------------------------------------------------------- operations

    async def all_reduce(
        self,
        key: RoundKey,
        tensor: Array,
        *,
        op: str = "mean",
        out: Array | None = None,
        weight: float = 1.0,
        told: Sequence[float] | None = None,
        codec: str = "raw",
        plan: str = "auto",
        record: Record | None = None,
        is_tolerant: bool = False,
        deadline_s: float | None = None,
    ) -> RoundStats:
        """The same bits on all members: Σ w·x / Σ w, Σ w·x, or the elementwise minimum or maximum.

        Args:
            key: see the class.
            tensor: our x, any shape; floats must be finite for "mean" and "sum".
            op: "mean" (floats; all zeros if Σ w is 0), "sum" (integers wrap around), "min" or "max". Half-precision
                numbers are summed in fp32.
            out: as many elements of the same dtype, not overlapping `tensor`; None works in place, which costs a
                buffer of the tensor's size inside, since the input must outlive an abort.
            weight: our w, from 0 to 2**64.
            told: the w of all members, in the order of ranks, if they are agreed on already; None: as each says itself.
            codec: wire form, see collective/codec; "raw" loses nothing, the others need fp32 and "mean" or "sum".
            plan: "butterfly" or "ring"; "auto" takes the fastest for the links that `survey` found.
            record: receives (start, numel, wire form) of every result chunk, valid during the call; see
                `decode_result`.
            is_tolerant: another member's numbers that cannot be added up do not abort the round: the result has zeros
                there, and `RoundStats.sizes` tells whose they are. For callers that look at these. Without effect
                where sums go through third hands.
            deadline_s: see the class.
        """
        given = Reducible(
            tensor, out=out, op=op, weight=weight, told=told, codec=codec, record=record, is_tolerant=is_tolerant
        )
        members, rank = self._place(key)
        if told is not None and (len(told) != len(members) or told[rank] != weight):
            raise ValueError("told must hold the weight of every member, ours included")
        operation = all_reduce(self._workplace, len(members), given, plan)
        return await self._runner.run(key, members, rank, operation, deadline_s=deadline_s)

    async def all_gather(
        self,
        key: RoundKey,
        tensor: Array,
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        deadline_s: float | None = None,
    ) -> tuple[list[Tensor], RoundStats]:
        """Every member's tensor, on all members, in the order of ranks.

        Args:
            key: see the class.
            tensor: ours.
            sizes: elements of each member's tensor; None if all are as long as ours. Where only their owners know
                them, gather them first as an int64 tensor.
            out: the parts one after another, Σ sizes elements, not overlapping `tensor`; None for fresh memory.
            deadline_s: see the class.

        Returns:
            (flat parts, which lie in `out`; stats).
        """
        members, rank = self._place(key)
        operation, parts = all_gather(self._workplace, len(members), rank, tensor, sizes, out)
        return parts, await self._runner.run(key, members, rank, operation, deadline_s=deadline_s)

    async def broadcast(
        self, key: RoundKey, tensor: Array, *, root: PeerId, deadline_s: float | None = None
    ) -> RoundStats:
        """The root's tensor, on all members.

        Args:
            key: see the class.
            tensor: the root's is read; the others' are overwritten, and undefined after an error.
            root: a member.
            deadline_s: see the class.
        """
        members, rank = self._place(key)
        ranks = [place for place, member in enumerate(members) if member.peer_id == root]
        if not ranks:
            raise ValueError(f"{root!r} is no member of the view; its members are {[m.peer_id for m in members]}")
        operation = broadcast(self._workplace, len(members), rank, ranks[0], tensor)
        return await self._runner.run(key, members, rank, operation, deadline_s=deadline_s)

    async def exchange(
        self, key: RoundKey, tensor: Array, *, out: Array, partner: PeerId, deadline_s: float | None = None
    ) -> RoundStats:
        """Swap tensors with one other member, which names us in turn. Several pairs may share a key.

        Args:
            key: see the class.
            tensor: goes to the partner.
            out: the partner's, as long as ours, not overlapping `tensor`.
            partner: another member.
            deadline_s: see the class.
        """
        members, rank = self._place(key)
        if partner in {members[other].peer_id for other in self._engine.check_free(key).apart_from(rank)}:
            raise ValueError(f"{partner} and this member have no link; exchange with another member")
        pair = [member for place, member in enumerate(members) if place == rank or member.peer_id == partner]
        if len(pair) != 2:
            raise ValueError(f"{partner!r} is no other member of the view")
        place = 0 if pair[0].ref == self.me else 1
        return await self._runner.run(
            key, pair, place, exchange(self._workplace, place, tensor, out), deadline_s=deadline_s
        )

    async def barrier(self, key: RoundKey, *, deadline_s: float | None = None) -> RoundStats:
        """Return when every member has posted this key."""
        members, rank = self._place(key)
        return await self._runner.run(key, members, rank, barrier(self._workplace, len(members)), deadline_s=deadline_s)

    async def survey(self, key: RoundKey, *, deadline_s: float | None = None) -> LinkTable:
        """Bring together what all members know of their links; from then on "auto" plans follow it, in this view.

        All members call it at the same point, with no all-reduce in flight. What earlier transfers showed is used;
        towards members to which nothing was sent yet, padding is sent first (see `look_ahead`).

        Args:
            key: see the class.
            deadline_s: see the class.
        """
        members, rank = self._place(key)
        seen = self._meter.observation(members)
        row = torch.tensor(seen.to_numbers(), dtype=torch.float64)

        async def probe() -> None:
            seconds = min(_PROBE_S, self._options.patience.stall.floor_s / 4)
            if (ahead := self._looking_ahead) is not None and not self._meter.awaits_turn:
                # As long as a probe from here would take, which has its first news after a round trip.
                await asyncio.wait([ahead], timeout=seconds + 2 * max(seen.one_way_s))
                if self._looking_ahead is not ahead:
                    return  # the view has changed meanwhile, and this survey is over
            self._end_looking_ahead()
            await self._meter.probe(members, seconds)
            row.copy_(torch.tensor(self._meter.observation(members).to_numbers(), dtype=torch.float64))

        # Announced before the probe: a fresh member that trains until it is awaited hears of it that much earlier.
        operation, parts = all_gather(self._workplace, len(members), rank, row, None, None)
        await self._runner.run(key, members, rank, operation, deadline_s=deadline_s, first=probe)
        seen_by_all = [Observation.from_numbers(part.tolist()) for part in parts]
        table = table_of(seen_by_all, self._workplace.apart)
        if self._engine.view is not None and self._engine.view.epoch == key.epoch:
            self._workplace.learn(table)
        return table

    # -------------------------------------------------------------------------------- figures

    def links(self) -> list[LinkReport]:
        """What is known of the way to every other member of the view."""
        return [] if self.view is None else self._meter.reports(self.view.members)

    def is_awaited(self) -> bool:
        """Whether a member of the view has posted a round that is not posted here yet."""
        return self._engine.is_awaited()

    def progress(self) -> int:
        """A number that grows with every byte moved."""
        return self.bytes_sent + self.bytes_received

    @property
    def bytes_sent(self) -> int:
        """Bulk bytes given to the kernel since the start, headers included."""
        return self._mesh.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bulk bytes read since the start, headers included."""
        return self._mesh.bytes_received

    @property
    def dropped(self) -> dict[str, int]:
        """Frames and connections that were dropped, by reason."""
        return dict(self._engine.dropped + self._engine.refused)

    @property
    def refused(self) -> Counter[str]:
        """Connections alone that were ended for what came over them, or not taken, by reason."""
        return self._engine.refused

    # -------------------------------------------------------------------------------- inside

    def _place(self, key: RoundKey) -> tuple[Sequence[Member], int]:
        view = self._engine.check_free(key)
        rank = view.rank_of(self.me.peer_id)
        if rank is None or view.members[rank].incarnation != self.me.incarnation:
            raise RoundRefused(key, "this peer is no member of the view")
        return view.members, rank
