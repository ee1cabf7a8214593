# SPDX-License-Identifier: Apache-2.0
"""What of a Hugging Face model is the run's, and what a peer must have itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.trainer.config.base_model import model_of, num_frozen, require_base_model, with_base_model
from isthmus.trainer.config.manifest import config_of, manifest_of
from isthmus.trainer.config.outer_method import fragment_table, tokens_per_sample
from isthmus.trainer.config.peers import NodeSection
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import Override, load_config
from isthmus.trainer.config.wiring import training_job, with_vocabulary
from isthmus.trainer.errors import ConfigError, EnvironmentFault, ExitCode, Refused
from isthmus.trainer.model.model_folder import weights_digest
from tests.unit.trainer.tiny_models import tiny_model


def load(folder: Path, *pairs: tuple[str, str]) -> Config:
    given = (("model.type", "hf"), ("model.path", str(folder)), *pairs)
    return load_config(overrides=[Override(key, text, f"--{key}") for key, text in given]).config


def at_a_joiner(config: Config, folder: Path) -> Config:
    """The run's manifest, with a folder of its own."""
    return config_of(manifest_of(config)).model_copy(update={"node": NodeSection(model=folder)})


def test_a_model_that_is_trained_whole_travels_without_its_folder(tmp_path: Path) -> None:
    reference = tiny_model("qwen3", tmp_path / "base")
    config = with_base_model(load(tmp_path / "base"))
    assert config.model.model_dump()["weights_digest"] is None
    joiner = at_a_joiner(config, Path("/nowhere"))
    require_base_model(joiner)
    assert fragment_table(joiner.model).numel == sum(one.numel() for one in reference.parameters())
    assert tokens_per_sample(joiner.model) == 64
    assert model_of(joiner).named_shapes() == model_of(config).named_shapes()
    assert num_frozen(joiner) == 0
    (tmp_path / "base").rename(tmp_path / "away")
    assert with_base_model(config) == config  # as one who goes on with the run


def test_where_something_is_frozen_a_peer_needs_the_same_weights_wherever_they_are(tmp_path: Path) -> None:
    reference = tiny_model("llama", tmp_path / "base")
    tiny_model("llama", tmp_path / "copy")
    tiny_model("llama", tmp_path / "other", seed=1)
    config = with_base_model(load(tmp_path / "base", ("model.lora.rank", "4")))
    assert config.model.model_dump()["weights_digest"] == weights_digest(tmp_path / "base")
    assert num_frozen(config) == sum(one.numel() for one in reference.parameters())
    require_base_model(at_a_joiner(config, tmp_path / "copy"))
    job = training_job(at_a_joiner(config, tmp_path / "copy"))
    assert job.model == model_of(at_a_joiner(config, tmp_path / "copy")) != model_of(config)
    with pytest.raises(Refused, match="is not the run's base model") as refused:
        require_base_model(at_a_joiner(config, tmp_path / "other"))
    assert refused.value.exit_code == ExitCode.REFUSED
    with pytest.raises(EnvironmentFault, match=r"there is no folder /nowhere.*--node\.model"):
        require_base_model(at_a_joiner(config, Path("/nowhere")))


def test_other_names_of_the_same_architecture_are_the_same_run(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path / "base")
    config = load(tmp_path / "base")
    first = manifest_of(with_base_model(config))
    path = tmp_path / "base" / "config.json"
    told = path.read_text().replace("{", '{"_name_or_path": "elsewhere", "transformers_version": "0", ', 1)
    path.write_text(told)
    assert manifest_of(with_base_model(config)) == first


def test_a_text_with_more_tokens_than_the_model_knows_is_refused(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    config = load(tmp_path)
    assert with_vocabulary(config, 256) == config
    with pytest.raises(ConfigError, match=r"the text has 257 tokens, and the model in .* knows 256"):
        with_vocabulary(config, 257)


def test_adapters_and_freeze_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"freeze is given, and with lora\.rank nothing but the adapters is trained"):
        load(tmp_path, ("model.lora.rank", "4"), ("model.freeze", '["*"]'))


def test_without_transformers_it_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "note": "not seen before"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentFault, match="pip install transformers") as missing:
        with_base_model(load(tmp_path))
    assert missing.value.exit_code == ExitCode.ENVIRONMENT


def test_transformers_is_not_loaded_where_no_model_of_it_is_trained() -> None:
    code = (
        "import sys, isthmus.trainer.run.daemon, isthmus.trainer.workers.worker, isthmus.trainer.checkpoint.export\n"
        "from isthmus.trainer.config.settings import Config\n"
        "from isthmus.trainer.config.wiring import training_job\n"
        "training_job(Config()); sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
