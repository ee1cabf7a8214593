# SPDX-License-Identifier: Apache-2.0
"""Which text this peer trains on, and where it is from: this machine, an earlier start, or the run's peers.

    a founder    what its `data.path` names; but who goes on with a run whose text came from peers, that copy
    a joiner     what `node.data` names, and nothing else, where it is given; else the copy of an earlier start, what
                 `data.path` names if it is the run's text, or what the peers give

Rules: a text counts as the run's by its digest alone. Must not know sockets, tickets or the disk (text_shelf.py).

Errors: `Refused` (5), `NobodyReachable` (4), `DataError` (2), `EnvironmentFault` (3).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from isthmus.collective.core.types import Instant, PeerId
from isthmus.collective.transport import Channel
from isthmus.elastic.errors import NoText
from isthmus.elastic.learner.text_fetch import PATIENCE_S, TextFetch
from isthmus.elastic.state.digest import StateManifest
from isthmus.trainer.config.outer_method import tokens_per_sample
from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.config.settings import Config
from isthmus.trainer.data.corpus import CHUNK_NBYTES, Corpus, DataError, load_corpus, require_one_sample
from isthmus.trainer.data.text_shelf import TextShelf
from isthmus.trainer.errors import NobodyReachable, Refused
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

_NAME_LENGTH = 4
"""Digits of a peer's id that people are shown here."""
_FIRST_WORD_S = 2.0
_NEXT_WORD_S = 5.0
"""When the progress of a fetch is told."""

Source = Literal["machine", "copy", "peers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundText:
    """A text and where it is from.

    Attributes:
        corpus: the text.
        source: "machine": its owner's files; "copy": what an earlier start in this folder has fetched.
        peers: who gave it.
        fetched_nbytes: what they gave, in this start.
        seconds: that took.
    """

    corpus: Corpus
    source: Source
    peers: tuple[PeerId, ...] = ()
    fetched_nbytes: int = 0
    seconds: float = 0.0


class GivenText:
    """A text as this peer gives it to others: `elastic.state.replica.SharedText`."""

    def __init__(self, corpus: Corpus) -> None:
        self._sides = (corpus.train, corpus.validation)
        self._manifest = corpus.manifest
        self._description = corpus.description

    @property
    def manifest(self) -> StateManifest:
        """See `elastic.state.replica.SharedText`."""
        return self._manifest

    @property
    def description(self) -> str:
        """See `elastic.state.replica.SharedText`."""
        return self._description

    def read(self, side: int, chunk: int) -> memoryview:
        """See `elastic.state.replica.SharedText`. numpy waits for the disk without Python's lock."""
        start = chunk * CHUNK_NBYTES
        return np.array(self._sides[side][start : start + CHUNK_NBYTES]).data


# --------------------------------------------------------------------------------------------------------- on this disk


def founders_text(folder: Path, config: Config, kept_digest: str | None) -> FoundText:
    """What a founder trains on. Blocks while it is read.

    Args:
        folder: of this peer.
        config: of the run.
        kept_digest: of the text of the run that this founder goes on with, if there is one.

    Raises:
        DataError: it cannot be read.
        EnvironmentFault: the disk refuses.
    """
    if kept_digest is not None and config.node.data is None:
        copy = TextShelf(folder, kept_digest).load()
        if copy is not None:
            return FoundText(corpus=copy, source="copy")
    return FoundText(corpus=_read(config), source="machine")


def joiners_text(folder: Path, config: Config, digest: str) -> FoundText | None:
    """The run's text, as far as this machine has it: None if not. Blocks while it is read.

    Raises:
        Refused: `node.data` names another text.
        DataError: what it names cannot be read.
        EnvironmentFault: the disk refuses.
    """
    if config.node.data is not None:
        corpus = _read(config)
        if corpus.digest != digest:
            raise Refused(
                f"the text here ({corpus.description}) is not the run's",
                cure="name a copy of the run's text with --data, or leave that out: then it comes from the run's peers",
                fields=("node.data",),
            )
        return FoundText(corpus=corpus, source="machine")
    copy = TextShelf(folder, digest).load()
    if copy is not None:
        return FoundText(corpus=copy, source="copy")
    try:
        corpus = _read(config)
    except DataError as error:  # where the founder has it there may be nothing here, or something else
        log.debug("text_not_here cause=%r", str(error))
        return None
    return FoundText(corpus=corpus, source="machine") if corpus.digest == digest else None


def _read(config: Config) -> Corpus:
    return load_corpus(
        config.data_path,
        seq_len=_seq_len(config),
        validation_fraction=config.data.validation_fraction,
        limit_nbytes=config.data.limit_nbytes,
    )


def _seq_len(config: Config) -> int:
    return tokens_per_sample(config.model)


def text_of_run(folder: Path, config: Config, digest: str | None) -> Corpus:
    """The text of a run that is over, or goes on elsewhere, as far as this machine has it. Blocks while it is read.

    Args:
        folder: of a peer of it.
        config: of the run.
        digest: of its text; None: whatever `data.path` names.

    Raises:
        DataError: it is not here.
        EnvironmentFault: the disk refuses.
    """
    corpus = founders_text(folder, config, digest).corpus
    if digest is not None and corpus.digest != digest:
        raise DataError(
            config.data_path, f"({corpus.description}) is not the run's text", cure="name a copy of that with --data"
        )
    return corpus


# ----------------------------------------------------------------------------------------------------- from the peers


async def fetch_text(
    folder: Path,
    config: Config,
    digest: str,
    *,
    find: Callable[[], Awaitable[Sequence[str]]],
    dial: Callable[[str], Awaitable[Channel]],
    patience_s: float = PATIENCE_S,
) -> FoundText:
    """Get the run's text from its peers, and keep it in this peer's folder. Goes on where an earlier start ended.

    Args:
        folder: of this peer.
        config: of the run.
        digest: of its text.
        find: addresses where peers may be; see `elastic.learner.text_fetch.TextFetch`.
        dial: opens a STATE connection.
        patience_s: how long nobody may have given anything.

    Raises:
        NobodyReachable: nobody gives it.
        EnvironmentFault: the disk refuses, or is too small.
        DataError: it holds no sample of the run's length.
    """
    clock = asyncio.get_running_loop().time
    began_at = clock()
    shelf = TextShelf(folder, digest)
    fetch = TextFetch(
        bytes.fromhex(digest),
        shelf,
        find=find,
        dial=dial,
        advanced=_Teller(clock).advanced,
        clock=clock,
        patience_s=patience_s,
    )
    log.info("text: the run's is not on this machine; asking its peers for it")
    try:
        await fetch.run()
        corpus = await in_thread(shelf.finish)
    except NoText as error:
        raise NobodyReachable(
            f"the run's text is not on this machine, and {error}",
            cure="start a peer that has it, or name a copy of it with --data",
        ) from error
    finally:
        shelf.close()
    for side, tokens in (("training", corpus.train), ("held-out", corpus.validation)):
        require_one_sample(tokens, _seq_len(config), None, side)
    return FoundText(
        corpus=corpus,
        source="peers",
        peers=fetch.givers,
        fetched_nbytes=fetch.fetched_nbytes,
        seconds=clock() - began_at,
    )


class _Teller:
    """Says now and then how far a fetch is."""

    def __init__(self, clock: Callable[[], Instant]) -> None:
        self._clock = clock
        self._began_at = clock()
        self._next_at = self._began_at + _FIRST_WORD_S
        self._before_nbytes: int | None = None

    def advanced(self, giver: PeerId, there_nbytes: int, whole_nbytes: int) -> None:
        """See `elastic.learner.text_fetch.TextFetch`."""
        now = self._clock()
        if self._before_nbytes is None:
            self._began_at, self._before_nbytes = now, there_nbytes
        elif now >= self._next_at:
            self._next_at = now + _NEXT_WORD_S
            rate = (there_nbytes - self._before_nbytes) / max(now - self._began_at, 1e-3)
            log.info(
                "text: %s of %s are here, %s a second from %s, %s left",
                rounded_nbytes(there_nbytes),
                rounded_nbytes(whole_nbytes),
                rounded_nbytes(round(rate)),
                giver[:_NAME_LENGTH],
                _time_in_words((whole_nbytes - there_nbytes) / max(rate, 1.0)),
            )


def _time_in_words(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
