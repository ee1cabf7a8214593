# SPDX-License-Identifier: Apache-2.0
"""Copies within one machine: every byte, and none beside it."""

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.collective.transport import copying
from isthmus.collective.transport.copying import HAS_STREAM_COPY, copy_bytes, copy_past_cache

Copy = Callable[[memoryview, memoryview], None]
LONG = 64 << 10
both = pytest.mark.parametrize("copy", [copy_bytes, copy_past_cache])


def pattern(nbytes: int) -> bytes:
    return bytes(range(251)) * (nbytes // 251) + bytes(range(nbytes % 251))


def check(copy: Copy, nbytes: int, from_offset: int, into_offset: int) -> None:
    source = memoryview(bytearray(from_offset) + bytearray(pattern(nbytes)))[from_offset:]
    whole = bytearray(b"\xee" * (into_offset + nbytes + 80))
    copy(source, memoryview(whole)[into_offset : into_offset + nbytes])
    assert whole[into_offset : into_offset + nbytes] == pattern(nbytes)
    assert set(whole[:into_offset]) | set(whole[into_offset + nbytes :]) == {0xEE}


@both
@given(
    nbytes=st.integers(0, 300) | st.integers(LONG - 70, LONG + 200),
    from_offset=st.integers(0, 70),
    into_offset=st.integers(0, 70),
)
def test_every_byte_is_copied_and_none_beside_it_wherever_both_lie(
    copy: Copy, nbytes: int, from_offset: int, into_offset: int
) -> None:
    check(copy, nbytes, from_offset, into_offset)


@both
def test_a_chunk_with_its_header_before_it_is_copied(copy: Copy) -> None:
    check(copy, (2 << 20) + 4, 64, 48)


@both
def test_what_may_only_be_read_can_be_copied(copy: Copy) -> None:
    into = bytearray(LONG + 5)
    copy(memoryview(pattern(LONG + 5)), memoryview(into))
    assert into == pattern(LONG + 5)


@both
@pytest.mark.parametrize("nbytes", [10, LONG + 10])
def test_lengths_that_differ_are_refused_and_nothing_is_written(copy: Copy, nbytes: int) -> None:
    whole = bytearray(nbytes + 64)
    with pytest.raises((ValueError, RuntimeError)):
        copy(memoryview(bytearray(pattern(nbytes))), memoryview(whole)[: nbytes - 1])
    assert not any(whole)


def test_without_the_library_an_ordinary_copy_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_stream", None)
    check(copy_past_cache, LONG + 7, 3, 48)


def test_a_library_that_is_missing_or_none_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "stream_copy.so"
    monkeypatch.setattr(copying, "_LIBRARY", other)
    assert copying._load() is None
    other.write_bytes(b"\x7fELF of another processor")
    assert copying._load() is None


def test_the_library_was_made_where_there_is_a_compiler() -> None:
    can_be_made = platform.machine() == "x86_64" and shutil.which("cc") is not None
    assert HAS_STREAM_COPY or not can_be_made
