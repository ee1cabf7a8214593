# SPDX-License-Identifier: Apache-2.0
"""The run manifest: all sections that peers share, equal on all of them, canonical JSON byte for byte.

Rules: `[node]` and `[coordinator]` are no part of it. Must not know what the keys mean (`trainer.config.settings`).

Errors: `Refused` (5) for a manifest that we do not understand.
"""

import hashlib
import json

from pydantic import ValidationError

from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.values import Json, flatten
from isthmus.trainer.errors import Refused

MANIFEST_FORMAT = 1
"""Grows when a manifest of an older program can no longer be understood."""

MAX_MANIFEST_NBYTES = 64 * 1024

LOCAL_SECTIONS = frozenset({"node", "coordinator"})
"""What is no part of the manifest."""


def manifest_of(config: Config) -> bytes:
    """The run manifest: all sections but the local ones, as canonical JSON (sorted keys, no spaces, ASCII)."""
    shared = {name: section for name, section in config.tree().items() if name not in LOCAL_SECTIONS}
    return canonical_json({"format": MANIFEST_FORMAT} | shared)


def config_of(manifest: bytes) -> Config:
    """The shared sections of a manifest, with a default `[node]`.

    Raises:
        Refused: it is no manifest, or one of another version.
    """
    return Config.model_validate_json(json.dumps(manifest_sections(manifest)))


def canonical_json(value: Json) -> bytes:
    """The one spelling of a JSON value: equal values give equal bytes, on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def manifest_digest(manifest: bytes) -> bytes:
    """SHA-256 of a manifest, 32 bytes; peers compare it at join."""
    return hashlib.sha256(manifest).digest()


def manifest_sections(manifest: bytes) -> dict[str, Json]:
    """The sections of a manifest, checked for being one.

    Raises:
        Refused: it is none, or one of another version of this program.
    """
    upgrade = "run the same version of isthmus on all peers"
    if len(manifest) > MAX_MANIFEST_NBYTES:
        raise Refused(f"the run's manifest has {len(manifest)} bytes, more than {MAX_MANIFEST_NBYTES}", cure=upgrade)
    try:
        tree = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise Refused("the run's manifest is not JSON", cure=upgrade) from error
    if not isinstance(tree, dict) or not LOCAL_SECTIONS.isdisjoint(tree):
        raise Refused("the run's manifest is not a table of shared sections", cure=upgrade)
    version = tree.pop("format", None)
    if version != MANIFEST_FORMAT:
        raise Refused(f"the run's manifest has format {version}, we know {MANIFEST_FORMAT}", cure=upgrade)
    try:
        Config.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise Refused(f"the run's manifest holds {where}, which we do not understand", cure=upgrade) from error
    return tree


def without_key(manifest: bytes, section: str, key: str) -> bytes:
    """The manifest without one of its values, which takes its default then.

    A resumed run need not wait for as many peers as its first start did.

    Raises:
        Refused: it is no manifest.
    """
    sections = manifest_sections(manifest)
    kept = sections[section]
    assert isinstance(kept, dict), "manifest_sections has checked it"
    trimmed = sections | {section: {name: value for name, value in kept.items() if name != key}}
    return canonical_json({"format": MANIFEST_FORMAT} | trimmed)


def manifest_diff(ours: bytes, theirs: bytes) -> tuple[tuple[str, Json, Json], ...]:
    """Where two manifests differ: (key, our value, their value); None for a value that is not there.

    Raises:
        Refused: one of them is no manifest.
    """
    a, b = (dict(flatten(manifest_sections(manifest))) for manifest in (ours, theirs))
    return tuple((key, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key))
