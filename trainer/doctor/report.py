# SPDX-License-Identifier: Apache-2.0
"""What `isthmus doctor` tells: schema `isthmus.doctor/1`.

Rules: fields, checks and facts are added without a new schema, none changes its meaning within one. The JSON of
`--json` is these structs, field for field. Must not know how anything is found out.
"""

import textwrap
from pathlib import Path
from typing import Final, Literal

import msgspec

SCHEMA: Final = "isthmus.doctor/1"

Level = Literal["ok", "warn", "fail"]
Fact = str | int | float | bool | None | list[str]

_SIGNS: Final[dict[str, str]] = {"ok": "✓", "warn": "!", "fail": "✗"}
_MARGIN = 14
"""Columns before the text: the sign, and the name of the check."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    `level`: `ok`; `warn`, a run works all the same; `fail`, it does not. `cure` says what to do, for the last two.
    `facts`: the same for programs; units are at the ends of their names.
    """

    name: str
    level: Level
    text: str
    cure: str | None = None
    facts: dict[str, Fact] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of them. `ok`: none has failed."""

    schema: Literal["isthmus.doctor/1"] = SCHEMA
    ok: bool
    checks: tuple[Check, ...]


def ok(name: str, text: str, **facts: Fact) -> Check:
    """As it should be."""
    return Check(name=name, level="ok", text=text, facts=facts)


def warn(name: str, text: str, cure: str, **facts: Fact) -> Check:
    """A run works, and could work better."""
    return Check(name=name, level="warn", text=text, cure=cure, facts=facts)


def fail(name: str, text: str, cure: str, **facts: Fact) -> Check:
    """No run works like this."""
    return Check(name=name, level="fail", text=text, cure=cure, facts=facts)


def render_check(check: Check, *, width: int | None) -> str:
    """A line for people, and one below it with the cure.

    Args:
        check: what to show.
        width: columns of the terminal, at which long lines go on below; None where there is none.
    """
    head = f"{_SIGNS[check.level]} {check.name.replace('_', ' ')}".ljust(_MARGIN)
    paragraphs = [check.text] if check.cure is None else [check.text, check.cure]
    lines: list[str] = []
    for paragraph in paragraphs:
        first = " " * _MARGIN if lines else head
        if width is None:
            lines.append(first + paragraph)
        else:
            lines += textwrap.wrap(
                paragraph,
                max(width, 2 * _MARGIN),
                initial_indent=first,
                subsequent_indent=" " * _MARGIN,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def report_of(checks: list[Check]) -> Report:
    """What `--json` prints."""
    return Report(ok=all(check.level != "fail" for check in checks), checks=tuple(checks))


def format_path(path: Path) -> str:
    """From here, where that is shorter."""
    here = Path.cwd()
    if path == here:
        return "this folder"
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def format_rate(bytes_per_s: float) -> str:
    """`47.6 Mbit/s`."""
    mbit = bytes_per_s * 8e-6
    return f"{mbit / 1000:.2f} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def format_ms(seconds: float) -> str:
    """`40.2 ms`."""
    return f"{1000 * seconds:.1f} ms"
