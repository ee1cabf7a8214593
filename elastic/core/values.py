# SPDX-License-Identifier: Apache-2.0
"""The values that messages, records and certificates speak of: digests, samples, states.

Rules: immutable, comparable, wire-ready. No behaviour beyond look-ups.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.collective.core.types import OuterStep

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Natural = Annotated[int, Meta(ge=0, le=2**53)]
Weight = Annotated[float, Meta(ge=0.0, le=1e15)]
Mark = Annotated[bytes, Meta(max_length=16)]
"""The beginning of a SHA-256; empty of nothing."""
MAX_SIGNATURE_NBYTES = 96
Signature = Annotated[bytes, Meta(max_length=MAX_SIGNATURE_NBYTES)]
"""A public key and what it has signed, or a seal; empty of nobody. See notary.py."""
Size = Annotated[float, Meta(ge=0.0, le=1e38)]
"""Root mean square of numbers in a payload; `HUGE` of numbers that nobody can count."""
Reason = Annotated[str, Meta(max_length=512)]


class IndexRange(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Half-open range of sample indices `[start, stop)`."""

    start: Natural
    stop: Natural

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


class DataPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which samples no commit has consumed: all from `next_index` on, and `unconsumed` below it."""

    next_index: Natural
    unconsumed: Annotated[tuple[IndexRange, ...], Meta(max_length=8192)] = ()


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A committed shared state that somebody has in memory, whole and verified."""

    outer_step: OuterStep
    digest: Digest
