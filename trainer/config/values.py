# SPDX-License-Identifier: Apache-2.0
"""What a value of the configuration can be, and how its key is spelled.

Rules: a quantity's Python name ends in its unit and its TOML key does not (`heartbeat_timeout_s` is
`heartbeat_timeout = "10s"`); "none" is TOML's way to say None. Must not know any section.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from isthmus.collective.core.address import is_wildcard, split_address
from isthmus.trainer.config.quantities import BytesPerSecond

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
T = TypeVar("T")

_UNIT_SUFFIXES = ("_nbytes", "_bytes_per_s", "_s")
_LEAST_RATE = 16_000.0
"""Bytes a second. Under less the others would take a peer for one that stands still."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")
_SHAPED = re.compile(r"\S{1,512}( [0-9]{1,10}(x[0-9]{1,10})*)?")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+|\*):(\d{1,5})")


def _toml_key(field: str) -> str:
    """The key of a field: its name without the unit."""
    for suffix in _UNIT_SUFFIXES:
        if field.endswith(suffix):
            return field.removesuffix(suffix)
    return field


def _word_none(value: object) -> object:
    return None if value == "none" else value


def _auto_or_count(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError('expected "auto" or a whole number of at least 1')


def _address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match[2]) > 65535:
        raise ValueError('expected host:port, such as "127.0.0.1:0" or "[::]:7000"')
    return value


def _dialled(value: str) -> str:
    """An address that others can dial, though its port may not be known yet."""
    if is_wildcard(split_address(_address(value))[0]):
        raise ValueError("expected an address that others can dial, not every interface of a machine")
    return value


def _fixed_address(value: str) -> str:
    if _dialled(value).endswith(":0"):
        raise ValueError("expected a port that others can know, not 0")
    return value


def _rate(value: float) -> float:
    if value < _LEAST_RATE:
        raise ValueError('expected at least "128kbit", which is 16000 bytes a second')
    return value


def _shaped(value: str) -> str:
    if _SHAPED.fullmatch(value) is None:
        raise ValueError('expected a name and a shape, such as "head.weight 256x64", or a name alone for a number')
    return value


def named_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """What a `Shaped` says: ("head.weight", (256, 64))."""
    name, _, shape = text.partition(" ")
    return name, tuple(map(int, shape.split("x"))) if shape else ()


def shaped(name: str, shape: Iterable[int]) -> str:
    """The same the other way round."""
    return f"{name} {'x'.join(map(str, shape))}".rstrip()


def _name(value: str) -> str:
    if _NAME.fullmatch(value) is None:
        raise ValueError("expected up to 48 lower-case letters, digits, dots, hyphens and underscores")
    return value


Maybe = Annotated[T | None, BeforeValidator(_word_none)]
"""A value, or the word "none"."""

AutoOrCount = Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)]
"""A number of at least 1, or the word "auto"."""

Address = Annotated[str, Field(max_length=256), AfterValidator(_address)]
"""`host:port`; port 0 lets the system choose."""

FixedAddress = Annotated[str, Field(max_length=256), AfterValidator(_fixed_address)]
"""`host:port` to dial."""

Rate = Annotated[BytesPerSecond, AfterValidator(_rate)]
"""Bytes a second that a line may carry."""

RunName = Annotated[str, AfterValidator(_name)]
"""What a run, and so its folder, can be called."""

Shaped = Annotated[str, AfterValidator(_shaped)]
"""Name and shape of a parameter, as `shaped` writes them."""

Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Portion = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the file: frozen, strict, without keys that it does not know."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=_toml_key,
        populate_by_name=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


def flatten(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """(dotted key, value) of every value that is no table."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
