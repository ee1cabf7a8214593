# SPDX-License-Identifier: Apache-2.0
"""Where the values of a configuration come from, and which one counts.

Layers, later ones win key by key: defaults < run manifest < files in the order given < `ISTHMUS__SECTION__KEY` <
`--section.key value`. Rules: every value knows its origin; a key that does not exist is an error that names its origin
and the closest key; choosing another variant (`type = ...`) forgets what lower layers said for the variant before.
Must not know what the keys mean (`trainer.config.settings`).

Errors: `ConfigError` (2); `Refused` (5) where a joiner's own values contradict the run.
"""

import json
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from isthmus.trainer.config.faults import config_error, key_at, show, with_origins
from isthmus.trainer.config.keys import DEFAULTS, KNOWN_KEYS, TABLES, closest_key
from isthmus.trainer.config.manifest import LOCAL_SECTIONS, manifest_sections
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import WsdSchedule
from isthmus.trainer.config.values import Json, flatten
from isthmus.trainer.errors import ConfigError, ConfigErrors, Refused

ENVIRONMENT_PREFIX = "ISTHMUS__"
DEFAULT = "default"
RUN_MANIFEST = "run manifest"

_MAX_FILE_NBYTES = 1 << 20


class Override(NamedTuple):
    """A value from the command line: the dotted key, the text, and the flag that people typed."""

    key: str
    text: str
    flag: str


@dataclass(frozen=True, slots=True)
class _Value:
    """One value of one layer. `raw` is set where it came as text, which may yet have to be taken literally."""

    value: Json
    origin: str
    layer: int
    raw: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration that knows where each of its values came from.

    Attributes:
        config: the validated values.
        origins: dotted TOML key → "default", "run manifest", a file, a variable or a flag; for every key.
    """

    config: Config
    origins: Mapping[str, str]
    _given: tuple[Mapping[str, _Value], ...] = field(repr=False, compare=False)

    def adopt(self, manifest: bytes) -> "ResolvedConfig":
        """The run's manifest with this peer's own local sections: what a joiner trains with.

        Raises:
            Refused: the manifest is of another version, or a value that was given here outside of those is not the
                run's; the error names each.
        """
        run = resolve([_manifest_layer(manifest), *self._given])
        ruling = dict(flatten(manifest_sections(manifest)))
        values = dict(flatten(run.config.tree()))
        differing = [
            f"{key} (here {show(values.get(key))} from {origin}, in the run {show(ruling.get(key))})"
            for key, origin in sorted(run.origins.items())
            if key.split(".", 1)[0] not in LOCAL_SECTIONS and values.get(key) != ruling.get(key)
        ]
        if differing:
            raise Refused(
                f"this peer's configuration is not the run's: {', '.join(differing)}",
                cure="leave out everything but [node] when joining, and [coordinator] when standing by",
                fields=[entry.split(" ", 1)[0] for entry in differing],
            )
        return run


def load_config(
    *,
    files: Sequence[Path] = (),
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[Override] = (),
    manifest: bytes | None = None,
) -> ResolvedConfig:
    """Merge all layers and validate the result.

    Args:
        files: TOML files, later ones win.
        environ: the environment; only `ISTHMUS__…` is looked at. None: no environment.
        overrides: from the command line, later ones win.
        manifest: of a run that is resumed.

    Raises:
        ConfigError: a file cannot be read, a key does not exist, a value cannot be.
        Refused: the manifest is of another version.
    """
    layers = [_file_layer(path) for path in files]
    if environ is not None:
        layers.append(_environment_layer(environ))
    layers.append({override.key: _text(override.text, override.flag) for override in overrides})
    if manifest is not None:
        layers.insert(0, _manifest_layer(manifest))
    return resolve(layers)


def resolve(layers: Sequence[Mapping[str, _Value]]) -> ResolvedConfig:
    """Merge layers, lowest first, over the defaults; see `load_config`."""
    ranked = [
        {key: _Value(entry.value, entry.origin, rank, entry.raw) for key, entry in layer.items()}
        for rank, layer in enumerate(layers)
    ]
    merged = {key: entry for layer in ranked for key, entry in layer.items()}
    faults = [*_unknown_keys(merged), *_settle_variants(merged)]
    config = _validate(merged, faults)
    if config is None:
        raise faults[0] if len(faults) == 1 else ConfigErrors(faults)
    origins = {key: merged[key].origin if key in merged else DEFAULT for key, _ in flatten(config.tree())}
    own = tuple(layer for layer in layers if not any(entry.origin == RUN_MANIFEST for entry in layer.values()))
    return ResolvedConfig(config=config, origins=origins, _given=own)


# ------------------------------------------------------------------------------------------------------------ layers


def _file_layer(path: Path) -> dict[str, _Value]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_NBYTES + 1)
        if len(content) > _MAX_FILE_NBYTES:
            raise ConfigError(f"{path} is larger than a configuration can be", cure="name a TOML file with --config")
        tree = tomllib.loads(content.decode())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}", cure="check the spelling of --config") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", cure="check its permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", cure="save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        raise ConfigError(f"{path} is not TOML: {message[:1].lower()}{message[1:]}", origin=str(path)) from error
    return {key: _Value(value, str(path), 0) for key, value in _leaves(tree)}


def _manifest_layer(manifest: bytes) -> dict[str, _Value]:
    return {key: _Value(value, RUN_MANIFEST, 0) for key, value in _leaves(manifest_sections(manifest))}


def _environment_layer(environ: Mapping[str, str]) -> dict[str, _Value]:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."): _text(text, name)
        for name, text in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def _text(text: str, origin: str) -> _Value:
    """Text of a shell: a TOML value or number if it is one, else itself. `_validate` may come back to the text.

    Raises:
        ConfigError: it is no text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the value of {origin} is not UTF-8 text", cure="give such a path another name", origin=origin
        ) from error
    value: Json = text
    for read in (_toml_value, float):
        try:
            value = read(text)
            break
        except ValueError:  # tomllib's errors are ValueErrors too
            continue
    return _Value(value, origin, 0, raw=text)


def _toml_value(text: str) -> Json:
    tree = tomllib.loads(f"value = {text}")
    if len(tree) != 1:
        raise ValueError("more than one value")
    value: Json = tree["value"]
    return value


def _leaves(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in KNOWN_KEYS:
            yield from _leaves(value, f"{dotted}.")
        else:
            yield dotted, value


# -------------------------------------------------------------------------------------------------------------- keys


def _unknown_keys(merged: dict[str, _Value]) -> Iterator[ConfigError]:
    """Take what is no key away, and say so."""
    for key in [key for key in merged if key not in KNOWN_KEYS]:
        origin = merged.pop(key).origin
        problem, cure = f"unknown key {key} from {origin}", closest_key(key)
        if key in TABLES:
            problem = f"{key} from {origin} is a section, not a value"
            cure = f"set for example {next(known for known in KNOWN_KEYS if known.startswith(f'{key}.'))}"
        yield ConfigError(problem, cure=cure, key=key, origin=origin)


def _settle_variants(merged: dict[str, _Value]) -> Iterator[ConfigError]:
    """Drop values of variants that a higher layer has switched away from, and tell of those that never fitted."""
    for key, entry in list(merged.items()):
        for table, tags in KNOWN_KEYS[key].items():
            choice = merged.get(f"{table}.type", _Value(DEFAULTS[f"{table}.type"], DEFAULT, -1))
            if choice.value in tags or choice.raw in tags:
                continue
            known_tags = KNOWN_KEYS[f"{table}.type"][table]
            if choice.value not in known_tags:
                continue  # validation says what is wrong with the type itself
            del merged[key]
            if choice.layer <= entry.layer:
                yield ConfigError(
                    f"{key} from {entry.origin} does not belong to {table}.type = {show(choice.value)}",
                    cure=f"remove it or set {table}.type to {_any_of(tags)}",
                    key=key,
                    origin=entry.origin,
                )
            break


def _any_of(tags: Iterable[str]) -> str:
    first, *others = map(show, sorted(tags))
    return f"{first} or another type that has it" if len(others) > 2 else " or ".join([first, *others])


# -------------------------------------------------------------------------------------------------------- validation


def _validate(merged: dict[str, _Value], faults: list[ConfigError]) -> Config | None:
    """The configuration, or None where there are faults, with those of the values among them."""
    while True:
        tree: dict[str, Json] = {}
        for key, entry in merged.items():
            *tables, leaf = key.split(".")
            place = tree
            for table_name in tables:
                place = typing.cast("dict[str, Json]", place.setdefault(table_name, {}))
            place[leaf] = entry.value
        for key, default in DEFAULTS.items():
            # A variant's tag must be there before pydantic looks; its other defaults it knows by itself.
            table, _, leaf = key.rpartition(".")
            if leaf == "type" and key not in merged and (place_of := _table(tree, table)) is not None:
                place_of["type"] = default
        try:
            config = Config.model_validate_json(json.dumps(tree, default=str))
            faults += () if faults else _misfits(config, merged)
            return None if faults else config
        except ValidationError as error:
            details = error.errors(include_url=False)
            literal = [name for fault in details if (name := _retry_as_text(fault, merged)) is not None]
            if not literal:
                # One mistake a value: what a list's second number is matters once its first is right.
                faults += {key_at(fault["loc"]): config_error(fault, merged) for fault in reversed(details)}.values()
                return None
            for key in literal:
                entry = merged[key]
                merged[key] = _Value(entry.raw, entry.origin, entry.layer)


def _misfits(config: Config, merged: Mapping[str, _Value]) -> Iterator[ConfigError]:
    """What the method says of its settings, the model, the run and its inner optimizer.

    To ask it takes torch, and so a second: not where nothing is said but the defaults.
    """
    default, schedule = Config().outer, config.inner.schedule
    steps = (schedule.warmup_steps, schedule.decay_steps if isinstance(schedule, WsdSchedule) else None)
    is_usual = config.outer.model_copy(update={"codec": default.codec}) == default and not config.is_loops
    if is_usual and steps == (None, None):
        return
    from isthmus.trainer.config.outer_method import pace_of
    from isthmus.trainer.config.wiring import require_kinds

    try:
        pace_of(config)
        require_kinds(config)
    except ConfigError as error:
        yield with_origins(error, merged)


def _table(tree: dict[str, Json], dotted: str) -> dict[str, Json] | None:
    place: Json = tree
    for part in dotted.split("."):
        place = place.get(part) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else None


def _retry_as_text(fault: ErrorDetails, merged: Mapping[str, _Value]) -> str | None:
    """The key at fault if it wants text, and came as text that looked like something else (`--run.name 123`)."""
    key = key_at(fault["loc"])
    entry = merged.get(key)
    wants_text = fault["type"] in ("string_type", "path_type")
    return key if wants_text and entry is not None and entry.raw is not None else None
