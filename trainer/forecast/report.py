# SPDX-License-Identifier: Apache-2.0
"""What `isthmus plan` tells: schema `isthmus.plan/1`, and the same for people.

Rules: fields are added without a new schema, none changes its meaning within one. Units are at the ends of names:
`_s` seconds, `_nbytes` bytes, `_bytes_per_s`. Must not know how anything is found out.
"""

from typing import Final, Literal

import msgspec

from isthmus.trainer.config.quantities import format_rate, format_seconds, rounded_nbytes
from isthmus.trainer.record.status import count
from isthmus.trainer.record.summary import format_duration

SCHEMA: Final = "isthmus.plan/1"
_DAY_S: Final = 86_400
_MARGIN: Final = 14
_MUCH: Final = 1.5
"""How much more than a typical one the largest outer step must send to be told; fragments differ by less."""


class OuterStep(msgspec.Struct, frozen=True, kw_only=True):
    """One outer step, or the mean of several. The workers stand still for `waiting_s`.

    `sent_nbytes` by each peer, which receives as many.
    """

    codec: str
    inner_steps: float
    sent_nbytes: int
    exchange_s: float
    waiting_s: float


class WithInnerSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The same run with another H."""

    inner_steps: int
    goodput: float


class Better(msgspec.Struct, frozen=True, kw_only=True):
    """A method whose workers would wait less, as flags; whether its loss is as good, `loss` says from publications."""

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

    `step_source`: "given", or the device that the inner step was timed on. `typical` is the mean of the second half of
    the outer steps, `largest` the one that sends most: methods may exchange more at first, or now and then.
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
    typical: OuterStep
    largest: OuterStep
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
    typical, largest = plan.typical, plan.largest
    lines = [
        ("run", f"{plan.method}, {typical.codec}, {plan.num_parameters:,} parameters, {plan.num_peers} peers"),
        ("links", f"{_line(plan)}, {_with_unit(format_seconds(plan.round_trip_s), 's')} there and back"),
        ("inner step", f"{plan.step_s:.3g} s, {plan.step_source}"),
        ("outer step", f"{_inner_steps(typical.inner_steps)}, {_seconds(typical.inner_steps * plan.step_s)}"),
        ("exchange", _exchange(typical)),
    ]
    if largest.sent_nbytes > _MUCH * typical.sent_nbytes:
        lines.append(("the largest", f"{largest.codec}, {_exchange(largest)}"))
    lines.append(("goodput", f"{plan.goodput:.1%} of the time goes into inner steps"))
    if plan.by_inner_steps:
        told = ", ".join(f"{other.inner_steps}: {other.goodput:.1%}" for other in plan.by_inner_steps)
        lines.append(("", f"with other numbers of inner steps: {told}"))
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
        lines.append(("waits less", f"{plan.better.goodput:.1%} with {plan.better.flags}"))
        lines.append(("", f"its loss in publications: {plan.better.loss}"))
    return "\n".join(name.ljust(_MARGIN) + text for name, text in lines)


def _line(plan: Plan) -> str:
    rates = (plan.upload_bytes_per_s, plan.download_bytes_per_s)
    up, down = (_with_unit(format_rate(rate), " bytes a second") for rate in rates)
    return f"{up} each way" if up == down else f"{up} up and {down} down"


def _with_unit(text: str, unit: str) -> str:
    """A quantity as people write it; where no unit of theirs fits, it is a number of this one."""
    return text if text[-1:].isalpha() else f"{float(text):.12g}{unit}"


def _exchange(step: OuterStep) -> str:
    waits = f"the workers wait {_seconds(step.waiting_s)} for each" if step.waiting_s else "the workers do not wait"
    sent = rounded_nbytes(step.sent_nbytes)
    return f"{sent} sent by each peer, and as much received, in {_seconds(step.exchange_s)}; {waits}"


def _need(need: Need) -> str:
    free = "unknown" if need.free_nbytes is None else rounded_nbytes(need.free_nbytes)
    return f"needs {rounded_nbytes(need.nbytes)} of {need.name} ({free} free)"


def _inner_steps(number: float) -> str:
    return "1 inner step" if number == 1 else f"{number:,.4g} inner steps"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _long(seconds: float) -> str:
    days, rest = divmod(round(seconds), _DAY_S)
    return f"{count(days, 'day')} {format_duration(rest)}" if days else format_duration(seconds)
