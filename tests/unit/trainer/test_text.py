# SPDX-License-Identifier: Apache-2.0
"""Which text a peer trains on, and what it says of it."""

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest

from isthmus.collective.core.types import PeerId
from isthmus.collective.errors import PeerUnreachable
from isthmus.collective.transport import Channel
from isthmus.elastic.learner import text_fetch
from isthmus.elastic.state.wire import ChunkMap, TextOffer
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import Override, load_config
from isthmus.trainer.data.corpus import CHUNK_NBYTES, Corpus, DataError
from isthmus.trainer.data.text import GivenText, _Teller, fetch_text, founders_text, joiners_text
from isthmus.trainer.data.text_shelf import TextShelf
from isthmus.trainer.errors import NobodyReachable, Refused

LINES = "one line after the other\n"
DIGEST_OF_NONE = "0" * 64


def text_in(folder: Path, name: str, count: int = 1000) -> Path:
    path = folder / name
    path.write_text(LINES * count)
    return path


def config_with(**given: object) -> Config:
    """Keys with their dots written as two underscores."""
    overrides = [("model.seq_len", "32"), *((key.replace("__", "."), str(value)) for key, value in given.items())]
    return load_config(overrides=[Override(key, value, f"--{key}") for key, value in overrides]).config


async def keep(folder: Path, corpus: Corpus) -> None:
    """What a fetch leaves."""
    shelf, given, chunks = TextShelf(folder, corpus.digest), GivenText(corpus), ChunkMap(corpus.manifest)
    await shelf.begin(TextOffer(corpus.manifest, corpus.description))
    for index in range(len(chunks)):
        await shelf.put(index, given.read(*chunks.place(index)))
    shelf.finish()


def corpus_at(path: Path) -> Corpus:
    return founders_text(path.parent, config_with(data__path=path), None).corpus


# ------------------------------------------------------------------------------------------------------------- joiners


def test_a_joiner_uses_what_it_is_named_if_that_is_the_runs_text_and_nothing_else(tmp_path: Path) -> None:
    own, other = text_in(tmp_path, "own.txt"), text_in(tmp_path, "other.txt", 999)
    digest = corpus_at(own).digest
    # The founder's own path says nothing to who names another.
    found = joiners_text(tmp_path, config_with(data__path=other, node__data=own), digest)
    assert found is not None
    assert (found.corpus.digest, found.source) == (digest, "machine")
    with pytest.raises(Refused, match=r"the text here \(other.txt\) is not the run's") as caught:
        joiners_text(tmp_path, config_with(data__path=own, node__data=other), digest)
    assert caught.value.fields == ("node.data",)
    with pytest.raises(DataError, match="does not exist"):
        joiners_text(tmp_path, config_with(node__data=tmp_path / "nowhere"), digest)


async def test_a_joiner_that_names_none_lacks_the_text_where_the_founders_path_has_it_not(tmp_path: Path) -> None:
    own, other = text_in(tmp_path, "own.txt"), text_in(tmp_path, "other.txt", 999)
    corpus = corpus_at(own)
    here = config_with(data__path=own)
    assert joiners_text(tmp_path, here, corpus.digest) is not None
    for elsewhere in (config_with(data__path=tmp_path / "nowhere"), config_with(data__path=other)):
        assert joiners_text(tmp_path, elsewhere, corpus.digest) is None
    await keep(tmp_path, corpus)
    kept = joiners_text(tmp_path, config_with(data__path=tmp_path / "nowhere"), corpus.digest)
    assert kept is not None
    assert (kept.corpus.digest, kept.source) == (corpus.digest, "copy")


# ------------------------------------------------------------------------------------------------------------ founders


async def test_a_founder_reads_its_own_text_but_goes_on_with_the_copy_that_its_run_had(tmp_path: Path) -> None:
    own, theirs = text_in(tmp_path, "own.txt"), corpus_at(text_in(tmp_path, "theirs.txt", 999))
    config = config_with(data__path=own)
    assert founders_text(tmp_path, config, None).source == "machine"
    assert founders_text(tmp_path, config, theirs.digest).source == "machine", "no copy is there"
    await keep(tmp_path, theirs)
    assert founders_text(tmp_path, config, None).source == "machine"
    found = founders_text(tmp_path, config, theirs.digest)
    assert (found.corpus.digest, found.source) == (theirs.digest, "copy")
    named = founders_text(tmp_path, config_with(data__path=own, node__data=own), theirs.digest)
    assert named.source == "machine"


# ------------------------------------------------------------------------------------------------------ what is told


@pytest.mark.parametrize("digest", ["", "../../x", "d" * 63, "D" * 64, "d" * 64 + "\n"])
def test_a_name_that_is_no_digest_never_becomes_one_of_a_file(tmp_path: Path, digest: str) -> None:
    with pytest.raises(Refused, match="a name that we do not understand"):
        joiners_text(tmp_path, config_with(), digest)
    assert list(tmp_path.iterdir()) == []


def test_a_long_fetch_says_now_and_then_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    teller = _Teller(lambda: now)
    with caplog.at_level(logging.INFO):
        for second in range(1, 21):
            now = float(second)
            teller.advanced(PeerId("a1b2000000000000"), second * 1_000_000, 80_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        "text: 2.0 MB of 80.0 MB are here, 1.0 MB a second from a1b2, 78 s left",
        "text: 7.0 MB of 80.0 MB are here, 1.0 MB a second from a1b2, 73 s left",
        "text: 12.0 MB of 80.0 MB are here, 1.0 MB a second from a1b2, 68 s left",
        "text: 17.0 MB of 80.0 MB are here, 1.0 MB a second from a1b2, 63 s left",
    ]


async def test_where_nobody_gives_it_one_sentence_says_who_was_asked_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find() -> tuple[str, ...]:
        return ("10.9.0.1:7000",)

    async def dial(address: str) -> Channel:
        raise PeerUnreachable(address, "refused")

    monkeypatch.setattr(text_fetch, "_FIRST_PAUSE_S", 0.01)
    with pytest.raises(NobodyReachable) as caught:
        async with asyncio.timeout(20.0):
            await fetch_text(tmp_path, config_with(), DIGEST_OF_NONE, find=find, dial=dial, patience_s=0.1)
    assert str(caught.value) == (
        "the run's text is not on this machine, and nobody gives it: 10.9.0.1:7000 (refused); "
        "start a peer that has it, or name a copy of it with --data"
    )
    assert caught.value.exit_code == 4


def test_what_is_given_is_a_copy_of_one_chunk() -> None:
    tokens = np.arange(3 * CHUNK_NBYTES // 2, dtype=np.uint64).astype(np.uint8)
    given = GivenText(Corpus.of(tokens, tokens[:10], "x\n\udcff" + "x" * 300))
    assert bytes(given.read(0, 1)) == tokens[CHUNK_NBYTES:].tobytes()
    assert bytes(given.read(1, 0)) == tokens[:10].tobytes()
    assert given.description == "x??" + "x" * 197, "it can be shown and sent"
