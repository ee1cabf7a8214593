# SPDX-License-Identifier: Apache-2.0
"""Who a peer is from one start to the next."""

import hashlib
import json
import multiprocessing
import time
from pathlib import Path

import pytest

from isthmus.collective.transport import Authority
from isthmus.trainer.contact.identity import PeerFolder
from isthmus.trainer.errors import EnvironmentFault, ExitCode, IntegrityError


def test_peer_keeps_its_id_and_each_start_is_later(tmp_path: Path) -> None:
    starts = []
    for _ in range(3):
        with PeerFolder(tmp_path / "peer") as folder:
            starts.append(folder.start_identity())
    assert len({start.peer_id for start in starts}) == 1
    assert starts[0].incarnation < starts[1].incarnation < starts[2].incarnation
    assert starts[0].ref.peer_id == starts[0].peer_id
    assert starts[0].key.private_bytes_raw() == starts[2].key.private_bytes_raw()


def test_the_id_is_that_of_the_key_and_two_folders_have_two(tmp_path: Path) -> None:
    with PeerFolder(tmp_path / "one") as one, PeerFolder(tmp_path / "other") as other:
        identity, another = one.start_identity(), other.start_identity()
    hashed = hashlib.sha256(identity.key.public_key().public_bytes_raw()).hexdigest()
    assert identity.peer_id == hashed[:16] == (tmp_path / "one" / "peer_id").read_text()
    assert identity.peer_id != another.peer_id
    assert "key" not in repr(identity)


def test_a_folder_whose_key_is_gone_says_so_and_makes_no_other_peer_of_it(tmp_path: Path) -> None:
    (tmp_path / "peer_id").write_text("0123456789abcdef")
    with PeerFolder(tmp_path) as folder:
        for _ in range(2):
            with pytest.raises(IntegrityError, match=r"has a peer id and no key.* older isthmus") as caught:
                folder.start_identity()
            assert "--dir" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"noise", b"-----BEGIN PRIVATE KEY-----\n"])
def test_a_damaged_key_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key.pem").write_bytes(content)
    with PeerFolder(tmp_path) as folder, pytest.raises(IntegrityError, match=r"key\.pem is damaged"):
        folder.start_identity()


def test_the_id_of_another_key_is_damage(tmp_path: Path) -> None:
    with PeerFolder(tmp_path) as folder:
        folder.start_identity()
        (tmp_path / "peer_id").write_text("0123456789abcdef")
        with pytest.raises(IntegrityError, match="peer_id is damaged"):
            folder.start_identity()


def test_a_certificate_is_kept_for_the_next_start(tmp_path: Path) -> None:
    with PeerFolder(tmp_path) as folder:
        assert folder.load_certificate() is None
        certificate = Authority(b"s" * 32).issue(folder.start_identity().key.public_key(), 1)
        folder.keep_certificate(certificate)
        assert folder.load_certificate() == certificate
        (tmp_path / "certificate.pem").write_bytes(b"noise")
        with pytest.raises(IntegrityError, match=r"certificate\.pem is damaged"):
            folder.load_certificate()


def test_start_is_later_also_when_the_clock_went_back(tmp_path: Path) -> None:
    far_ahead = time.time_ns() // 1_000_000 + 10**9
    with PeerFolder(tmp_path) as folder:
        (tmp_path / "incarnation").write_text(str(far_ahead))
        assert folder.start_identity().incarnation == far_ahead + 1


def test_start_is_later_also_when_the_file_was_lost(tmp_path: Path) -> None:
    with PeerFolder(tmp_path) as folder:
        first = folder.start_identity()
        (tmp_path / "incarnation").unlink()
        deadline = time.monotonic() + 5
        while time.time_ns() // 1_000_000 <= first.incarnation and time.monotonic() < deadline:
            pass  # the next start of a process is more than a millisecond later
        assert folder.start_identity().incarnation > first.incarnation


def test_files_are_only_ours_to_read(tmp_path: Path) -> None:
    with PeerFolder(tmp_path) as folder:
        folder.start_identity()
        folder.found_run("demo")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert set(modes) == {"lock", "key.pem", "peer_id", "incarnation", "run.json"}
    assert set(modes.values()) == {0o600}


def test_second_daemon_in_the_same_folder_is_told_so(tmp_path: Path) -> None:
    with PeerFolder(tmp_path):
        with pytest.raises(EnvironmentFault, match="another isthmus works in") as caught:
            PeerFolder(tmp_path)
        assert caught.value.exit_code == ExitCode.ENVIRONMENT
    PeerFolder(tmp_path).close()


def hold_and_die(path: Path, ready: object) -> None:
    PeerFolder(path)
    ready.set()  # type: ignore[attr-defined]
    while True:
        time.sleep(1)


def test_lock_of_a_killed_daemon_is_free(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=hold_and_die, args=(tmp_path, ready))
    process.start()
    try:
        assert ready.wait(20)
        with pytest.raises(EnvironmentFault):
            PeerFolder(tmp_path)
    finally:
        process.kill()
        process.join(20)
    PeerFolder(tmp_path).close()


@pytest.mark.parametrize("content", ["", "zz", "0123456789ABCDEF", "0123456789abcdef0", "../../etc/passwd"])
def test_damaged_peer_id_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "peer_id").write_text(content)
    with PeerFolder(tmp_path) as folder, pytest.raises(IntegrityError, match="peer_id is damaged"):
        folder.start_identity()


def test_damaged_incarnation_is_told(tmp_path: Path) -> None:
    (tmp_path / "incarnation").write_bytes(b"\xff12")
    with PeerFolder(tmp_path) as folder, pytest.raises(IntegrityError, match="incarnation is damaged"):
        folder.start_identity()


def test_run_is_founded_once_and_its_secret_is_kept(tmp_path: Path) -> None:
    with PeerFolder(tmp_path) as folder:
        assert folder.load_run() is None
        run = folder.found_run("demo")
        assert folder.found_run("other") == run == folder.load_run()
    assert run.run_id.startswith("demo-")
    assert len(run.secret) == 32
    assert repr(run.secret) not in repr(run)
    with PeerFolder(tmp_path / "b") as other:
        assert other.found_run("demo").secret != run.secret


def test_damaged_run_file_is_told(tmp_path: Path) -> None:
    with PeerFolder(tmp_path) as folder:
        folder.found_run("demo")
        content = json.loads((tmp_path / "run.json").read_text())
        for broken in ("{", json.dumps(content | {"extra": 1}), json.dumps(content | {"run_id": "../x"})):
            (tmp_path / "run.json").write_text(broken)
            with pytest.raises(IntegrityError, match=r"run\.json is damaged"):
                folder.load_run()


def test_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be used: Not a directory"):
        PeerFolder(tmp_path / "file" / "below")
