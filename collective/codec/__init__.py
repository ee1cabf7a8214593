"""How a chunk of fp32 becomes bytes and back. One codec, one file; `codec_named` finds them."""

from collective.codec.base import BLOCK_NUMEL, Codec, NotFinite
from collective.codec.int8 import Int8Codec
from collective.codec.raw import RawCodec

__all__ = ["BLOCK_NUMEL", "Codec", "Int8Codec", "NotFinite", "RawCodec", "codec_named", "codec_names"]

_CODECS: dict[str, type[RawCodec] | type[Int8Codec]] = {"raw": RawCodec, "int8": Int8Codec}


def codec_names() -> tuple[str, ...]:
    """Every codec that a round can ask for."""
    return tuple(_CODECS)


def codec_named(name: str) -> Codec:
    """A fresh codec with its own scratch; not to be shared between threads.

    Raises:
        ValueError: there is no codec of that name.
    """
    if name not in _CODECS:
        raise ValueError(f"no codec {name!r}; there are {', '.join(_CODECS)}")
    return _CODECS[name]()
