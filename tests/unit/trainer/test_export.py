# SPDX-License-Identifier: Apache-2.0
"""From a run's checkpoint to a model that continues a text."""

import shutil
from pathlib import Path

import pytest
import torch

from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, STATE_NAME, CheckpointMeta, CheckpointStore
from isthmus.trainer.checkpoint.export import export_model
from isthmus.trainer.config.manifest import manifest_of
from isthmus.trainer.config.outer import outer_section
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import DecoderSection
from isthmus.trainer.config.wiring import fragments_of
from isthmus.trainer.errors import CheckpointCorrupted, ConfigError, EnvironmentFault
from isthmus.trainer.model.exported import load_model
from isthmus.trainer.model.generate import generate

CONFIG = Config(model=DecoderSection(preset="nano", num_layers=1, seq_len=16))


def save(
    run_dir: Path, outer_step: int, tensors: dict[str, torch.Tensor] | None = None, config: Config = CONFIG
) -> CheckpointStore:
    anchor = CONFIG.model.description().initial_parameters(seed=outer_step)
    store = CheckpointStore(run_dir / FOLDER_NAME, keep=3)
    meta = CheckpointMeta(
        run_id="demo-0123abcd",
        outer_step=outer_step,
        digest=bytes(32),
        run_manifest=manifest_of(config),
        next_index=0,
    )
    store.save(meta, {"anchor": anchor, "momentum": torch.zeros_like(anchor)} if tensors is None else tensors)
    return store


def test_newest_checkpoint_becomes_a_model_with_its_parameters(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2)
    exported = export_model(tmp_path / "run", tmp_path / "model")
    assert (exported.run_id, exported.outer_step) == ("demo-0123abcd", 2)

    model = load_model(tmp_path / "model")
    flat = torch.cat([parameter.flatten() for parameter in model.parameters()])
    assert torch.equal(flat, CONFIG.model.description().initial_parameters(seed=2))
    assert flat.numel() == exported.num_parameters
    assert len(generate(model, b"The sea", max_new_tokens=5)) == 5


def test_the_fragments_of_a_streaming_run_become_one_model(tmp_path: Path) -> None:
    method = outer_section("streaming")(inner_steps=8, num_fragments=2)
    config = Config(model=DecoderSection(preset="nano", num_layers=3, seq_len=16), outer=method)
    parameters = config.model.description().initial_parameters(seed=1)
    tensors = {}
    for fragment in fragments_of(config):
        anchor = fragment.gather(parameters, out=torch.empty(fragment.numel))
        tensors |= {f"{fragment.index}/anchor": anchor, f"{fragment.index}/momentum": torch.zeros_like(anchor)}
    save(tmp_path / "run", 1, tensors, config)
    export_model(tmp_path / "run", tmp_path / "model")
    flat = torch.cat([parameter.flatten() for parameter in load_model(tmp_path / "model").parameters()])
    assert torch.equal(flat, parameters)
    del tensors["1/anchor"]
    save(tmp_path / "run", 2, tensors, config)
    with pytest.raises(CheckpointCorrupted, match="its run's model has"):
        export_model(tmp_path / "run", tmp_path / "model")


def test_an_export_has_the_tokenizer_of_a_checkpoint_that_was_copied_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_text('{"version": "1.0"}')
    shutil.copytree(save(tmp_path / "run", 1).path_of(1), tmp_path / "elsewhere" / "step-00000001")
    export_model(tmp_path / "elsewhere" / "step-00000001", tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == '{"version": "1.0"}'


def test_what_an_older_export_said_of_its_tokenizer_goes(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "model").mkdir()
    for name in ("special_tokens_map.json", "chat_template.jinja", "generation_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    export_model(tmp_path / "run", tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_a_whole_model_does_not_go_into_a_folder_of_adapters(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds adapters"):
        export_model(tmp_path / "run", tmp_path / "model")


def test_damaged_newest_checkpoint_gives_the_model_of_the_one_before(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    store = save(tmp_path / "run", 2)
    (store.path_of(2) / STATE_NAME).unlink()
    assert export_model(tmp_path / "run", tmp_path / "model").outer_step == 1


@pytest.mark.parametrize("tensors", [{}, {"momentum": torch.zeros(3)}, {"anchor": torch.zeros(3)}])
def test_state_of_another_model_is_told(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save(tmp_path / "run", 1, tensors)
    with pytest.raises(CheckpointCorrupted, match="its run's model has"):
        export_model(tmp_path / "run", tmp_path / "model")


def test_folder_without_checkpoints_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        export_model(tmp_path, tmp_path / "model")


def test_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "model").write_text("in the way")
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        export_model(tmp_path / "run", tmp_path / "model")


def test_full_disk_is_told_when_exporting(tmp_path: Path, small_disk: Path) -> None:
    save(tmp_path / "run", 1)
    (small_disk / "ballast").write_bytes(b"x" * 900_000)
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        export_model(tmp_path / "run", small_disk / "model")
