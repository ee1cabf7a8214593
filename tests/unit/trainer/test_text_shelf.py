# SPDX-License-Identifier: Apache-2.0
"""A text from peers on this peer's disk: kept chunk by chunk, found again, believed only as far as it hashes."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from isthmus.elastic.state.digest import describe_state
from isthmus.elastic.state.wire import ChunkMap, TextOffer
from isthmus.trainer.data import text_shelf
from isthmus.trainer.data.corpus import CHUNK_NBYTES, Corpus, TokenArray
from isthmus.trainer.data.text import GivenText
from isthmus.trainer.data.text_shelf import FOLDER_NAME, TextShelf
from isthmus.trainer.errors import EnvironmentFault, Refused
from isthmus.trainer.workers.shared_buffer import SharedTokens

NUM_TRAIN, NUM_VALIDATION = 2 * CHUNK_NBYTES + 500, CHUNK_NBYTES + 3
NUM_CHUNKS = 5


def _tokens(count: int, seed: int) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.of(_tokens(NUM_TRAIN, 1), _tokens(NUM_VALIDATION, 2), "a text of numbers")


@pytest.fixture
def shelf(corpus: Corpus, tmp_path: Path) -> Iterator[TextShelf]:
    shelf = TextShelf(tmp_path, corpus.digest)
    yield shelf
    shelf.close()


def offer_of(corpus: Corpus) -> TextOffer:
    return TextOffer(corpus.manifest, corpus.description)


def file_in(folder: Path, corpus: Corpus, end: str = "") -> Path:
    return folder / FOLDER_NAME / f"{corpus.digest}{end}"


async def fill(shelf: TextShelf, corpus: Corpus, stop: int = NUM_CHUNKS) -> int:
    """Put what is missing of the first chunks; returns how many were there."""
    chunks, given = ChunkMap(corpus.manifest), GivenText(corpus)
    begin = await shelf.begin(offer_of(corpus))
    for index in range(begin, stop):
        await shelf.put(index, given.read(*chunks.place(index)))
    return begin


async def test_a_text_that_was_kept_is_the_same_text_now_and_at_the_next_start(
    shelf: TextShelf, corpus: Corpus, tmp_path: Path
) -> None:
    assert shelf.load() is None
    assert await fill(shelf, corpus) == 0
    assert shelf.load() is None, "not before its end"
    for found in (shelf.finish(), TextShelf(tmp_path, corpus.digest).load()):
        assert found is not None
        assert (found.digest, found.description) == (corpus.digest, corpus.description)
        assert np.array_equal(found.train, corpus.train)
        assert np.array_equal(found.validation, corpus.validation)
    assert not file_in(tmp_path, corpus, ".partial").exists()
    for name in ("", ".manifest"):
        assert file_in(tmp_path, corpus, name).stat().st_mode & 0o077 == 0


async def test_it_is_mapped_and_not_read_into_memory(shelf: TextShelf, corpus: Corpus, tmp_path: Path) -> None:
    await fill(shelf, corpus)
    found = shelf.finish()
    for tokens, offset in ((found.train, 0), (found.validation, NUM_TRAIN)):
        assert isinstance(tokens, np.memmap)
        shared = SharedTokens.share(tokens)
        assert (shared.offset, shared.numel) == (offset, len(tokens))
        assert os.fstat(shared.fd).st_ino == file_in(tmp_path, corpus).stat().st_ino
        shared.close()


@pytest.mark.parametrize("tail", [b"", b"half a chunk" * 1000], ids=["between two chunks", "within a chunk"])
async def test_a_start_that_was_cut_short_goes_on_behind_its_last_whole_chunk(
    corpus: Corpus, tmp_path: Path, tail: bytes
) -> None:
    first = TextShelf(tmp_path, corpus.digest)
    await fill(first, corpus, stop=3)
    first.close()
    with file_in(tmp_path, corpus, ".partial").open("ab") as file:
        file.write(tail)
    second = TextShelf(tmp_path, corpus.digest)
    assert second.load() is None
    assert await fill(second, corpus) == 3
    assert second.finish().digest == corpus.digest
    assert _is_right(tmp_path, corpus)


@pytest.mark.parametrize(
    ("at", "num_right"), [(0, 0), (CHUNK_NBYTES, 1), (NUM_TRAIN - 1, 2), (NUM_TRAIN, 3)], ids="byte {}".format
)
async def test_a_wrong_byte_on_the_disk_costs_what_follows_it_and_no_wrong_text(
    shelf: TextShelf, corpus: Corpus, tmp_path: Path, at: int, num_right: int
) -> None:
    await fill(shelf, corpus)
    shelf.finish()
    with file_in(tmp_path, corpus).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    again = TextShelf(tmp_path, corpus.digest)
    assert again.load() is None
    assert await fill(again, corpus) == num_right
    assert again.finish().digest == corpus.digest
    assert _is_right(tmp_path, corpus)


@pytest.mark.parametrize("nbytes", [-1, 1], ids=["short", "long"])
async def test_a_file_of_another_length_is_no_whole_text(
    shelf: TextShelf, corpus: Corpus, tmp_path: Path, nbytes: int
) -> None:
    await fill(shelf, corpus)
    shelf.finish()
    os.truncate(file_in(tmp_path, corpus), corpus.nbytes + nbytes)
    again = TextShelf(tmp_path, corpus.digest)
    assert again.load() is None
    await fill(again, corpus)
    assert again.finish().digest == corpus.digest
    assert _is_right(tmp_path, corpus)


async def test_a_description_that_was_damaged_is_asked_for_again(
    shelf: TextShelf, corpus: Corpus, tmp_path: Path
) -> None:
    await fill(shelf, corpus)
    shelf.finish()
    file_in(tmp_path, corpus, ".manifest").write_bytes(b"nonsense")
    again = TextShelf(tmp_path, corpus.digest)
    assert again.load() is None
    await fill(again, corpus)
    assert again.finish().digest == corpus.digest


async def test_a_disk_without_room_is_told_before_the_first_byte(
    shelf: TextShelf, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(text_shelf.shutil, "disk_usage", lambda _path: usage._replace(free=corpus.nbytes))
    with pytest.raises(EnvironmentFault, match=r"needs 3\.1 MB more in .* where 3\.1 MB are free") as caught:
        await shelf.begin(offer_of(corpus))
    assert "--dir" in caught.value.cure
    assert file_in(tmp_path, corpus, ".partial").stat().st_size == 0


async def test_a_disk_that_becomes_full_is_one_sentence_and_loses_no_whole_chunk(
    shelf: TextShelf, corpus: Corpus, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As a full disk does, the kernel takes what fits of a chunk and refuses the rest.
    resource.setrlimit(resource.RLIMIT_FSIZE, (corpus.nbytes - 1, hard))
    try:
        with pytest.raises(EnvironmentFault, match=r"cannot be kept in .*: File too large; free some space"):
            await fill(shelf, corpus)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    shelf.close()
    assert file_in(tmp_path, corpus, ".partial").stat().st_size == corpus.nbytes - 1
    again = TextShelf(tmp_path, corpus.digest)
    assert await fill(again, corpus) == NUM_CHUNKS - 1
    assert again.finish().digest == corpus.digest


async def test_a_text_of_a_form_or_size_that_nobody_keeps_is_refused(shelf: TextShelf, corpus: Corpus) -> None:
    whole = corpus.manifest
    named_otherwise = describe_state(0, whole.tensors[::-1], chunk_nbytes=CHUNK_NBYTES)
    cut_otherwise = describe_state(0, whole.tensors, chunk_nbytes=2 * CHUNK_NBYTES)
    for manifest in (named_otherwise, cut_otherwise):
        with pytest.raises(Refused, match="not one that we understand"):
            await shelf.begin(TextOffer(manifest, ""))
    huge = tuple(type(part)(part.name, text_shelf.MAX_NBYTES, ()) for part in whole.tensors)
    with pytest.raises(EnvironmentFault, match=r"has 137\.4 GB, more than 68\.7 GB"):
        await shelf.begin(TextOffer(describe_state(0, huge, chunk_nbytes=CHUNK_NBYTES), ""))


def _is_right(folder: Path, corpus: Corpus) -> bool:
    return file_in(folder, corpus).read_bytes() == corpus.train.tobytes() + corpus.validation.tobytes()
