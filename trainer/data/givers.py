# SPDX-License-Identifier: Apache-2.0
"""Who gives the parts of a prepared text: the run's peers, or a URL that the fsspec library can read.

Rules: what comes is believed by its digest alone (text_shelf.py). Must not know which parts are needed, nor when.

Errors: `NobodyReachable` (4), `DataError` (2), `EnvironmentFault` (3).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import Final

from isthmus.collective.core.types import Instant, PeerId
from isthmus.collective.transport import Channel
from isthmus.elastic.errors import NoText
from isthmus.elastic.learner.text_fetch import PATIENCE_S, TextFetch
from isthmus.trainer.data.corpus import DataError
from isthmus.trainer.data.prepared import INDEX_NAME, TOKENIZER_NAME, PreparedText
from isthmus.trainer.data.shard_supply import Given, Giver
from isthmus.trainer.data.text_shelf import TextShelf
from isthmus.trainer.errors import EnvironmentFault, NobodyReachable
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

Find = Callable[[], Awaitable[Sequence[str]]]
Dial = Callable[[str], Awaitable[Channel]]

_URL_PATIENCE_S: Final = 60.0
_URL_FLOOR_BYTES_PER_S: Final = 64 << 10
"""A store that gives less is given up."""
_MAX_INDEX_NBYTES: Final = 1 << 30


def from_peers(
    find: Find,
    dial: Dial,
    *,
    patience_s: float = PATIENCE_S,
    advanced: Callable[[PeerId, int, int], None] = lambda _giver, _there, _whole: None,
) -> Giver:
    """A giver that asks the run's peers; see `elastic.learner.text_fetch.TextFetch` for the arguments."""

    async def give(shelf: TextShelf, digest: str) -> Given:
        clock: Callable[[], Instant] = asyncio.get_running_loop().time
        fetch = TextFetch(
            bytes.fromhex(digest),
            shelf,
            find=find,
            dial=dial,
            advanced=advanced,
            clock=clock,
            patience_s=patience_s,
        )
        try:
            await fetch.run()
        except NoText as error:
            raise NobodyReachable(
                f"a part of the run's text is not on this machine, and {error}",
                cure="start a peer that has it, or name a copy of the text with --data",
            ) from error
        await in_thread(shelf.finish_part)
        return Given(url=None, peers=fetch.givers)

    return give


class UrlPlace:
    """A prepared text at a URL.

    Args:
        url: of its folder.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def load(self) -> PreparedText:
        """Its index. Blocks.

        Raises:
            DataError: there is none.
            EnvironmentFault: the library, or what it needs for this URL, is missing.
        """
        name = self.url.rpartition("/")[2]
        return PreparedText.of(self._read(INDEX_NAME, _MAX_INDEX_NBYTES), folder=None, description=name, where=None)

    def giver(self, text: PreparedText, otherwise: Giver | None) -> Giver:
        """A giver that reads the parts of this text there, and asks another one for what it does not get."""
        index = text.index
        parts = {shard.digest: (shard.name, index.nbytes(shard)) for shard in index.shards}
        if index.tokenizer is not None:
            parts[index.tokenizer] = (TOKENIZER_NAME, _MAX_INDEX_NBYTES)
        told: dict[str, str] = {}

        async def give(shelf: TextShelf, digest: str) -> Given:
            name, nbytes = parts[digest]
            try:
                data = await in_thread(self._read, name, nbytes)
                if not await in_thread(shelf.adopt, data):
                    raise DataError(None, f"at {self.url} has another {name} than its index says", cure="copy it again")
            except DataError as error:
                if otherwise is None:
                    raise NobodyReachable(
                        f"{self.url} does not give a part of the run's text: {error}", cure="look at that place"
                    ) from error
                if told.get(name) != str(error):  # it may be asked for again and again
                    told[name] = str(error)
                    log.warning("shard_not_at_url name=%s cause=%r", name, str(error))
                return await otherwise(shelf, digest)
            return Given(url=self.url, peers=())

        return give

    def _read(self, name: str, most_nbytes: int) -> bytes:
        """All of it; what is asked for at once may come in pieces. A request that hangs ends when the library says so.

        Found before: the deadline was around the thread, and threw away what had come too late.
        """
        fsspec = _library()
        ends_at = time.monotonic() + _URL_PATIENCE_S + most_nbytes / _URL_FLOOR_BYTES_PER_S
        data = bytearray()
        try:
            with fsspec.open(f"{self.url}/{name}", "rb") as file:
                while piece := file.read(most_nbytes + 1 - len(data)):
                    data += piece
                    if len(data) < most_nbytes and time.monotonic() > ends_at:
                        raise TimeoutError("it takes too long")
        except ImportError as error:
            raise EnvironmentFault(
                f"{self.url} cannot be read: {error}", cure="install what the fsspec library needs for such a URL"
            ) from error
        except Exception as error:  # every file system has errors of its own
            raise DataError(
                None, f"cannot be read: {self.url}/{name}: {type(error).__name__}: {error}", cure="check --data"
            ) from error
        if len(data) > most_nbytes:
            raise DataError(None, f"at {self.url} has a longer {name} than its index says", cure="copy it again")
        return bytes(data)


def _library() -> ModuleType:
    try:
        import fsspec
    except ImportError as error:
        raise EnvironmentFault(
            "the text is at a URL, and the fsspec library is not installed", cure="pip install 'fsspec[http]'"
        ) from error
    module: ModuleType = fsspec
    return module
