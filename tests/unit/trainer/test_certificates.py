# SPDX-License-Identifier: Apache-2.0
"""The certificates on a peer's disk: the newest stay, one way to write them, nothing counts without the run's seal."""

import asyncio
import contextlib
import errno
import os
from pathlib import Path

import msgspec
import pytest

from isthmus.elastic.core.certificate import Certificate, encode_certificate
from isthmus.trainer.checkpoint import certificates
from isthmus.trainer.checkpoint.certificates import FILE_NAME, KEPT, CertificateKeeper, load_certificates
from tests.unit.elastic.machines import KEYS, OTHERS, certificate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


def chain_of(length: int) -> list[Certificate]:
    made = [certificate(3, 0)]
    while len(made) < length:
        made.append(certificate(3, len(made), parent=made[-1]))
    return made


async def test_what_is_offered_is_read_back_with_the_newest_last(path: Path) -> None:
    keeper = CertificateKeeper(path, [])
    for item in chain_of(3):
        keeper.offer(item)
    await keeper.drain()
    assert load_certificates(path, KEYS) == chain_of(3)
    assert os.stat(path).st_mode & 0o077 == 0


async def test_only_the_newest_are_kept_over_starts_too(path: Path) -> None:
    made = chain_of(KEPT + 5)
    for item in made:
        keeper = CertificateKeeper(path, load_certificates(path, KEYS))
        keeper.offer(item)
        await keeper.drain()
    assert load_certificates(path, KEYS) == made[-KEPT:]


async def test_keeper_writes_by_itself_and_what_comes_meanwhile_with_the_next_writing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = chain_of(3)
    written = []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    keeper = CertificateKeeper(path, [])
    real = certificates._write

    def write(where: Path, content: bytes) -> None:
        if not written:  # while the disk is busy
            loop.call_soon_threadsafe(keeper.offer, second)
            loop.call_soon_threadsafe(keeper.offer, third)
        real(where, content)
        written.append(len(msgspec.msgpack.decode(content)))
        if written[-1] == 3:
            loop.call_soon_threadsafe(done.set)

    monkeypatch.setattr(certificates, "_write", write)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(keeper.run())
        keeper.offer(first)
        await done.wait()
        running.cancel()
    assert written[0] == 1
    assert len(written) <= 3
    assert load_certificates(path, KEYS) == [first, second, third]


async def test_full_disk_is_warned_of_once_and_ends_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = CertificateKeeper(path, [])

    def refuse(_path: Path, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_write", refuse)
        for item in chain_of(2):
            keeper.offer(item)
            await keeper.drain()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    keeper.offer(chain_of(3)[2])
    await keeper.drain()
    assert load_certificates(path, KEYS) == chain_of(3), "what could not be written goes with the next"


def test_no_file_is_no_certificate_and_no_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_certificates(path, KEYS) == []
    assert not caplog.records


@pytest.mark.parametrize("content", [b"", b"\x93", b"not a file of ours", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000])
def test_damaged_file_is_warned_of_and_counts_as_none(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)
    assert load_certificates(path, KEYS) == []
    assert "certificates_unusable" in caplog.text


def test_certificate_of_another_run_or_a_changed_one_is_left_out(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, changed = chain_of(2)
    changed = msgspec.structs.replace(changed, final=True)
    pieces = [good, changed, certificate(3, 8, keys=OTHERS)]
    path.write_bytes(msgspec.msgpack.encode([encode_certificate(item) for item in pieces] + [b"nothing"]))
    assert load_certificates(path, KEYS) == [good]
    assert "refused=3 of=4" in caplog.text


async def test_file_is_whole_whenever_the_keeper_is_stopped(path: Path) -> None:
    keeper = CertificateKeeper(path, [])
    made = chain_of(KEPT)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(keeper.run())
        for item in made:
            keeper.offer(item)
            await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    read = load_certificates(path, KEYS)
    assert read == made[: len(read)]
    assert [entry.name for entry in path.parent.iterdir()] in ([], [FILE_NAME])
