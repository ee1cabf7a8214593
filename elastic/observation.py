# SPDX-License-Identifier: Apache-2.0
"""What the elastic layer tells whoever watches, a struct for each kind.

An `Event` is told as it is shown: it has plain fields, and is a line of the trainer's event log under the name that
its `tag` gives it (trainer/record/events.py says what the fields mean). What the trainer also acts on it gets whole:
`RecordWritten`, `CertificateKept`, `TrustHeard`.

Rules: facts after they happened, frozen, and cheap. An observer runs on the event loop between two steps of a machine:
it must not block, and what it raises is a bug that ends the run. They carry no time; the observer stamps them.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from isthmus.collective.core.types import RoundKey, View
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.messages import Held, Trust
from isthmus.elastic.core.records import Record


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_snake_case):
    """What happened. The observer fills these fields in."""

    t_s: float = 0.0
    """Seconds since this start's log was opened, monotonic: for durations."""
    wall: str = ""
    """ISO 8601 time of this machine's clock in UTC, only to find things."""
    peer: str = ""
    """Whose log it is: a peer id."""


class Fault(Event, frozen=True, tag_field="kind"):
    """Something went wrong; training goes on, or a `leave` follows. Its line is named "fault", its tag is `kind`."""


class OfRound(Event, frozen=True):
    """Of a round."""

    epoch: int
    outer_step: int
    fragment: int


class OfView(Event, frozen=True):
    """Of a view."""

    epoch: int
    outer_step: int
    members: tuple[str, ...]
    apart: tuple[str, ...]


# ------------------------------------------------------------------------------------ at the coordinator


class RecordWritten(msgspec.Struct, frozen=True):
    """A record is durable; nobody has heard of it yet. Views, commits, leases, joins and evictions are records."""

    slot: int
    record: Record


class Lied(Event, frozen=True):
    """A member was overruled or put out for what it said, or it forged a certificate: a lie, or a broken machine."""

    of: str
    incarnation: int
    outer_step: int
    cause: str


class PeerConnected(Event, frozen=True):
    """A control connection of this start of a peer is up, perhaps in place of an older one."""

    of: str
    incarnation: int


class PeerDisconnected(Fault, frozen=True):
    """The control connection of this start of a peer is gone."""

    of: str
    incarnation: int
    cause: str


# ------------------------------------------------------------------------------------ at a peer


class CoordinatorConnected(Event, frozen=True):
    """The control connection to the coordinator is up."""

    address: str


class CoordinatorLost(Fault, frozen=True):
    """The control connection to the coordinator is gone; this peer dials again."""

    cause: str


class CoordinatorAsks(Fault, frozen=True, tag="journal_lost"):
    """The coordinator has lost its journal: `testified` of the `needed` members have brought a certificate so far."""

    testified: int
    needed: int


class TrustHeard(msgspec.Struct, frozen=True):
    """The coordinator says whose certificates count and who is put out; it may have said so before."""

    trust: Trust


class CertificateKept(msgspec.Struct, frozen=True):
    """This is the newest commit that this peer can prove."""

    certificate: Certificate


class ViewInstalled(OfView, frozen=True, tag="view"):
    """The collective layer has this view. `cause`: why some of its links could not be made."""

    incarnations: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    cause: str | None = None


class BecameActive(OfView, frozen=True, tag="join"):
    """This peer is a member and holds the view's state."""


class BecameLearner(Event, frozen=True, tag="learner"):
    """This peer is no member (any more)."""

    cause: str


class BecameExcused(OfView, frozen=True, tag="excused"):
    """This peer is late: the round goes on without it in this view."""


class WorkCarriedOver(Event, frozen=True, tag="carried_over"):
    """`outer_step` was committed without this peer's payload, which goes into the next one."""

    outer_step: int


class RoundStarted(OfRound, frozen=True):
    """The exchange of a round began here."""

    weight: float | None


class RoundStaged(OfRound, frozen=True, tag="vote"):
    """The exchange is done, in `seconds`; this peer votes for the digest."""

    digest: str
    seconds: float


class RoundBroke(Fault, frozen=True):
    """The exchange could not finish in this view."""

    epoch: int
    outer_step: int
    fragment: int
    suspects: tuple[str, ...]
    cause: str


class RoundAborted(OfRound, frozen=True):
    """The coordinator's word ended this exchange, or what it staged is forgotten."""


class RoundCommitted(OfRound, frozen=True, tag="commit"):
    """What the round staged is the shared state now, `seconds` after the payload was handed in."""

    digest: str
    final: bool
    seconds: float


class WentBack(Event, frozen=True):
    """The run goes on under `epoch` from `outer_step`, which is not the newest one that was told, for this `cause`."""

    epoch: int
    outer_step: int
    cause: str


class CatchUpStarted(Event, frozen=True):
    """This learner begins to fetch or replay, or aims at a newer target; from so many `donors`."""

    outer_step: int
    donors: int


class CatchUpEnded(Event, frozen=True, tag="catch_up"):
    """What this learner holds now, or None with the cause why it could not be had this time."""

    outer_step: int | None
    digest: str | None
    cause: str
    bytes: int
    seconds: float


class Deviated(Event, frozen=True):
    """The others agreed on `digest` where this peer had `voted` for another one; told when it is repaired.

    The first difference: these bytes of `tensor`, and in how many chunks there are any; None if nobody could say any
    more what the committed state consisted of. The trainer knows which `parameters` these are. `damaged_chunks` of the
    state that this peer computed from had other bits than were committed: its memory is not to be trusted.
    """

    outer_step: int
    digest: str
    voted: str
    damaged_chunks: int
    tensor: str | None = None
    start_bytes: int | None = None
    stop_bytes: int | None = None
    differing_chunks: int | None = None
    parameters: tuple[str, ...] = ()


class Finished(Event, frozen=True, tag="leave"):
    """This peer's part in the run is over."""

    code: int
    cause: str


Observation = Event | RecordWritten | CertificateKept | TrustHeard
Observe = Callable[[Observation], None]


def ignore(_fact: Observation) -> None:
    """An observer that does not look."""


def round_fields(key: RoundKey) -> dict[str, Any]:
    """Of an `OfRound`."""
    return {"epoch": key.epoch, "outer_step": key.outer_step, "fragment": key.fragment}


def state_fields(held: Held | None) -> dict[str, Any]:
    """The outer step, and the digest in hex; None if nothing is held."""
    return {"outer_step": held and held.outer_step, "digest": held and held.digest.hex()}


def view_fields(view: View) -> dict[str, Any]:
    """Of an `OfView`: peer ids by rank, and which two of these have no link ("id id")."""
    members = tuple(member.peer_id for member in view.members)
    apart = tuple(f"{members[one]} {members[other]}" for one, other in view.apart)
    return {"epoch": view.epoch, "outer_step": view.outer_step, "members": members, "apart": apart}
