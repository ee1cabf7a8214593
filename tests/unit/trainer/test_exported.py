# SPDX-License-Identifier: Apache-2.0
"""Folders of trained models: written whole or not at all, read back, and loaded by transformers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.model import model_files
from isthmus.trainer.model.decoder import Decoder, ModelConfig, preset
from isthmus.trainer.model.exported import (
    MARK,
    ModelCorrupted,
    ModelNotFound,
    has_bytes,
    load_model,
    save_decoder,
    save_tokenizer,
)
from isthmus.trainer.model.model_folder import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME

CONFIG = preset("nano", num_layers=1, dim=32, hidden_dim=48, max_seq_len=16)


def save(directory, config, state):
    save_decoder(directory, config, state, has_bytes=True)


@pytest.fixture
def decoder():
    decoder = Decoder(CONFIG)
    decoder.init_weights(torch.Generator().manual_seed(3))
    return decoder


@pytest.fixture
def directory(decoder, tmp_path):
    save(tmp_path / "model", CONFIG, decoder.state_dict())
    return tmp_path / "model"


# ----------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("shape", [{"tie_embeddings": True}, {"tie_embeddings": False, "vocab_size": 300}])
def test_transformers_computes_what_the_decoder_computes(tmp_path, shape):
    config = ModelConfig(
        dim=32, num_layers=3, num_heads=4, num_kv_heads=2, hidden_dim=48, max_seq_len=40, rope_theta=500.0,
        norm_eps=1e-3, **shape,
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.init_weights(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in decoder.parameters():  # wide apart, so that a mistake shows
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save(tmp_path, config, decoder.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    tokens = torch.arange(80).reshape(2, 40) * 7 % config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, decoder(tokens), rtol=1e-4, atol=1e-4)
    assert sum(one.numel() for one in loaded.parameters()) == sum(one.numel() for one in decoder.parameters())


def test_the_byte_tokenizer_maps_each_byte_of_a_text_to_its_value_and_back(directory):
    save_tokenizer(directory, (), max_seq_len=16)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    texts = ["plain", " two  spaces\n\tand a tab", "ümlaut ¡ 水 🙂", "".join(map(chr, range(256)))]
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 256
    assert tokenizer.model_max_length == 16


def test_a_tokenizer_of_its_own_comes_along(directory, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text(f'{{"of": "{name}"}}')
    save_tokenizer(directory, [tmp_path / "tokenizer.json", tmp_path / "chat_template.jinja"], max_seq_len=16)
    assert json.loads((directory / "tokenizer.json").read_text()) == {"of": "tokenizer.json"}
    assert json.loads((directory / "tokenizer_config.json").read_text())["model_max_length"] == 16
    assert (directory / "chat_template.jinja").exists()
    save_tokenizer(directory, [tmp_path / "tokenizer_config.json"], max_seq_len=16)
    assert json.loads((directory / "tokenizer_config.json").read_text()) == {"of": "tokenizer_config.json"}


def test_large_weights_lie_in_several_files_which_transformers_finds(decoder, directory, monkeypatch):
    monkeypatch.setattr(model_files, "MAX_FILE_NBYTES", 20_000)
    save(directory, CONFIG, decoder.state_dict())
    assert not (directory / WEIGHTS_NAME).exists()
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    tokens = torch.arange(16)[None]
    loaded = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, decoder(tokens), rtol=1e-4, atol=1e-4)
        assert torch.equal(load_model(directory)(tokens), decoder(tokens))
    monkeypatch.undo()
    save(directory, CONFIG, decoder.state_dict())
    assert sorted(path.name for path in directory.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
    assert not (directory / INDEX_NAME).exists()


# ------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_loaded_model_gives_the_same_logits(tmp_path, tie_embeddings):
    config = preset("nano", num_layers=1, dim=32, hidden_dim=48, num_kv_heads=2, tie_embeddings=tie_embeddings)
    decoder = Decoder(config)
    decoder.init_weights(torch.Generator().manual_seed(3))
    save(tmp_path, config, decoder.state_dict())
    loaded = load_model(tmp_path)
    tokens = torch.arange(64)[None]
    assert loaded.config == config
    assert not loaded.training
    assert torch.equal(loaded(tokens), decoder(tokens))
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
    assert has_bytes(tmp_path)


def test_dtype_of_the_file_is_kept(decoder, tmp_path):
    save(tmp_path, CONFIG, decoder.bfloat16().state_dict())
    assert {parameter.dtype for parameter in load_model(tmp_path).parameters()} == {torch.bfloat16}


def test_files_are_as_readable_as_any_other_file(directory):
    (directory / "other").touch()
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1


def test_new_model_replaces_the_old_one(decoder, directory):
    with torch.no_grad():
        decoder.norm.weight.fill_(0.5)
    save(directory, CONFIG, decoder.state_dict())
    assert torch.equal(load_model(directory).norm.weight, torch.full((32,), 0.5))


def test_failed_write_leaves_the_old_model_and_no_scraps(decoder, directory, monkeypatch):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_files, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save(directory, CONFIG, decoder.state_dict())
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.pop("norm.weight"), "lacks norm.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "holds extra"),
        (lambda state: state.update({"norm.weight": torch.zeros(31)}), r"in shape \(31,\) instead of \(32,\)"),
    ],
)
def test_state_of_another_model_is_not_saved(decoder, tmp_path, change, reason):
    state = dict(decoder.state_dict())
    change(state)
    with pytest.raises(ValueError, match=reason):
        save(tmp_path / "model", CONFIG, state)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_missing_file_is_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(ModelNotFound, match=r"does not exist.*isthmus export") as caught:
        load_model(directory)
    assert caught.value.path == directory / name


def test_single_flipped_bit_in_the_weights_is_noticed(directory):
    path = directory / WEIGHTS_NAME
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelCorrupted, match="damaged"):
        load_model(directory)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[]",
        b"\xff\xfe",
        b'{"isthmus": {"weights_blake2b": 1}}',
    ],
)
def test_bad_config_is_refused(directory, content):
    (directory / CONFIG_NAME).write_bytes(content)
    with pytest.raises(ModelCorrupted, match="is not a model's config") as caught:
        load_model(directory)
    assert caught.value.path == directory / CONFIG_NAME


def test_config_with_an_impossible_shape_is_refused(directory):
    config = json.loads((directory / CONFIG_NAME).read_text())
    config["num_attention_heads"] = 5
    (directory / CONFIG_NAME).write_text(json.dumps(config))
    with pytest.raises(ModelCorrupted, match="not a multiple of num_heads 5"):
        load_model(directory)


def rewrite_digest(directory):
    config = json.loads((directory / CONFIG_NAME).read_text())
    config[MARK]["weights_blake2b"] = model_files.digest_of([directory / WEIGHTS_NAME])
    (directory / CONFIG_NAME).write_text(json.dumps(config))


def test_weights_in_another_format_are_refused(directory):
    (directory / WEIGHTS_NAME).write_bytes(b"PK\x03\x04" * 100)
    rewrite_digest(directory)
    with pytest.raises(ModelCorrupted, match="is not a safetensors file"):
        load_model(directory)


def test_weights_of_another_shape_are_refused(directory):
    save_file({"norm.weight": torch.zeros(32)}, directory / WEIGHTS_NAME)
    rewrite_digest(directory)
    with pytest.raises(ModelCorrupted, match="lacks blocks"):
        load_model(directory)


def test_unreadable_file_is_the_machine_s_fault(directory):
    (directory / CONFIG_NAME).unlink()
    (directory / CONFIG_NAME).mkdir()
    with pytest.raises(EnvironmentFault, match="cannot be read: Is a directory"):
        load_model(directory)
