# SPDX-License-Identifier: Apache-2.0
"""What `isthmus plan` tells: schema `isthmus.plan/1`, and the same for people.

Rules: fields are added without a new schema, none changes its meaning within one. Units are at the ends of names:
`_s` seconds, `_nbytes` bytes, `_bytes_per_s`. Must not know how anything is found out.
"""

from typing import Final, Literal

import msgspec

from isthmus.trainer.config.quantities import format_rate, format_seconds, rounded_nbytes
from isthmus.trainer.record.summary import format_duration

SCHEMA: Final = "isthmus.plan/1"
_DAY_S: Final = 86_400
_MARGIN: Final = 14
_AT_FIRST: Final = 1.5
"""How much more the first outer step must send than the last to be told; fragments differ by less."""


class OuterStep(msgspec.Struct, frozen=True, kw_only=True):
    """One outer step. `sent_nbytes` by each peer, which receives as many; the workers stand still for `waiting_s`."""

    codec: str
    inner_steps: int
    sent_nbytes: int
    exchange_s: float
    waiting_s: float


class WithInnerSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The same run with another H."""

    inner_steps: int
    goodput: float


class Better(msgspec.Struct, frozen=True, kw_only=True):
    """A method that would spend more of the time in inner steps, as flags; `loss` says what is published of it."""

    flags: str
    goodput: float
    loss: str


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Of this machine: `memory`, `each GPU` or `disk`. `free_nbytes` null: not known."""

    name: str
    nbytes: int
    free_nbytes: int | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as it will be if all goes well. `goodput`: the share of the time that goes into inner steps.

    `step_source`: "given", or the device that the inner step was timed on. `last` is an outer step of the long run;
    `first` is one that exchanges more, where a method begins so.
    """

    schema: Literal["isthmus.plan/1"] = SCHEMA
    method: str
    num_parameters: int
    num_peers: int
    upload_bytes_per_s: float
    download_bytes_per_s: float
    round_trip_s: float
    step_s: float
    step_source: str
    first: OuterStep
    last: OuterStep
    goodput: float
    seconds: float
    outer_steps: int
    inner_steps: int
    tokens: int
    sent_nbytes: int
    by_inner_steps: tuple[WithInnerSteps, ...]
    better: Better | None
    needs: tuple[Need, ...]


def render(plan: Plan) -> str:
    """For people."""
    first, last = plan.first, plan.last
    lines = [
        ("run", f"{plan.method}, {last.codec}, {plan.num_parameters:,} parameters, {plan.num_peers} peers"),
        ("links", f"{_line(plan)}, {format_seconds(plan.round_trip_s)} there and back"),
        ("inner step", f"{plan.step_s:.3g} s, {plan.step_source}"),
        ("outer step", f"{_inner_steps(last.inner_steps)}, {_seconds(last.inner_steps * plan.step_s)}"),
        ("exchange", f"{_exchange(last)}"),
    ]
    if first.sent_nbytes > _AT_FIRST * last.sent_nbytes:
        lines.append(("at first", f"{first.codec}, {_exchange(first)}"))
    lines.append(("goodput", f"{plan.goodput:.1%} of the time goes into inner steps"))
    if plan.by_inner_steps:
        told = ", ".join(f"{other.inner_steps}: {other.goodput:.1%}" for other in plan.by_inner_steps)
        lines.append(("goodput by H", told))
    a_day = rounded_nbytes(round(plan.sent_nbytes / plan.seconds * _DAY_S))
    lines += [
        ("traffic", f"{a_day} a day sent by each peer, and as much received"),
        (
            "to the end",
            f"{plan.outer_steps:,} outer steps, {plan.inner_steps:,} inner steps, {plan.tokens:,} tokens: "
            f"{_long(plan.seconds)}, {rounded_nbytes(plan.sent_nbytes)} sent by each peer",
        ),
        ("this machine", ", ".join(map(_need, plan.needs))),
    ]
    if plan.better is not None:
        lines.append(("better here", f"{plan.better.goodput:.1%} with {plan.better.flags}"))
        lines.append(("", f"published of its loss: {plan.better.loss}"))
    return "\n".join(name.ljust(_MARGIN) + text for name, text in lines)


def _line(plan: Plan) -> str:
    up, down = format_rate(plan.upload_bytes_per_s), format_rate(plan.download_bytes_per_s)
    return f"{up} each way" if up == down else f"{up} up and {down} down"


def _exchange(step: OuterStep) -> str:
    waits = f"the workers wait {_seconds(step.waiting_s)}" if step.waiting_s else "the workers do not wait"
    sent = rounded_nbytes(step.sent_nbytes)
    return f"{sent} sent by each peer, and as much received, in {_seconds(step.exchange_s)}; {waits}"


def _need(need: Need) -> str:
    free = "unknown" if need.free_nbytes is None else rounded_nbytes(need.free_nbytes)
    return f"{need.name} {rounded_nbytes(need.nbytes)} of {free} free"


def _inner_steps(number: int) -> str:
    return "1 inner step" if number == 1 else f"{number:,} inner steps"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _long(seconds: float) -> str:
    days, rest = divmod(round(seconds), _DAY_S)
    return f"{days:,} days {format_duration(rest)}" if days else format_duration(seconds)
