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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from isthmus.collective.core.types import Instant, PeerId
from isthmus.elastic.core.messages import Digest
from isthmus.elastic.errors import NoText
from isthmus.elastic.learner.text_fetch import PATIENCE_S, TextFetch
from isthmus.elastic.state.digest import StateManifest
from isthmus.trainer.config.outer_method import tokens_per_sample
from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.config.settings import Config
from isthmus.trainer.data.corpus import CHUNK_NBYTES, NUM_BYTES, Corpus, DataError, load_corpus, require_one_sample
from isthmus.trainer.data.givers import Dial, Find, UrlPlace
from isthmus.trainer.data.places import ShardPlaces
from isthmus.trainer.data.prepared import TOKENIZER_NAME, PreparedText, is_prepared, load_prepared
from isthmus.trainer.data.samples import SampleOrder
from isthmus.trainer.data.shard_supply import Given, Giver, bring_first
from isthmus.trainer.data.text_shelf import TextShelf
from isthmus.trainer.errors import NobodyReachable, Refused
from isthmus.trainer.files import write_atomically
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

_NAME_LENGTH = 4
"""Digits of a peer's id that people are shown here."""
_FIRST_WORD_S = 2.0
_NEXT_WORD_S = 5.0
"""When the progress of a fetch is told."""

Source = Literal["machine", "copy", "peers", "url"]

Text = Corpus | PreparedText


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundText:
    """A text and where it is from.

    Attributes:
        corpus: the text.
        source: "machine": its owner's files; "copy": what an earlier start in this folder has fetched; "url": where
            this peer's owner keeps it.
        peers: who gave it, or a part of it.
        fetched_nbytes: what they gave, in this start.
        seconds: that took.
    """

    corpus: Text
    source: Source
    peers: tuple[PeerId, ...] = ()
    fetched_nbytes: int = 0
    seconds: float = 0.0


class GivenText:
    """A text in one piece as this peer gives it to others: `elastic.state.replica.SharedText`."""

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

    def part(self, digest: Digest) -> "GivenText | None":
        """See `elastic.state.replica.SharedText`. It has none but itself."""
        return self if digest == self._manifest.digest else None


# --------------------------------------------------------------------------------------------------------- on this disk


def founders_text(folder: Path, config: Config, kept_digest: str | None) -> FoundText:
    """What a founder trains on. Blocks while it is read; of a prepared text that is its index.

    Args:
        folder: of this peer.
        config: of the run.
        kept_digest: of the text of the run that this founder goes on with, if there is one.

    Raises:
        DataError: it cannot be read.
        EnvironmentFault: the disk refuses, or a library is missing.
    """
    if kept_digest is not None and config.node.data is None:
        copy = TextShelf(folder, kept_digest).load()
        if copy is not None:
            return FoundText(corpus=copy, source="copy")
    return FoundText(corpus=read_text(config), source="machine" if config.data_url is None else "url")


def joiners_text(folder: Path, config: Config, digest: str) -> FoundText | None:
    """The run's text, as far as this machine has it: None if not. Blocks while it is read.

    Raises:
        Refused: `node.data` names another text.
        DataError: what it names cannot be read.
        EnvironmentFault: the disk refuses, or a library is missing.
    """
    if config.node.data is not None:
        corpus = read_text(config)
        if corpus.digest != digest:
            raise Refused(
                f"the text here ({corpus.description}) is not the run's",
                cure="name a copy of the run's text with --data, or leave that out: then it comes from the run's peers",
                fields=("node.data",),
            )
        return FoundText(corpus=corpus, source="machine" if config.data_url is None else "url")
    copy = TextShelf(folder, digest).load()
    if copy is not None:
        return FoundText(corpus=copy, source="copy")
    try:
        corpus = read_text(config)
    except DataError as error:  # where the founder has it there may be nothing here, or something else
        log.debug("text_not_here cause=%r", str(error))
        return None
    return FoundText(corpus=corpus, source="machine") if corpus.digest == digest else None


def vocabulary_here(config: Config) -> tuple[int, int | None]:
    """`vocabulary_of` what `read_text` reads. Of a prepared text only the index is read. Raises as `read_text`."""
    prepared = _prepared(config)
    return (NUM_BYTES, None) if prepared is None else vocabulary_of(prepared)


def vocabulary_of(text: Text) -> tuple[int, int | None]:
    """How many tokens a text has, and the one behind every document, if there is one."""
    return text.vocab_size, text.index.end_of_document if isinstance(text, PreparedText) else None


def read_text(config: Config) -> Text:
    """What this peer's configuration names. Blocks; one that is prepared is not read, but for its index.

    Raises:
        DataError: it cannot be read, or holds no sample of the run's length.
        EnvironmentFault: a library is missing.
    """
    prepared = _prepared(config)
    if prepared is not None:
        require_samples(prepared, _seq_len(config))
        return prepared
    return load_corpus(
        config.data_path,
        seq_len=_seq_len(config),
        validation_fraction=config.data.validation_fraction,
        limit_nbytes=config.data.limit_nbytes,
    )


def _prepared(config: Config) -> PreparedText | None:
    if config.data_url is not None:
        return UrlPlace(config.data_url).load()
    path = config.data_path
    return None if path is None or not is_prepared(path) else load_prepared(path)


def require_samples(text: Text, seq_len: int) -> None:
    """Demand that both sides hold a sample.

    Raises:
        DataError: one does not.
    """
    if isinstance(text, PreparedText):
        held_out = [shard.num_tokens for shard in text.index.held_out]
        sides = [("training", max(text.shard_lengths)), ("held-out", max(held_out))]
    else:
        sides = [("training", len(text.train)), ("held-out", len(text.validation))]
    for side, num_tokens in sides:
        require_one_sample(num_tokens, seq_len, None, side)


def sample_order(text: Text, config: Config) -> SampleOrder:
    """Where the samples of the run lie in its text."""
    return SampleOrder(text.shard_lengths, _seq_len(config), config.run.seed, pool=config.data.shuffle_shards)


def _seq_len(config: Config) -> int:
    return tokens_per_sample(config.model)


def text_of_run(folder: Path, config: Config, digest: str | None) -> Text:
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
    find: Find,
    dial: Dial,
    patience_s: float = PATIENCE_S,
) -> FoundText:
    """Get the run's text from its peers, and keep it in this peer's folder. Goes on where an earlier start ended.

    Of a prepared text that is the index; its parts come later (`complete`).

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
        text = await in_thread(shelf.finish)
    except NoText as error:
        raise NobodyReachable(
            f"the run's text is not on this machine, and {error}",
            cure="start a peer that has it, or name a copy of it with --data",
        ) from error
    finally:
        shelf.close()
    require_samples(text, _seq_len(config))
    return FoundText(
        corpus=text,
        source="peers",
        peers=fetch.givers,
        fetched_nbytes=fetch.fetched_nbytes,
        seconds=clock() - began_at,
    )


async def complete(found: FoundText, folder: Path, config: Config, peers: Giver | None) -> FoundText:
    """See that what every peer needs of a prepared text is here before it takes part. Nothing is asked where it is.

    Args:
        found: the text.
        folder: of this peer; gets a copy of the tokenizer, for models that are exported from it.
        config: of the run.
        peers: give what this machine lacks; None: there are none yet.

    Raises:
        NobodyReachable: nobody gives it.
        EnvironmentFault: the disk refuses, or is too small.
        IntegrityError: a shard in its owner's folder is damaged.
    """
    text = found.corpus
    if not isinstance(text, PreparedText) or text.index.tokenizer is None:
        (folder / TOKENIZER_NAME).unlink(missing_ok=True)  # of a run before
    if not isinstance(text, PreparedText):
        return found
    places = ShardPlaces(text, folder)
    fetched = await bring_first(text, places, _seq_len(config), giver_of(text, config, peers))
    if text.index.tokenizer is not None and (tokenizer := places.find(text.index.tokenizer)) is not None:
        write_atomically(folder / TOKENIZER_NAME, await in_thread(tokenizer.read_bytes))
    givers = dict.fromkeys([*found.peers, *(peer for one in fetched for peer in one.given.peers)])
    return replace(
        found,
        peers=tuple(givers),
        fetched_nbytes=found.fetched_nbytes + sum(one.nbytes for one in fetched),
        seconds=found.seconds + sum(one.seconds for one in fetched),
    )


def giver_of(text: PreparedText, config: Config, peers: Giver | None) -> Giver:
    """Who gives parts to this peer: its URL, if it names one; else, or if that fails, the peers, if there are any."""
    return UrlPlace(config.data_url).giver(text, peers) if config.data_url is not None else peers or _nobody


async def _nobody(_shelf: TextShelf, digest: str) -> Given:
    raise NobodyReachable(
        f"a part of the run's text ({digest[:8]}) is not in its folder, and no peer is there to give it",
        cure="prepare the text again, or start a peer that has all of it",
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
