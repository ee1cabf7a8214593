# SPDX-License-Identifier: Apache-2.0
"""Where bulk frames and rounds meet: every frame is judged by the fence, then goes to its round, waits, or is dropped.

Rules:
* A frame of an older view, or of a round that has ended, is read into scratch, dropped and counted. Who opens such a
  round is told, unless it has ended well and no connection has broken: then nothing can be missing.
* A frame of a round that is not posted here yet, or of a newer view, is held back (`Stash`). The credit of
  core/round_machine.py bounds what an honest peer can send so early; more is its protocol error.
* A round that is announced has said to the others that we have come; what they send for it is held back as well.
* A round ends when it is done, when a newer view is installed, or when its caller goes away. Its key is never used
  again: a retry belongs to another view.
* Nothing here waits: callbacks of the loop in, effects out. Deadlines are supervision.py's.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping

from isthmus.collective.core.fence import Fence, Standing
from isthmus.collective.core.types import Epoch, PeerRef, RoundKey, View
from isthmus.collective.errors import CollectiveError, OperationAborted, RemoteProtocolError, RoundRefused, StreamBroken
from isthmus.collective.rounds.notices import HAS_RESULT, abort_payload, abort_payload_of
from isthmus.collective.rounds.plan import FAR_CHUNK_NBYTES
from isthmus.collective.rounds.running_round import RunningRound
from isthmus.collective.transport.bundle import Bundle, Notice
from isthmus.collective.transport.link import Link, Sink
from isthmus.collective.transport.memory import fresh_memory
from isthmus.collective.transport.refusal_log import RefusalLog
from isthmus.collective.transport.wire import CHUNKS, NOTICE_NBYTES, Frame, FrameType, Header, pack

log = logging.getLogger(__name__)

_CLOSED_KEYS_KEPT = 1024
_MAX_ROUNDS = 256
"""In flight at once."""
_VIEW_OVER = abort_payload("it has left that view", ())
_NO_RANK = 0
"""Of who speaks of a view that it may never have been in; nobody reads the rank of an ABORT."""


class Stash:
    """Frames of one peer that came before their round was posted. Bounded in number and bytes; repeats replace.

    Args:
        max_frames: more is the peer's protocol error.
        max_nbytes: likewise.
    """

    def __init__(self, *, max_frames: int, max_nbytes: int) -> None:
        self._max_frames = max_frames
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._frames: dict[tuple[RoundKey, FrameType, int, int], Frame] = {}

    def put(self, frame: Frame) -> bool:
        """Keep a copy. Whether it is the first, of a round not given up. RemoteProtocolError beyond the bounds."""
        name = (frame.header.key, frame.header.type, frame.header.rank, frame.header.chunk)
        is_over = any(key == frame.header.key and kind is FrameType.ABORT for key, kind, *_ in self._frames)
        is_new = name not in self._frames and not is_over
        self._drop(name)
        if frame.header.type is FrameType.ABORT:  # whatever came for that round has lost its meaning
            self.take(frame.header.key)
        nbytes = frame.header.payload_nbytes
        if len(self._frames) >= self._max_frames or self._nbytes + nbytes > self._max_nbytes:
            raise RemoteProtocolError("too far ahead")
        copy = fresh_memory(nbytes)
        copy[:] = frame.payload
        self._frames[name] = Frame(frame.header, copy)
        self._nbytes += nbytes
        return is_new

    def take(self, key: RoundKey) -> list[Frame]:
        """Remove and return the frames of this round, in the order of their arrival."""
        names = [name for name in self._frames if name[0] == key]
        frames = [self._frames[name] for name in names]
        for name in names:
            self._drop(name)
        return frames

    def holds(self, epoch: Epoch, *, but: Collection[RoundKey]) -> bool:
        """Whether anything waits for a round of this view that is none of these."""
        return any(key.epoch == epoch and key not in but for key, *_ in self._frames)

    def drop_before(self, epoch: Epoch) -> int:
        """Forget frames of older views; return how many."""
        names = [name for name in self._frames if name[0].epoch < epoch]
        for name in names:
            self._drop(name)
        return len(names)

    def _drop(self, name: tuple[RoundKey, FrameType, int, int]) -> None:
        frame = self._frames.pop(name, None)
        if frame is not None:
            self._nbytes -= frame.header.payload_nbytes


class Engine:
    """Routes frames between bundles and rounds. See the module.

    Args:
        chunk_nbytes: longest payload.
        eager_chunks: parts that a peer may send before we post a round, if they are of the longest; of shorter
            ones as many as make the same bytes, so that a long path has something to carry until it has heard of us.
        max_rounds_ahead: for how many rounds it may do so.
    """

    def __init__(self, *, chunk_nbytes: int, eager_chunks: int, max_rounds_ahead: int) -> None:
        self.fence = Fence.before_any_view()
        self.view: View | None = None
        self.rounds: dict[RoundKey, RunningRound] = {}
        self._announced: dict[RoundKey, RunningRound] = {}  # opened towards the others, not posted yet
        self.dropped: Counter[str] = Counter()
        self.call_wanted: Callable[[PeerRef, str], None] = _ignore
        self.refused: Counter[str] = Counter()
        self.refusals = RefusalLog(self.refused)
        self._closed_keys: OrderedDict[RoundKey, tuple[int, bytes]] = OrderedDict()  # our rank, what ended it
        self._stashes: dict[PeerRef, Stash] = {}
        self._num_spent = 0
        self._eager_nbytes = eager_chunks * chunk_nbytes
        self._least_nbytes = min(chunk_nbytes, FAR_CHUNK_NBYTES)  # that a chunk counts for
        self._max_rounds_ahead = max_rounds_ahead
        self._max_frames = max_rounds_ahead * (self._eager_nbytes // self._least_nbytes) + 2 * _MAX_ROUNDS
        self._max_nbytes = max_rounds_ahead * self._eager_nbytes + _MAX_ROUNDS * NOTICE_NBYTES

    def install(self, view: View, bundles: Mapping[PeerRef, Bundle]) -> None:
        """From now on this view is current. Rounds of older ones end."""
        for round_ in self.under_way():
            if round_.key.epoch < view.epoch:
                round_.fail(OperationAborted(round_.key, f"view {view.epoch} was installed"))
        self.fence = Fence.of(view)
        self.view = view
        self._num_spent = 0
        for ref in list(self._stashes):
            self.dropped["of an older view"] += self._stashes[ref].drop_before(view.epoch)
            if ref not in bundles:
                del self._stashes[ref]

    def check_free(self, key: RoundKey) -> View:
        """The view in which this round may be posted. Raises RoundRefused."""
        if self.view is None:
            raise RoundRefused(key, "no view is installed")
        if key.epoch != self.view.epoch:
            raise RoundRefused(key, f"the installed view is {self.view.epoch}")
        if not (0 <= key.epoch < 2**32 and 0 <= key.outer_step < 2**32 and 0 <= key.fragment < 2**16):
            raise RoundRefused(key, "its numbers do not fit a frame")
        if len(self.rounds) >= _MAX_ROUNDS:
            raise RoundRefused(key, f"{_MAX_ROUNDS} rounds are in flight; await some first")
        if key in self.rounds or key in self._announced or key in self._closed_keys:
            raise RoundRefused(key, "this key was used before")
        return self.view

    def under_way(self) -> list[RunningRound]:
        """Rounds that are posted or announced."""
        return [*self.rounds.values(), *self._announced.values()]

    def credit(self, chunk_nbytes: int) -> int:
        """How many chunks a round that is posted now may send to members that have not opened it.

        Of the rounds that somebody has not opened only so many may send chunks ahead, whatever is in flight.

        Args:
            chunk_nbytes: longest chunk of the round that may go ahead.
        """
        num_ahead = self._num_spent + sum(map(_spends_credit, self.under_way()))
        if num_ahead >= self._max_rounds_ahead:
            return 0
        return self._eager_nbytes // max(chunk_nbytes, self._least_nbytes)

    def is_awaited(self) -> bool:
        """Whether frames of a round of this view wait for it to be posted here."""
        epoch = None if self.view is None else self.view.epoch
        stashes = self._stashes.values()
        return any(stash.holds(epoch, but=self._announced) for stash in stashes if epoch is not None)

    def announce(self, round_: RunningRound) -> None:
        """Open a round that is posted later, or closed. Until then what comes for it lies in the stash.

        For rounds of a few small chunks: who hears that we have come sends all of them, and no credit bounds that.
        """
        self._announced[round_.key] = round_
        round_.announce()

    def post(self, round_: RunningRound) -> None:
        """Take a round in, start it and give it what has arrived for it already."""
        self._announced.pop(round_.key, None)
        self.rounds[round_.key] = round_
        round_.start()
        for bundle in round_.bundles:
            stash = self._stashes.get(bundle.peer) if bundle is not None else None
            if bundle is None or stash is None:
                continue
            for frame in stash.take(round_.key):
                if round_.is_done:
                    break
                try:
                    self._deliver(bundle, frame)
                except RemoteProtocolError as error:
                    # It came over a link that may be gone by now, so it is the peer that is refused.
                    self._refuse(bundle, error.reason)
                    rank = round_.rank_of(bundle)
                    round_.suspect([] if rank is None else [rank], str(error))

    def close(self, round_: RunningRound) -> None:
        """The round has ended; what still comes for it is dropped. Idempotent."""
        key = round_.key
        if self._announced.get(key) is round_:
            del self._announced[key]
            for stash in self._stashes.values():
                stash.take(key)
        if self.rounds.get(key) is round_:
            del self.rounds[key]
            if key.epoch == self.fence.epoch:
                # Others may hold its chunks back until the next view: what they were lent is free for no other round.
                self._num_spent += _spends_credit(round_) and not round_.has_told
        ended = abort_payload_of(round_.error, round_.members[round_.rank].peer_id)
        self._closed_keys[key] = (round_.rank, ended)
        if len(self._closed_keys) > _CLOSED_KEYS_KEPT:
            self._closed_keys.popitem(last=False)

    # -------------------------------------------------------------------------------- as owner of bundles

    def place(self, bundle: Bundle, link: Link, header: Header) -> tuple[memoryview, Sink | None]:
        """Destination of a payload: a round's memory, or the link's scratch for all that is copied or dropped."""
        if header.type in (FrameType.OPEN, FrameType.ABORT):
            return memoryview(bytearray(header.payload_nbytes)), None
        if self.fence.judge(bundle.peer, Epoch(header.epoch)) is Standing.CURRENT:
            round_ = self.rounds.get(header.key)
            rank = None if round_ is None else round_.rank_of(bundle)
            if round_ is not None and rank is not None:
                return round_.place(link, rank, header)
        return link.staging.room(header.payload_nbytes), None

    def on_frame(self, bundle: Bundle, frame: Frame) -> None:
        """A frame is whole that no round takes by itself."""
        header = frame.header
        if header.type is FrameType.CALL:
            if bundle.address is not None:
                self.call_wanted(bundle.peer, bundle.address)
            return
        standing = self.fence.judge(bundle.peer, Epoch(header.epoch))
        if standing is Standing.STALE or header.key in self._closed_keys:
            self.dropped["of an older view" if standing is Standing.STALE else "of an ended round"] += 1
            if header.type in CHUNKS:
                bundle.moving.came(header.payload_nbytes, is_needed=False)
            if header.type is FrameType.OPEN:
                self._answer_late(bundle, header)
        elif standing is Standing.CURRENT and header.key in self.rounds:
            self._deliver(bundle, frame)
        else:
            is_new = self._stash_of(bundle.peer).put(frame)
            if header.type in CHUNKS:
                bundle.moving.came(header.payload_nbytes, is_needed=is_new)

    def on_broken(self, bundle: Bundle, cause: CollectiveError) -> None:
        """Let the rounds with this peer look at it."""
        if isinstance(cause, RemoteProtocolError):
            self._refuse(bundle, cause.reason)
        elif isinstance(cause, StreamBroken):
            self._refuse(bundle, cause.cause)
        for round_, rank in self._rounds_with(bundle):
            round_.on_broken(rank, cause)

    def on_renewed(self, bundle: Bundle) -> None:
        """Let the rounds with this peer send again."""
        for round_, rank in self._rounds_with(bundle):
            round_.on_renewed(rank)

    # -------------------------------------------------------------------------------- look-ups

    def _refuse(self, bundle: Bundle, kind: str) -> None:
        self.refusals.ended(kind, asyncio.get_running_loop().time(), peer_id=bundle.peer_id, purpose="bulk")

    def _deliver(self, bundle: Bundle, frame: Frame) -> None:
        round_ = self.rounds[frame.header.key]
        rank = round_.rank_of(bundle)
        if rank is not None:
            round_.on_frame(rank, frame)
        elif frame.header.type is FrameType.OPEN:
            round_.refuse_outsider(bundle)
        if round_.is_done:
            self.close(round_)

    def _answer_late(self, bundle: Bundle, opening: Header) -> None:
        """Somebody opens a round that has ended here, or cannot begin: say so, else it waits until its deadline."""
        if len(bundle.notices) >= _MAX_ROUNDS:
            return  # it asks and does not listen; an honest peer has fewer rounds
        rank, payload = self._closed_keys.get(opening.key, (_NO_RANK, _VIEW_OVER))
        if payload == HAS_RESULT and not bundle.has_lost:
            return  # what it still lacks is on its way; other streams may be slower than the one that brought this
        header = Header(
            type=FrameType.ABORT,
            payload_nbytes=len(payload),
            epoch=opening.epoch,
            outer_step=opening.outer_step,
            fragment=opening.fragment,
            rank=rank,
        )
        bundle.notices.append(Notice(pack(header, payload), payload))
        bundle.wake()

    def _rounds_with(self, bundle: Bundle) -> list[tuple[RunningRound, int]]:
        found = [(round_, round_.rank_of(bundle)) for round_ in self.rounds.values() if not round_.is_done]
        return [(round_, rank) for round_, rank in found if rank is not None]

    def _stash_of(self, peer: PeerRef) -> Stash:
        if peer not in self._stashes:
            self._stashes[peer] = Stash(max_frames=self._max_frames, max_nbytes=self._max_nbytes)
        return self._stashes[peer]


def _spends_credit(round_: RunningRound) -> bool:
    return round_.eager_chunks > 0 and not round_.is_open


def _ignore(_peer: PeerRef, _address: str) -> None:
    """Nobody here calls back."""
