# SPDX-License-Identifier: Apache-2.0
"""One running round: carries out what core/round_machine.py orders, on real buffers.

The values are in buffers.py, what is sent in outbox.py, the order of things is the machine's; this file joins them with
the links. Results whose wire form is the output's own memory land there straight from the socket, everything else
passes through the link's scratch, one chunk at a time.

Rules: the round uses the caller's memory until `is_done` and not a moment longer (`Bundle.release` takes it back from
the sockets). A round that fails ends at once and stays failed; `changed` is set whenever the supervisor should look.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import assert_never

import msgspec
import torch
from torch import Tensor

from isthmus.collective.codec.base import NotFinite
from isthmus.collective.core.apart import NO_PAIR, Apart
from isthmus.collective.core.round_machine import RoundMachine
from isthmus.collective.core.round_words import (
    Accumulate,
    FinishChunk,
    Finished,
    HandOnOpening,
    InstallResult,
    LinkRenewed,
    PartArrived,
    PeerOpened,
    ResultArrived,
    RoundEffect,
    SendOpen,
    SendPart,
    SendResult,
)
from isthmus.collective.core.types import Instant, Member, RoundKey
from isthmus.collective.errors import (
    CollectiveError,
    NonFiniteInput,
    PlanMismatch,
    RemoteProtocolError,
)
from isthmus.collective.rounds.buffers import RoundBuffers
from isthmus.collective.rounds.chunks import Inbox
from isthmus.collective.rounds.findings import Findings
from isthmus.collective.rounds.notices import (
    AbortNotice,
    abort_payload,
    abort_payload_of,
    mismatch_heard,
    opening_payload,
)
from isthmus.collective.rounds.outbox import Outbox
from isthmus.collective.rounds.plan import RoundPlan, Terms
from isthmus.collective.transport.bundle import Bundle
from isthmus.collective.transport.hello import decode
from isthmus.collective.transport.link import Link, Sink
from isthmus.collective.transport.wire import HEADER_NBYTES, Frame, FrameType, Header

_MAX_FAULTS = 3
"""So often a peer's link may break by its own fault (a wrong checksum) before the round gives it up."""


class RunningRound:
    """See the module.

    Args:
        key: the round.
        members: who takes part, in the order of ranks.
        rank: our place among them.
        plan: the cut; `terms` says the same in words that can be compared.
        buffers: our tensor, the output, the codec.
        weight: of our part.
        told: what the members' parts weigh, by rank, whatever they say; None: what they say.
        bundles: by rank; None at ours.
        eager_chunks: see RoundMachine.
        chunk_nbytes: of the longest chunk.
        apart: pairs of ranks that have no link; `bundles` is None for who has none with us.
    """

    def __init__(
        self,
        *,
        key: RoundKey,
        members: Sequence[Member],
        rank: int,
        plan: RoundPlan,
        terms: Terms,
        buffers: RoundBuffers,
        weight: float,
        told: Sequence[float] | None = None,
        bundles: Sequence[Bundle | None],
        eager_chunks: int,
        chunk_nbytes: int = 0,
        apart: Apart = NO_PAIR,
    ) -> None:
        self.key = key
        self.members = tuple(members)
        self.rank = rank
        self.error: Exception | None = None
        self.is_done = False
        self.has_told = False
        """Whether the others have heard from us that it is over, and let go of what they held back for it."""
        self.opened_at: Instant | None = None
        """When every member had posted the round, by the monotonic clock."""
        self.changed = asyncio.Event()
        self.bytes_received = 0
        self.weights: list[float | None] = [None] * len(self.members) if told is None else list(told)
        self.weights[rank] = weight
        self._is_told = told is not None
        self.bundles = bundles
        self.eager_chunks = eager_chunks
        self.nbytes = chunk_nbytes * plan.slices.num_chunks
        """Of the whole buffer, about."""
        self.machine = RoundMachine(
            key=key,
            rank=rank,
            slices=plan.slices,
            eager_chunks=eager_chunks,
            apart=apart,
        )
        self.findings = Findings(self.members, self.machine)
        self._plan = plan
        self._terms = terms
        self._plan_hash = terms.hash32
        self._buffers = buffers
        self._ranks = {bundle: other for other, bundle in enumerate(bundles) if bundle is not None}
        self._inboxes = [Inbox(self, other) for other in range(len(self.members))]
        self._outbox = Outbox(
            key=key,
            rank=rank,
            terms=terms,
            plan_hash=self._plan_hash,
            weight=weight,
            buffers=buffers,
            machine=self.machine,
            bundles=bundles,
            on_bad_input=self.give_up,
            on_drained=self._end_if_drained,
        )
        self._faults = [0] * len(self.members)
        self._landing: dict[int, Link] = {}  # results on their way straight into the output
        self._arrived: Tensor | None = None  # wire form of the chunk being handled; None if it landed in place

    # -------------------------------------------------------------------------------- from the engine

    def start(self) -> None:
        """Begin: open the round towards all, send what the credit allows."""
        self._run(self.machine.start())

    def announce(self) -> None:
        """Open the round towards all before it starts: our terms, and that we are there."""
        for rank, bundle in enumerate(self.bundles):
            if bundle is not None:
                self._outbox.put_open(rank)
                bundle.wake()

    def rank_of(self, bundle: Bundle) -> int | None:
        """Place of this peer in the round; None for one that the round does not hold."""
        return self._ranks.get(bundle)

    def refuse_outsider(self, bundle: Bundle) -> None:
        """Another peer posted this round with us, and we posted it with others: an error for both."""
        self._outbox.refuse(bundle)
        ours = [member.peer_id for member in self.members]
        self.give_up(PlanMismatch("members", ours, "others", bundle.peer_id))

    def place(self, link: Link, rank: int, header: Header) -> tuple[memoryview, Sink | None]:
        """Destination of a chunk of this round, and who takes it."""
        # A round that has ended must not hand out its caller's memory again; a chunk of another plan is only read.
        if self.is_done or header.plan_hash != self._plan_hash:
            return link.staging.room(header.payload_nbytes), None
        self._check_planned(rank, header)
        if self._lands_in_place(rank, header):
            lander = self._landing.get(header.chunk)
            if lander is None or lander.closed:
                self._landing[header.chunk] = link
                return self._buffers.landing_place(header.chunk), self._inboxes[rank]
        return link.staging.room(header.payload_nbytes), self._inboxes[rank]

    def on_frame(self, rank: int, frame: Frame) -> None:
        """Take a frame that no inbox takes: no chunk, a chunk of another plan, or one that was held back.

        Raises:
            RemoteProtocolError: the sender broke the protocol.
        """
        if self.is_done:
            return
        header = frame.header
        self.bytes_received += HEADER_NBYTES + header.payload_nbytes
        match header.type:
            case FrameType.PART | FrameType.RESULT:
                if header.plan_hash == self._plan_hash:  # else of another plan: its OPEN says which
                    self._check_planned(rank, header)
                    self._on_chunk(rank, header, torch.frombuffer(frame.payload, dtype=torch.uint8))
            case FrameType.OPEN:
                self._on_open(self._speaker(rank, header), header, frame.payload)
            case FrameType.ABORT:
                self._on_abort(self._speaker(rank, header), decode(frame.payload, AbortNotice))
            case _:
                return

    def wants_chunk(self, rank: int, header: Header) -> bool:
        """Whether this chunk of a member's brings the round further; each does once."""
        if self.is_done:
            return False
        if header.type is FrameType.RESULT:
            return self.machine.wants_result(rank, header.chunk)
        return self.machine.wants_part(rank, header.chunk)

    def take_chunk(self, link: Link, rank: int, frame: Frame) -> None:
        """A chunk is whole where `place` put it."""
        if self.is_done:
            return
        header = frame.header
        self.bytes_received += HEADER_NBYTES + header.payload_nbytes
        if self._lands_in_place(rank, header):
            if self._landing.get(header.chunk) is link:
                self._on_chunk(rank, header, None)
            return  # else the same chunk is landing from another stream
        self._on_chunk(rank, header, link.staging.tensor_of(frame.payload))

    def on_renewed(self, rank: int) -> None:
        """A stream to this member is new: send again what may have been lost."""
        self._outbox.forget(rank)
        self._run(self.machine.handle(LinkRenewed(rank)))

    def on_broken(self, rank: int, cause: CollectiveError) -> None:
        """A stream to this member broke. Whether that matters is for the supervisor to say."""
        if isinstance(cause, RemoteProtocolError):
            self._faults[rank] += 1
            if self._faults[rank] >= _MAX_FAULTS:
                self.suspect([rank], str(cause))
        self.changed.set()

    # -------------------------------------------------------------------------------- to the supervisor

    @property
    def bytes_sent(self) -> int:
        """Bytes of our opens and chunks that were sent, headers included."""
        return self._outbox.bytes_sent

    @property
    def is_open(self) -> bool:
        """Whether every member has posted the round."""
        return self.machine.num_unopened == 0

    def concerns(self, rank: int) -> bool:
        """Whether the round cannot end without this link: one owes the other something, or has to tell of a third."""
        is_awaited = self.machine.needs(rank) or self.machine.hears_through(rank)
        return rank != self.rank and (is_awaited or self._outbox.holds_for(rank))

    def owes_now(self, rank: int) -> bool:
        """Whether bytes must be moving between us: what it owes depends on nobody else, or it does not take ours."""
        return self._outbox.holds_for(rank) or self.machine.owes_own_parts(rank)

    def owing(self) -> list[int]:
        """Members that this round waits for and that wait for nobody: they have not come, or owe something now."""
        ranks = range(len(self.members))
        return [r for r in ranks if self.concerns(r) and (self.owes_now(r) or not self.machine.has_opened(r))]

    @property
    def num_missing(self) -> int:
        """Chunks that others still have to send us."""
        return sum(self.machine.num_missing(rank) for rank in range(len(self.members)) if rank != self.rank)

    def left_nbytes(self, rank: int) -> int:
        """What has to move between us and this member until the round can end, without headers."""
        unsent = self._outbox.unsent_to(rank)
        coming = [(rank, chunk, is_result) for chunk, is_result in self.machine.missing_from(rank)]
        going = [(self.rank, send.chunk, send.type is FrameType.RESULT) for send in unsent]
        return sum(self._planned_nbytes(at, chunk, is_result=is_result) for at, chunk, is_result in coming + going)

    def suspect(self, ranks: Sequence[int], cause: str) -> None:
        """Give up because of these members, and say so to the others."""
        self.give_up(self.findings.suspects(ranks, cause))

    def give_up(self, error: Exception) -> None:
        """Fail, and tell the others so that they need not find out by themselves."""
        if self.is_done:
            return
        self.fail(error)
        self.has_told = True
        self._outbox.abort(abort_payload_of(error, self.members[self.rank].peer_id))

    def hold_up(self, cause: str) -> None:
        """Give up because the round takes too long, though nobody owes us what depends on nobody else."""
        if not self.is_done:
            self.fail(self.findings.overdue(cause))
            self.has_told = True
            self._outbox.abort(abort_payload(cause, (), is_overdue=True))

    def fail(self, error: Exception) -> None:
        """End without a result. Idempotent."""
        if not self.is_done:
            self.error = error
            self._end()

    @property
    def sizes(self) -> tuple[float, ...]:
        """See RoundStats."""
        return self._buffers.sizes

    @property
    def sums(self) -> tuple[float, ...]:
        """See RoundStats."""
        return self._buffers.sums

    def weight_sum(self) -> float:
        """Σw over the members, in rank order."""
        return math.fsum(weight for weight in self.weights if weight is not None)

    # -------------------------------------------------------------------------------- frames

    def _lands_in_place(self, rank: int, header: Header) -> bool:
        is_result = header.type is FrameType.RESULT and self._buffers.is_identity
        return is_result and self.machine.wants_result(rank, header.chunk)

    def _check_planned(self, rank: int, header: Header) -> None:
        chunk = header.chunk
        if header.rank != rank:
            raise RemoteProtocolError("rank is not the sender's")
        if chunk >= self._plan.slices.num_chunks:
            raise RemoteProtocolError("no such chunk")
        if header.payload_nbytes != self._planned_nbytes(rank, chunk, is_result=header.type is FrameType.RESULT):
            raise RemoteProtocolError("chunk has another length than planned")

    def _planned_nbytes(self, sender: int, chunk: int, *, is_result: bool) -> int:
        if is_result:
            return self._buffers.result_nbytes(chunk)
        return self._buffers.part_nbytes(chunk, is_into_root=self.machine.is_into_root(sender, chunk))

    def _speaker(self, rank: int, header: Header) -> int:
        """Whose word this is: the sender's own, or that of a member which we hear of from the sender only."""
        return header.rank if self.machine.hears_of(header.rank, via=rank) else rank

    def _on_open(self, rank: int, header: Header, payload: memoryview) -> None:
        if payload != opening_payload(self._terms):
            difference = self._terms.first_difference(decode(payload, Terms))
            if difference is not None:
                # A third member may hear of it from us before it hears the terms that differ.
                self.give_up(PlanMismatch(*difference, self.members[rank].peer_id))
                return
        self._take_weight(rank, header.weight)
        bundle = self.bundles[rank]
        if bundle is not None:
            bundle.is_met = True
        self._run(self.machine.handle(PeerOpened(rank)))

    def _on_abort(self, rank: int, notice: AbortNotice) -> None:
        sender = self.members[rank].peer_id
        for other in self.machine.between(rank):
            self._outbox.hand_on(FrameType.ABORT, other, of=rank, payload=msgspec.msgpack.encode(notice))
        if notice.mismatch is not None:
            self.fail(mismatch_heard(notice.mismatch, self._terms, sender))
            return
        if self.members[self.rank].peer_id in notice.suspects:
            index = self._buffers.first_bad_input()
            if index is not None:  # another member found it where the parts are added up
                self.fail(NonFiniteInput(index))
                return
        self.fail(self.findings.heard(notice, rank))

    def _on_chunk(self, rank: int, header: Header, arrived: Tensor | None) -> None:
        """`arrived` is the chunk's wire form; None if it landed in the output."""
        bundle = self.bundles[rank]
        if bundle is not None:
            bundle.moving.came(header.payload_nbytes, is_needed=self.wants_chunk(rank, header))
        self._arrived = arrived
        self._take_weight(rank, header.weight)
        try:
            if header.type is FrameType.RESULT:
                effects = self.machine.handle(ResultArrived(rank, header.chunk))
            else:
                effects = self.machine.handle(PartArrived(rank, header.chunk))
            self._run(effects)
        except NotFinite as error:
            self.suspect([rank], f"a {header.type.name} is not finite: {error}")
        self._arrived = None  # the memory is the link's

    def _take_weight(self, rank: int, weight: float) -> None:
        known = self.weights[rank]
        if self._is_told:
            return
        if known is None:
            self.weights[rank] = weight
        elif known != weight:
            raise RemoteProtocolError("weight changed within a round")

    # -------------------------------------------------------------------------------- effects

    def _run(self, effects: Sequence[RoundEffect]) -> None:
        try:
            self._carry_out(effects)
        except NotFinite:
            raise
        except NonFiniteInput as error:
            self.give_up(error)
        except OverflowError as error:  # nobody's fault: every part is finite
            self.suspect([], str(error))
        except Exception as error:  # noqa: BLE001 - above is only the loop; the caller must hear it (its `record` failed)
            self.give_up(error)

    def _carry_out(self, effects: Sequence[RoundEffect]) -> None:
        if self.opened_at is None and self.is_open:
            self.opened_at = time.monotonic()
        touched: set[int] = set()
        for effect in effects:
            if self.is_done:
                return
            match effect:
                case SendPart(to=to, chunk=chunk):
                    self._outbox.put_chunk(FrameType.PART, to, chunk)
                    touched.add(to)
                case SendResult(to=to, chunk=chunk):
                    self._outbox.put_chunk(FrameType.RESULT, to, chunk)
                    touched.add(to)
                case Accumulate(chunk=chunk, rank=rank):
                    self._accumulate(chunk, rank)
                case FinishChunk(chunk=chunk):
                    self._buffers.finish(chunk, self.weight_sum())
                case InstallResult(chunk=chunk):
                    if self._arrived is None:
                        self._buffers.install_landed(chunk)
                    else:
                        self._buffers.install(chunk, self._arrived, self.weights)
                case SendOpen(to=to):
                    self._outbox.put_open(to)
                    touched.add(to)
                case HandOnOpening(to=to, of=of):
                    opening = opening_payload(self._terms)  # its terms are ours
                    self._outbox.hand_on(FrameType.OPEN, to, of=of, payload=opening, weight=self.weights[of] or 0.0)
                case Finished():
                    self._buffers.keep_own()
                    self.changed.set()
                case _:
                    assert_never(effect)
        for to in touched:
            self._outbox.bundle(to).wake()
        self._end_if_drained()

    def _accumulate(self, chunk: int, rank: int) -> None:
        assert self._arrived is not None
        is_sum = self.machine.adds_for(rank, chunk)
        weight = 1.0 if is_sum else self.weights[rank]
        assert weight is not None, "a chunk is added only after its weight was taken"
        is_into_root = self.machine.is_into_root(rank, chunk)
        self._buffers.add(chunk, self._arrived, weight, is_into_root=is_into_root, rank=None if is_sum else rank)

    def _end_if_drained(self) -> None:
        if self.machine.finished and not self.is_done and not self._outbox.num_unsent:
            self._end()

    def _end(self) -> None:
        self.is_done = True
        self._arrived = None  # an error keeps its round alive for a while, but not a link's memory
        self._landing.clear()
        for bundle in self.bundles:
            if bundle is not None:
                bundle.release(self._outbox)
                bundle.release(self)
        self._outbox.let_go()
        self._inboxes.clear()
        self.changed.set()
