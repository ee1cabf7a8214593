# SPDX-License-Identifier: Apache-2.0
"""Lies of a peer's rounds: different words to different members, false sums, nothing at all."""

import asyncio
import math
import struct
from collections.abc import Callable
from typing import Any, cast

FALSE_SUM = 100.0
FRAMING = 100.0
SLOW_BYTES_PER_S = 10_000.0
PADDING_INTERVAL_S = 0.1
TRICKLE_NBYTES, TRICKLE_INTERVAL_S = 16, 0.2


def tell_each_another_weight() -> None:
    """The weight of the own part grows with the rank of whoever hears of it."""
    from isthmus.collective.rounds.chunks import ChunkSend
    from isthmus.collective.rounds.outbox import Outbox

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


def give_two_another_sum() -> None:
    """In rounds, two of the others get another sum than the rest; surveys of links are honest."""

    def spoil(payload: bytearray) -> None:
        payload[-1] ^= 1

    _tell_two(spoil, in_surveys=False)


def tell_two_another_speed() -> None:
    """In surveys of links, two of the others hear that this peer's line is slow; rounds are honest."""

    def spoil(payload: bytearray) -> None:
        payload[:8] = struct.pack("<d", SLOW_BYTES_PER_S)

    _tell_two(spoil, in_surveys=True)


def _tell_two(spoil: Callable[[bytearray], None], *, in_surveys: bool) -> None:
    from isthmus.collective.transport.wire import FrameType

    def spoil_for_two(send: Any, payload: bytearray) -> None:
        others = [rank for rank, bundle in enumerate(send.owner._bundles) if bundle is not None]
        if send.type is FrameType.RESULT and send.to in others[:2] and len(others) > 2:
            spoil(payload)

    _change_payloads(spoil_for_two, in_surveys=in_surveys)


def send_parts_that_are_no_numbers() -> None:
    """Every part begins with a NaN."""
    from isthmus.collective.transport.wire import FrameType

    def spoil(send: Any, payload: bytearray) -> None:
        if send.type is FrameType.PART:
            payload[:4] = struct.pack("<f", math.nan)

    _change_payloads(spoil, in_surveys=False)


def _change_payloads(change: Callable[[Any, bytearray], None], *, in_surveys: bool) -> None:
    """Of chunks that are sent, in surveys or in all other rounds."""
    from isthmus.collective.rounds.chunks import ChunkSend
    from isthmus.collective.transport.wire import pack
    from isthmus.trainer.engine.outer_step_runner import _SURVEY_FRAGMENT

    honest_pieces = ChunkSend.pieces

    def pieces(self: ChunkSend, scratch: Any) -> Any:
        made, outbox = honest_pieces(self, scratch), cast(Any, self.owner)
        if made is None or (outbox._key.fragment == _SURVEY_FRAGMENT) != in_surveys:
            return made
        payload = bytearray(made[1])
        change(self, payload)
        return pack(outbox._header(self.type, len(payload), self.chunk), payload), memoryview(payload)

    ChunkSend.pieces = pieces  # type: ignore[method-assign]


def give_all_a_false_sum() -> None:
    """The sum of the own slice is the same false number for everybody."""
    import torch

    from isthmus.collective.rounds.coded import CodedBuffers

    finish = CodedBuffers.finish

    def falsify(self: CodedBuffers, chunk: int, weight_sum: float) -> None:
        part, self.record = self.record, None
        finish(self, chunk, weight_sum)
        self.record = part
        self._codec.encode(torch.full_like(self._out_part(chunk), FALSE_SUM), self._results[chunk])
        self._codec.decode(self._results[chunk], self._out_part(chunk))
        self._tell_record(chunk, self.result(chunk))

    CodedBuffers.finish = falsify  # type: ignore[method-assign]


def frame_one_other() -> None:
    """Numbers a hundred times as large go to one other alone, for the slice that this one adds up."""
    from isthmus.collective.rounds.coded import CodedBuffers

    part = CodedBuffers.part

    def enlarge(self: CodedBuffers, chunk: int, scratch: Any, *, is_sum: bool, is_into_root: bool) -> memoryview:
        framed = 0 if self._rank else 1
        if not is_into_root or self._plan.slices.root_of(chunk) != framed:
            return part(self, chunk, scratch, is_sum=is_sum, is_into_root=is_into_root)
        room = scratch.room(self.part_nbytes(chunk, is_into_root=True))
        self._codec.encode(self._own_part(chunk) * FRAMING, scratch.tensor_of(room))
        return room

    CodedBuffers.part = enlarge  # type: ignore[method-assign]


def pad_instead_of_parts(is_meant: Callable[[], bool]) -> None:
    """While it is meant, send no parts, but bytes without meaning on every line."""
    from isthmus.collective.rounds.outbox import Outbox
    from isthmus.collective.transport.wire import FrameType

    put_chunk, tasks = Outbox.put_chunk, set[asyncio.Task[None]]()

    async def pad(outbox: Outbox) -> None:
        while outbox.num_unsent or is_meant():
            for bundle in outbox._bundles:
                if bundle is not None:
                    bundle.pad_once()
            await asyncio.sleep(PADDING_INTERVAL_S)

    def withhold(self: Outbox, frame_type: FrameType, to: int, chunk: int) -> None:
        if frame_type is not FrameType.PART or not is_meant():
            put_chunk(self, frame_type, to, chunk)
            return
        for task in tasks:
            task.cancel()
        tasks.clear()
        tasks.add(asyncio.get_running_loop().create_task(pad(self)))

    Outbox.put_chunk = withhold  # type: ignore[method-assign]


def send_byte_by_byte(is_meant: Callable[[], bool]) -> None:
    """While it is meant, each line carries 80 bytes a second. Only of a peer whose upload has a bound, however high."""
    from isthmus.collective.transport.link import Link

    within, due = Link._within, dict[int, float]()

    def trickle(self: Any, cap: Any, buffers: list[memoryview], resume: Callable[[], None]) -> list[memoryview]:
        if not is_meant():
            return within(self, cap, buffers, resume)
        now = self._loop.time()
        if now < due.get(id(self), 0.0):
            self._timers[resume] = self._loop.call_later(due[id(self)] - now, resume)
            return []
        due[id(self)] = now + TRICKLE_INTERVAL_S
        return [buffers[0][:TRICKLE_NBYTES]]

    Link._within = trickle  # type: ignore[method-assign]


def withhold_sums(is_meant: Callable[[], bool]) -> None:
    """While it is meant, take the others' parts and give none of the sums that are made of them."""
    from isthmus.collective.rounds.outbox import Outbox
    from isthmus.collective.transport.wire import FrameType

    put_chunk = Outbox.put_chunk

    def withhold(self: Outbox, frame_type: FrameType, to: int, chunk: int) -> None:
        if frame_type is not FrameType.RESULT or not is_meant():
            put_chunk(self, frame_type, to, chunk)

    Outbox.put_chunk = withhold  # type: ignore[method-assign]
