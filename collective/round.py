"""One running MEAN: carries out what core/reduce.py orders, on real buffers.

Who owns memory: the caller owns `tensor` and `out`; the round uses them until `done` is set and not a moment longer
(`Bundle.release` takes them back from the sockets). An owner sums in its own slice of `out`; raw results land in
`out` straight from the socket; everything else passes through the link's scratch, one chunk at a time. There is no
temporary of the size of the tensor.

In place (`out` is `tensor`): a slice is overwritten only by its owner's results, which exist only after our part of
them was counted. So a duplicate that is sent again from an overwritten slice is dropped by its owner.

Rules: everything runs on the loop's thread, chunk by chunk. The result's bytes are the same on all members: the
owner encodes once and decodes what it sends.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec
import torch
from torch import Tensor

from collective.codec.base import Codec, NotFinite, first_non_finite
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
from collective.transport.link import Link, Scratch, bytes_of
from collective.wire import HEADER_NBYTES, Frame, FrameType, Header, pack

Record = Callable[[int, memoryview], None]
"""Receives (start_numel, wire form) of every result chunk; the memory is valid during the call only."""

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
        codec: with its scratch.
        tensor: fp32, flat, contiguous, on the CPU: our part.
        out: the same shape; `tensor` itself or other memory.
        weight: of our part.
        bundles: by rank; None at ours.
        eager_chunks: see MeanMachine.
        record: see Record.
    """

    def __init__(
        self,
        *,
        key: RoundKey,
        view: View,
        rank: int,
        plan: MeanPlan,
        terms: Terms,
        codec: Codec,
        tensor: Tensor,
        out: Tensor,
        weight: float,
        bundles: Sequence[Bundle | None],
        eager_chunks: int,
        record: Record | None,
    ) -> None:
        self.key = key
        self.view = view
        self.rank = rank
        self.error: CollectiveError | None = None
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
        self._codec = codec
        self._tensor = tensor
        self._out = out
        self._weight = weight
        self._record = record
        self._machine = MeanMachine(key=key, rank=rank, slices=plan.slices, eager_chunks=eager_chunks)
        self._unsent: list[set[_ChunkSend]] = [set() for _ in bundles]
        self._faults = [0] * view.world_size
        self._landing: dict[int, Link] = {}  # raw results on their way into `out`
        self._arrived = tensor[:0]  # wire form of the chunk that is being handled
        self._sum_begun = -1  # chunk whose sum begins with our own part
        self._result_wires: dict[int, Tensor] = {}
        own = plan.slices.chunks_of(rank)
        longest = max((codec.wire_nbytes(plan.numel_of(chunk)) for chunk in own), default=0)
        self._wire_memory = torch.empty(0 if codec.is_identity else (len(own), longest), dtype=torch.uint8)

    # -------------------------------------------------------------------------------- from the engine

    def start(self) -> None:
        """Begin: open the round towards all, send what the credit allows."""
        self._run(self._machine.start())

    def place(self, link: Link, rank: int, header: Header) -> tuple[memoryview, object]:
        """Destination of a chunk of this round."""
        if not self._is_ours(header):
            return link.staging.bytes[: header.payload_nbytes], None
        chunk = header.chunk
        if header.type is FrameType.RESULT and self._codec.is_identity and self._machine.wants_result(rank, chunk):
            lander = self._landing.get(chunk)
            if lander is None or lander.closed:
                self._landing[chunk] = link
                return bytes_of(self._out[self._plan.span(chunk)]), self
        return link.staging.bytes[: header.payload_nbytes], self

    def on_frame(self, link: Link | None, rank: int, frame: Frame) -> None:
        """Take a frame of this round. `link` is None for one that was held back.

        Raises:
            RemoteProtocolError: the sender broke the protocol.
        """
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
        self.bytes_sent += HEADER_NBYTES + self._codec.wire_nbytes(self._plan.numel_of(send.chunk))
        self._unsent[send.to].discard(send)
        self._end_if_drained()

    def pieces_of(self, frame_type: FrameType, chunk: int, scratch: Scratch) -> tuple[bytes, memoryview]:
        """Encode now."""
        if frame_type is FrameType.CONTRIBUTION:
            wire = self._codec.encode(self._tensor[self._plan.span(chunk)], scratch.tensor)
        else:
            wire = self._result_wires[chunk]
        payload = bytes_of(wire)
        return pack(self._header(frame_type, len(payload), chunk), payload), payload

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

    def give_up(self, error: OperationAborted) -> None:
        """Fail, and tell the others so that they need not find out by themselves."""
        if self.is_done:
            return
        self.fail(error)
        payload = msgspec.msgpack.encode(AbortNotice(error.cause[:512], error.suspects))
        for bundle in self.bundles:
            if bundle is not None:
                bundle.notices.append(Notice(pack(self._header(FrameType.ABORT, len(payload)), payload), payload))
                bundle.wake()

    def fail(self, error: CollectiveError) -> None:
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
        if chunk >= self._plan.slices.num_chunks:
            raise RemoteProtocolError("no such chunk")
        if header.payload_nbytes != self._codec.wire_nbytes(self._plan.numel_of(chunk)):
            raise RemoteProtocolError("chunk has another length than planned")
        is_result = header.type is FrameType.RESULT
        if is_result and self._codec.is_identity and self._machine.wants_result(rank, chunk):
            if self._landing.get(chunk) is not link:
                return  # the same chunk is landing from another stream
            self._arrived = self._out[self._plan.span(chunk)].view(torch.uint8)
        elif link is not None:
            self._arrived = link.staging.tensor[: header.payload_nbytes]
        else:
            self._arrived = torch.frombuffer(payload, dtype=torch.uint8)
        try:
            self._codec.check(self._arrived)
            if is_result:
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
        touched: dict[int, Bundle] = {}
        for effect in effects:
            if self.is_done:
                return
            match effect:
                case Accumulate(chunk=chunk, rank=rank):
                    self._accumulate(chunk, rank)
                case FinishChunk(chunk=chunk):
                    self._finish_chunk(chunk)
                case InstallResult(chunk=chunk):
                    self._codec.decode(self._arrived, self._out[self._plan.span(chunk)])
                    self._tell_record(chunk, self._arrived)
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

    def _accumulate(self, chunk: int, rank: int) -> None:
        span = self._plan.span(chunk)
        if rank == self.rank:
            # Added together with the first part that arrives: one pass over memory less.
            self._sum_begun = chunk
            return
        weight = self.weights[rank]
        assert weight is not None
        total = self._out[span]
        if self._sum_begun == chunk:
            self._codec.accumulate(self._arrived, weight, self._tensor[span], self._weight, total)
            self._sum_begun = -1
        else:
            self._codec.accumulate(self._arrived, weight, total, 1.0, total)

    def _finish_chunk(self, chunk: int) -> None:
        span = self._plan.span(chunk)
        total = self._out[span]
        if self._sum_begun == chunk:  # alone in the view
            torch.mul(self._tensor[span], self._weight, out=total)
            self._sum_begun = -1
        weight_sum = self.weight_sum()
        if weight_sum > 0.0:
            total.div_(weight_sum)
        else:
            total.zero_()
        if first_non_finite(total) is not None:
            self.suspect([], "the sum overflows fp32")
            return
        index = chunk - self._plan.slices.chunks_of(self.rank).start
        wire = self._codec.encode(total, total if self._codec.is_identity else self._wire_memory[index])
        if not self._codec.is_identity:
            self._codec.decode(wire, total)
        self._result_wires[chunk] = wire
        self._tell_record(chunk, wire)

    def _tell_record(self, chunk: int, wire: Tensor) -> None:
        if self._record is not None:
            self._record(self._plan.starts[chunk], bytes_of(wire))

    def _queue(self, frame_type: FrameType, to: int, chunk: int) -> Bundle:
        send = _ChunkSend(self, frame_type, to, chunk)
        self._unsent[to].add(send)
        bundle = self._bundle(to)
        (bundle.results if frame_type is FrameType.RESULT else bundle.contributions).append(send)
        return bundle

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
