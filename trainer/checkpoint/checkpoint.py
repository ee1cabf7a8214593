# SPDX-License-Identifier: Apache-2.0
"""The shared state at an outer step, on this peer's disk.

::

    checkpoints/step-00000012/
        state.safetensors     fp32 tensors by name
        tokenizer.json        of the run's text; none where tokens are bytes
        manifest.json         step, digests, sizes, run manifest, data position

Rules: a checkpoint appears whole or not at all (written beside its place, flushed, renamed); nothing is used before
its size and digests have been checked; no name from a file becomes a path; the newest `keep` stay. Saving blocks for
as long as the disk takes: call it off the event loop. One writer for each folder (contact/identity.py).
Must not know who decides when, nor what the tensors mean.

Errors: `CheckpointFailed` (the disk refuses; training goes on), `CheckpointCorrupted` (exit code 9);
`ConfigError` (2) where a person names a folder without checkpoints.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from isthmus.elastic.core.messages import IndexRange, Natural
from isthmus.trainer.checkpoint.lineages import set_aside
from isthmus.trainer.checkpoint.tensor_files import write_tensors
from isthmus.trainer.errors import CheckpointCorrupted, CheckpointFailed, ConfigError, require_ours
from isthmus.trainer.files import PRIVATE_FOLDER_MODE, make_private_folder, sync_folder, write_atomically
from isthmus.trainer.model.model_folder import TOKENIZER_NAME

log = logging.getLogger(__name__)

STATE_NAME = "state.safetensors"
MANIFEST_NAME = "manifest.json"
FOLDER_NAME = "checkpoints"

STEP_FOLDER = re.compile(r"step-(\d{8,16})")
_TENSOR_NAME = re.compile(r"[a-z0-9_][a-z0-9_./-]{0,254}", re.IGNORECASE)
_PARTIAL_PREFIX = ".partial-"
_MAX_MANIFEST_NBYTES = 16 << 20
_CHANGED = "was changed since it was written (its SHA-256 differs)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """What belongs to the tensors.

    Attributes:
        run_id: of which run.
        outer_step: how many exchanges made this state.
        digest: 32-byte root of the shared state, as voted.
        run_manifest: canonical JSON; who resumes takes it as the layer below files.
        next_index: first sample that nobody has been given.
        returned: samples below `next_index` that were given out and not trained.
        certificate: of the commit that made the state (elastic/core/certificate.py), if the peer had it; else empty.
    """

    run_id: str
    outer_step: int
    digest: bytes
    run_manifest: bytes
    next_index: int
    returned: tuple[IndexRange, ...] = ()
    certificate: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A verified checkpoint in memory. The tensors are fp32, on the CPU, and the caller's."""

    path: Path
    meta: CheckpointMeta
    tensors: Mapping[str, Tensor]

    @property
    def tokenizer(self) -> Path | None:
        """That of the run's text, beside the tensors or, in an older checkpoint, in the peer's folder; None: bytes."""
        places = (folder / TOKENIZER_NAME for folder in (self.path, self.path.parent.parent))
        return next((place for place in places if place.is_file()), None)


_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`manifest.json`. `check` is the SHA-256 of the canonical JSON of everything else.

    Anybody can compute that. Who has signed for the state is in `certificate`, which is left out where there is none,
    as `tokenizer_sha256` is.
    """

    format: Literal["isthmus-checkpoint/1"] = "isthmus-checkpoint/1"
    run_id: str
    outer_step: Natural
    digest: _Sha256
    state_nbytes: Natural
    state_sha256: _Sha256
    run_manifest: str
    next_index: Natural
    returned: tuple[IndexRange, ...]
    certificate: bytes | msgspec.UnsetType = msgspec.UNSET
    tokenizer_sha256: _Sha256 | msgspec.UnsetType = msgspec.UNSET
    check: str = ""

    def sealed(self) -> "Manifest":
        """The same with the `check` that belongs to it."""
        return msgspec.structs.replace(self, check=self.expected_check())

    def expected_check(self) -> str:
        """What `check` has to be."""
        unsealed = msgspec.json.encode(msgspec.structs.replace(self, check=""), order="sorted")
        return hashlib.sha256(unsealed).hexdigest()


class CheckpointStore:
    """The checkpoints of one peer.

    Args:
        folder: where the `step-…` folders are; made with the first save.
        keep: how many stay, at least 1.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._folder = folder
        self._keep = keep

    def path_of(self, outer_step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self._folder / f"step-{outer_step:08d}"

    def steps(self) -> tuple[int, ...]:
        """Outer steps of the checkpoints that are there, oldest first, verified or not."""
        if not self._folder.is_dir():
            return ()
        matches = (STEP_FOLDER.fullmatch(entry.name) for entry in self._folder.iterdir())
        return tuple(sorted(int(match[1]) for match in matches if match is not None))

    def run_of(self, outer_step: int) -> str | None:
        """Of which run a checkpoint is; None if it does not say so."""
        try:
            return read_manifest(self.path_of(outer_step) / MANIFEST_NAME).run_id
        except CheckpointCorrupted:
            return None

    def save(self, meta: CheckpointMeta, tensors: Mapping[str, Tensor]) -> Path:
        """Write a checkpoint, then remove those that are too many.

        Args:
            meta: see there.
            tensors: fp32 CPU tensors, contiguous; must not change until this returns.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointFailed: the disk is full or broken. Nothing half-written is left, the earlier ones stand.
            ValueError: a tensor is not fp32, contiguous and on the CPU, or has a strange name.
        """
        for name in tensors:
            if _TENSOR_NAME.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no name for a tensor in a checkpoint")
        place = self.path_of(meta.outer_step)
        partial = self._folder / f"{_PARTIAL_PREFIX}{place.name}"
        try:
            self._remove_partials()
            make_private_folder(self._folder)
            partial.mkdir(mode=PRIVATE_FOLDER_MODE)
            nbytes, sha256 = write_tensors(partial / STATE_NAME, tensors)
            tokenizer_sha256 = self._copy_tokenizer(partial)
            manifest = Manifest(
                run_id=meta.run_id,
                outer_step=meta.outer_step,
                digest=meta.digest.hex(),
                state_nbytes=nbytes,
                state_sha256=sha256,
                run_manifest=meta.run_manifest.decode(),
                next_index=meta.next_index,
                returned=meta.returned,
                certificate=meta.certificate or msgspec.UNSET,
                tokenizer_sha256=tokenizer_sha256 or msgspec.UNSET,
            ).sealed()
            content = msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1)
            write_atomically(partial / MANIFEST_NAME, content)
            self._put_in_place(partial, place)
            self._clear_newer(meta)
            self._prune()
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointFailed(place, error) from error
        return place

    def load(self, outer_step: int) -> Checkpoint:
        """Read and verify one checkpoint.

        Raises:
            CheckpointCorrupted: a file is missing, cut, changed, or not ours; the error names it.
        """
        return load_checkpoint(self.path_of(outer_step))

    def load_newest(self, *, run_id: str | None = None) -> Checkpoint | None:
        """The newest checkpoint that is whole; a damaged one is left where it is and warned of.

        Args:
            run_id: of which run; None: of any.

        Returns:
            None where there has never been such a checkpoint.

        Raises:
            CheckpointCorrupted: there are checkpoints, and none is whole. Names the newest one's fault.
        """
        faults: list[CheckpointCorrupted] = []
        for outer_step in reversed(self.steps()):
            if run_id is not None and self.run_of(outer_step) not in (run_id, None):
                continue
            try:
                return self.load(outer_step)
            except CheckpointCorrupted as fault:
                log.warning(
                    "checkpoint_damaged path=%s reason=%r; the one before it is tried, delete this one",
                    fault.path,
                    fault.reason,
                )
                faults.append(fault)
        if not faults:
            return None
        others = f", and {len(faults) - 1} earlier ones are damaged too" if len(faults) > 1 else ""
        raise CheckpointCorrupted(faults[0].path, faults[0].reason + others, cure="resume from another peer's folder")

    def _copy_tokenizer(self, partial: Path) -> str | None:
        """A checkpoint that is copied elsewhere has it with it. Its SHA-256; None: the peer's folder has none."""
        try:
            content = (self._folder.parent / TOKENIZER_NAME).read_bytes()
        except FileNotFoundError:
            return None
        write_atomically(partial / TOKENIZER_NAME, content)
        return hashlib.sha256(content).hexdigest()

    def _put_in_place(self, partial: Path, place: Path) -> None:
        """Rename; a checkpoint of the same step (of a run that went back to an earlier one) gives way."""
        sync_folder(partial)
        replaced = self._folder / f"{_PARTIAL_PREFIX}replaced"
        if place.exists():
            place.rename(replaced)
        partial.rename(place)
        sync_folder(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _clear_newer(self, meta: CheckpointMeta) -> None:
        """What this run has of later steps is of commits that it gave up when it went back; other runs' is put aside.

        Found before: in a folder with another run's checkpoints of later steps each new one was pruned at once.
        """
        newer = [step for step in self.steps() if step > meta.outer_step]
        others = [step for step in newer if self.run_of(step) != meta.run_id]
        set_aside(self._folder.parent, [self.path_of(step) for step in others])
        for outer_step in {*newer} - {*others}:
            self.remove(outer_step)

    def _prune(self) -> None:
        for outer_step in self.steps()[: -self._keep]:
            self.remove(outer_step)

    def remove(self, outer_step: int) -> None:
        """Remove one checkpoint. Raises OSError."""
        # Renamed first, so that a crash in the middle never leaves a step folder that lacks a file.
        doomed = self._folder / f"{_PARTIAL_PREFIX}pruned-{outer_step}"
        self.path_of(outer_step).rename(doomed)
        shutil.rmtree(doomed)

    def _remove_partials(self) -> None:
        if self._folder.is_dir():
            for entry in self._folder.iterdir():
                if entry.name.startswith(_PARTIAL_PREFIX):
                    shutil.rmtree(entry)


def find_checkpoints(path: Path) -> Path:
    """The folder of `step-…` folders that a person means by a path: a peer's folder, or that folder itself."""
    inside = path / FOLDER_NAME
    return inside if inside.is_dir() else path


def load_resumed(path: Path) -> Checkpoint:
    """The checkpoint that `--resume PATH` means: that one, or the newest whole one of a peer's folder.

    Raises:
        ConfigError: there is none.
        CheckpointCorrupted: none is whole.
        NotOurs: this user may not look there.
    """
    require_ours(path)
    if path.is_dir() and STEP_FOLDER.fullmatch(path.resolve().name) is not None:
        return load_checkpoint(path)
    newest = CheckpointStore(find_checkpoints(path), keep=1).load_newest()
    if newest is None:
        aside = sorted(path.glob(f"lineage-*/{FOLDER_NAME}"))
        other = f"those that were put aside are in {aside[-1].parent}" if aside else "name the folder of a peer"
        raise ConfigError(f"{path} holds no checkpoint", cure=f"{other}, or name one checkpoint")
    return newest


def furthest_of_one_run(folders: Sequence[Path]) -> Path | None:
    """Which of these peers' folders has the newest checkpoint; None if they are of several runs, or one is damaged."""
    newest: list[tuple[int, Path]] = []
    run_ids = set()
    for folder in folders:
        store = CheckpointStore(folder / FOLDER_NAME, keep=1)
        for outer_step in store.steps()[-1:]:
            try:
                run_ids.add(read_manifest(store.path_of(outer_step) / MANIFEST_NAME).run_id)
            except (CheckpointCorrupted, OSError):
                return None
            newest.append((outer_step, folder))
    return max(newest)[1] if len(run_ids) == 1 else None


def newest_usable(path: Path, *, run_id: str | None = None) -> Checkpoint | None:
    """What a peer's folder still has of its run (of this run, if one is named); damaged ones are warned of.

    If the others have newer, the peer replays or fetches the rest.
    """
    try:
        return CheckpointStore(path / FOLDER_NAME, keep=1).load_newest(run_id=run_id)
    except CheckpointCorrupted as error:
        log.warning("checkpoints_unusable cause=%r; this peer has to find the state at others", str(error))
        return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint folder.

    Raises:
        CheckpointCorrupted: a file is missing, cut, changed, or not ours; the error names it.
    """
    manifest = read_manifest(path / MANIFEST_NAME)
    tensors = _read_state(path / STATE_NAME, manifest)
    require_tokenizer(path, manifest)
    meta = CheckpointMeta(
        run_id=manifest.run_id,
        outer_step=manifest.outer_step,
        digest=bytes.fromhex(manifest.digest),
        run_manifest=manifest.run_manifest.encode(),
        next_index=manifest.next_index,
        returned=manifest.returned,
        certificate=manifest.certificate or b"",
    )
    return Checkpoint(path=path, meta=meta, tensors=tensors)


def read_manifest(path: Path) -> Manifest:
    """Read and verify a `manifest.json`.

    Raises:
        CheckpointCorrupted: it is missing, changed, or not ours.
    """
    with open_regular(path) as file:
        return decode_manifest(path, file.read(_MAX_MANIFEST_NBYTES))


def decode_manifest(path: Path, content: bytes) -> Manifest:
    """The manifest that these bytes are; `path` says where they are from.

    Raises:
        CheckpointCorrupted: they were changed, or are not ours.
    """
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CheckpointCorrupted(path, f"is not the manifest of a checkpoint: {error}") from error
    if manifest.check != manifest.expected_check():
        raise CheckpointCorrupted(path, "was changed since it was written")
    return manifest


def require_tokenizer(path: Path, manifest: Manifest) -> None:
    """Check that a checkpoint folder has the tokenizer that its manifest names, if it names one.

    Raises:
        CheckpointCorrupted: it is missing or was changed.
    """
    if isinstance(manifest.tokenizer_sha256, str):
        with open_regular(path / TOKENIZER_NAME) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.tokenizer_sha256:
                raise CheckpointCorrupted(path / TOKENIZER_NAME, _CHANGED)


def _read_state(path: Path, manifest: Manifest) -> Mapping[str, Tensor]:
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes != manifest.state_nbytes:
            raise CheckpointCorrupted(path, f"has {nbytes} bytes instead of {manifest.state_nbytes}")
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest.state_sha256:
            raise CheckpointCorrupted(path, _CHANGED)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointCorrupted(path, f"is not a safetensors file: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or _TENSOR_NAME.fullmatch(name) is None:
            raise CheckpointCorrupted(path, f"holds {name[:80]!r}, which is no fp32 tensor of ours")
    return tensors


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """A regular file to read; never through a link that somebody put in its place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointCorrupted(path, "is no regular file")
            yield file
    except FileNotFoundError as error:
        raise CheckpointCorrupted(path, "is missing") from error
    except OSError as error:
        raise CheckpointCorrupted(path, f"cannot be read: {error.strerror}") from error
