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
another run, is left out with a warning; nothing is allocated that the file does not hold. Every call blocks for as long
as the disk takes. Must not know when a result is worth keeping.
"""

import hashlib
import logging
import os
import re
import secrets
import struct
from pathlib import Path

import msgspec

from isthmus.collective.core.types import RoundKey
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


class ResultFiles:
    """The results of one run in a peer's folder. One writer.

    Args:
        folder: made with the first result.
        run_id: of the run; what is of another one is not read.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id

    def steps(self) -> tuple[int, ...]:
        """Outer steps whose results are there, oldest first, whole or not."""
        if not self._folder.is_dir():
            return ()
        matches = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir())
        return tuple(sorted(int(match[1]) for match in matches if match is not None))

    def save(self, previous: bytes, entry: CommitEntry) -> None:
        """Keep a committed result. Those of this step and later ones are of what the run gave up, and go.

        Raises:
            OSError: the disk refuses.
        """
        for step in self.steps():
            if step > entry.outer_step:
                self._path_of(step).unlink(missing_ok=True)
        self._write(self._path_of(entry.outer_step), previous, entry, None)

    def save_voted(self, key: RoundKey, previous: bytes, entry: CommitEntry) -> None:
        """Keep a result before this peer votes for it; it replaces the one that was voted for before.

        Raises:
            OSError: the disk refuses.
        """
        self._write(self._folder / VOTED_NAME, previous, entry, key)

    def load(self, outer_step: int, previous: bytes) -> CommitEntry | None:
        """The result that makes this step out of the state with digest `previous`; None if there is no whole one."""
        found = self._read(self._path_of(outer_step))
        return None if found is None or found[0].previous != previous else found[1]

    def load_voted(self, outer_step: int, previous: bytes) -> tuple[RoundKey, CommitEntry] | None:
        """What was voted for last, if it makes this step out of the state with digest `previous`."""
        found = self._read(self._folder / VOTED_NAME)
        if found is None or found[0].previous != previous or found[1].outer_step != outer_step:
            return None
        return None if found[0].key is None else (found[0].key, found[1])

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

    def _write(self, path: Path, previous: bytes, entry: CommitEntry, key: RoundKey | None) -> None:
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
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self._folder)

    def _read(self, path: Path) -> tuple[SavedResult, CommitEntry] | None:
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
        return (saved, entry) if saved.run_id == self._run_id else None


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
