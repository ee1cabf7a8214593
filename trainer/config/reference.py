# SPDX-License-Identifier: Apache-2.0
"""A page about every key there is, made from the sections themselves: trainer/CONFIG.md.

`isthmus config reference > trainer/CONFIG.md` writes it anew. Must not say anything that the sections do not say.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.trainer.config.keys import DEFAULTS, KNOWN_KEYS
from isthmus.trainer.config.methods import methods
from isthmus.trainer.config.outer import OUTER, OuterSection
from isthmus.trainer.config.show import Entry, every_entry

_PREFACE = """\
# Every key of the configuration

A run is told in TOML (`isthmus up -c run.toml`), in the environment (`ISTHMUS__INNER__LR=3e-4`) and by flags
(`--inner.lr 3e-4`); the later one wins. `isthmus init` writes a file with all keys, `isthmus config show --origin` says
what holds and why. Only `[node]` is a peer's own: all else is the run's. `isthmus config reference` makes this page.
"""
_HEAD = ("| key | default | meaning |", "|---|---|---|")


@dataclass(slots=True)
class _Row:
    meaning: str
    types_by_default: dict[str, list[str]] = field(default_factory=dict)


def as_reference() -> str:
    """The page, in Markdown."""
    tables: dict[str, dict[str, _Row]] = {}
    settings: dict[str, list[Entry]] = {method: [] for method in methods()}
    for kind, entry in every_entry():
        if entry.table == OUTER and entry.key not in OuterSection.model_fields:
            settings[kind].append(entry)
            continue
        row = tables.setdefault(entry.table, {}).setdefault(entry.key, _Row(entry.meaning))
        types = row.types_by_default.setdefault(entry.value, [])
        if kind not in types:
            types.append(kind)
    lines = [_PREFACE]
    for table, rows in tables.items():
        lines += [f"## [{table}]", "", *_HEAD, *(_line(table, key, row) for key, row in rows.items()), ""]
        if table == OUTER:
            lines += _of_methods(settings)
    return "\n".join(lines)


def _of_methods(settings: Mapping[str, Sequence[Entry]]) -> Iterator[str]:
    """A table for each method: what a key means there is the method's own word."""
    for method, entries in settings.items():
        yield from (f'### [{OUTER}] with `type = "{method}"`', "", methods()[method].meaning, "", *_HEAD)
        for entry in entries:
            yield f"| `{entry.key}` | {_default(entry.value)} | {_escaped(entry.meaning)} |"
        yield ""


def _line(table: str, key: str, row: _Row) -> str:
    values = [_default(value) for value in row.types_by_default]
    if len(values) > 1:
        values = [f"{_default(value)} ({', '.join(types)})" for value, types in row.types_by_default.items()]
    meaning = _escaped(f"{row.meaning}{_condition(f'{table}.{key}')}")
    default = f'`"{DEFAULTS[f"{table}.type"]}"`' if key == "type" else ", ".join(values)
    return f"| `{key}` | {default} | {meaning} |"


def _default(value: str) -> str:
    return f"`{value}`" if value else "must be given"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _condition(key: str) -> str:
    """Which types have the key, where not all do."""
    told = [
        f"{table}.type {' or '.join(sorted(tags))}"
        for table, tags in KNOWN_KEYS[key].items()
        if tags != KNOWN_KEYS[f"{table}.type"][table]
    ]
    return f" Only with {' and '.join(told)}." if told else ""
