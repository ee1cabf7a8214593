# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a prepared text lie on this machine, and how they are given to others.

    folder               its owner's, as `isthmus data prep` wrote it; or
    <dir>/text/<digest>  a copy from peers or a URL, one file a part (text_shelf.py)

Rules: a part is hashed when somebody asks for it, and who reads it keeps it open. Must not know who needs what.
"""

import logging
from pathlib import Path

import numpy as np

from isthmus.elastic.core.messages import Digest
from isthmus.elastic.state.digest import StateManifest
from isthmus.trainer.data.corpus import CHUNK_NBYTES
from isthmus.trainer.data.prepared import TOKENIZER_NAME, PreparedText, describe_part
from isthmus.trainer.data.text_shelf import FOLDER_NAME, TextShelf

log = logging.getLogger(__name__)


class ShardPlaces:
    """Where parts lie on this machine, if they do. Used by whoever gives them too: from any thread.

    Args:
        text: what they are of.
        folder: this peer's.
    """

    def __init__(self, text: PreparedText, folder: Path) -> None:
        self._text = text
        self._folder = folder
        index = text.index
        self._names = {shard.digest: shard.name for shard in index.shards}
        if index.tokenizer is not None:
            self._names[index.tokenizer] = TOKENIZER_NAME

    def owned(self, digest: str) -> Path | None:
        """In the owner's folder."""
        folder = self._text.folder
        path = None if folder is None else folder / self._names[digest]
        return path if path is not None and path.is_file() else None

    def shelf(self, digest: str) -> TextShelf:
        """For a copy; each call makes another object."""
        return TextShelf(self._folder, digest)

    def find(self, digest: str) -> Path | None:
        """Where the part is, unproved; None if it is not here or no part of the text."""
        if digest not in self._names:
            return None
        copy = self._folder / FOLDER_NAME / digest
        return self.owned(digest) or (copy if copy.is_file() else None)


class GivenPrepared:
    """A prepared text as this peer gives it to others, and the parts of it that are here: `SharedText`."""

    def __init__(self, text: PreparedText, places: ShardPlaces) -> None:
        self._text = text
        self._places = places

    @property
    def manifest(self) -> StateManifest:
        """See `elastic.state.replica.SharedText`."""
        return self._text.manifest

    @property
    def description(self) -> str:
        """See `elastic.state.replica.SharedText`."""
        return self._text.description

    def read(self, side: int, chunk: int) -> memoryview:
        """See `elastic.state.replica.SharedText`."""
        assert side == 0, "an index is one part"
        return memoryview(self._text.index_bytes)[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES]

    def part(self, digest: Digest) -> "GivenPrepared | _GivenPart | None":
        """See `elastic.state.replica.SharedText`. A part is hashed when it is asked for."""
        if digest == self._text.manifest.digest:
            return self
        path = self._places.find(digest.hex())
        if path is None:
            return None
        try:
            manifest = describe_part(path)
            return _GivenPart(path, manifest, self._text.description) if manifest.digest == digest else None
        except OSError as error:  # it may have made room just now. Found before: between the two, and the peer ended
            log.debug("part_unreadable cause=%r", str(error))
            return None


class _GivenPart:
    """A file, mapped: who reads it keeps it, even if it makes room meanwhile."""

    def __init__(self, path: Path, manifest: StateManifest, description: str) -> None:
        self.manifest = manifest
        self.description = description
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def read(self, side: int, chunk: int) -> memoryview:
        """See `elastic.state.replica.SharedText`."""
        assert side == 0, "a part is one file"
        return np.array(self._data[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES]).data

    def part(self, digest: Digest) -> "_GivenPart | None":
        """See `elastic.state.replica.SharedText`."""
        return self if digest == self.manifest.digest else None
