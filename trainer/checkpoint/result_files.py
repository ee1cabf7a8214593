# SPDX-License-Identifier: Apache-2.0
"""The results of the newest commits on this peer's disk, in their wire form: what its newest checkpoint lacks.

::

    results/step-00000013.result    makes outer step 13 out of outer step 12
    results/voted.result            of a round that this peer voted for, and whose commit it may not have heard of

    length    u32   of the header
    header          msgpack of `SavedResult`
    chunks          the result's bytes, one chunk after the other
    check     32    SHA-256 of everything before it

Rules: a file is there whole or not at all (written beside its place, flushed, renamed); what was damaged, or is of
another run, is left out with a warning; nothing is allocated that the file does not hold. A file that a learner reads
stays open, so that it may be removed. Every call blocks for as long as the disk takes. Must not know when a result is
worth keeping.
"""

import errno
import hashlib
import logging
import os
import re
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from isthmus.collective.core.types import OuterStep, RoundKey
from isthmus.elastic.core.values import Digest
from isthmus.elastic.state.replica import CommitEntry, ResultChunk
from isthmus.elastic.state.wire import CommitHeader
from isthmus.trainer.checkpoint.checkpoint import open_regular
from isthmus.trainer.errors import CheckpointCorrupted
from isthmus.trainer.files import make_private_folder, open_private, sync_folder

log = logging.getLogger(__name__)

FOLDER_NAME = "results"
VOTED_NAME = "voted.result"

_NAME = re.compile(r"step-(\d{8,16})\.result")
_LENGTH = struct.Struct(">I")
_MAX_HEADER_NBYTES = 16 << 20
_CHECK_NBYTES = 32


class SavedResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A result's header. It is applied to the state with digest `previous`. `key`: its round, if this is a vote's."""

    run_id: str
    previous: Digest
    commit: CommitHeader
    key: RoundKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """Where a whole result lies: `StoredResult` of elastic/donor/commit_log.py. `check` is the file's."""

    path: Path
    outer_step: OuterStep
    digest: bytes
    nbytes: int
    check: bytes

    def open(self) -> "OpenResultFile":
        """Begin to read it.

        Raises:
            OSError: it is gone.
        """
        return OpenResultFile(self)


class OpenResultFile:
    """`OpenResult` of elastic/donor/commit_log.py: a result in pieces, which is compared with what was written."""

    def __init__(self, file: ResultFile) -> None:
        self._about = file
        self._rest_nbytes = file.nbytes
        self._digest = hashlib.sha256()
        self._file = os.fdopen(os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")

    def read_header(self) -> CommitHeader:
        """See OpenResult."""
        (length,) = _LENGTH.unpack(self._next(_LENGTH.size))
        if length > _MAX_HEADER_NBYTES:
            raise self._damage()
        try:
            header = msgspec.msgpack.decode(self._next(length), type=SavedResult).commit
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._damage() from error
        if header.nbytes != self._rest_nbytes:
            raise self._damage()
        return header

    def read(self, nbytes: int) -> bytes:
        """See OpenResult."""
        data = self._next(nbytes)
        self._rest_nbytes -= nbytes
        if not self._rest_nbytes and self._digest.digest() != self._about.check:
            raise self._damage()
        return data

    def close(self) -> None:
        """See OpenResult."""
        self._file.close()

    def _next(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes)
        if len(data) != nbytes:
            raise self._damage()
        self._digest.update(data)
        return data

    def _damage(self) -> OSError:
        return OSError(errno.EIO, "it was changed since it was written", str(self._about.path))


class ResultFiles:
    """The results of one run in a peer's folder. One writer.

    Args:
        folder: made with the first result.
        run_id: of the run; what is of another one is not read.
        is_for_later: whether what is written shall survive a power cut.
    """

    def __init__(self, folder: Path, run_id: str, *, is_for_later: bool = True) -> None:
        self._folder = folder
        self._run_id = run_id
        self._is_for_later = is_for_later

    def steps(self) -> tuple[int, ...]:
        """Outer steps whose results are there, oldest first, whole or not."""
        if not self._folder.is_dir():
            return ()
        matches = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir())
        return tuple(sorted(int(match[1]) for match in matches if match is not None))

    def save(self, previous: bytes, entry: CommitEntry) -> ResultFile:
        """Keep a committed result. Those of this step and later ones are of what the run gave up, and go.

        Raises:
            OSError: the disk refuses.
        """
        for step in self.steps():
            if step > entry.outer_step:
                self._path_of(step).unlink(missing_ok=True)
        return self._write(self._path_of(entry.outer_step), previous, entry, None)

    def save_voted(self, key: RoundKey, previous: bytes, entry: CommitEntry) -> None:
        """Keep a result before this peer votes for it; it replaces the one that was voted for before.

        Raises:
            OSError: the disk refuses.
        """
        self._write(self._folder / VOTED_NAME, previous, entry, key)

    def load(self, outer_step: int, previous: bytes) -> tuple[ResultFile, CommitEntry] | None:
        """The result that makes this step out of the state with digest `previous`; None if there is no whole one."""
        path = self._path_of(outer_step)
        found = self._read(path)
        if found is None or found[0].previous != previous:
            return None
        _, entry, check = found
        return _placed(path, entry, check), entry

    def load_voted(self, outer_step: int, previous: bytes) -> tuple[RoundKey, CommitEntry] | None:
        """What was voted for last, if it makes this step out of the state with digest `previous`."""
        found = self._read(self._folder / VOTED_NAME)
        if found is None:
            return None
        saved, entry, _ = found
        if saved.previous != previous or entry.outer_step != outer_step or saved.key is None:
            return None
        return saved.key, entry

    def forget_before(self, outer_step: int) -> None:
        """Remove the results of all earlier steps.

        Raises:
            OSError: the disk refuses.
        """
        for step in self.steps():
            if step < outer_step:
                self._path_of(step).unlink(missing_ok=True)

    def _path_of(self, outer_step: int) -> Path:
        return self._folder / f"step-{outer_step:08d}.result"

    def _write(self, path: Path, previous: bytes, entry: CommitEntry, key: RoundKey | None) -> ResultFile:
        header = msgspec.msgpack.encode(
            SavedResult(run_id=self._run_id, previous=previous, commit=CommitHeader.of(entry), key=key)
        )
        make_private_folder(self._folder)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        digest = hashlib.sha256()
        try:
            with open_private(temporary, "xb") as file:
                for piece in (_LENGTH.pack(len(header)), header, *(chunk.data for chunk in entry.chunks)):
                    digest.update(piece)
                    file.write(piece)
                file.write(digest.digest())
                file.flush()
                if self._is_for_later:
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if self._is_for_later:
            sync_folder(self._folder)
        return _placed(path, entry, digest.digest())

    def _read(self, path: Path) -> tuple[SavedResult, CommitEntry, bytes] | None:
        try:
            with open_regular(path) as file:
                content = memoryview(file.read())
            saved, entry = _decode(content)
        except CheckpointCorrupted as fault:
            if path.exists():
                log.warning("result_damaged path=%s reason=%r; it is left out", path, fault.reason)
            return None
        except (msgspec.MsgspecError, struct.error, ValueError, RecursionError) as error:
            log.warning("result_damaged path=%s reason=%r; it is left out", path, str(error))
            return None
        return (saved, entry, bytes(content[-_CHECK_NBYTES:])) if saved.run_id == self._run_id else None


def _placed(path: Path, entry: CommitEntry, check: bytes) -> ResultFile:
    return ResultFile(path=path, outer_step=entry.outer_step, digest=entry.digest, nbytes=entry.nbytes, check=check)


def _decode(content: memoryview) -> tuple[SavedResult, CommitEntry]:
    body, check = content[:-_CHECK_NBYTES], content[-_CHECK_NBYTES:]
    if hashlib.sha256(body).digest() != check:
        raise ValueError("it was changed since it was written (its SHA-256 differs)")
    (length,) = _LENGTH.unpack_from(body)
    if length > _MAX_HEADER_NBYTES:
        raise ValueError("its header is too long")
    start = _LENGTH.size + length
    saved = msgspec.msgpack.decode(body[_LENGTH.size : start], type=SavedResult)
    commit = saved.commit
    if start + commit.nbytes != len(body):
        raise ValueError("its chunks do not fill it")
    chunks: list[ResultChunk] = []
    for start_numel, nbytes in commit.chunks:
        chunks.append(ResultChunk(start_numel, bytes(body[start : start + nbytes])))
        start += nbytes
    return saved, commit.with_chunks(chunks)
