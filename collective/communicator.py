"""The awaitable face of this package: install a view, average a tensor over its members.

Rules: one event loop, one thread. `install` and the rounds are the only places where connections are made; nothing
runs in the background but the sockets' callbacks. Several rounds with different keys may run at once.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collective.buffers import MeanBuffers, Record, check_tensors
from collective.codec import BLOCK_NUMEL, Codec, codec_named
from collective.codec.base import first_non_finite
from collective.core.types import PeerRef, RoundKey, View
from collective.engine import Engine
from collective.errors import NonFiniteInput, OperationAborted, RoundRefused
from collective.plan import plan_mean, terms_of
from collective.round import MeanRound
from collective.supervision import Patience, supervise
from collective.transport.bundle import Bundle
from collective.transport.hello import MAX_STREAMS, Hello
from collective.transport.sockets import SocketOptions

log = logging.getLogger(__name__)

_MAX_STRANGERS = 64
"""Peers that may be connected before a view names them; the oldest goes first."""
_CHECK_NUMEL = 1 << 20
"""Elements looked at before the loop gets its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceStats:
    """What one finished round was. Bytes include headers."""

    members: tuple[PeerRef, ...]
    weights: tuple[float, ...]
    """Of the members, in their order."""
    weight_sum: float
    bytes_sent: int
    bytes_received: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkOptions:
    """How one peer moves bulk bytes. Local: peers may differ."""

    eager_chunks: int = 4
    """Contributions sent to a peer that has not posted the round yet."""
    max_rounds_ahead: int = 4
    """Rounds of which a peer may send us frames before we post them."""
    install_grace_s: float = 1.0
    """How long `install` waits for new connections; the first round goes on with what is missing."""
    patience: Patience = field(default_factory=Patience)
    sockets: SocketOptions = field(default_factory=SocketOptions)

    def __post_init__(self) -> None:
        if min(self.eager_chunks, self.max_rounds_ahead) < 1:
            raise ValueError(f"eager chunks and rounds ahead must be at least 1: {self}")


class Communicator:
    """Averages tensors among the members of the installed view.

    Args:
        me: this start of this peer.
        hello: makes the hello for (peer, stream, num_streams) of a connection that we dial.
        num_streams: TCP connections that we dial to each peer with a larger id; more where the path is long.
        chunk_nbytes: longest chunk in fp32, a multiple of 1024. Must be equal on all peers.
        options: see BulkOptions.
    """

    def __init__(
        self,
        *,
        me: PeerRef,
        hello: Callable[[PeerRef, int, int], Hello],
        num_streams: int = 1,
        chunk_nbytes: int = 1 << 20,
        options: BulkOptions | None = None,
    ) -> None:
        if chunk_nbytes <= 0 or chunk_nbytes % (4 * BLOCK_NUMEL):
            raise ValueError(f"chunk_nbytes must be a multiple of {4 * BLOCK_NUMEL}, not {chunk_nbytes}")
        if not 1 <= num_streams <= MAX_STREAMS:
            raise ValueError(f"num_streams must be from 1 to {MAX_STREAMS}, not {num_streams}")
        self.me = me
        self._hello = hello
        self._num_streams = num_streams
        self._chunk_nbytes = chunk_nbytes
        self._options = options or BulkOptions()
        self._engine = Engine(
            chunk_nbytes=chunk_nbytes,
            eager_chunks=self._options.eager_chunks,
            max_rounds_ahead=self._options.max_rounds_ahead,
        )
        self._bundles: dict[PeerRef, Bundle] = {}
        self._codecs: dict[str, Codec] = {}
        self._moved_by_closed = [0, 0]
        self._closed = False

    # -------------------------------------------------------------------------------- connections

    def adopt(self, sock: socket.socket, hello: Hello) -> None:
        """Take an accepted BULK connection for good. One that cannot be meant for us is closed and counted."""
        known = self._engine.view
        member = next((m for m in known.members if m.peer_id == hello.peer_id), None) if known else None
        if self._closed or hello.peer_id >= self.me.peer_id or hello.stream >= hello.num_streams:
            self._refuse(sock, "connection in the wrong direction")
            return
        if member is not None and hello.incarnation < member.incarnation:
            self._refuse(sock, "connection of an older incarnation")
            return
        bundle = self._bundles.get(hello.ref)
        if bundle is None:
            self._make_room_for_stranger()
            bundle = self._new_bundle(hello.ref, hello.num_streams)
        bundle.num_streams = hello.num_streams  # the dialler decides
        bundle.attach(sock, hello.stream)

    async def install(self, view: View) -> None:
        """Make this view current: end rounds of older ones, keep links to members that stay, drop and dial others.

        Waits at most `install_grace_s` for the dials; a member that cannot be reached is the first round's finding.

        Raises:
            ValueError: the view is older than the installed one.
        """
        installed = self._engine.view
        if installed is not None and view.epoch < installed.epoch:
            raise ValueError(f"view {view.epoch} is older than the installed {installed.epoch}")
        former = {member.ref for member in installed.members} if installed else set()
        members = {member.ref for member in view.members}
        newest = {member.peer_id: member.incarnation for member in view.members}
        for ref in list(self._bundles):
            outdated = ref.incarnation < newest.get(ref.peer_id, 0)
            if ref not in members and (ref in former or outdated):
                self._drop(ref)
        for member in view.members:
            if member.ref != self.me:
                if member.ref not in self._bundles:
                    self._new_bundle(member.ref, self._num_streams)
                self._bundles[member.ref].address = member.address
        self._engine.install(view, self._bundles)
        log.info("view_installed epoch=%d world_size=%d", view.epoch, view.world_size)
        await self._dial_members(members)

    async def close(self) -> None:
        """End all rounds and connections."""
        self._closed = True
        for round_ in list(self._engine.rounds.values()):
            round_.fail(OperationAborted(round_.key, "the communicator was closed"))
        for ref in list(self._bundles):
            self._drop(ref)

    # -------------------------------------------------------------------------------- rounds

    async def all_reduce_mean(
        self,
        key: RoundKey,
        tensor: Tensor,
        *,
        out: Tensor,
        weight: float = 1.0,
        codec: str = "raw",
        record: Record | None = None,
        deadline_s: float | None = None,
    ) -> ReduceStats:
        """`out = Σ w·x / Σ w` over the members of the view, the same bits on all of them. All zeros if Σw is 0.

        Args:
            key: name of the round; its epoch must be the installed view's. Used once.
            tensor: our x. Flat contiguous fp32 on the CPU, finite. Untouched, whatever happens, unless it is `out`.
            out: as long as `tensor`; either `tensor` itself or memory that does not overlap it. After an error its
                content is undefined; in place that means that the input is lost.
            weight: our w, from 0 up.
            codec: wire form; "raw" is exact fp32. Our own part is not encoded for ourselves; the result is, for all.
            record: receives (start_numel, wire form) of every result chunk, valid during the call; see
                `decode_result`.
            deadline_s: end of patience for the whole round; default `Patience.round_s`.

        Raises:
            OperationAborted: a member broke or stood still, or a newer view was installed. Try again in the next view.
            PlanMismatch: a member posted other terms; all members see it.
            NonFiniteInput: `tensor` holds NaN or infinity; nothing was sent.
            RoundRefused: the key is not for now.
            ValueError: tensors, weight or codec are not as described.
        """
        started = time.monotonic()
        check_tensors(tensor, out, weight)
        chosen = self._codecs.setdefault(codec, codec_named(codec))
        self._engine.check_free(key)
        await _check_finite(tensor)
        round_ = self._new_round(key, tensor, out, weight, chosen, record)
        try:
            self._engine.post(round_)
            if not round_.is_done:
                patience = self._options.patience
                await supervise(round_, patience, patience.round_s if deadline_s is None else deadline_s)
        except BaseException as error:
            cause = "cancelled by its caller" if isinstance(error, asyncio.CancelledError) else "failed inside"
            round_.give_up(OperationAborted(key, cause))
            raise
        finally:
            self._engine.close(round_)
        if round_.error is not None:
            raise round_.error
        return ReduceStats(
            members=tuple(member.ref for member in round_.view.members),
            weights=tuple(0.0 if known is None else known for known in round_.weights),
            weight_sum=round_.weight_sum(),
            bytes_sent=round_.bytes_sent,
            bytes_received=round_.bytes_received,
            seconds=time.monotonic() - started,
        )

    # -------------------------------------------------------------------------------- figures

    def is_awaited(self) -> bool:
        """Whether a member of the view has posted a round that is not posted here yet."""
        return self._engine.is_awaited()

    def progress(self) -> int:
        """A number that grows with every byte moved."""
        return self.bytes_sent + self.bytes_received

    @property
    def bytes_sent(self) -> int:
        """Bulk bytes given to the kernel since the start, headers included."""
        return self._moved_by_closed[0] + sum(bundle.bytes_sent for bundle in self._bundles.values())

    @property
    def bytes_received(self) -> int:
        """Bulk bytes read since the start, headers included."""
        return self._moved_by_closed[1] + sum(bundle.bytes_received for bundle in self._bundles.values())

    @property
    def dropped(self) -> dict[str, int]:
        """Frames and connections that were dropped, by reason."""
        return dict(self._engine.dropped)

    # -------------------------------------------------------------------------------- inside

    def _new_round(
        self, key: RoundKey, tensor: Tensor, out: Tensor, weight: float, codec: Codec, record: Record | None
    ) -> MeanRound:
        view = self._engine.check_free(key)  # again: the loop has run since
        rank = view.rank_of(self.me.peer_id)
        if rank is None or not view.holds(self.me):
            raise RoundRefused(key, "this peer is no member of the view")
        chunk_numel = self._chunk_nbytes // 4
        plan = plan_mean(tensor.numel(), [1.0] * view.world_size, chunk_numel)
        bundles: Sequence[Bundle | None] = [
            None if member.ref == self.me else self._bundles[member.ref] for member in view.members
        ]
        return MeanRound(
            key=key,
            view=view,
            rank=rank,
            plan=plan,
            terms=terms_of(view, numel=tensor.numel(), codec=codec.name, chunk_numel=chunk_numel, plan=plan),
            buffers=MeanBuffers(
                plan=plan,
                own=plan.slices.chunks_of(rank),
                codec=codec,
                tensor=tensor.detach(),
                out=out.detach(),
                weight=weight,
                record=record,
            ),
            weight=weight,
            bundles=bundles,
            eager_chunks=self._options.eager_chunks,
        )

    def _new_bundle(self, ref: PeerRef, num_streams: int) -> Bundle:
        self._bundles[ref] = Bundle(
            ref,
            is_dialler=self.me.peer_id < ref.peer_id,
            num_streams=num_streams,
            chunk_nbytes=self._chunk_nbytes,
            hello=self._hello,
            owner=self._engine,
            options=self._options.sockets,
        )
        return self._bundles[ref]

    def _drop(self, ref: PeerRef) -> None:
        bundle = self._bundles.pop(ref)
        bundle.close()
        self._moved_by_closed[0] += bundle.bytes_sent
        self._moved_by_closed[1] += bundle.bytes_received

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        self._engine.dropped[reason] += 1
        sock.close()

    def _make_room_for_stranger(self) -> None:
        view = self._engine.view
        strangers = [ref for ref in self._bundles if view is None or not view.holds(ref)]
        if len(strangers) >= _MAX_STRANGERS:
            self._engine.dropped["too many connections before a view"] += 1
            self._drop(strangers[0])

    async def _dial_members(self, members: set[PeerRef]) -> None:
        wanted = [bundle for ref, bundle in self._bundles.items() if ref in members and bundle.is_dialler]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.install_grace_s), asyncio.TaskGroup() as dials:
                for bundle in wanted:
                    dials.create_task(bundle.repair())


def decode_result(codec: str, start_numel: int, wire_bytes: bytes | memoryview, out: Tensor) -> None:
    """Write a recorded result chunk into `out`, bit for bit as it was installed when it was recorded.

    Args:
        codec: the round's.
        start_numel: where the chunk begins.
        wire_bytes: as `record` received it.
        out: flat fp32 of the whole buffer.

    Raises:
        ValueError: the bytes do not fit the codec or the buffer.
    """
    wire = torch.frombuffer(bytearray(wire_bytes), dtype=torch.uint8)
    chosen = codec_named(codec)
    numel = chosen.numel(wire.numel())
    if not 0 <= start_numel <= out.numel() - numel:
        raise ValueError(f"chunk {start_numel} + {numel} does not fit {out.numel()} elements")
    chosen.decode(wire, out[start_numel : start_numel + numel])


async def _check_finite(tensor: Tensor) -> None:
    for start in range(0, tensor.numel(), _CHECK_NUMEL):
        index = first_non_finite(tensor[start : start + _CHECK_NUMEL])
        if index is not None:
            raise NonFiniteInput(start + index)
        if start:
            await asyncio.sleep(0)
