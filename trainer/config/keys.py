# SPDX-License-Identifier: Apache-2.0
"""Which keys a configuration can have, found by looking at its sections.

Rules: nothing is listed twice; a new field of a section, or of a method, is known here by itself. Must not know values.
"""

import difflib
import types
import typing
from collections.abc import Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from isthmus.trainer.config.methods import methods
from isthmus.trainer.config.outer import OuterSection
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.values import flatten

_OTHER_WORDS = {
    "learning_rate": "lr",
    "block_size": "seq_len",
    "max_seq_len": "seq_len",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "dim",
    "hidden_size": "dim",
    "compression": "codec",
    "max_norm": "grad_clip",
    "workers": "local_workers",
    "steps": "outer_steps",
}
"""What other programs call our keys."""


def _known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, dict[str, frozenset[str]]]:
    """What `KNOWN_KEYS` says, for the sections below `prefix`."""
    known: dict[str, dict[str, frozenset[str]]] = {}
    for name, info in model.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        if info.annotation is OuterSection:
            known |= _keys_of_methods(key)
            continue
        parts = typing.get_args(info.annotation) if _is_union(info.annotation) else (info.annotation,)
        variants = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        if not variants:
            known[key] = {}
        for variant in variants:
            for inner_key, conditions in _known_keys(variant, f"{key}.").items():
                seen = known.setdefault(inner_key, {})
                for table, tags in conditions.items():
                    seen[table] = seen.get(table, frozenset()) | tags
                if len(variants) > 1:
                    tag = variant.model_fields["type"].default
                    seen[key] = seen.get(key, frozenset()) | {tag}
    return known


def _keys_of_methods(table: str) -> dict[str, dict[str, frozenset[str]]]:
    """The same of `[outer]`, without making a section of every method: that takes time."""
    known = {f"{table}.{name}": {table: frozenset(methods())} for name in OuterSection.model_fields}
    for method, told in methods().items():
        for setting in told.settings:
            seen = known.setdefault(f"{table}.{setting.name}", {table: frozenset()})
            seen[table] |= {method}
    return known


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def types_of(table: FieldInfo) -> list[str]:
    """What the `type` of a table can be; empty where it has none."""
    if table.annotation is OuterSection:
        return list(methods())
    parts = typing.get_args(table.annotation)
    return [one.model_fields["type"].default for one in parts if isinstance(one, type) and issubclass(one, BaseModel)]


KNOWN_KEYS: Mapping[str, Mapping[str, frozenset[str]]] = _known_keys(Config)
"""Dotted key → {table of a variant: the types that have the key}; the inner dict is empty where there is no variant."""

TABLES = frozenset(key.rsplit(".", depth)[0] for key in KNOWN_KEYS for depth in range(1, key.count(".") + 1))
"""Dotted names of all sections and of the tables in them."""

DEFAULTS = dict(flatten(Config().tree()))
"""Dotted key → the value where nobody says anything."""


def keys_called(name: str) -> list[str]:
    """The keys with this name, or with another program's word for it, in whatever section."""
    leaf = _OTHER_WORDS.get(name, name)
    return [key for key in KNOWN_KEYS if key.rpartition(".")[2] == leaf]


def closest_key(key: str) -> str:
    """The closest key: the right name in the wrong section, another program's word for it, a wrong letter."""
    section, _, name = key.rpartition(".")
    leaf = _OTHER_WORDS.get(name, name)
    corrected = f"{section}.{leaf}"
    close = difflib.get_close_matches(corrected, keys_called(leaf), n=1, cutoff=0.0)
    close = close or difflib.get_close_matches(corrected, KNOWN_KEYS, n=1, cutoff=0.8)
    if not close:
        by_leaf = {known.rpartition(".")[2]: known for known in KNOWN_KEYS}
        close = [by_leaf[one] for one in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)]
    return f"did you mean {close[0]}?" if close else "isthmus config show lists all keys"
