# SPDX-License-Identifier: Apache-2.0
"""Everything that happens in one process, a struct for each kind. All that is shown is made of these.

Here are the kinds that the trainer tells, and the records of a coordinator's journal; what elastic tells is in
`elastic/observation.py`. `chronicle.py` hands each event to the file, to the log and to the figures (`figures.py`).

What is not `Unfiled` is one line of events.jsonl, schema `isthmus.events/1`: `t_s`, `wall` and `peer` of `Event`, then
`event`, the kind's tag, which is its name in snake_case if it has no other (of a `Fault` it is "fault", and the tag is
`kind`), and its own fields. What these mean, wherever they are:

    epoch, fragment    of the view, of the round
    outer_step         the one that a round starts from, that a commit has made, or that is held
    inner_step         of this peer, over all its outer steps
    of, incarnation    another peer's id, and which start of it
    members, apart     peer ids by rank; which two of these have no link ("id id")
    digest             of the shared state, hex, in full: an audit needs nothing else
    loss               mean, nats a token
    tokens, samples    how many
    …bytes, …seconds, …_s
    cause              a sentence

A number that is not finite is null in the file. Fields are added without a new schema, with a default; none changes
its meaning within one.
"""

from collections.abc import Iterator, Mapping

import msgspec

from isthmus.elastic.observation import Event, Fault, OfRound, OfView

SCHEMA = "isthmus.events/1"


class Unfiled(Event, frozen=True):
    """What the file leaves out, mostly because there is too much of it."""


# ------------------------------------------------------------------------------------ this start


class LogOpened(Event, frozen=True):
    """First line of every start."""

    schema: str = SCHEMA


class LogContinued(Event, frozen=True):
    """First line of every further file of a start: the file before it, which may be gone, and what `started` said."""

    before: str
    run_id: str = ""
    samples_per_data_epoch: int | None = None
    schema: str = SCHEMA


class Started(Event, frozen=True):
    """This process listens and knows what it is part of. `num_parameters` is 0 for a coordinator without a peer."""

    run_id: str
    address: str
    num_parameters: int
    tokens_per_inner_step: int
    samples_per_data_epoch: int | None


class Text(Event, frozen=True):
    """What this peer trains on. `source`: "machine", "copy" of an earlier start, "url", or "peers"; these gave it."""

    digest: str
    bytes: int
    description: str
    source: str
    peers: tuple[str, ...]
    fetched_bytes: int
    seconds: float


class Shard(Event, frozen=True):
    """A part of a prepared text has come, from `url` or from these peers. `name`: of its file at its owner's."""

    name: str
    bytes: int
    url: str | None
    peers: tuple[str, ...]
    seconds: float


class CoordinatorEnded(Event, frozen=True):
    """A coordinator without a peer ends. `complete`: so is the run."""

    complete: bool


class Failed(Event, frozen=True):
    """This process ends with an error, and with this exit code."""

    code: int
    cause: str


class LeaveAsked(Unfiled, frozen=True):
    """The operator, or a loop that ends before its run, wants this process to leave in order."""


class Counted(Unfiled, frozen=True):
    """Once a second, totals of this start: connections that were not let in, by reason; bytes for learners."""

    refused: dict[str, int]
    state_served_bytes: int


class Coordinated(Unfiled, frozen=True):
    """Once a second, where its run is: of a coordinator without a peer."""

    epoch: int
    outer_step: int
    members: tuple[str, ...]


# ------------------------------------------------------------------------------------ training


class Workers(Event, frozen=True):
    """The workers are there, or others in their place. They compute `micro_batch` samples at a time.

    `flops_per_token` is what a step computes for each token, `peak_flops` what all devices can do in a second at most,
    where their data sheets are known. Null where it is not known, or a loop of one's own sees to it.
    """

    devices: tuple[str, ...]
    precision: str | None
    micro_batch: int | None
    flops_per_token: int | None
    peak_flops: float | None
    seconds: float


class InnerStep(Unfiled, frozen=True):
    """One inner step is done. It took the workers so many seconds, with these parts: see `Trained`.

    Null where nobody said, and where its gradient is being exchanged.
    """

    inner_step: int
    loss: float | None
    tokens: int
    seconds: float | None = None
    data_s: float = 0.0
    passes_s: float = 0.0
    clip_s: float = 0.0
    update_s: float = 0.0


class HandedIn(Unfiled, frozen=True):
    """The payload of a round is made, and the workers stand still for the others."""


class Round(OfRound, frozen=True):
    """The mean of a round is here. `predicted_s` is what the cost model expected, where links are measured."""

    members: tuple[str, ...]
    bytes_sent: int
    bytes_received: int
    seconds: float
    plan: str
    predicted_s: float | None


class Trained(Event, frozen=True):
    """A commit holds work of this peer: what it was, and for how long the workers stood still for it (`wait_s`).

    Of the `train_s` seconds of its inner steps the workers were at work for `step_s`, on `step_tokens` tokens: waiting
    for text (`data_s`), with both passes, clipping, and the inner optimizer's update. `mfu` is the share of what their
    devices can do at most (PaLM, arXiv:2204.02311, appendix B), null where that is not known.
    """

    epoch: int
    outer_step: int
    inner_step: int
    loss: float | None
    tokens: int
    train_s: float
    wait_s: float
    world_size: int
    step_s: float = 0.0
    step_tokens: int = 0
    data_s: float = 0.0
    passes_s: float = 0.0
    clip_s: float = 0.0
    update_s: float = 0.0
    mfu: float | None = None


class Evaluate(Event, frozen=True):
    """The anchor of this step was judged on held-out text, by one member, beside its training if there was room.

    `tokens`: that the run had trained on by then; `seconds`: of this member's workers, of which they would have
    trained for `held_s`.
    """

    outer_step: int
    loss: float | None
    bits_per_byte: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    held_s: float = 0.0


class Checkpoint(Event, frozen=True):
    """A checkpoint is on the disk; `seconds` to write it."""

    outer_step: int
    seconds: float


class CheckpointFailed(Fault, frozen=True):
    """A checkpoint could not be written."""

    cause: str


class CheckpointCopied(Event, frozen=True):
    """A checkpoint is at `node.checkpoints` too, and was read back from there; `seconds` for both."""

    outer_step: int
    seconds: float


class CheckpointNotCopied(Fault, frozen=True):
    """A checkpoint is on this peer's disk, and could not be copied to `node.checkpoints`."""

    cause: str


class ValuesNotFinite(Fault, frozen=True):
    """The workers begin anew at the anchor. `fragment` is a name here."""

    outer_step: int
    fragment: str


class WorkerDied(Fault, frozen=True):
    """A worker ended, -n by signal n; all are replaced, and what they did since the last commit is done again."""

    local_rank: int
    exit_code: int
    memory_bytes: int
    cause: str


class OutOfMemory(Fault, frozen=True):
    """What the workers were asked for did not fit. Others take their place, with micro-batches of `micro_batch`."""

    micro_batch: int
    cause: str


class WorkerHung(Fault, frozen=True):
    """Workers (`local_ranks`) did not answer `request` within `seconds`; all are killed and replaced."""

    request: str
    local_ranks: tuple[int, ...]
    seconds: float
    cause: str


# ------------------------------------------------------------------------------------ certificates and records


class Certificate(OfRound, frozen=True):
    """The newest commit that this peer can prove. `link` is what the next certificate names as its parent."""

    digest: str
    link: str


class Trust(Event, frozen=True):
    """The coordinator says whose certificates count, and who is put out."""

    authorities: int
    barred: tuple[str, ...]


class Genesis(Event, frozen=True):
    """Record: the run begins with this state and sample."""

    outer_step: int
    digest: str
    next_index: int


class Rebuilt(Event, frozen=True):
    """Record: a lost journal was begun anew with what these peers proved, or because the operator `insisted`."""

    epoch: int
    outer_step: int | None
    digest: str | None
    testified: tuple[str, ...]
    insisted: bool


class RolledBack(Event, frozen=True):
    """Record: the run goes back from step `given_up`, which nobody has, to what `holders` have; null: its beginning."""

    epoch: int
    outer_step: int | None
    digest: str | None
    given_up: int
    holders: tuple[str, ...]


class ViewDecided(OfView, frozen=True):
    """Record: the next view, and whom its round does not wait for."""

    cause: str
    excused: tuple[str, ...]


class CommitDecided(OfRound, frozen=True):
    """Record: an outer step, and whose work it holds."""

    digest: str
    members: tuple[str, ...]
    tokens: int
    final: bool


class Lease(Event, frozen=True):
    """Record: samples were given to a peer, for its request `serial`."""

    of: str
    serial: int
    samples: int


class LeaseReturned(Event, frozen=True):
    """Record: a peer's samples are free again."""

    of: str
    epoch: int
    samples: int


class PutOut(Event, frozen=True):
    """Record: a peer was evicted or banned."""

    of: str
    banned: bool


class TicketRevoked(Event, frozen=True):
    """Record: a ticket (hex), perhaps `and_earlier` ones, admits nobody any more."""

    ticket: str
    and_earlier: bool


class Admitted(Event, frozen=True):
    """Record: a peer came in by this ticket (hex)."""

    of: str
    ticket: str


class Snapshot(OfView, frozen=True):
    """Record: what the journal knows, with so many commits and leased samples, so that older records may go."""

    commits: int
    samples: int


# ------------------------------------------------------------------------------------ lines


def line_of(event: Event) -> dict[str, object]:
    """The line of events.jsonl that tells of it."""
    head = {"t_s": event.t_s, "wall": event.wall, "peer": event.peer, "event": "fault"}
    return {**head, **msgspec.to_builtins(event)}


def event_of(line: Mapping[str, object]) -> Event | None:
    """The event that a line tells of; None if this version knows no such one."""
    kind = _KINDS.get(str(line.get("kind" if line.get("event") == "fault" else "event")))
    try:
        return None if kind is None else msgspec.convert(line, kind)
    except msgspec.ValidationError:
        return None


def _kinds(base: type[Event]) -> Iterator[type[Event]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


_KINDS = {str(kind.__struct_config__.tag): kind for kind in _kinds(Event)}
