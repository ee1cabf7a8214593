# SPDX-License-Identifier: Apache-2.0
"""The configuration as text: what `isthmus config show` prints.

Rules: the TOML reads back to the same configuration ("none" stands for a value that is not set); the JSON has the
schema `isthmus.config/1`.
"""

import json

from trainer.config_sources import ResolvedConfig
from trainer.config_values import Json
from trainer.run_manifest import manifest_digest, manifest_of


def as_toml(resolved: ResolvedConfig, *, with_origin: bool) -> str:
    """All sections as TOML; each value followed by its origin if asked."""
    lines: list[str] = []
    for section, values in resolved.config.tree().items():
        assert isinstance(values, dict)
        _add_table(lines, section, values, resolved if with_origin else None)
    return "\n".join(lines).lstrip("\n") + "\n"


def as_json_text(resolved: ResolvedConfig) -> str:
    """`{"schema", "config", "origins", "manifest_digest"}` on one line."""
    result = {
        "schema": "isthmus.config/1",
        "config": resolved.config.tree(),
        "origins": dict(resolved.origins),
        "manifest_digest": manifest_digest(manifest_of(resolved.config)).hex(),
    }
    return json.dumps(result) + "\n"


def _add_table(lines: list[str], name: str, values: dict[str, Json], resolved: ResolvedConfig | None) -> None:
    lines += ["", f"[{name}]"]
    for key, value in values.items():
        if not isinstance(value, dict):
            comment = "" if resolved is None else f"  # {resolved.origins[f'{name}.{key}']}"
            lines.append(f"{key} = {_toml_value(value)}{comment}")
    for key, value in values.items():
        if isinstance(value, dict):
            _add_table(lines, f"{name}.{key}", value, resolved)


def _toml_value(value: Json) -> str:
    # JSON's numbers, booleans, lists and strings are TOML's, but for null.
    return '"none"' if value is None else json.dumps(value)
