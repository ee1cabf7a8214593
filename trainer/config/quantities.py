# SPDX-License-Identifier: Apache-2.0
"""Quantities as people write them: "30min", "64MiB", "3B", "20mbit".

Rules: a number without a unit is in the base unit (seconds, bytes, one, bytes a second), so that what a manifest holds
reads back as itself. kB is 1000 bytes and KiB 1024. Letters' case does not matter, but for one letter: a rate in "Mb"
may mean bits or bytes, which is a factor of eight, so it is refused.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import BeforeValidator

_PATTERN = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*([a-z/]*)\s*", re.IGNORECASE)

_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SIZES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_RATES = {"": 1.0, "b": 1.0, "bit": 1 / 8} | {
    f"{letter}{suffix}": scale * base**power
    for power, letter in enumerate("kmg", start=1)
    for suffix, base, scale in (("b", 1000, 1.0), ("ib", 1024, 1.0), ("bit", 1000, 1 / 8))
}


def parse_seconds(value: object) -> object:
    """`"250ms"`, `"30s"`, `"30min"`, `"2h"`, `"1d"` or a number of seconds → float.

    Raises:
        ValueError: a text that is no duration. What is neither text nor number is handed on as it is.
    """
    return _parse(value, _SECONDS, 'a duration such as "250ms", "30s", "30min", "2h" or "1d"')


def parse_nbytes(value: object) -> object:
    """`"64KiB"`, `"1MiB"`, `"2GB"` or a number of bytes → int.

    Raises:
        ValueError: see `parse_seconds`; also a fraction of a byte.
    """
    return _whole(_parse(value, _SIZES, 'a size such as "64KiB", "1MiB" or "2GB"'), value)


def parse_count(value: object) -> object:
    """`"500"`, `"250k"`, `"1.5M"`, `"3B"` or a number → int.

    Raises:
        ValueError: see `parse_seconds`; also a fraction.
    """
    return _whole(_parse(value, _COUNTS, 'a count such as "500", "250k", "1.5M" or "3B"'), value)


def parse_rate(value: object) -> object:
    """`"20mbit"`, `"6MB"`, `"512KiB/s"` or a number of bytes a second → float, bytes a second.

    Raises:
        ValueError: see `parse_seconds`; also "Mb", "mb", "kb" and "mbps", which some read as bits and some as bytes.
    """
    expected = 'a rate such as "20mbit" (bits a second) or "6MB" (bytes a second)'
    if isinstance(value, str):
        value = re.sub(r"(?<=[A-Za-z])\s*/\s*s\s*$", "", value)
        if re.search(r"(?:[kmgKMG]i?b|ps)\s*$", value):
            raise ValueError(f"expected {expected}; Mb and mbps could be either")
    return _parse(value, _RATES, expected)


def format_seconds(seconds: float) -> str:
    """The shortest text that `parse_seconds` reads back as this, such as "90s" or "7d"."""
    return _format(seconds, {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}, parse_seconds)


def format_nbytes(nbytes: float) -> str:
    """Likewise for `parse_nbytes`, such as "64MiB"."""
    return _format(nbytes, {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}, parse_nbytes)


def format_rate(bytes_per_s: float) -> str:
    """Likewise for `parse_rate`, such as "20mbit"."""
    return _format(bytes_per_s, {"gbit": 1.25e8, "mbit": 1.25e5, "kbit": 125.0}, parse_rate)


def rounded_nbytes(nbytes: int) -> str:
    """`1.5 MB`; thousands, as networks count."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _format(number: float, units: Mapping[str, float], parse: Callable[[object], object]) -> str:
    for unit, scale in units.items():
        text = f"{number / scale:.12g}{unit}"
        if number and (number / scale).is_integer() and parse(text) == number:
            return text
    return f"{number:.12g}" if number and parse(f"{number:.12g}") == number else repr(number)


def _parse(value: object, units: Mapping[str, float], expected: str) -> object:
    if not isinstance(value, str):
        return value
    match = _PATTERN.fullmatch(value)
    scale = None if match is None else units.get(match[2].lower())
    if match is None or scale is None:
        raise ValueError(f"expected {expected}")
    number = float(match[1])
    if not math.isfinite(number):
        raise ValueError(f"expected {expected}")
    # Whole numbers stay exact beyond 2**53.
    return int(number) * scale if number.is_integer() else number * scale


def _whole(number: object, value: object) -> object:
    if isinstance(value, str) and isinstance(number, float):
        if not number.is_integer():
            raise ValueError("expected a whole number")
        return int(number)
    return number


Seconds = Annotated[float, BeforeValidator(parse_seconds)]
"""A duration."""

Nbytes = Annotated[int, BeforeValidator(parse_nbytes)]
"""A size."""

Count = Annotated[int, BeforeValidator(parse_count)]
"""A large whole number."""

BytesPerSecond = Annotated[float, BeforeValidator(parse_rate)]
"""A rate."""
