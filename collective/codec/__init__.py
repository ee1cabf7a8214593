# SPDX-License-Identifier: Apache-2.0
"""How a chunk of fp32 becomes bytes and back. One codec, one file; `codec_named` finds them."""

from collections.abc import Callable

from isthmus.collective.codec.base import BLOCK_NUMEL, BadWire, Codec, NotFinite
from isthmus.collective.codec.bf16 import Bf16Codec
from isthmus.collective.codec.blocks import BlockCodec
from isthmus.collective.codec.e3m0 import E3M0Kernel
from isthmus.collective.codec.int8 import Int8Kernel
from isthmus.collective.codec.raw import RawCodec
from isthmus.collective.codec.topk import TopKCodec
from isthmus.collective.codec.twobit import TwoBitKernel

__all__ = ["BLOCK_NUMEL", "BadWire", "Codec", "NotFinite", "codec_named", "codec_names"]

_CODECS: dict[str, Callable[[], Codec]] = {
    "raw": RawCodec,
    "bf16": Bf16Codec,
    "int8": lambda: BlockCodec(Int8Kernel()),
    "e3m0": lambda: BlockCodec(E3M0Kernel()),
    "twobit": lambda: BlockCodec(TwoBitKernel()),
    "topk": TopKCodec,
}
_WITH_NUMBER: dict[str, Callable[[int], Codec]] = {"topk": TopKCodec}
"""Codecs that take one whole number after a colon."""
_NUMBER_DIGITS = 6


def codec_names() -> tuple[str, ...]:
    """Every codec that a round can ask for, with its parameters left to their defaults."""
    return tuple(_CODECS)


def codec_named(name: str) -> Codec:
    """A fresh codec with its own scratch, which it makes when it first needs it; not to be shared between threads.

    Args:
        name: one of codec_names; "topk" may say how many of 4096 elements it keeps: "topk:32".

    Raises:
        ValueError: there is no codec of that name, or its parameter is not in range.
    """
    kind, colon, number = name.partition(":")
    if not colon and kind in _CODECS:
        return _CODECS[kind]()
    if kind in _WITH_NUMBER and number.isascii() and number.isdigit() and len(number) <= _NUMBER_DIGITS:
        return _WITH_NUMBER[kind](int(number))
    raise ValueError(f"no codec {name!r}; there are {', '.join(_CODECS)}")
