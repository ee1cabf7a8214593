# SPDX-License-Identifier: Apache-2.0
"""What is known about the links between members: the input of every plan.

Rules: values only, no measuring and no choosing. Ranks are those of one view. What nobody has measured is written as
`inf` bytes/s, or 0 s, and then limits nothing; what cannot be reached is written as 0 bytes/s. A table is published to
all members, who must make the same plan from it: nothing here depends on anything but the numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isnan

from isthmus.collective.core.apart import Apart, are_apart

Matrix = tuple[tuple[float, ...], ...]
"""One number for each directed pair, [from][to]; the diagonal means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """Latency and bandwidth of every directed pair, and of every member in all.

    Raises:
        ValueError: tables of different sizes, a negative number, or one that is not a number.
    """

    latency_s: Matrix
    """One way."""
    rate: Matrix
    """bytes/s that a pair reaches when it is alone; inf is unknown."""
    upload: tuple[float, ...]
    """bytes/s that a member can send to all together; inf is unknown."""
    download: tuple[float, ...]
    """bytes/s that a member can receive from all together; inf is unknown."""

    def __post_init__(self) -> None:
        size = self.world_size
        for name, matrix in (("latency_s", self.latency_s), ("rate", self.rate)):
            if len(matrix) != size or any(len(row) != size for row in matrix):
                raise ValueError(f"{name} must be {size} x {size}")
            for row in matrix:
                _check(name, row)
        for name, limits in (("upload", self.upload), ("download", self.download)):
            if len(limits) != size:
                raise ValueError(f"{name} has {len(limits)} members, latency_s has {size}")
            _check(name, limits)

    @classmethod
    def unknown(cls, world_size: int) -> "LinkTable":
        """A table that says nothing."""
        return cls(
            latency_s=((0.0,) * world_size,) * world_size,
            rate=((inf,) * world_size,) * world_size,
            upload=(inf,) * world_size,
            download=(inf,) * world_size,
        )

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.latency_s)

    @property
    def says_nothing(self) -> bool:
        """Whether no number of it is known, so that no plan can be told from another; a missing link is no number."""
        everybody = range(self.world_size)
        pairs = [(a, b) for a in everybody for b in everybody if a != b]
        return all(self.latency_s[a][b] == 0 and self.rate[a][b] in (0, inf) for a, b in pairs) and all(
            limit == inf for limit in self.upload + self.download
        )

    def speed(self, sender: int, receiver: int) -> float:
        """bytes/s of one pair when nobody else speaks, as far as known."""
        return min(self.rate[sender][receiver], self.upload[sender], self.download[receiver])

    def without(self, apart: Apart) -> "LinkTable":
        """The table in which these pairs cannot speak."""
        if not apart:
            return self
        rate = tuple(
            tuple(0.0 if are_apart(apart, a, b) else known for b, known in enumerate(row))
            for a, row in enumerate(self.rate)
        )
        return replace(self, rate=rate)

    @property
    def apart(self) -> Apart:
        """The pairs that cannot speak."""
        everybody = range(self.world_size)
        return frozenset((a, b) for b in everybody for a in range(b) if 0 in (self.rate[a][b], self.rate[b][a]))

    def quantised(self) -> "LinkTable":
        """The table with two significant digits, so that most of the noise of a measurement changes no plan."""
        return LinkTable(
            latency_s=tuple(_two_digits(row) for row in self.latency_s),
            rate=tuple(_two_digits(row) for row in self.rate),
            upload=_two_digits(self.upload),
            download=_two_digits(self.download),
        )


def _check(name: str, values: Sequence[float]) -> None:
    if any(isnan(value) or value < 0 for value in values):
        raise ValueError(f"{name} must be numbers from 0 up: {list(values)}")


def _two_digits(values: Sequence[float]) -> tuple[float, ...]:
    """Through decimal text, whose rounding is exact and the same everywhere."""
    return tuple(float(f"{value:.1e}") for value in values)
