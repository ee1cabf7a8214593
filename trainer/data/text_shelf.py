# SPDX-License-Identifier: Apache-2.0
"""A text that came from the run's peers, on this peer's disk.

::

    <dir>/text/<digest>            both sides, one behind the other, as the run uses them; mapped, never read whole
    <dir>/text/<digest>.partial    the beginning of it, while it is fetched
    <dir>/text/<digest>.manifest   what it consists of, for the next start

Of a prepared text (prepared.py) its index lies there, and each part by its own digest, likewise.

It lies in the peer's own folder, not in a cache that several share: the folder's lock gives it one writer, and it goes
with the run that it is of.

Rules: what is on the disk is believed no more than what comes from the network: it is hashed chunk by chunk when it is
opened, and what follows the first wrong chunk is fetched again. Work on the disk is done in threads. Must not know who
gives a text.

Errors: `EnvironmentFault` (3), where the disk refuses or is too small.
"""

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from isthmus.collective.errors import CollectiveError
from isthmus.elastic.errors import DonorFault
from isthmus.elastic.state.digest import Hasher, StateManifest, digest_of
from isthmus.elastic.state.wire import TEXT_OFFERS, ChunkMap, TextOffer
from isthmus.elastic.wire import decode, encode
from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.data.corpus import CHUNK_NBYTES, SIDES, Corpus
from isthmus.trainer.data.prepared import INDEX_PART, PART, PreparedText, describe_bytes
from isthmus.trainer.errors import EnvironmentFault, Refused
from isthmus.trainer.files import make_private_folder, open_private, sync_folder, write_atomically
from isthmus.trainer.threads import in_thread

FOLDER_NAME = "text"
MAX_NBYTES = 64 << 30
"""Of a text that is fetched, and that is given. What describes it fits into one frame then."""
_KINDS = (SIDES, (INDEX_PART,), (PART,))
"""What is kept here: a text in one piece, the index of a prepared one, a part of that."""
_RESERVE_NBYTES = 64 << 20
"""Of the disk; for checkpoints and logs."""
_SAME_VERSION = "run the same version of isthmus on all peers"
_CURE = "free some space, give another folder with --dir, or name a copy of the text with --data"


class TextShelf:
    """The place of one text in the folder of a peer. `elastic.learner.text_fetch.Shelf`; of one task.

    Args:
        folder: the peer's.
        digest: the text's.

    Raises:
        Refused: this is no digest of a text.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        if re.fullmatch("[0-9a-f]{64}", digest) is None:  # it becomes the name of a file
            raise Refused("the run's text has a name that we do not understand", cure=_SAME_VERSION)
        self._folder = folder / FOLDER_NAME
        self._digest = digest
        self._whole = self._folder / digest
        self._partial = self._folder / f"{digest}.partial"
        self._manifest = self._folder / f"{digest}.manifest"
        self._file: IO[bytes] | None = None
        self._num_chunks = 0

    def load(self) -> Corpus | PreparedText | None:
        """The text, if it is here and whole. Blocks for as long as it takes to hash it.

        One with a wrong byte is made a partial one again.

        Raises:
            EnvironmentFault: the disk refuses.
        """
        with self._disk_errors():
            offer = self._kept_offer()
            return self._text(offer) if offer is not None and self._is_whole(offer) else None

    def has(self) -> bool:
        """Whether the part of a text that is to lie here does, and is whole. Likewise."""
        with self._disk_errors():
            offer = self._kept_offer()
            return offer is not None and self._is_whole(offer)

    def _is_whole(self, offer: TextOffer) -> bool:
        if not self._whole.exists():
            return False
        if self._whole.stat().st_size == offer.manifest.nbytes and _is_right(self._whole, offer.manifest):
            return True
        self._whole.replace(self._partial)
        return False

    async def begin(self, offer: TextOffer) -> int:
        """See `elastic.learner.text_fetch.Shelf`.

        Raises:
            EnvironmentFault: the disk refuses or has no room for the text.
            Refused: it is no text that this version knows.
        """
        if self._file is None:
            self._num_chunks = await in_thread(self._open, offer)
        return self._num_chunks

    async def put(self, index: int, data: memoryview) -> None:
        """See `elastic.learner.text_fetch.Shelf`.

        Raises:
            EnvironmentFault: the disk refuses or is full.
        """
        assert self._file is not None, "begin first"
        assert index == self._num_chunks, "chunks come in their order"
        with self._disk_errors():
            await in_thread(_write, self._file, data)
        self._num_chunks += 1

    def finish(self) -> Corpus | PreparedText:
        """The text, which is whole now. Blocks until it is on the disk.

        Raises:
            EnvironmentFault: the disk refuses.
            DataError: it is no text that this version knows.
        """
        self.finish_part()
        offer = self._kept_offer()
        assert offer is not None, "begin has written it"
        return self._text(offer)

    def finish_part(self) -> None:
        """The same for a part of one."""
        assert self._file is not None, "begin first"
        with self._disk_errors():
            os.fsync(self._file.fileno())
            self.close()
            self._partial.replace(self._whole)
            sync_folder(self._folder)

    def adopt(self, data: bytes) -> bool:
        """Keep what came from elsewhere in one piece, if it is the text or part that belongs here. Blocks.

        Raises:
            EnvironmentFault: the disk refuses.
        """
        for name in (PART, INDEX_PART):
            offer = TextOffer(describe_bytes(name, data), "")
            if offer.manifest.digest.hex() == self._digest:
                with self._disk_errors():
                    make_private_folder(self._folder)
                    write_atomically(self._manifest, encode(offer))
                    write_atomically(self._whole, data)
                return True
        return False

    def remove(self) -> None:
        """Delete it. Who has it mapped keeps it.

        Raises:
            EnvironmentFault: the disk refuses.
        """
        with self._disk_errors():
            for path in (self._whole, self._partial, self._manifest):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; what is in it stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, offer: TextOffer) -> int:
        """The file, at the place of the first chunk that is missing; returns that chunk's number."""
        manifest = offer.manifest
        if manifest.chunk_nbytes != CHUNK_NBYTES or tuple(part.name for part in manifest.tensors) not in _KINDS:
            raise Refused("the run's text is not one that we understand", cure=_SAME_VERSION)
        if manifest.nbytes > MAX_NBYTES:
            raise EnvironmentFault(
                f"the run's text has {rounded_nbytes(manifest.nbytes)}, more than {rounded_nbytes(MAX_NBYTES)}",
                cure="name a copy of it with --data",
            )
        with self._disk_errors():
            make_private_folder(self._folder)
            write_atomically(self._manifest, encode(offer))
            file = open_private(self._partial, "a+b", 0)
            try:
                there = os.fstat(file.fileno()).st_size
                self._require_room(manifest.nbytes - min(there, manifest.nbytes))
                file.seek(0)
                num_right = _count_right(file, manifest)
                file.truncate(sum(map(ChunkMap(manifest).nbytes, range(num_right))))
            except BaseException:
                file.close()
                raise
        self._file = file
        return num_right

    def _require_room(self, nbytes: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if nbytes + _RESERVE_NBYTES > free:
            raise EnvironmentFault(
                f"the run's text needs {rounded_nbytes(nbytes)} more in {self._folder}, where {rounded_nbytes(free)} "
                f"are free, of which {rounded_nbytes(_RESERVE_NBYTES)} are left to checkpoints",
                cure=_CURE,
            )

    def _kept_offer(self) -> TextOffer | None:
        """What an earlier start was told of this text; None if there is none, or it is damaged."""
        try:
            offer = decode(TEXT_OFFERS, self._manifest.read_bytes())
            offer.manifest.verify()
        except (FileNotFoundError, CollectiveError, DonorFault):
            return None
        return offer if offer.manifest.digest.hex() == self._digest else None

    def _text(self, offer: TextOffer) -> Corpus | PreparedText:
        if offer.manifest.tensors[0].name == INDEX_PART:
            data, name = self._whole.read_bytes(), offer.description
            return PreparedText.of(data, folder=None, description=name, where=self._whole)
        tokens = np.memmap(self._whole, dtype=np.uint8, mode="r")
        num_train = offer.manifest.tensors[0].nbytes
        return Corpus(
            train=tokens[:num_train],
            validation=tokens[num_train:],
            manifest=offer.manifest,
            description=offer.description,
        )

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EnvironmentFault(
                f"the run's text cannot be kept in {self._folder}: {error.strerror or error}", cure=_CURE
            ) from error


def _write(file: IO[bytes], data: memoryview) -> None:
    """All of it; a disk that becomes full takes a part first."""
    while data:
        data = data[file.write(data) :]


def _is_right(path: Path, manifest: StateManifest) -> bool:
    """Whether a file of the right size has the right bytes. Hashed by several threads."""
    if not manifest.nbytes:
        return True
    data = np.memmap(path, dtype=np.uint8, mode="r")
    ends = list(itertools.accumulate(part.nbytes for part in manifest.tensors))
    parts = [data[start:stop].data for start, stop in itertools.pairwise([0, *ends])]
    hasher = Hasher(chunk_nbytes=manifest.chunk_nbytes)
    try:
        return hasher.hash(parts) == [part.chunk_digests for part in manifest.tensors]
    finally:
        hasher.close()


def _count_right(file: IO[bytes], manifest: StateManifest) -> int:
    """How many chunks are in the file as they should be, from its beginning to the first that is not."""
    count = 0
    for part in manifest.tensors:
        rest = part.nbytes
        for digest in part.chunk_digests:
            data = file.read(min(rest, manifest.chunk_nbytes))
            if digest_of(data) != digest:
                return count
            rest -= len(data)
            count += 1
    return count
