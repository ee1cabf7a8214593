# SPDX-License-Identifier: Apache-2.0
"""What a run wants of a peer, against what is here."""

import dataclasses
from pathlib import Path

import pytest

from isthmus.trainer.config.manifest import manifest_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import Override, ResolvedConfig, load_config
from isthmus.trainer.data.corpus import load_corpus
from isthmus.trainer.doctor import run
from isthmus.trainer.doctor.messages import Facts

TEXT = "a bridge is no wider than it must be. " * 400


def resolved(**values: object) -> ResolvedConfig:
    return load_config(overrides=[Override(key.replace("__", "."), str(value), key) for key, value in values.items()])


@dataclasses.dataclass
class Founded:
    """A run, as its coordinator tells of it."""

    config: Config
    facts: Facts


@pytest.fixture
def founded(tmp_path: Path) -> Founded:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    config = resolved(data__path=text, model__seq_len=32).config
    digest = load_corpus(text, seq_len=32, validation_fraction=config.data.validation_fraction).digest
    return Founded(
        config,
        Facts(version="0.1.0", manifest=manifest_of(config), data_digest=digest, seen_from="10.9.0.3", num_members=2),
    )


def test_another_version_of_the_program_is_a_warning(founded: Founded) -> None:
    assert run.program(founded.facts).level == "ok"
    other = Facts(version="0.0.9", manifest=b"", data_digest="", seen_from="", num_members=0)
    assert run.program(other).level == "warn"


def test_the_runs_configuration_is_taken_over_unless_this_peers_own_contradicts_it(founded: Founded) -> None:
    check, config = run.adopted(resolved(node__device="cpu"), founded.facts)
    assert (check.level, check.facts["num_members"]) == ("ok", 2)
    assert config is not None
    assert (config.node.device, config.model) == ("cpu", founded.config.model)

    check, config = run.adopted(resolved(inner__lr=0.5), founded.facts)
    assert (check.level, config) == ("fail", None)
    assert "inner.lr" in check.text


def test_the_text_is_compared_with_the_runs(founded: Founded, tmp_path: Path) -> None:
    assert run.text_of(founded.config, founded.facts).level == "ok"
    copy = tmp_path / "copy.txt"
    _, named = run.adopted(resolved(node__data=copy), founded.facts)
    assert named is not None
    assert run.text_of(named, founded.facts).level == "fail", "it is not there"
    copy.write_text(TEXT.upper())
    check = run.text_of(named, founded.facts)
    assert check.level == "fail"
    copy.write_text(TEXT)
    assert run.text_of(named, founded.facts).level == "ok"
    (tmp_path / "text.txt").unlink()
    here = run.text_of(founded.config, founded.facts)
    assert (here.level, here.facts["is_here"]) == ("ok", False), "a joiner gets it from the peers"


def test_memory_fails_where_the_machine_has_less_than_the_run_takes(
    founded: Founded, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = run.memory(founded.config, on_gpu=False).facts["needed_bytes"]
    assert isinstance(needed, int)
    levels = []
    for total, available in ((2 * needed, needed), (2 * needed, needed - 1), (10**8, 10**8)):
        monkeypatch.setattr(run, "memory_nbytes", lambda both=(total, available): both)
        levels.append(run.memory(founded.config, on_gpu=False).level)
    assert levels == ["ok", "warn", "fail"]


def test_gpus_take_the_workers_part(founded: Founded) -> None:
    on_gpu = run.memory(founded.config, on_gpu=True, gpu_free_nbytes=10**12).facts
    on_cpu = run.memory(founded.config, on_gpu=False).facts
    assert on_cpu["needed_gpu_bytes"] == 0
    assert on_gpu["needed_gpu_bytes"] > 0  # type: ignore[operator]
    assert run.memory(founded.config, on_gpu=True, gpu_free_nbytes=0).level == "fail"
