# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a second place: another folder, or whatever fsspec has a URL for.

::

    URL/<peer id>/checkpoints/step-00000012/state.safetensors, tokenizer.json if it has one, manifest.json
    URL/<peer id>/private/step-00000012.safetensors

A peer's folder there is laid out as its own is, so `--resume` takes either. Rules: an object store cannot rename, so
the manifest is written last, and what has none is no checkpoint: the next copy removes it. What was written is read
back and compared. Room for the `keep` newest copies is enough. Another run's checkpoints of later steps are put aside,
as on the peer's disk. What is fetched is no larger than its manifest says, and is checked as a checkpoint of this disk
is. Every call blocks, for as long as the place takes. Must not know when a copy is due (`copier.py`).

Errors: `OSError` where the place refuses; `EnvironmentFault` (3) where fsspec cannot reach it at all; `ConfigError` (2)
and `CheckpointCorrupted` (9) as for folders.
"""

import contextlib
import errno
import hashlib
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from isthmus.trainer.checkpoint.checkpoint import (
    FOLDER_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    STEP_FOLDER,
    CheckpointStore,
    Manifest,
    decode_manifest,
    load_checkpoint,
    open_regular,
    read_manifest,
)
from isthmus.trainer.checkpoint.private_files import FOLDER_NAME as PRIVATE_FOLDER_NAME
from isthmus.trainer.checkpoint.private_files import PrivateFiles
from isthmus.trainer.errors import CheckpointCorrupted, ConfigError, EnvironmentFault
from isthmus.trainer.files import make_private_folder, open_private
from isthmus.trainer.model.model_folder import TOKENIZER_NAME

_BLOCK_NBYTES = 4 << 20
_MAX_NBYTES = 16 << 20
"""Of a manifest."""
_MAX_TOKENIZER_NBYTES = 256 << 20
_OWN_FACTOR = 16
"""What is a peer's own is never so many times the shared state."""


def is_url(text: str) -> bool:
    """Whether a person means a URL and not a path."""
    return "://" in text


class RemoteFolder:
    """A peer's folder somewhere else.

    Args:
        url: of it, or the path of a local one.

    Raises:
        EnvironmentFault: there is no such kind of place, or what fsspec needs for it is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            self._fs: Any
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise EnvironmentFault(f"{url} cannot be used: {error}", cure="install what it needs") from error
        self._root = PurePosixPath(root)

    # -------------------------------------------------------------------------------- writing

    def put(self, checkpoint: Path, own: Path, *, keep: int) -> bool:
        """Copy one checkpoint of this disk, read it back, and keep the newest ones.

        Args:
            checkpoint: its `step-…` folder.
            own: the file of the peer's own state; left out if there is none. It may come later, with another call.
            keep: how many stay.

        Returns:
            Whether it was done. If a newer one has taken its place here meanwhile, it was not.

        Raises:
            CheckpointCorrupted: the one here is damaged.
            OSError: it could not be written, or is not there as it was written.
        """
        try:
            self._put(checkpoint, own, keep)
        except CheckpointCorrupted:
            if checkpoint.exists():
                raise
            return False
        return True

    def _put(self, checkpoint: Path, own: Path, keep: int) -> None:
        manifest = read_manifest(checkpoint / MANIFEST_NAME)
        step = manifest.outer_step
        if step in self.steps() and self.manifest(step) == manifest:
            if own.exists():
                self._put_file(own, self._own_path(step))
            return
        self._remove_manifest(step)  # while its files change it is none
        self._remove_remnants()
        self._set_others_aside(manifest)
        try:
            self._put_files(manifest, checkpoint, own)
        except OSError as error:
            surplus = self.steps()[: 1 - keep]
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or keep < 2 or not surplus:
                raise
            for older in surplus:
                self._remove(older)
            self._remove_remnants()
            self._put_files(manifest, checkpoint, own)
        for newer in [other for other in self.steps() if other > step]:  # the run went back behind them
            self._remove(newer)
        for older in self.steps()[:-keep]:
            self._remove(older)

    def _put_files(self, manifest: Manifest, checkpoint: Path, own: Path) -> None:
        there, sha256 = self._path_of(manifest.outer_step), {STATE_NAME: manifest.state_sha256}
        if isinstance(manifest.tokenizer_sha256, str):
            sha256[TOKENIZER_NAME] = manifest.tokenizer_sha256
        for name, digest in sha256.items():
            if self._put_file(checkpoint / name, there / name) != digest:
                raise CheckpointCorrupted(checkpoint / name, "was changed since it was written (its SHA-256 differs)")
        if own.exists():
            self._put_file(own, self._own_path(manifest.outer_step))
        self._put_file(checkpoint / MANIFEST_NAME, there / MANIFEST_NAME)

    def _remove_remnants(self) -> None:
        """Copies that were cut short. Found before: each stayed for ever, and a full place never got room again."""
        whole = self.steps()
        for name in self._names(self._root / FOLDER_NAME):
            match = STEP_FOLDER.fullmatch(name)
            if match is not None and int(match[1]) not in whole:
                self._remove(int(match[1]))

    def _set_others_aside(self, manifest: Manifest) -> None:
        """Another run's checkpoints of later steps, as `CheckpointStore` does."""
        later = [step for step in self.steps() if step > manifest.outer_step]
        others = [step for step in later if self._run_of(step) != manifest.run_id]
        aside = self._unused_lineage() if others else self._root
        for path in (path for step in others for path in (self._own_path(step), self._path_of(step))):
            if self._fs.exists(str(path)):
                target = aside / path.relative_to(self._root)
                self._fs.makedirs(str(target.parent), exist_ok=True)
                self._fs.mv(str(path), str(target), recursive=True)

    def _run_of(self, step: int) -> str | None:
        try:
            return self.manifest(step).run_id
        except CheckpointCorrupted:
            return None

    def _unused_lineage(self) -> PurePosixPath:
        places = (self._root / f"lineage-{number}" for number in itertools.count(1))
        return next(place for place in places if not self._fs.exists(str(place)))

    def _put_file(self, source: Path, target: PurePosixPath) -> str:
        self._fs.makedirs(str(target.parent), exist_ok=True)
        written, refusal = "", None
        with open_regular(source) as here:
            try:
                with self._open(target, "wb") as there:
                    written = _copied(here, there, None)
            except OSError as error:  # found before: a full place was told as damage of the checkpoint here
                refusal = error
        if refusal is not None:
            raise refusal
        with self._open(target, "rb") as there:
            if _copied(there, None, None) != written:
                raise OSError(f"{target} does not hold what was written to it")
        return written

    def _remove_manifest(self, step: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(str(self._path_of(step) / MANIFEST_NAME))

    def _remove(self, step: int) -> None:
        self._remove_manifest(step)  # first: a crash leaves what the next copy removes
        self._fs.rm(str(self._path_of(step)), recursive=True)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(str(self._own_path(step)))

    # -------------------------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Outer steps of the checkpoints that have a manifest, oldest first."""
        found = []
        for name in self._names(self._root / FOLDER_NAME):
            match = STEP_FOLDER.fullmatch(name)
            if match is not None and self._fs.exists(str(self._path_of(int(match[1])) / MANIFEST_NAME)):
                found.append(int(match[1]))
        return sorted(found)

    def folders(self) -> list[str]:
        """URLs of the peers' folders in this one."""
        names = self._names(self._root)
        return [f"{self.url.rstrip('/')}/{name}" for name in names if re.fullmatch(r"[0-9a-f]{16}", name)]

    def manifest(self, step: int) -> Manifest:
        """What belongs to a checkpoint.

        Raises:
            CheckpointCorrupted: it is not ours, or was changed.
        """
        path = self._path_of(step) / MANIFEST_NAME
        with self._open(path, "rb") as file:
            return decode_manifest(Path(path), file.read(_MAX_NBYTES))

    def fetch(self, step: int, folder: Path) -> Path:
        """Bring a checkpoint into a peer's folder on this disk, and what is beside it of the peer's own.

        Args:
            step: of it.
            folder: the peer's, existing and locked by the caller.

        Returns:
            The checkpoint's folder, as whole as it was.

        Raises:
            CheckpointCorrupted: it is damaged.
            ConfigError: the folder here has another one of this step.
            OSError: the place or the disk refuses.
        """
        manifest = self.manifest(step)
        place = CheckpointStore(folder / FOLDER_NAME, keep=1).path_of(step)
        own = PrivateFiles(folder / PRIVATE_FOLDER_NAME, "", keep=1).path_of(step)
        if place.exists():
            if read_manifest(place / MANIFEST_NAME) == manifest:
                return place
            raise ConfigError(
                f"{folder} holds another checkpoint of outer step {step}", cure="give another folder with --dir"
            )
        partial = place.with_name(f".partial-{place.name}")
        shutil.rmtree(partial, ignore_errors=True)
        make_private_folder(partial)
        try:
            self._get_file(self._path_of(step) / STATE_NAME, partial / STATE_NAME, manifest.state_nbytes)
            self._get_file(self._path_of(step) / MANIFEST_NAME, partial / MANIFEST_NAME, _MAX_NBYTES)
            if isinstance(manifest.tokenizer_sha256, str):
                self._get_file(self._path_of(step) / TOKENIZER_NAME, partial / TOKENIZER_NAME, _MAX_TOKENIZER_NBYTES)
            load_checkpoint(partial)
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if self._fs.exists(str(self._own_path(step))):
            make_private_folder(own.parent)
            own.unlink(missing_ok=True)
            self._get_file(self._own_path(step), own, _OWN_FACTOR * manifest.state_nbytes + _MAX_NBYTES)
        return place

    def _get_file(self, source: PurePosixPath, target: Path, most_nbytes: int) -> None:
        with self._open(source, "rb") as there, open_private(target, "xb") as here:
            _copied(there, here, most_nbytes)

    def _names(self, folder: PurePosixPath) -> list[str]:
        self._fs.invalidate_cache()  # another process may have written there
        try:
            return sorted(PurePosixPath(entry).name for entry in self._fs.ls(str(folder), detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextlib.contextmanager
    def _open(self, path: PurePosixPath, mode: str) -> Iterator[IO[bytes]]:
        with self._fs.open(str(path), mode) as file:
            yield file

    def _path_of(self, step: int) -> PurePosixPath:
        return self._root / FOLDER_NAME / f"step-{step:08d}"

    def _own_path(self, step: int) -> PurePosixPath:
        return self._root / PRIVATE_FOLDER_NAME / f"step-{step:08d}.safetensors"


def find_resumed(url: str) -> tuple[RemoteFolder, int]:
    """The checkpoint that `--resume URL` means: that one, the newest of a peer's folder, or of all peers' in a folder.

    Raises:
        ConfigError: there is none, or there are those of several runs.
        CheckpointCorrupted: a manifest was changed.
        EnvironmentFault: the place cannot be reached.
    """
    head, _, name = url.rstrip("/").rpartition("/")
    match = STEP_FOLDER.fullmatch(name)
    with reaching(url):
        if match is not None:
            return RemoteFolder(head.removesuffix(f"/{FOLDER_NAME}")), int(match[1])
        given = RemoteFolder(url)
        folders = [folder for folder in (given, *map(RemoteFolder, given.folders())) if folder.steps()]
        newest = [(folder.steps()[-1], number, folder) for number, folder in enumerate(folders)]
        run_ids = {folder.manifest(step).run_id for step, _, folder in newest}
    if not newest:
        raise ConfigError(f"{url} holds no checkpoint", cure="name the folder of a peer, or one checkpoint")
    if len(run_ids) > 1:
        raise ConfigError(f"{url} holds checkpoints of several runs", cure="name the folder of one peer in it")
    step, _, folder = max(newest)
    return folder, step


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """What a place says no with, as an operator's error.

    Raises:
        EnvironmentFault: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(f"{url} cannot be used: {error}", cure="check it, and what it asks for") from error


def _copied(source: IO[bytes], target: IO[bytes] | None, most_nbytes: int | None) -> str:
    """Read all of it, in blocks, and write it. Returns its SHA-256 in hex."""
    digest, nbytes = hashlib.sha256(), 0
    while block := source.read(_BLOCK_NBYTES):
        nbytes += len(block)
        if most_nbytes is not None and nbytes > most_nbytes:
            raise OSError(f"it has more than the {most_nbytes} bytes that were announced")
        digest.update(block)
        if target is not None:
            target.write(block)
    return digest.hexdigest()
