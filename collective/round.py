"""One running MEAN: carries out what core/reduce.py orders, on real buffers.

The values are in buffers.py, the order of things is the machine's; this file joins them with the links. Raw results
land in the output straight from the socket, everything else passes through the link's scratch, one chunk at a time.

Rules: the round uses the caller's memory until `is_done` and not a moment longer (`Bundle.release` takes it back from
the sockets). A round that fails ends at once and stays failed; `changed` is set whenever the supervisor should look.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import assert_never

import msgspec
import torch
from torch import Tensor

from collective.buffers import MeanBuffers
from collective.codec.base import NotFinite
from collective.core.reduce import (
    Accumulate,
    ContributionArrived,
    FinishChunk,
    Finished,
    InstallResult,
    LinkRenewed,
    MeanMachine,
    PeerOpened,
    ReduceEffect,
    ResultArrived,
    SendContribution,
    SendOpen,
    SendResult,
)
from collective.core.types import PeerId, RoundKey, View
from collective.errors import CollectiveError, OperationAborted, PlanMismatch, RemoteProtocolError
from collective.plan import MeanPlan, Terms
from collective.transport.bundle import Bundle, Notice
from collective.transport.hello import decode
from collective.transport.link import Link, Scratch
from collective.wire import HEADER_NBYTES, Frame, FrameType, Header, pack

_MAX_FAULTS = 3
"""So often a peer's link may break by its own fault (a wrong checksum) before the round gives it up."""


class AbortNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Payload of ABORT: this member has given the round up."""

    cause: str
    suspects: tuple[PeerId, ...]


class _ChunkSend:
    """A chunk in a queue; encoded when a socket can take it."""

    __slots__ = ("chunk", "owner", "to", "type")

    def __init__(self, owner: "MeanRound", frame_type: FrameType, to: int, chunk: int) -> None:
        self.owner = owner
        self.type = frame_type
        self.to = to
        self.chunk = chunk

    def pieces(self, scratch: Scratch) -> tuple[bytes, memoryview]:
        """See Outgoing."""
        return self.owner.pieces_of(self.type, self.chunk, scratch)

    def sent(self) -> None:
        """See Outgoing."""
        self.owner.on_sent(self)


class MeanRound:
    """See the module.

    Args:
        key: the round.
        view: the view it runs in.
        rank: our place in it.
        plan: the cut; `terms` says the same in words that can be compared.
        buffers: our tensor, the output, the codec.
        weight: of our part.
        bundles: by rank; None at ours.
        eager_chunks: see MeanMachine.
    """

    def __init__(
        self,
        *,
        key: RoundKey,
        view: View,
        rank: int,
        plan: MeanPlan,
        terms: Terms,
        buffers: MeanBuffers,
        weight: float,
        bundles: Sequence[Bundle | None],
        eager_chunks: int,
    ) -> None:
        self.key = key
        self.view = view
        self.rank = rank
        self.error: Exception | None = None
        self.is_done = False
        self.changed = asyncio.Event()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.weights: list[float | None] = [None] * view.world_size
        self.weights[rank] = weight
        self.bundles = bundles
        self._plan = plan
        self._terms = terms
        self._plan_hash = terms.hash32
        self._buffers = buffers
        self._weight = weight
        self._machine = MeanMachine(key=key, rank=rank, slices=plan.slices, eager_chunks=eager_chunks)
        self._unsent: list[set[_ChunkSend]] = [set() for _ in bundles]
        self._faults = [0] * view.world_size
        self._result_headers: dict[int, bytes] = {}
        self._landing: dict[int, Link] = {}  # raw results on their way into `out`
        self._arrived: Tensor | None = None  # wire form of the chunk being handled; None if it landed in place

    # -------------------------------------------------------------------------------- from the engine

    def start(self) -> None:
        """Begin: open the round towards all, send what the credit allows."""
        self._run(self._machine.start())

    def place(self, link: Link, rank: int, header: Header) -> tuple[memoryview, object]:
        """Destination of a chunk of this round."""
        # A round that has ended must not hand out its caller's memory again.
        if self._is_ours(header) and not self.is_done:
            self._check_planned(header)
            if self._lands_in_place(rank, header):
                lander = self._landing.get(header.chunk)
                if lander is None or lander.closed:
                    self._landing[header.chunk] = link
                    return self._buffers.landing_place(header.chunk), self
        return link.staging.bytes[: header.payload_nbytes], self

    def on_frame(self, link: Link | None, rank: int, frame: Frame) -> None:
        """Take a frame of this round. `link` is None for one that was held back.

        Raises:
            RemoteProtocolError: the sender broke the protocol.
        """
        if self.is_done:
            return
        header = frame.header
        self.bytes_received += HEADER_NBYTES + header.payload_nbytes
        match header.type:
            case FrameType.OPEN:
                self._on_open(rank, header, frame.payload)
            case FrameType.ABORT:
                notice = decode(frame.payload, AbortNotice)
                peer_id = self.view.members[rank].peer_id
                self.fail(OperationAborted(self.key, f"peer {peer_id} gave up: {notice.cause}", notice.suspects))
            case FrameType.CONTRIBUTION | FrameType.RESULT if self._is_ours(header):
                self._on_chunk(link, rank, header, frame.payload)
            case _:
                return  # a chunk of another plan: its OPEN says which

    def on_renewed(self, rank: int) -> None:
        """A stream to this member is new: send again what may have been lost."""
        bundle = self.bundles[rank]
        assert bundle is not None
        bundle.forget_queued(self)
        self._unsent[rank].clear()
        self._run(self._machine.handle(LinkRenewed(rank)))

    def on_broken(self, rank: int, cause: CollectiveError) -> None:
        """A stream to this member broke. Whether that matters is for the supervisor to say."""
        if isinstance(cause, RemoteProtocolError):
            self._faults[rank] += 1
            if self._faults[rank] >= _MAX_FAULTS:
                self.suspect([rank], str(cause))
        self.changed.set()

    def on_sent(self, send: _ChunkSend) -> None:
        """A chunk is the kernel's now."""
        self.bytes_sent += HEADER_NBYTES + self._buffers.wire_nbytes(send.chunk)
        self._unsent[send.to].discard(send)
        self._end_if_drained()

    def pieces_of(self, frame_type: FrameType, chunk: int, scratch: Scratch) -> tuple[bytes, memoryview]:
        """Encode now."""
        if frame_type is FrameType.CONTRIBUTION:
            payload = self._buffers.contribution(chunk, scratch.tensor)
            return pack(self._header(frame_type, len(payload), chunk), payload), payload
        payload = self._buffers.result(chunk)
        if chunk not in self._result_headers:  # the same frame goes to all: its checksum is made once
            self._result_headers[chunk] = pack(self._header(frame_type, len(payload), chunk), payload)
        return self._result_headers[chunk], payload

    # -------------------------------------------------------------------------------- to the supervisor

    def concerns(self, rank: int) -> bool:
        """Whether the round cannot end without this member: it owes us something, or we owe it."""
        return rank != self.rank and (self._machine.needs(rank) or bool(self._unsent[rank]))

    def has_opened(self, rank: int) -> bool:
        """Whether this member has posted the round."""
        return self._machine.has_opened(rank)

    def owes_only_results(self, rank: int) -> bool:
        """Whether all that this member owes may depend on a third one."""
        return not self._unsent[rank] and not self._machine.owes_contributions(rank)

    def waiting_for(self) -> list[int]:
        """Every member that this round still concerns."""
        return [rank for rank in range(self.view.world_size) if self.concerns(rank)]

    def suspect(self, ranks: Sequence[int], cause: str) -> None:
        """Give up because of these members, and say so to the others."""
        self.give_up(OperationAborted(self.key, cause, [self.view.members[rank].peer_id for rank in ranks]))

    def give_up(self, error: Exception) -> None:
        """Fail, and tell the others so that they need not find out by themselves."""
        if self.is_done:
            return
        self.fail(error)
        notice = AbortNotice("failed inside", ())
        if isinstance(error, OperationAborted):
            notice = AbortNotice(error.cause[:512], error.suspects)
        payload = msgspec.msgpack.encode(notice)
        for bundle in self.bundles:
            if bundle is not None:
                bundle.notices.append(Notice(pack(self._header(FrameType.ABORT, len(payload)), payload), payload))
                bundle.wake()

    def fail(self, error: Exception) -> None:
        """End without a result. Idempotent."""
        if not self.is_done:
            self.error = error
            self._end()

    def weight_sum(self) -> float:
        """Σw over the members, in rank order."""
        return math.fsum(weight for weight in self.weights if weight is not None)

    # -------------------------------------------------------------------------------- frames

    def _is_ours(self, header: Header) -> bool:
        return header.plan_hash == self._plan_hash

    def _lands_in_place(self, rank: int, header: Header) -> bool:
        is_raw_result = header.type is FrameType.RESULT and self._buffers.codec.is_identity
        return is_raw_result and self._machine.wants_result(rank, header.chunk)

    def _check_planned(self, header: Header) -> None:
        if header.chunk >= self._plan.slices.num_chunks:
            raise RemoteProtocolError("no such chunk")
        if header.payload_nbytes != self._buffers.wire_nbytes(header.chunk):
            raise RemoteProtocolError("chunk has another length than planned")

    def _on_open(self, rank: int, header: Header, payload: memoryview) -> None:
        peer_id = self.view.members[rank].peer_id
        difference = self._terms.first_difference(decode(payload, Terms))
        if difference is not None:
            self.fail(PlanMismatch(*difference, peer_id))
            return
        self._take_weight(rank, header.weight)
        self._run(self._machine.handle(PeerOpened(rank)))

    def _on_chunk(self, link: Link | None, rank: int, header: Header, payload: memoryview) -> None:
        chunk = header.chunk
        self._check_planned(header)
        if self._lands_in_place(rank, header):
            if self._landing.get(chunk) is not link:
                return  # the same chunk is landing from another stream
            self._arrived = None
        elif link is not None:
            self._arrived = link.staging.tensor[: header.payload_nbytes]
        else:
            self._arrived = torch.frombuffer(payload, dtype=torch.uint8)
        try:
            if header.type is FrameType.RESULT:
                effects = self._machine.handle(ResultArrived(rank, chunk))
            else:
                self._take_weight(rank, header.weight)
                effects = self._machine.handle(ContributionArrived(rank, chunk))
            self._run(effects)
        except NotFinite as error:
            self.suspect([rank], f"a {header.type.name} is not finite: {error}")

    def _take_weight(self, rank: int, weight: float) -> None:
        known = self.weights[rank]
        if known is not None and known != weight:
            raise RemoteProtocolError("weight changed within a round")
        self.weights[rank] = weight

    # -------------------------------------------------------------------------------- effects

    def _run(self, effects: Sequence[ReduceEffect]) -> None:
        try:
            self._carry_out(effects)
        except NotFinite:
            raise
        except OverflowError as error:  # nobody's fault: every part is finite
            self.suspect([], str(error))
        except Exception as error:  # noqa: BLE001 - above is only the loop; the caller must hear it (its `record` failed)
            self.give_up(error)

    def _carry_out(self, effects: Sequence[ReduceEffect]) -> None:
        touched: dict[int, Bundle] = {}
        for effect in effects:
            if self.is_done:
                return
            match effect:
                case Accumulate(chunk=chunk, rank=rank) if rank == self.rank:
                    self._buffers.begin_sum(chunk)
                case Accumulate(chunk=chunk, rank=rank):
                    assert self._arrived is not None
                    self._buffers.add(chunk, self._arrived, self._weight_of(rank))
                case FinishChunk(chunk=chunk):
                    self._buffers.finish(chunk, self.weight_sum())
                case InstallResult(chunk=chunk):
                    if self._arrived is None:
                        self._buffers.install_landed(chunk)
                    else:
                        self._buffers.install(chunk, self._arrived)
                case SendContribution(to=to, chunk=chunk):
                    touched[to] = self._queue(FrameType.CONTRIBUTION, to, chunk)
                case SendResult(to=to, chunk=chunk):
                    touched[to] = self._queue(FrameType.RESULT, to, chunk)
                case SendOpen(to=to):
                    touched[to] = self._bundle(to)
                    payload = msgspec.msgpack.encode(self._terms)
                    header = pack(self._header(FrameType.OPEN, len(payload)), payload)
                    touched[to].notices.append(Notice(header, payload))
                    self.bytes_sent += len(header) + len(payload)
                case Finished():
                    self.changed.set()
                case _:
                    assert_never(effect)
        for bundle in touched.values():
            bundle.wake()
        self._end_if_drained()

    def _queue(self, frame_type: FrameType, to: int, chunk: int) -> Bundle:
        send = _ChunkSend(self, frame_type, to, chunk)
        self._unsent[to].add(send)
        bundle = self._bundle(to)
        (bundle.results if frame_type is FrameType.RESULT else bundle.contributions).append(send)
        return bundle

    def _weight_of(self, rank: int) -> float:
        weight = self.weights[rank]
        assert weight is not None, "a chunk is added only after its weight was taken"
        return weight

    def _bundle(self, rank: int) -> Bundle:
        bundle = self.bundles[rank]
        assert bundle is not None
        return bundle

    def _header(self, frame_type: FrameType, payload_nbytes: int, chunk: int = 0) -> Header:
        return Header(
            type=frame_type,
            payload_nbytes=payload_nbytes,
            epoch=self.key.epoch,
            outer_step=self.key.outer_step,
            fragment=self.key.fragment,
            rank=self.rank,
            slice=self._plan.slices.owner_of(chunk) if payload_nbytes else 0,
            chunk=chunk,
            weight=self._weight,
            plan_hash=self._plan_hash,
        )

    def _end_if_drained(self) -> None:
        if self._machine.finished and not self.is_done and not any(self._unsent):
            self._end()

    def _end(self) -> None:
        self.is_done = True
        for bundle in self.bundles:
            if bundle is not None:
                bundle.release(self)
        self.changed.set()
