# SPDX-License-Identifier: Apache-2.0
"""What a run needs is said beforehand; against a real daemon in tests/multiprocess/test_run_memory.py."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from isthmus.optim.registry import outer_types
from isthmus.trainer.config.memory import Needs, needs_of
from isthmus.trainer.config.outer_method import fragment_table
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import Override, load_config
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.run import room
from isthmus.trainer.run.room import Room, misfit, require_room

PROGRAM_NBYTES = 400 << 20


def config_of(**values: object) -> Config:
    return load_config(overrides=[Override(key, str(value), key) for key, value in values.items()]).config


def copies(needs: Needs, config: Config) -> float:
    """Of the fp32 parameters, in a daemon, beyond its program."""
    return (needs.daemon - PROGRAM_NBYTES) / (4 * fragment_table(config.model).numel)


@pytest.mark.parametrize(
    ("outer", "measured"),
    [
        ({}, 5.5),
        ({"outer.type": "streaming", "outer.num_fragments": "2"}, 4.8),
        ({"outer.type": "streaming", "outer.num_fragments": "4"}, 3.9),
    ],
)
def test_a_daemon_needs_what_scripts_bench_memory_has_measured(outer: dict[str, object], measured: float) -> None:
    config = config_of(**{"model.preset": "150m", "inner.type": "sgd", **outer})
    assert copies(needs_of(config, on_gpu=False), config) == pytest.approx(measured, rel=0.03)


def test_moments_are_copied_for_the_disk(tmp_path: Path) -> None:
    sgd, adamw = (config_of(**{"model.preset": "150m", "inner.type": kind}) for kind in ("sgd", "adamw"))
    copy = 4 * fragment_table(sgd.model).numel
    one, other = needs_of(sgd, on_gpu=False), needs_of(adamw, on_gpu=False)
    assert other.daemon - one.daemon == 2 * copy
    assert other.disk - one.disk == 2 * copy * (sgd.checkpoint.keep + 1)


@pytest.mark.parametrize("name", outer_types())
def test_every_method_says_what_it_needs(name: str) -> None:
    config = config_of(**{"outer.type": name, "inner.type": "sgd" if name == "demo" else "adamw"})
    copy = 4 * fragment_table(config.model).numel
    needs = needs_of(config, on_gpu=False)
    assert 3 * copy < needs.daemon - PROGRAM_NBYTES < 30 * copy
    assert needs.disk > 4 * copy


def test_more_gpus_take_less_each_and_a_smaller_micro_batch_too() -> None:
    one = needs_of(config_of(**{"model.preset": "150m"}), on_gpu=True)
    assert one.device > needs_of(config_of(**{"model.preset": "150m", "node.local_workers": 4}), on_gpu=True).device
    assert one.device > needs_of(config_of(**{"model.preset": "150m", "node.micro_batch": 2}), on_gpu=True).device
    assert needs_of(config_of(), on_gpu=False).device == 0


NEEDS = Needs(daemon=3 * 10**9, workers=10**9, device=5 * 10**9, disk=2 * 10**9)


@pytest.mark.parametrize(
    ("free", "named"),
    [
        (Room(host=4 * 10**9, device=5 * 10**9, disk=2 * 10**9), None),
        (Room(host=4 * 10**9, device=None, disk=2 * 10**9), None),
        (Room(host=4 * 10**9 - 1, device=5 * 10**9, disk=2 * 10**9), "4 GB of memory here"),
        (Room(host=4 * 10**9, device=10**9, disk=2 * 10**9), "5 GB of each GPU's memory here, and 1 GB"),
        (Room(host=4 * 10**9, device=5 * 10**9, disk=10**9), "2 GB of disk here"),
    ],
)
def test_what_does_not_fit_is_named_with_both_numbers(free: Room, named: str | None) -> None:
    found = misfit(NEEDS, free)
    assert (found is None) == (named is None)
    assert found is None or named is None or named in found[0].replace(".0 GB", " GB")


def test_a_peer_does_not_begin_where_its_run_cannot_fit_unless_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO", "isthmus")
    require_room(config_of(**{"node.device": "cpu"}), tmp_path, has_loop=False)
    assert "this_run_needs memory=" in caplog.text
    monkeypatch.setattr(room, "memory_nbytes", lambda: (10**9, 10**8))
    with pytest.raises(EnvironmentFault, match=r"of memory here, and .* are free.*--ignore-memory") as refused:
        require_room(config_of(**{"node.device": "cpu"}), tmp_path, has_loop=False)
    assert refused.value.exit_code == 3
    require_room(config_of(**{"node.device": "cpu", "node.ignore_memory": "true"}), tmp_path, has_loop=False)
    assert "does_not_fit" in caplog.text


def test_a_peer_that_comes_back_is_not_kept_out_by_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    config = config_of(**{"node.device": "cpu"})
    needed = needs_of(config, on_gpu=False).disk
    free = namedtuple("usage", "free")(needed - 1000)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: free)
    with pytest.raises(EnvironmentFault, match="of disk here"):
        require_room(config, tmp_path, has_loop=False)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "state").write_bytes(bytes(1000))
    require_room(config, tmp_path, has_loop=False)
    assert "does_not_fit" not in caplog.text, "newer checkpoints take the place of those that are there"
    (tmp_path / "checkpoints" / "state").write_bytes(bytes(10))
    require_room(config, tmp_path, has_loop=False)
    assert "does_not_fit" in caplog.text
