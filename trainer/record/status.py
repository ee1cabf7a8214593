# SPDX-License-Identifier: Apache-2.0
"""What `isthmus status` tells: schema `isthmus.status/1`.

Rules: fields are added without a new schema, none changes its meaning within one; null means "not known yet". The
JSON of `--json` is these structs, field for field. Must not know how a status travels or who draws it.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from isthmus.trainer.config.quantities import rounded_nbytes

SCHEMA: Final = "isthmus.status/1"

LOSSES_SHOWN: Final = 120
"""Commits whose loss a status tells: as many as a terminal has columns."""

Phase = Literal["starting", "learning", "training", "exchanging", "leaving", "coordinating"]


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One member of the view.

    `address` has all candidates; `host` is where the link with it leads or comes from (`is_dialled`: we called), and
    `round_trip_ms` is the shortest round trip there. All null before there is a link. `is_apart`: there will be none,
    neither side can dial the other; what the two exchange goes through other members.
    """

    peer_id: str
    incarnation: int
    address: str
    host: str | None = None
    is_dialled: bool | None = None
    round_trip_ms: float | None = None
    is_apart: bool = False
    is_me: bool = False
    is_coordinator: bool = False


class RoundStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The last round that was committed. `bytes` counts both directions of this peer; `loss` is its mean here.

    Of its `seconds` the workers stood still for `wait_seconds`; the exchange takes `exchange_seconds` of these, or of
    the others where it goes on beside the training. The cost model had expected `predicted_seconds` for the exchange,
    null where links are not measured.
    """

    outer_step: int
    seconds: float
    exchange_seconds: float
    bytes: int
    num_members: int
    loss: float | None = None
    wait_seconds: float = 0.0
    predicted_seconds: float | None = None


class StepStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The newest inner step, as the workers tell of it.

    Its parts: waiting for text, both passes, clipping, the inner optimizer's update; `mfu` is the share of what the
    devices can do at most, null where that is not known.
    """

    seconds: float
    data_seconds: float
    passes_seconds: float
    clip_seconds: float
    update_seconds: float
    tokens_per_s: float
    mfu: float | None = None


class CoordinationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator in this process knows of the run: its view, and whose votes on the next step are here.

    `num_learners` peers are connected and no members; the round goes on without `num_late` members.
    """

    epoch: int
    outer_step: int
    num_members: int
    voted: tuple[str, ...] = ()
    num_learners: int = 0
    num_late: int = 0


class FetchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One learner that fetches the state from this peer. `total_bytes` is the whole state: it may need less."""

    peer_id: str
    sent_bytes: int
    total_bytes: int


class LeavingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer that wants to go waits for.

    `commit`: the one that holds its last steps; `handover`: until another peer holds the state; `answer`: of the
    coordinator; `checkpoint`: it has left, for `reason`, and writes its state to the disk; `others`: it has left, and
    its process coordinates `num_others` peers.
    """

    waits_for: Literal["start", "commit", "handover", "answer", "checkpoint", "others"]
    reason: str | None = None
    fetches: tuple[FetchStatus, ...] = ()
    num_others: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One peer at one moment.

    Losses are in nats a token; `first_loss` is that of this start's first round, `losses` those of the newest commits,
    each with its outer step; the `validation_…` are of the newest evaluation that this peer made, of the anchor of
    `validation_outer_step`, when the run had trained on `validation_tokens`; `goodput` is the share of `uptime_s`
    spent in inner steps; `tokens`, `num_commits`, `num_inner_steps` and `peers_seen`, other members of any view, count
    this start of this peer; `total_outer_steps` is where the run ends, `seconds_left` until then at the present pace.
    """

    schema: Literal["isthmus.status/1"] = SCHEMA
    run_id: str
    peer_id: str
    incarnation: int
    pid: int
    phase: Phase
    outer_step: int
    total_outer_steps: int
    inner_step: int = 0
    inner_steps_per_round: int = 0
    epoch: int = 0
    members: tuple[MemberStatus, ...] = ()
    coordinator: str | None = None
    num_commits: int = 0
    num_inner_steps: int = 0
    peers_seen: int = 0
    seconds_left: float | None = None
    first_loss: float | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    validation_bits_per_byte: float | None = None
    validation_outer_step: int | None = None
    validation_tokens: int | None = None
    losses: tuple[tuple[int, float], ...] = ()
    tokens: int = 0
    tokens_per_s: float | None = None
    goodput: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    last_round: RoundStatus | None = None
    step: StepStatus | None = None
    checkpoint_outer_step: int | None = None
    metrics_address: str | None = None
    leaving: LeavingStatus | None = None
    coordination: CoordinationStatus | None = None
    uptime_s: float = 0.0


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One peer of the run, or one that is kept out of it. `state`: member, late, learner, evicted or banned."""

    peer_id: str
    state: str
    incarnation: int | None = None
    address: str | None = None


def members_of(status: Status) -> tuple[PeerStatus, ...]:
    """The peers that a peer without a coordinator knows of: those of its view."""
    return tuple(
        PeerStatus(peer_id=one.peer_id, state="member", incarnation=one.incarnation, address=one.address)
        for one in status.members
    )


def render_status(status: Status) -> str:
    """The status for people, a few lines without colours."""
    if status.phase == "coordinating":
        lines = [
            f"run {status.run_id}, coordinator {status.peer_id}",
            f"outer step {status.outer_step} of {status.total_outer_steps}, "
            f"view {status.epoch} of {count(len(status.members), 'peer')}",
        ]
    else:
        lines = _training(status)
    if (coordination := status.coordination) is not None:
        lines.append(
            f"round {coordination.outer_step + 1}: {len(coordination.voted)} of "
            f"{count(coordination.num_members, 'vote')}, {count(coordination.num_learners, 'learner')}, "
            f"{coordination.num_late} late"
        )
    if status.metrics_address is not None:
        lines.append(f"page at http://{status.metrics_address}/, metrics at http://{status.metrics_address}/metrics")
    lines += [_line_of(member) for member in status.members]
    return "\n".join(lines)


def _training(status: Status) -> list[str]:
    lines = [
        f"run {status.run_id}, peer {status.peer_id}: {status.phase}",
        f"outer step {status.outer_step} of {status.total_outer_steps}"
        + (
            f", inner step {status.inner_step} of {status.inner_steps_per_round}"
            if status.inner_steps_per_round
            else ""
        )
        + f", view {status.epoch} of {count(len(status.members), 'peer')}",
        f"train loss {figure(status.train_loss, '.4f')}, {_validation(status)}",
        f"{status.tokens:,} tokens, {figure(status.tokens_per_s, ',.0f')} a second, "
        f"goodput {figure(status.goodput, '.1%')}",
        f"sent {rounded_nbytes(status.sent_bytes)}, received {rounded_nbytes(status.received_bytes)}",
    ]
    if (step := status.step) is not None:
        lines.append(_line_of_step(step))
    if (last := status.last_round) is not None:
        lines.append(
            f"last round {last.seconds:.2f} s ({exchange_of(last)}, {rounded_nbytes(last.bytes)}) "
            f"with {count(last.num_members, 'peer')}"
        )
    if status.checkpoint_outer_step is not None:
        lines.append(f"checkpoint at outer step {status.checkpoint_outer_step}")
    return lines


def _line_of_step(step: StepStatus) -> str:
    parts = (
        ("passes", step.passes_seconds),
        ("clipping", step.clip_seconds),
        ("update", step.update_seconds),
        ("waiting for text", step.data_seconds),
    )
    shares = ", ".join(f"{name} {seconds / step.seconds:.0%}" for name, seconds in parts)
    mfu = "" if step.mfu is None else f", {step.mfu:.1%} of the devices' peak"
    return f"last inner step {step.seconds:.3g} s: {step.tokens_per_s:,.0f} tokens a second{mfu} ({shares})"


def _validation(status: Status) -> str:
    loss = f"validation loss {figure(status.validation_loss, '.4f')}"
    if status.validation_outer_step is None:
        return loss
    bits = figure(status.validation_bits_per_byte, ".4f")
    return f"{loss} ({bits} bits a byte) at outer step {status.validation_outer_step}"


def _line_of(member: MemberStatus) -> str:
    notes = [note for note, holds in (("this", member.is_me), ("coordinator", member.is_coordinator)) if holds]
    return f"  {member.peer_id}  {path_to(member)}" + (f"  ({', '.join(notes)})" if notes else "")


def render_peers(peers: Sequence[PeerStatus]) -> str:
    """For people, one line a peer."""
    return "\n".join(f"{peer.peer_id}  {peer.state:8}  {peer.address or '-'}" for peer in peers)


def exchange_of(last: RoundStatus) -> str:
    """What it took, and what it was expected to take."""
    planned = "" if last.predicted_seconds is None else f", planned {last.predicted_seconds:.3f} s"
    return f"exchange {last.exchange_seconds:.3f} s{planned}"


def path_to(member: MemberStatus, *, with_round_trip: bool = True) -> str:
    """The path that its link takes, or else where it may be reached."""
    if member.is_apart:
        return "no link, through other members"
    if not member.host:
        return member.address
    path = f"{'to' if member.is_dialled else 'from'} {member.host}"
    return path if member.round_trip_ms is None or not with_round_trip else f"{path}, {member.round_trip_ms:.1f} ms"


def figure(value: float | None, spec: str) -> str:
    """In the form of a format specification."""
    return "unknown" if value is None else format(value, spec)


def count(number: int, noun: str) -> str:
    """`1 peer`, `2,000 peers`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
