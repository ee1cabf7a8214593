# SPDX-License-Identifier: Apache-2.0
"""What the view server, the nursery and the peers say to each other: one JSON line each. Times are CLOCK_MONOTONIC.

Rules: values only. All of these processes are ours and on one machine, so nothing is hostile here.
"""

import enum
from typing import TypeAlias

import msgspec

from isthmus.collective import RoundKey, View


class Mode(enum.StrEnum):
    """How an operation is posted."""

    OUT_OF_PLACE = "out_of_place"
    IN_PLACE = "in_place"
    SEVERAL = "several"
    """Four operations of a quarter each, all in flight at once."""
    QUANTISED = "quantised"

    @property
    def fragments(self) -> tuple[int, ...]:
        """The operations of one step."""
        return (0, 1, 2, 3) if self is Mode.SEVERAL else (0,)

    @property
    def codec(self) -> str:
        """Wire form."""
        return "int8" if self is Mode.QUANTISED else "raw"


class _Word(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# ---------------------------------------------------------------- to the nursery


class Launch(_Word, frozen=True):
    """Start a peer that connects to the server's `path`."""

    number: int
    incarnation: int
    path: str
    nbytes: int
    deadline_s: float
    num_streams: int


class Cut(_Word, frozen=True):
    """Take the network away from a peer, without a word to anybody."""

    number: int


class Heal(_Word, frozen=True):
    """Give it back."""

    number: int


# ---------------------------------------------------------------- to a peer


class SelfFault(_Word, frozen=True):
    """Send yourself this signal when so many elements of results are in place."""

    signal: int
    after_numel: int


class Prepare(_Word, frozen=True):
    """Make the inputs of a step."""

    step: int
    mode: Mode


class Post(_Word, frozen=True):
    """Install the view, then post these operations of the prepared step. A later Post overtakes an earlier one."""

    view: View
    step: int
    mode: Mode
    fragments: tuple[int, ...]
    fault: SelfFault | None = None


class Check(_Word, frozen=True):
    """Say a Verdict on every result at hand."""


class Weigh(_Word, frozen=True):
    """Say what you hold."""


class Beat(_Word, frozen=True):
    """Are you there? The answer is the same word."""


# ---------------------------------------------------------------- from a peer


class Here(_Word, frozen=True):
    """The first word of a peer."""

    number: int
    incarnation: int
    address: str
    pid: int


class Ready(_Word, frozen=True):
    """The inputs of this step are made."""

    step: int


class Struck(_Word, frozen=True):
    """A signal to ourselves follows at once."""

    at: float


class Report(_Word, frozen=True):
    """How one posted operation ended."""

    key: RoundKey
    outcome: str
    """`finished`, `aborted`, or `failed`: an error that no fault explains."""
    at: float
    posted_at: float
    """After the view was installed."""
    numbers: tuple[int, ...] = ()
    """Of the peers whose inputs went into the result."""
    cause: str = ""
    suspects: tuple[int, ...] = ()


class Verdict(_Word, frozen=True):
    """What one result is worth."""

    key: RoundKey
    is_right: bool
    bits: str


class Weight(_Word, frozen=True):
    """What this process holds."""

    rss_kib: int
    descriptors: int


ToNursery: TypeAlias = Launch | Cut | Heal
ToPeer: TypeAlias = Prepare | Post | Check | Weigh | Beat
FromPeer: TypeAlias = Here | Ready | Struck | Report | Verdict | Weight | Beat


def line(word: msgspec.Struct) -> bytes:
    """A word as it is sent."""
    return msgspec.json.encode(word) + b"\n"
