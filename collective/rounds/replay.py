# SPDX-License-Identifier: Apache-2.0
"""Results that were recorded, replayed: what a learner does that missed a round."""

import torch
from torch import Tensor

from isthmus.collective.codec import codec_named


def decode_result(codec: str, start: int, numel: int, wire_bytes: bytes | memoryview, out: Tensor) -> None:
    """Write a recorded result chunk into `out`, bit for bit as it was installed when it was recorded.

    Args:
        codec: the round's.
        start: element where the chunk begins.
        numel: how many it holds.
        wire_bytes: as `record` received it.
        out: flat fp32 of the whole buffer.

    Raises:
        ValueError: the bytes do not fit the codec or the buffer.
    """
    chosen = codec_named(codec)
    if start < 0 or numel < 0 or start + numel > out.numel() or len(wire_bytes) != chosen.wire_nbytes(numel):
        raise ValueError(f"a {codec} chunk of {len(wire_bytes)} bytes at {start} + {numel} does not fit {out.numel()}")
    wire = torch.frombuffer(bytearray(wire_bytes), dtype=torch.uint8) if numel else torch.empty(0, dtype=torch.uint8)
    chosen.check(wire, numel)
    chosen.decode(wire, out[start : start + numel])
