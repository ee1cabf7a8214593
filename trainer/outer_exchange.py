# SPDX-License-Identifier: Apache-2.0
"""How a planned round becomes operations of the collective layer, and when it counts.

A round is two operations, one after the other, while the script goes on training:

    payload   MEAN: all_reduce. GATHER: all_gather of the codec's bytes. PAIR: exchange with a partner that is drawn.
    votes     all_gather of a row of fp64 from every member: whether it has the result, its history, weight and notes.

The result counts if all votes say so. Whoever lacks a vote starts the round again in the next view, where it can only
succeed if all members of that view lack one; who has gone on refuses it there. If the votes break after some members
have them all, these go on with a result that others lack: histories differ then, and the next votes show it.

Rules: nothing here waits longer than the deadline. Payloads are only read. Results have the same bits on all members,
but for PAIR. No thread of its own: what happens between the two operations happens on the communicator's.
It must not know states, models or hooks.
"""

import concurrent.futures
import dataclasses
import logging
import math
from concurrent.futures import Future
from typing import Any, Final, TypeVar, assert_never

import torch
from torch import Tensor

from isthmus.collective.api.blocking import BlockingCommunicator
from isthmus.collective.codec import Codec, NotFinite, codec_named
from isthmus.collective.codec.base import first_non_finite
from isthmus.collective.core.types import OuterStep, PeerId, RoundKey, View
from isthmus.collective.errors import CollectiveError, OperationAborted
from isthmus.collective.transport.wire import MAX_WEIGHT
from isthmus.optim.outer import Contribution, Emitted, Op, Result, Round
from isthmus.optim.workload import draw_pairs
from isthmus.trainer.outer_votes import History, Settled, Vote

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_PAYLOAD, _VOTES, _REPAIR = range(3)
_NUM_PHASES: Final = 3
"""Operations that a round may need; place p in the plan of its inner step owns the fragments 3p, 3p + 1, 3p + 2."""
_WIRE_ALIGNMENT: Final = 4


class Exchanger:
    """Starts rounds in whatever view is installed, and waits in bounded time.

    Args:
        communicator: with a view that holds this peer.
        codec: of rounds that name none.
        deadline_s: longest wait for an operation, from when it is waited for.

    Raises:
        ValueError: no such codec, no view, or this peer is not in it.
    """

    def __init__(self, communicator: BlockingCommunicator, *, codec: str, deadline_s: float) -> None:
        if not 0.0 < deadline_s < math.inf:
            raise ValueError(f"deadline_s must be positive and finite, got {deadline_s}")
        self.communicator = communicator
        self.default_codec = codec
        self._deadline_s = deadline_s
        self._codecs = {codec: codec_named(codec)}
        others = {report.peer_id for report in communicator.links()}
        own = [member.peer_id for member in self.view.members if member.peer_id not in others]
        if not own:
            raise ValueError("this peer is no member of the installed view; install one that holds it")
        self.me: PeerId = own[0]

    @property
    def view(self) -> View:
        """The installed one.

        Raises:
            ValueError: there is none.
        """
        view = self.communicator.view
        if view is None:
            raise ValueError("no view is installed; call communicator.install(view_of(0, addresses)) first")
        return view

    def codec(self, name: str | None) -> Codec:
        """With its scratch: for the thread that trains only."""
        name = name or self.default_codec
        if name not in self._codecs:
            self._codecs[name] = codec_named(name)
        return self._codecs[name]

    def start(self, round_: Round, place: int, emitted: Emitted, weight: float, history: History) -> "Exchange":
        """Begin a round. A payload with NaN or infinity is set to zero and gets weight 0: it is in no result.

        Args:
            round_: as planned.
            place: in the plan of its inner step.
            emitted: what we give. The payload is borrowed until the round is settled.
            weight: ours, the emitted factor included.
            history: ours.

        Raises:
            ValueError: the weight or the notes are not as the protocol wants them, or there is no such codec.
        """
        if len(emitted.notes) != round_.num_notes or not 0.0 <= weight <= MAX_WEIGHT:
            raise ValueError(f"{round_}: emitted with weight {weight} and notes {emitted.notes}")
        if first_non_finite(emitted.payload) is not None:
            log.warning("payload_not_finite inner_step=%d fragment=%s", round_.inner_step, round_.fragment)
            emitted.payload.zero_()
            weight = 0.0
        vote = Vote(has_result=True, history=history, weight=weight, notes=emitted.notes)
        return Exchange(self, round_, place, emitted, vote)

    def gather(self, step: int, fragment: int, row: Tensor) -> list[Tensor]:
        """Everybody's row, by rank, under a key of the installed view. Raises CollectiveError."""
        key = RoundKey(self.view.epoch, OuterStep(step), fragment)
        return self.wait(self.communicator.all_gather(key, row), key)[0]

    def broadcast(self, step: int, fragment: int, tensor: Tensor) -> None:
        """Overwrite `tensor` with that of the view's first member. Raises CollectiveError."""
        view = self.view
        key = RoundKey(view.epoch, OuterStep(step), fragment)
        self.wait(self.communicator.broadcast(key, tensor, root=view.members[0].peer_id), key)

    def refuse(self, step: int, place: int) -> list[Future[Any]]:
        """Let a round that is settled here fail for those who start it again in the installed view.

        Returns:
            What does it; once it was cancelled, such a round fails as well.
        """
        # An operation that nobody else posts: the others' differ from it, and all members hear of that at once.
        keys = _keys(self.view, step, place)
        return [self.communicator.barrier(key) for key in (keys[_PAYLOAD], keys[_VOTES])]

    def wait(self, work: "Future[_T]", key: RoundKey) -> _T:
        """The operation's result.

        Raises:
            CollectiveError: it broke, or its time was up; then it is cancelled, which ends it for all members.
        """
        try:
            return work.result(self._deadline_s)
        except concurrent.futures.CancelledError as error:
            raise OperationAborted(key, "it was cancelled, or the communicator was closed") from error
        except TimeoutError as error:
            work.cancel()
            raise OperationAborted(key, f"not finished in {self._deadline_s:g} s") from error


class Exchange:
    """One round under way; see `Exchanger.start`."""

    def __init__(self, exchanger: Exchanger, round_: Round, place: int, emitted: Emitted, vote: Vote) -> None:
        view = exchanger.view
        self.round_, self.emitted = round_, emitted
        self._exchanger, self._communicator = exchanger, exchanger.communicator
        self._codec = exchanger.codec(round_.codec)
        self._vote = vote
        self.members: tuple[PeerId, ...] = tuple(member.peer_id for member in view.members)
        """Of the view it runs in."""
        self._keys = _keys(view, round_.inner_step, place)
        self._encoded: Tensor | None = None
        self._received: Tensor | None = None
        self._partner: str | None = None
        self._voting: Future[tuple[list[Tensor], Any]] | None = None
        self._rows: Future[list[Tensor]] = Future()
        self._is_left = False
        self._payload = self._send_payload()
        if self._payload is None:
            self._cast_vote(None)
        else:
            self._payload.add_done_callback(self._cast_vote)

    # -------------------------------------------------------------------------------- the caller's

    def settle(self) -> Settled:
        """Wait for the votes. May be called again.

        Raises:
            ValueError: the operation was not possible at all, and would never be.
        """
        votes: tuple[Vote, ...] = ()
        broken: CollectiveError | None = None
        try:
            rows = self._exchanger.wait(self._rows, self._keys[_VOTES])
            votes = tuple(Vote.from_row(row) for row in rows)
        except CollectiveError as error:
            broken = error
            # In bounded time for the others too: a payload that is given up is voted against.
            for work in (self._payload, self._voting):
                if work is not None:
                    work.cancel()
        if self._payload is not None and self._payload.done() and not self._payload.cancelled():
            first = self._payload.exception()
            if first is not None and not isinstance(first, CollectiveError):
                raise first
            broken = first or broken
        return Settled(votes=votes, error=broken)

    def result(self, votes: tuple[Vote, ...]) -> Result | None:
        """What a round that counts has brought; None for whoever has no partner, or nothing that can be read."""
        round_ = self.round_
        everybody: dict[str, Vote] = dict(zip(self.members, votes, strict=True))
        members: tuple[str, ...] = tuple(member for member in self.members if everybody[member].weight > 0.0)
        if round_.op is Op.PAIR:
            pair = tuple(member for member in (self._exchanger.me, self._partner) if member in members)
            if len(pair) < 2:
                return None
            members = pair
        try:
            value = self._value(members)
        except NotFinite as error:
            log.warning("result_unreadable inner_step=%d fragment=%s: %s", round_.inner_step, round_.fragment, error)
            return None
        weights = tuple(everybody[member].weight for member in members)
        return Result(
            value=value,
            members=members,
            weight_sum=math.fsum(weights),
            weights=weights,
            notes=tuple(everybody[member].notes for member in members) if round_.num_notes else (),
        )

    def contribution(self, newer_payload: Tensor | None) -> Contribution:
        """What we gave. With a lossy codec's MEAN the part that this member reduces itself arrives better than told."""
        return Contribution(
            payload=self.emitted.payload,
            weight=self._vote.weight,
            read_delivered=self._read_delivered,
            notes=self.emitted.notes,
            kept=self.emitted.kept,
            newer_payload=newer_payload,
        )

    def repair(self, root: int, tensor: Tensor) -> None:
        """Give everybody the bytes of the member with this rank; all who have the votes do it.

        Raises:
            CollectiveError: it broke.
        """
        key = self._keys[_REPAIR]
        self._exchanger.wait(self._communicator.broadcast(key, tensor, root=self.members[root]), key)

    @property
    def is_current(self) -> bool:
        """Whether its view is still the installed one."""
        return self._exchanger.view.epoch == self._keys[_PAYLOAD].epoch

    def leave(self) -> None:
        """End it, for all members, and vote no more."""
        self._is_left = True
        for work in (self._payload, self._voting):
            if work is not None:
                work.cancel()

    # -------------------------------------------------------------------------------- payload

    def _send_payload(self) -> Future[Any] | None:
        payload, key = self.emitted.payload, self._keys[_PAYLOAD]
        match self.round_.op:
            case Op.MEAN:
                self._received = torch.empty_like(payload)
                return self._communicator.all_reduce(
                    key, payload, out=self._received, weight=self._vote.weight, codec=self._codec.name
                )
            case Op.GATHER:
                return self._communicator.all_gather(key, self._wire())
            case Op.PAIR:
                members = [str(member) for member in self.members]
                self._partner = draw_pairs(self.round_, members).get(self._exchanger.me)
                if self._partner is None:
                    return None
                self._received = torch.empty_like(self._wire())
                return self._communicator.exchange(key, self._wire(), out=self._received, partner=PeerId(self._partner))
            case _:
                assert_never(self.round_.op)

    def _value(self, members: tuple[str, ...]) -> Tensor:
        """Of a round whose payload operation succeeded. Raises NotFinite."""
        numel = self.emitted.payload.numel()
        match self.round_.op:
            case Op.MEAN:
                assert self._received is not None
                return self._received
            case Op.GATHER:
                assert self._payload is not None
                parts = dict(zip(self.members, self._payload.result()[0], strict=True))
                value = torch.empty(len(members), numel)
                for row, member in zip(value, members, strict=True):
                    self._decode(parts[PeerId(member)], row)
                return value
            case Op.PAIR:
                assert self._received is not None
                value = torch.empty(numel)
                self._decode(self._received, value)
                return value
            case _:
                assert_never(self.round_.op)

    def _wire(self) -> Tensor:
        """Our payload as bytes, in the length that all have, so that each of several in a row is aligned."""
        if self._encoded is None:
            payload = self.emitted.payload
            nbytes = self._codec.wire_nbytes(payload.numel())
            wire = torch.zeros(-(-nbytes // _WIRE_ALIGNMENT) * _WIRE_ALIGNMENT, dtype=torch.uint8)
            encoded = self._codec.encode(payload, wire[:nbytes])
            self._encoded = encoded if self._codec.is_identity else wire
        return self._encoded

    def _decode(self, wire: Tensor, out: Tensor) -> None:
        wire = wire[: self._codec.wire_nbytes(out.numel())]
        self._codec.check(wire, out.numel())
        self._codec.decode(wire, out)

    def _read_delivered(self, out: Tensor) -> None:
        if self._codec.is_identity:
            out.copy_(self.emitted.payload)
        else:
            self._decode(self._wire(), out)

    # -------------------------------------------------------------------------------- votes: the communicator's thread

    def _cast_vote(self, payload: Future[Any] | None) -> None:
        if self._is_left:
            return
        has_result = payload is None or (not payload.cancelled() and payload.exception() is None)
        row = dataclasses.replace(self._vote, has_result=has_result).to_row()
        try:
            self._voting = self._communicator.all_gather(self._keys[_VOTES], row)
        except RuntimeError:  # the communicator is closed
            self._rows.cancel()
            return
        self._voting.add_done_callback(self._take_votes)

    def _take_votes(self, voting: "Future[tuple[list[Tensor], Any]]") -> None:
        if voting.cancelled():
            self._rows.cancel()
        elif self._rows.set_running_or_notify_cancel():
            error = voting.exception()
            if error is None:
                self._rows.set_result(voting.result()[0])
            else:
                self._rows.set_exception(error)


def _keys(view: View, step: int, place: int) -> list[RoundKey]:
    """Of the phases of the round at this place in the plan of this inner step."""
    return [RoundKey(view.epoch, OuterStep(step), _NUM_PHASES * place + phase) for phase in range(_NUM_PHASES)]
