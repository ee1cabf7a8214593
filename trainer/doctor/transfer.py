# SPDX-License-Identifier: Apache-2.0
"""Padding that shows what a path carries: sent for two seconds, counted in windows of an eighth of a second.

A path is measured by several streams at once, as exchanges use it, and what counts is what the receiver has got.
Windows have the receiver's clock, so those of several streams add up.

Rules: bounded in seconds and in bytes on both sides. Must not know who asks.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping

from isthmus.collective.core.bucket import TokenBucket
from isthmus.collective.core.held_rate import HeldRate
from isthmus.collective.errors import ConnectionLost, DeadlineExceeded
from isthmus.collective.transport import Channel, FrameType
from isthmus.collective.transport.channel import ChannelFrame
from isthmus.collective.transport.tcp_info import TcpInfo
from isthmus.collective.transport.wire import PADDING_NBYTES
from isthmus.trainer.doctor.messages import MAX_WINDOWS, Moved

TRANSFER_S = 2.0
MAX_STREAMS = 8
MAX_NBYTES = 256 << 20
"""Of one stream: what 1 Gbit/s carries in two seconds."""
WINDOW_S = 0.125
_SEND_S = 5.0
"""For one piece. One that is cut off would end the connection, which has a last word to carry."""
_FIRST_PIECE_NBYTES = 2 << 10
_BURST_S = 0.02
"""What a gentle transfer may make up for when it was woken late."""
_GROWTH = 16
"""A piece is at most this part of what was sent before: on a slow path a long one would fill several windows."""

Windows = Mapping[int, int]
"""Bytes by number of the window."""


async def send_padding(channel: Channel, *, cap: TokenBucket | None, most_bytes_per_s: float | None = None) -> None:
    """Send for two seconds, or until so many bytes are sent.

    Args:
        channel: to send over.
        cap: what this machine may send.
        most_bytes_per_s: no faster than this, to see what gets lost where the line is not full.

    Raises:
        CollectiveError: the connection is gone or takes nothing; the other side may have had enough.
    """
    clock = asyncio.get_running_loop().time
    padding = memoryview(secrets.token_bytes(PADDING_NBYTES))  # nothing on the way can make it shorter
    buckets = [] if cap is None else [cap]
    if most_bytes_per_s is not None:
        buckets.append(TokenBucket(most_bytes_per_s, max(_FIRST_PIECE_NBYTES, _BURST_S * most_bytes_per_s)))
    ends_at, sent_nbytes = clock() + TRANSFER_S, 0
    while (left_s := ends_at - clock()) > 0 and sent_nbytes < MAX_NBYTES:
        most_nbytes = max(_FIRST_PIECE_NBYTES, sent_nbytes // _GROWTH)
        piece = padding[: most_nbytes if most_bytes_per_s is None else _FIRST_PIECE_NBYTES]
        delay_s = max((bucket.delay_s(clock(), piece.nbytes) for bucket in buckets), default=0.0)
        if delay_s > 0:
            await asyncio.sleep(min(delay_s, left_s))
            continue
        for bucket in buckets:
            bucket.take(clock(), piece.nbytes)
        await channel.send(FrameType.PADDING, piece, timeout_s=_SEND_S)
        sent_nbytes += piece.nbytes
        await asyncio.sleep(0)  # a path that takes all at once would let nothing else run


async def count_padding(
    channel: Channel, *, cap: TokenBucket | None, patience_s: float, last_word_s: float = 0.0
) -> tuple[Counter[int], ChannelFrame | None]:
    """Receive for two seconds from the first piece on, or until so many bytes have come.

    Args:
        channel: to read from.
        cap: what this machine may receive.
        patience_s: for the first piece.
        last_word_s: for what ends the padding, after these two seconds.

    Returns:
        What came in each window, and the frame that ended it if that was no padding.

    Raises:
        CollectiveError: the connection is gone, and nothing has come.
    """
    clock = asyncio.get_running_loop().time
    windows: Counter[int] = Counter()
    room = memoryview(bytearray(PADDING_NBYTES))

    def into(kind: FrameType, _: int, nbytes: int) -> memoryview | None:
        return room[:nbytes] if kind is FrameType.PADDING else None

    ends_at, received_nbytes = clock() + patience_s, 0
    while (left_s := ends_at - clock()) > 0 and received_nbytes < MAX_NBYTES:
        try:
            frame = await channel.receive(timeout_s=left_s, into=into)
        except DeadlineExceeded:
            break
        except ConnectionLost:
            if not received_nbytes:
                raise
            break  # on a slow line the other side gives up before its last word gets through
        if frame.type is not FrameType.PADDING:
            return windows, frame
        if not received_nbytes:
            ends_at = clock() + TRANSFER_S + last_word_s
        nbytes = frame.payload.nbytes
        received_nbytes += max(1, nbytes)
        windows[int(clock() / WINDOW_S)] += nbytes
        if cap is not None:
            cap.take(clock(), nbytes)
            await asyncio.sleep(min(cap.delay_s(clock()), max(0.0, ends_at - clock())))
        await asyncio.sleep(0)
    return windows, None


def moved_of(windows: Windows) -> Moved:
    """What was counted, for the other side."""
    if not windows:
        return Moved()
    first = min(windows)
    last = min(max(windows), first + MAX_WINDOWS - 1)
    return Moved(first=first, windows=tuple(windows.get(number, 0) for number in range(first, last + 1)))


def windows_of(moved: Moved) -> Windows:
    """The inverse of `moved_of`."""
    return {moved.first + place: nbytes for place, nbytes in enumerate(moved.windows) if nbytes}


def bytes_between(before: TcpInfo | None, after: TcpInfo | None) -> tuple[int, int]:
    """Bytes that have arrived at the other side between two looks, and bytes that were sent again; 0 if not known."""
    if before is None or after is None or after.bytes_acked is None or before.bytes_acked is None:
        return 0, 0
    resent = (after.bytes_retrans or 0) - (before.bytes_retrans or 0)
    return max(0, after.bytes_acked - before.bytes_acked), max(0, resent)


def rate_of(streams: Iterable[Windows]) -> float:
    """Bytes a second that these streams held together; 0.0 if nothing came."""
    together: Counter[int] = Counter()
    for windows in streams:
        together.update(windows)
    if not together:
        return 0.0
    numbers = list(range(min(together), max(together) + 1))
    held = HeldRate()
    for number in numbers[1:-1] or numbers:  # the first and the last one are not whole
        held.window(together[number] / WINDOW_S, is_padding=False)
    return held.most()
