# SPDX-License-Identifier: Apache-2.0
"""A real peer that lies: `python liar.py KIND join ...`, the program with one thing about its work made untrue.

    weight       its worker claims to have trained on a million million tokens a step, and sends noise
    noise        its worker sends noise, a thousand times as large as the others' differences
    huge         its worker sends numbers whose weighted sum is beyond the largest fp32
    not_finite   it sends parts with a NaN
    length       its worker says that its difference is a million times as long (Decoupled alone)
    against      its worker sends −5 times its difference
    two_weights  it tells every other member another weight
    two_results  it gives two of the others another sum than the rest, in rounds; in surveys of links it is honest
    sum          it gives all the same false sum of its slice, in rounds
    framing      it sends numbers a hundred times as large to one other alone, for the slice that this one adds up
    two_surveys  it tells two of the others that its line is slow, and the rest the truth; its rounds are honest
    digest       it votes for another state than it has computed, in every round
    leased       it asks for 2^31 samples at once, claims to have used up 2^20 a round, or all it gets, and sends noise
    unsigned     it signs something else than what it votes for
    mute         it keeps its votes to itself while there is a file `mute` in its folder
    told         while there is a file `mute` in its folder it says instead of a vote that somebody told it to give up
    certificate  it joins with a certificate of step 1,000,001, made with all that a member has

Not a test. Nothing else of it is changed: it joins, leases, exchanges and votes like any other.
"""

import dataclasses
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for scripts/

HUGE_TOKENS = 10**12
NOISE = 100.0
HUGE = 3e38
ALL_SAMPLES = 2**31
CLAIMED_SAMPLES = 2**20
FALSE_SUM = 100.0
FRAMING = 100.0
LENGTHENED = 1e6
AGAINST = -5.0
SLOW_BYTES_PER_S = 10_000.0


def _lie_as_worker(kind: str) -> None:
    """Change what a worker does. Those of this process are forks of it."""
    import torch

    from isthmus.trainer.workers.inner_loop import InnerLoop
    from isthmus.trainer.workers.step import PendingStep

    result, store, load = PendingStep.result, InnerLoop.store, InnerLoop.load
    began = torch.empty(0)

    def remember(self: InnerLoop, mailbox: torch.Tensor, *arguments: Any, **more: Any) -> int:
        nonlocal began
        num_broken = load(self, mailbox, *arguments, **more)
        began = mailbox.clone()
        return num_broken

    def claim(self: PendingStep) -> Any:
        done = result(self)
        return dataclasses.replace(done, num_tokens=HUGE_TOKENS) if kind == "weight" else done

    def spoil(self: InnerLoop, mailbox: torch.Tensor, *arguments: Any, **more: Any) -> None:
        store(self, mailbox, *arguments, **more)
        if kind == "huge":
            mailbox.fill_(HUGE)
        elif kind == "against":
            mailbox.sub_(began).mul_(AGAINST).add_(began)
        else:
            mailbox.add_(torch.randn(mailbox.shape), alpha=NOISE)

    PendingStep.result = claim  # type: ignore[method-assign]
    InnerLoop.store, InnerLoop.load = spoil, remember  # type: ignore[method-assign, assignment]


def _claim_all_leases() -> None:
    """Lease as much as can be had, let the trainer see half of it, and claim to have used up the rest in each round."""
    from isthmus.elastic.core.lease_desk import LeaseDesk
    from isthmus.elastic.core.leases import count
    from isthmus.elastic.core.messages import IndexRange
    from isthmus.elastic.core.place import Place

    want, take, hand_in = LeaseDesk.want, LeaseDesk.take, Place.take_payload
    unused: list[IndexRange] = []

    def want_all(self: LeaseDesk, num_samples: int, epoch: Any) -> Any:
        return want(self, ALL_SAMPLES if num_samples else 0, epoch)

    def take_half(self: LeaseDesk, grant: Any) -> Any:
        ranges = take(self, grant)
        if ranges:
            *first, last = ranges
            middle = min((last.start + last.stop) // 2, last.start + 10_000)
            unused.append(IndexRange(middle, last.stop))
            ranges = (*first, IndexRange(last.start, middle))
        return ranges

    def claim(self: Place, payload: Any) -> bool:
        pretended = [IndexRange(item.start, min(item.stop, item.start + CLAIMED_SAMPLES)) for item in unused]
        unused[:] = [IndexRange(done.stop, item.stop) for done, item in zip(pretended, unused, strict=True)]
        unused[:] = [item for item in unused if len(item)]
        if payload.num_tokens and pretended:
            used = count(payload.consumed)
            num_tokens = payload.num_tokens // used * (used + count(pretended))
            consumed = (*payload.consumed, *pretended)
            payload = dataclasses.replace(payload, weight=float(num_tokens), num_tokens=num_tokens, consumed=consumed)
        return hand_in(self, payload)

    LeaseDesk.want, LeaseDesk.take = want_all, take_half  # type: ignore[method-assign]
    Place.take_payload = claim  # type: ignore[method-assign]


def forged(me: Any, sign: Any) -> Any:
    """A commit that never was, of a round with its maker alone, under its own signature as the run's seal."""
    from isthmus.collective.core.types import Epoch, OuterStep, RoundKey
    from isthmus.elastic.core.certificate import Certificate, Contributor, ballot
    from isthmus.elastic.core.messages import DataPosition

    key, previous, digest = RoundKey(Epoch(1_000_000), OuterStep(1_000_000), 0), b"p" * 32, b"d" * 32
    signature = sign(ballot(key, previous, digest, me, 1.0))
    return Certificate(
        key=key,
        previous=previous,
        digest=digest,
        contributors=(Contributor(me.peer_id, me.incarnation, 1.0, signature),),
        final=False,
        position=DataPosition(0),
        parent=bytes(32),
        seal=sign(b"")[32:],
    )


def _say_that_it_was_told(while_there: Path) -> None:
    """Report every round of its own as one that it gave up since it was told to."""
    from isthmus.elastic.core.local_round import LocalRound
    from isthmus.elastic.core.messages import RoundFailed, Vote

    report = LocalRound.report

    def was_told(self: LocalRound) -> Vote | RoundFailed | None:
        said = report(self)
        if said is None or not while_there.exists():
            return said
        return RoundFailed(key=said.key, suspects=(), cause="was told to", told_by=self._me.peer_id)

    LocalRound.report = was_told  # type: ignore[method-assign]


def lie(kind: str) -> None:
    """Run the command that the rest of the command line gives."""
    import msgspec
    import torch

    from isthmus.collective.rounds.chunks import ChunkSend
    from isthmus.collective.rounds.coded import CodedBuffers
    from isthmus.collective.rounds.outbox import Outbox
    from isthmus.collective.transport.wire import FrameType, pack
    from isthmus.elastic.core.line import Line
    from isthmus.elastic.core.messages import Join
    from isthmus.elastic.shell.notary import PeerSigner
    from isthmus.optim.decoupled import DecoupledDiLoCo
    from isthmus.optim.outer import Emitted
    from isthmus.trainer.cli.app import main
    from isthmus.trainer.engine.outer_step_runner import _SURVEY_FRAGMENT, OuterStepRunner
    from scripts.chaoslab.mute import MUTE, keep_votes_while

    sign = PeerSigner.sign
    if kind in ("weight", "noise", "huge", "against", "leased"):
        _lie_as_worker(kind)
    if kind == "leased":
        _claim_all_leases()
    if kind == "two_weights":
        put_open, pieces = Outbox.put_open, ChunkSend.pieces

        def open_to(self: Outbox, to: int) -> None:
            honest, self._weight = self._weight, self._weight + to
            vars(self).pop("_opening", None)
            put_open(self, to)
            self._weight = honest

        def pieces_to(self: ChunkSend, scratch: Any) -> Any:
            outbox: Any = self.owner
            honest, outbox._weight = outbox._weight, outbox._weight + self.to
            outbox._result_headers.clear()
            made = pieces(self, scratch)
            outbox._weight = honest
            return made

        Outbox.put_open, ChunkSend.pieces = open_to, pieces_to  # type: ignore[method-assign]
    if kind in ("two_results", "two_surveys"):
        honest_pieces = ChunkSend.pieces

        def betray(self: ChunkSend, scratch: Any) -> Any:
            made, outbox = honest_pieces(self, scratch), cast(Any, self.owner)
            others = [rank for rank, bundle in enumerate(outbox._bundles) if bundle is not None]
            is_survey = outbox._key.fragment == _SURVEY_FRAGMENT
            is_lie = self.type is FrameType.RESULT and is_survey == (kind == "two_surveys")
            if made is None or not is_lie or self.to not in others[:2] or len(others) < 3:
                return made
            payload = bytearray(made[1])
            if is_survey:
                payload[:8] = struct.pack("<d", SLOW_BYTES_PER_S)
            else:
                payload[-1] ^= 1
            return pack(outbox._header(self.type, len(payload), self.chunk), payload), memoryview(payload)

        ChunkSend.pieces = betray  # type: ignore[method-assign]
    if kind == "length":
        emit = DecoupledDiLoCo.emit

        def lengthen(self: DecoupledDiLoCo, *arguments: Any, **more: Any) -> Emitted:
            made = emit(self, *arguments, **more)
            return dataclasses.replace(made, notes=(LENGTHENED * made.notes[0],))

        DecoupledDiLoCo.emit = lengthen  # type: ignore[method-assign]
    if kind == "not_finite":
        finite_pieces = ChunkSend.pieces

        def spoil(self: ChunkSend, scratch: Any) -> Any:
            made, outbox = finite_pieces(self, scratch), cast(Any, self.owner)
            if made is None or self.type is not FrameType.PART or outbox._key.fragment == _SURVEY_FRAGMENT:
                return made
            payload = bytearray(made[1])
            payload[:4] = struct.pack("<f", math.nan)
            return pack(outbox._header(self.type, len(payload), self.chunk), payload), memoryview(payload)

        ChunkSend.pieces = spoil  # type: ignore[method-assign]
    if kind == "sum":
        finish = CodedBuffers.finish

        def falsify(self: CodedBuffers, chunk: int, weight_sum: float) -> None:
            part, self.record = self.record, None
            finish(self, chunk, weight_sum)
            self.record = part
            self._codec.encode(torch.full_like(self._out_part(chunk), FALSE_SUM), self._results[chunk])
            self._codec.decode(self._results[chunk], self._out_part(chunk))
            self._tell_record(chunk, self.result(chunk))

        CodedBuffers.finish = falsify  # type: ignore[method-assign]
    if kind == "framing":
        part = CodedBuffers.part

        def enlarge(self: CodedBuffers, chunk: int, scratch: Any, *, is_sum: bool, is_into_root: bool) -> memoryview:
            framed = 0 if self._rank else 1
            if not is_into_root or self._plan.slices.root_of(chunk) != framed:
                return part(self, chunk, scratch, is_sum=is_sum, is_into_root=is_into_root)
            room = scratch.room(self.part_nbytes(chunk, is_into_root=True))
            self._codec.encode(self._own_part(chunk) * FRAMING, scratch.tensor_of(room))
            return room

        CodedBuffers.part = enlarge  # type: ignore[method-assign]
    if kind == "mute":
        keep_votes_while(Path(sys.argv[sys.argv.index("--dir") + 1]) / MUTE)
    if kind == "told":
        _say_that_it_was_told(Path(sys.argv[sys.argv.index("--dir") + 1]) / MUTE)
    if kind == "digest":
        exchange = OuterStepRunner.exchange

        async def deny(self: OuterStepRunner, *arguments: Any) -> Any:
            made: Any = await exchange(self, *arguments)
            return dataclasses.replace(made, digest=os.urandom(32))

        OuterStepRunner.exchange = deny  # type: ignore[method-assign]
    if kind == "unsigned":
        PeerSigner.sign = lambda self, words: sign(self, words + b"!")  # type: ignore[method-assign]
    if kind == "certificate":
        join = Line._join

        def forge(self: Line) -> Join:
            place = self._place
            return msgspec.structs.replace(join(self), certificate=forged(place.me, place.round.sign))

        Line._join = forge  # type: ignore[method-assign]
    main()


if __name__ == "__main__":
    lie(sys.argv.pop(1))
