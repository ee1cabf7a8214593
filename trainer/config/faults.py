# SPDX-License-Identifier: Apache-2.0
"""What pydantic finds wrong, as the sentence an operator needs: key, origin, value, what is expected.

Must not know how values are merged.
"""

import difflib
import json
import re
from collections.abc import Mapping
from typing import Protocol

from pydantic_core import ErrorDetails

from isthmus.trainer.config.keys import KNOWN_KEYS, TABLES
from isthmus.trainer.config.values import Json
from isthmus.trainer.errors import ConfigError

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "path_type": "a path in quotes",
    "tuple_type": "a list",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_pattern_mismatch": "a text like {pattern}",
    "string_too_long": "at most {max_length} characters",
    "literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags}",
    "too_short": "{min_length} values",
    "too_long": "at most {max_length} values",
    "missing": "a further value",
}


class Given(Protocol):
    """A value and where it came from."""

    @property
    def value(self) -> Json:
        """As it was read."""

    @property
    def origin(self) -> str:
        """A file, a variable, a flag."""


def key_at(loc: tuple[int | str, ...]) -> str:
    """The key of a pydantic location, which also names variants and positions in lists."""
    key = ""
    for part in loc:
        longer = f"{key}.{part}" if key else str(part)
        if longer in KNOWN_KEYS or longer in TABLES:
            key = longer
    return key


def config_error(fault: ErrorDetails, given: Mapping[str, Given]) -> ConfigError:
    """A fault as one sentence; `given` holds the values by dotted key."""
    key = key_at(fault["loc"])
    if fault["type"] == "union_tag_invalid":
        key = f"{key}.type"
    context = fault.get("ctx", {})
    if fault["type"] == "value_error":
        problem = str(context["error"])
    else:
        expected = _EXPECTED.get(fault["type"])
        problem = (
            f"{fault['msg'][:1].lower()}{fault['msg'][1:]}"
            if expected is None
            else f"expected {expected.format(**context)}"
        )
    entry = given.get(key)
    if entry is None and fault["type"] == "missing":
        section = key.rpartition(".")[0]
        return ConfigError(f"{key} is not given, and this {section}.type has no default for it", key=key)
    if entry is None:
        where = f"[{key}] " if key else ""
        return ConfigError(f"{where}{problem}{_origins_in(problem, key, given)}", key=key or None)
    cure = _closest_choice(entry.value, problem)
    return ConfigError(
        f"{key} from {entry.origin} is {show(entry.value)}, {problem}", cure=cure, key=key, origin=entry.origin
    )


def with_origins(error: ConfigError, given: Mapping[str, Given]) -> ConfigError:
    """An error of several keys, or of a section, with where the values come from that it names."""
    key = error.key or ""
    section = key if key in TABLES else key.rpartition(".")[0]
    entry = given.get(key)
    return ConfigError(
        f"{error.problem}{_origins_in(error.problem, section, given)}",
        cure=error.cure,
        key=error.key,
        origin=None if entry is None else entry.origin,
    )


def _origins_in(problem: str, section: str, given: Mapping[str, Given]) -> str:
    """Where the values that a sentence about several keys names come from, but for flags that are called like them."""
    words = set(re.findall(r"[a-z_]+(?:\.[a-z_]+)*", problem))
    named = [key for key in given if (key.removeprefix(f"{section}.") if section else key) in words]
    told = [f"{key} from {origin}" for key in named if (origin := given[key].origin) != f"--{key}"]
    return f" ({', '.join(told)})" if told else ""


def _closest_choice(value: Json, problem: str) -> str:
    choices = problem.split("'")[1::2]
    close = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f"did you mean {close[0]}?" if close else ""


def show(value: object) -> str:
    """A value as people would write it, cut where it gets long."""
    text = "none" if value is None else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
