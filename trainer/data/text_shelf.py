# SPDX-License-Identifier: Apache-2.0
"""A text that came from the run's peers, on this peer's disk.

::

    <dir>/text/<digest>            both sides, one behind the other, as the run uses them; mapped, never read whole
    <dir>/text/<digest>.partial    the beginning of it, while it is fetched
    <dir>/text/<digest>.manifest   what it consists of, for the next start

It lies in the peer's own folder, not in a cache that several share: the folder's lock gives it one writer, and it goes
with the run that it is of.

Rules: what is on the disk is believed no more than what comes from the network: it is hashed chunk by chunk when it is
opened, and what follows the first wrong chunk is fetched again. Work on the disk is done in threads. Must not know who
gives a text.

Errors: `EnvironmentFault` (3), where the disk refuses or is too small.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from isthmus.collective.errors import CollectiveError
from isthmus.elastic.errors import DonorFault
from isthmus.elastic.state.digest import StateManifest, digest_of
from isthmus.elastic.state.wire import TEXT_OFFERS, ChunkMap, TextOffer
from isthmus.elastic.wire import decode, encode
from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.data.corpus import CHUNK_NBYTES, SIDES, Corpus
from isthmus.trainer.errors import EnvironmentFault, Refused
from isthmus.trainer.files import make_private_folder, open_private, sync_folder, write_atomically
from isthmus.trainer.threads import in_thread

FOLDER_NAME = "text"
MAX_NBYTES = 64 << 30
"""Of a text that is fetched, and that is given. What describes it fits into one frame then."""
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

    def load(self) -> Corpus | None:
        """The text, if it is here and whole. Blocks for as long as it takes to hash it.

        One with a wrong byte is made a partial one again.

        Raises:
            EnvironmentFault: the disk refuses.
        """
        with self._disk_errors():
            if not self._whole.exists() or (offer := self._kept_offer()) is None:
                return None
            if self._whole.stat().st_size == offer.manifest.nbytes:
                kept = self._mapped(offer)
                if Corpus.of(kept.train, kept.validation, kept.description).digest == self._digest:
                    return kept
            self._whole.replace(self._partial)
            return None

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

    def finish(self) -> Corpus:
        """The text, which is whole now. Blocks until it is on the disk.

        Raises:
            EnvironmentFault: the disk refuses.
        """
        assert self._file is not None, "begin first"
        with self._disk_errors():
            os.fsync(self._file.fileno())
            self.close()
            self._partial.replace(self._whole)
            sync_folder(self._folder)
            offer = self._kept_offer()
            assert offer is not None, "begin has written it"
            return self._mapped(offer)

    def close(self) -> None:
        """Close the file; what is in it stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, offer: TextOffer) -> int:
        """The file, at the place of the first chunk that is missing; returns that chunk's number."""
        manifest = offer.manifest
        if manifest.chunk_nbytes != CHUNK_NBYTES or tuple(part.name for part in manifest.tensors) != SIDES:
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

    def _mapped(self, offer: TextOffer) -> Corpus:
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
