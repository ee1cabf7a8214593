# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or not there, verified before use, and a full disk costs no earlier one."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from isthmus.elastic.core.messages import IndexRange
from isthmus.trainer.checkpoint.checkpoint import (
    MANIFEST_NAME,
    STATE_NAME,
    Checkpoint,
    CheckpointMeta,
    CheckpointStore,
    load_checkpoint,
    load_resumed,
    newest_usable,
)
from isthmus.trainer.errors import CheckpointCorrupted, CheckpointFailed, ConfigError, EnvironmentFault, ExitCode

REPOSITORY = Path(__file__).parents[3]


def meta(outer_step: int) -> CheckpointMeta:
    return CheckpointMeta(
        run_id="demo-0123abcd",
        outer_step=outer_step,
        digest=bytes(range(32)),
        run_manifest=b'{"format":1}',
        next_index=1000 + outer_step,
        returned=(IndexRange(3, 5), IndexRange(9, 10)),
    )


def state(outer_step: int, numel: int = 1000) -> dict[str, torch.Tensor]:
    flat = torch.arange(2 * numel, dtype=torch.float32) + outer_step
    # Views of one buffer, as the trainer has them; a scalar and an empty tensor for the corners.
    return {
        "anchor": flat[:numel],
        "momentum": flat[numel:].view(2, -1),
        "scalar": torch.tensor(float(outer_step)),
        "empty": torch.zeros(0),
    }


def watch_the_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on: the path of everything that is flushed, and what is renamed, in their order."""
    happened: list[str] = []
    flush, rename, replace = os.fsync, Path.rename, Path.replace

    def flushing(descriptor: int) -> None:
        happened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    def moving(move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def moved(source: Path, target: Path) -> Path:
            happened.append(f"renamed to {Path(target).name}")
            return move(source, target)

        return moved

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(Path, "rename", moving(rename))
    monkeypatch.setattr(Path, "replace", moving(replace))
    return happened


def a_store(folder: Path, *steps: int, keep: int = 10) -> CheckpointStore:
    store = CheckpointStore(folder / "checkpoints", keep=keep)
    for step in steps:
        store.save(meta(step), state(step))
    return store


def assert_is(checkpoint: Checkpoint | None, outer_step: int) -> None:
    assert checkpoint is not None
    assert checkpoint.meta == meta(outer_step)
    expected = state(outer_step)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensors[name], tensor)


# ---------------------------------------------------------------------------------------------------------- good days


def test_checkpoint_reads_back_bit_for_bit(tmp_path: Path) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, float("inf"), float("nan"), -1.5])
    store = CheckpointStore(tmp_path, keep=1)
    store.save(meta(7), {"anchor": special})
    loaded = store.load(7).tensors["anchor"]
    assert torch.equal(loaded.view(torch.int32), special.view(torch.int32))


def test_newest_checkpoint_is_loaded_and_only_the_last_stay(tmp_path: Path) -> None:
    store = a_store(tmp_path, 1, 2, 3, 4, keep=2)
    assert store.steps() == (3, 4)
    assert_is(store.load_newest(), 4)
    assert_is(store.load(3), 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


def test_another_runs_later_checkpoints_are_put_aside_and_push_none_out(tmp_path: Path) -> None:
    a_store(tmp_path, 20, 30, 40)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3):
        store.save(replace(meta(step), run_id="another"), state(step))
    assert store.steps() == (2, 3)
    assert CheckpointStore(tmp_path / "lineage-1" / "checkpoints", keep=9).steps() == (20, 30, 40)
    assert_is(CheckpointStore(tmp_path / "lineage-1" / "checkpoints", keep=9).load_newest(), 40)
    newest = newest_usable(tmp_path, run_id="another")
    assert newest is not None
    assert newest.meta.outer_step == 3


def test_of_several_runs_checkpoints_that_of_the_run_is_found(tmp_path: Path) -> None:
    store = a_store(tmp_path, 5, 6)
    store.save(replace(meta(7), run_id="another"), state(7))
    found = newest_usable(tmp_path, run_id=meta(6).run_id)
    assert found is not None
    assert found.meta.outer_step == 6
    assert newest_usable(tmp_path, run_id="a third") is None


def test_a_checkpoint_has_its_tokenizer_with_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    store = a_store(tmp_path, 1)
    (tmp_path / "tokenizer.json").write_text('{"of": "another run"}')
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(store.path_of(1), elsewhere)
    loaded = load_checkpoint(elsewhere)
    assert loaded.tokenizer == elsewhere / "tokenizer.json"
    assert loaded.tokenizer.read_text() == "{}"
    loaded.tokenizer.write_text("[]")
    with pytest.raises(CheckpointCorrupted, match=r"tokenizer.json was changed"):
        load_checkpoint(elsewhere)
    loaded.tokenizer.unlink()
    with pytest.raises(CheckpointCorrupted, match=r"tokenizer.json is missing"):
        load_checkpoint(elsewhere)


def test_no_checkpoint_is_not_an_error(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", keep=1).load_newest() is None


def test_state_file_is_readable_by_the_library(tmp_path: Path) -> None:
    store = a_store(tmp_path, 5)
    with safe_open(store.path_of(5) / STATE_NAME, framework="pt") as file:
        assert set(file.keys()) == {"anchor", "momentum", "scalar", "empty"}
        assert torch.equal(file.get_tensor("momentum"), state(5)["momentum"])


def test_loaded_tensors_are_the_callers(tmp_path: Path) -> None:
    store = a_store(tmp_path, 1)
    store.load(1).tensors["anchor"].fill_(0)
    assert_is(store.load(1), 1)


def test_checkpoint_of_a_step_that_is_made_again_replaces_the_old_one(tmp_path: Path) -> None:
    store = a_store(tmp_path, 1, 2)
    (store.path_of(2) / STATE_NAME).write_bytes(b"broken")
    store.save(meta(2), state(2))
    assert_is(store.load_newest(), 2)


def test_leftovers_of_a_crash_are_ignored_and_cleared(tmp_path: Path) -> None:
    store = a_store(tmp_path, 1)
    leftover = tmp_path / "checkpoints" / ".partial-step-00000002"
    leftover.mkdir()
    (leftover / STATE_NAME).write_bytes(b"half")
    assert store.steps() == (1,)
    store.save(meta(3), state(3))
    assert not leftover.exists()


def test_killed_in_the_middle_of_saving_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    moments = ("write", "fsync", "rename")
    for moment in moments:
        a_store(tmp_path / moment, 1)
    script = """
import os, signal, sys, torch
from pathlib import Path
from isthmus.trainer.checkpoint import checkpoint
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
def save(moment):
    if moment == "write": checkpoint.write_tensors = lambda path, *_: (path.write_bytes(b"half"), die())
    if moment == "fsync": os.fsync = die
    if moment == "rename": checkpoint.CheckpointStore._put_in_place = die
    store = checkpoint.CheckpointStore(Path(sys.argv[1]) / moment / "checkpoints", keep=1)
    store.save(checkpoint.CheckpointMeta(run_id="r", outer_step=2, digest=bytes(32), run_manifest=b"", next_index=0),
               {"anchor": torch.zeros(9)})
for moment in sys.argv[2:]:
    child = os.fork()  # to begin a process for each takes seconds
    if child == 0:
        save(moment)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, moment
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path), *moments], cwd=REPOSITORY, timeout=100, check=True)
    for moment in moments:
        store = CheckpointStore(tmp_path / moment / "checkpoints", keep=1)
        assert_is(store.load_newest(), 1)
        store.save(meta(2), state(2))
        assert_is(store.load_newest(), 2)


def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = a_store(tmp_path, 1)
    happened = watch_the_disk(monkeypatch)
    store.save(meta(2), state(2))
    renamed = happened.index(f"renamed to {store.path_of(2).name}")
    flushed = [Path(what).name for what in happened[:renamed]]
    assert all(any(file in name for name in flushed) for file in (STATE_NAME, MANIFEST_NAME)), "its files"
    assert any(name.startswith(".partial") for name in flushed), "their names"
    assert str(tmp_path / "checkpoints") in happened[renamed:], "its own name"


# ----------------------------------------------------------------------------------------------------------- our bugs


@pytest.mark.parametrize(
    "tensors",
    [
        {"anchor": torch.zeros(3, dtype=torch.float64)},
        {"anchor": torch.zeros(3, dtype=torch.bfloat16)},
        {"anchor": torch.zeros(4, 4).t()[:2]},
        {"../anchor": torch.zeros(3)},
        {"": torch.zeros(3)},
        {"a b": torch.zeros(3)},
        {"x" * 300: torch.zeros(3)},
    ],
)
def test_what_is_no_state_of_ours_is_not_saved(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"checkpoint|contiguous fp32"):
        CheckpointStore(tmp_path, keep=1).save(meta(1), tensors)
    assert CheckpointStore(tmp_path, keep=1).steps() == ()


def test_keeping_no_checkpoint_is_no_policy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointStore(tmp_path, keep=0)


# ------------------------------------------------------------------------------------------------------------- damage


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x01
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    elsewhere = path.with_suffix(".elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b"") and None,
    "first byte changed": lambda path: flip(path, 0),
    "byte in the middle changed": lambda path: flip(path, path.stat().st_size // 2),
    "last byte changed": lambda path: flip(path, -1),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte long": lambda path: path.write_bytes(path.read_bytes() + b" x") and None,
    "grown to a sparse terabyte": lambda path: os.truncate(path, 1 << 40),
    "a link": replace_by_link,
    "a pipe": replace_by_fifo,
    "a folder": replace_by_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [STATE_NAME, MANIFEST_NAME])
def test_damaged_checkpoint_is_named_and_the_one_before_it_is_loaded(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = a_store(tmp_path, 1, 2)
    path = store.path_of(2) / name
    DAMAGES[damage](path)

    with pytest.raises(CheckpointCorrupted) as caught:
        store.load(2)
    assert caught.value.path == path
    assert caught.value.exit_code == ExitCode.INTEGRITY
    assert str(path) in str(caught.value)

    with caplog.at_level(logging.WARNING):
        assert_is(store.load_newest(), 1)
    assert [record.message.split()[0] for record in caplog.records] == ["checkpoint_damaged"]
    assert str(path) in caplog.text


def test_every_single_byte_of_the_state_file_is_guarded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(meta(1), {"anchor": torch.arange(16, dtype=torch.float32)})
    path = store.path_of(1) / STATE_NAME
    for position in range(path.stat().st_size):
        flip(path, position)
        with pytest.raises(CheckpointCorrupted):
            store.load(1)
        flip(path, position)
    store.load(1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("outer_step", 99),
        ("next_index", 0),
        ("returned", []),
        ("digest", "00" * 32),
        ("run_manifest", '{"format":2}'),
        ("run_id", "other"),
        ("format", "isthmus-checkpoint/2"),
        ("extra", 1),
        ("state_nbytes", -1),
    ],
)
def test_every_field_of_the_manifest_is_guarded(tmp_path: Path, key: str, value: object) -> None:
    store = a_store(tmp_path, 1)
    path = store.path_of(1) / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointCorrupted, match=r"manifest\.json"):
        store.load(1)


def test_when_none_is_whole_the_error_says_so(tmp_path: Path) -> None:
    store = a_store(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        flip(store.path_of(step) / STATE_NAME, 100)
    with pytest.raises(CheckpointCorrupted, match="2 earlier ones are damaged too") as caught:
        store.load_newest()
    assert caught.value.path == store.path_of(3) / STATE_NAME


# ---------------------------------------------------------------------------------------------------------- full disk


def test_full_disk_fails_the_checkpoint_and_keeps_the_earlier_one(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep=5)
    store.save(meta(1), state(1))
    too_big = {"anchor": torch.zeros(1 << 19)}  # 2 MiB on a disk of 1 MiB

    with pytest.raises(CheckpointFailed, match="No space left on device") as caught:
        store.save(meta(2), too_big)

    assert isinstance(caught.value, EnvironmentFault)
    assert caught.value.path == store.path_of(2)
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000001"]
    assert_is(store.load_newest(), 1)
    store.save(meta(3), state(3))
    assert_is(store.load_newest(), 3)


def test_file_size_limit_fails_the_checkpoint_and_keeps_the_earlier_one(tmp_path: Path) -> None:
    store = a_store(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        with pytest.raises(CheckpointFailed, match="File too large"):
            store.save(meta(2), {"anchor": torch.zeros(1 << 16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert_is(store.load_newest(), 1)


def test_place_that_is_no_folder_fails_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointFailed):
        CheckpointStore(tmp_path / "checkpoints", keep=1).save(meta(1), state(1))


# ------------------------------------------------------------------------------------------------------------- resume


def test_resume_takes_a_peers_folder_its_checkpoints_or_one_of_them(tmp_path: Path) -> None:
    store = a_store(tmp_path, 1, 2)
    assert_is(load_resumed(tmp_path), 2)
    assert_is(load_resumed(tmp_path / "checkpoints"), 2)
    assert_is(load_resumed(store.path_of(1)), 1)
    moved = tmp_path / "elsewhere" / "step-00000001"
    shutil.copytree(store.path_of(1), moved)
    assert_is(load_checkpoint(moved), 1)


def test_resume_from_where_no_checkpoint_is_is_the_operators_mistake(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "step-00000001"):
        with pytest.raises(ConfigError, match="holds no checkpoint"):
            load_resumed(path)
