# SPDX-License-Identifier: Apache-2.0
"""The configuration as text: what `isthmus config show` prints, and what `isthmus init` writes.

Rules: the TOML reads back to the same configuration ("none" stands for a value that is not set); what a key means is
its docstring in the sections, and stands nowhere else; the JSON has the schema `isthmus.config/1`.
"""

import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic.fields import FieldInfo

from isthmus.trainer.config.keys import types_of
from isthmus.trainer.config.manifest import manifest_digest, manifest_of
from isthmus.trainer.config.methods import methods
from isthmus.trainer.config.outer import OuterSection, outer_section
from isthmus.trainer.config.quantities import format_nbytes, format_rate, format_seconds
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import ResolvedConfig
from isthmus.trainer.config.values import Json, Section

_WIDTH = 96
"""Of the meaning of a key above it."""
_PREFACE = """\
# What a run is told. Every key has its default here: take the # away where you want something else.
# `isthmus up -c run.toml` founds the run; `isthmus config show -c run.toml` says what it comes to.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a table with its value, as TOML has them, and what it means."""

    table: str
    key: str
    value: str
    meaning: str


def entries(config: Config) -> Iterator[Entry]:
    """Every key of this configuration, table by table."""
    for name, info in type(config).model_fields.items():
        section = getattr(config, name)
        assert isinstance(section, Section)
        yield from _entries(section, info.alias or name, info)


def every_entry() -> Iterator[tuple[str, Entry]]:
    """Every key with its default, again for every type that has it: (type, or empty, entry).

    The value is empty where there is no default.
    """
    for name, info in Config.model_fields.items():
        for section in _sections_in(info):
            yield from _of_every_type(section, info.alias or name, info)


def _of_every_type(section: type[Section], table: str, info: FieldInfo) -> Iterator[tuple[str, Entry]]:
    kind = str(section.model_fields["type"].default) if len(types_of(info)) > 1 else ""
    defaults = section.model_construct()  # also where something must be given
    yield from ((kind, entry) for entry in _entries(defaults, table, info) if entry.table == table)
    for name, inner in section.model_fields.items():
        for one in _sections_in(inner):
            yield from _of_every_type(one, f"{table}.{inner.alias or name}", inner)


def as_toml(resolved: ResolvedConfig, *, with_origin: bool) -> str:
    """All sections as TOML, each value followed by the first sentence of its meaning, and by its origin if asked."""
    lines: list[str] = []
    table = ""
    for entry in entries(resolved.config):
        if entry.table != table:
            table = entry.table
            lines += ["", f"[{table}]"]
        origin = f"({resolved.origins[f'{table}.{entry.key}']}) " if with_origin else ""
        lines.append(f"{entry.key} = {entry.value}  # {origin}{_first_sentence(entry.meaning)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def as_template() -> str:
    """A file to begin with: every key as a comment, with its meaning and its default."""
    lines = [_PREFACE]
    table = ""
    for entry in entries(Config()):
        if entry.table != table:
            table = entry.table
            lines += [f"[{table}]"]
        lines += [f"# {line}" for line in _wrapped(entry.meaning)]
        lines += [f"# {entry.key} = {entry.value}", ""]
    return "\n".join(lines)


def as_json_text(resolved: ResolvedConfig) -> str:
    """`{"schema", "config", "origins", "manifest_digest"}` on one line."""
    result = {
        "schema": "isthmus.config/1",
        "config": resolved.config.tree(),
        "origins": dict(resolved.origins),
        "manifest_digest": manifest_digest(manifest_of(resolved.config)).hex(),
    }
    return json.dumps(result) + "\n"


def _entries(section: Section, table: str, field: FieldInfo) -> Iterator[Entry]:
    tables: list[tuple[str, Section, FieldInfo]] = []
    values = section.model_dump(mode="json", by_alias=True)
    choices = types_of(field)
    fields = type(section).model_fields
    for name in sorted(fields, key=lambda name: name != "type"):
        info = fields[name]
        key = info.alias or name
        value = getattr(section, name, None)
        if isinstance(value, Section):
            tables.append((f"{table}.{key}", value, info))
            continue
        is_choice = name == "type" and len(choices) > 1
        meaning = f"One of {', '.join(choices)}." if is_choice else _meaning(info)
        yield Entry(table, key, _toml_value(name, values[key]) if key in values else "", meaning)
    for inner_table, value, info in tables:
        yield from _entries(value, inner_table, info)


def _meaning(info: FieldInfo) -> str:
    """The docstring of a key, and the words that it takes, if it takes no others."""
    words = _words_in(info.annotation)
    listed = f" One of {', '.join(words)}." if len(words) > 1 else ""
    return " ".join((info.description or "").split()) + listed


def _words_in(annotation: object) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [word for word in typing.get_args(annotation) if isinstance(word, str)]
    return [word for part in typing.get_args(annotation) for word in _words_in(part)]


def _sections_in(field: FieldInfo) -> list[type[Section]]:
    if field.annotation is OuterSection:
        return [outer_section(method) for method in methods()]
    parts = [field.annotation, *typing.get_args(field.annotation)]
    return [part for part in parts if isinstance(part, type) and issubclass(part, Section)]


def _toml_value(name: str, value: Json) -> str:
    """JSON's numbers, booleans, lists and strings are TOML's, but for null; quantities have their unit."""
    if value is None:
        return '"none"'
    for suffix, write in (("_bytes_per_s", format_rate), ("_nbytes", format_nbytes), ("_s", format_seconds)):
        if name.endswith(suffix) and isinstance(value, int | float):
            return json.dumps(write(value))
    return json.dumps(value)


def _first_sentence(meaning: str) -> str:
    return meaning.partition(". ")[0].rstrip(".")


def _wrapped(text: str) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > _WIDTH:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    if line:
        yield line
