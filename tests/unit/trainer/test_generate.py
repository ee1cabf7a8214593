# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
from safetensors.torch import save_file

from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.model import generate as generate_module
from isthmus.trainer.model.decoder import Decoder, preset
from isthmus.trainer.model.generate import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    ModelCorrupted,
    ModelNotFound,
    generate,
    load_model,
    save_model,
)

CONFIG = preset("nano", num_layers=1, dim=32, hidden_dim=48, max_seq_len=16)


@pytest.fixture
def decoder():
    decoder = Decoder(CONFIG)
    decoder.init_weights(torch.Generator().manual_seed(3))
    return decoder


@pytest.fixture
def directory(decoder, tmp_path):
    save_model(tmp_path / "model", CONFIG, decoder.state_dict())
    return tmp_path / "model"


# ------------------------------------------------------------------------------------------------------- generation


def test_seed_decides_the_text(decoder):
    def draw(seed):
        return generate(decoder, b"to be", max_new_tokens=40, temperature=1.0, seed=seed)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(draw(1)) == 40


def test_zero_temperature_takes_the_likeliest_byte_of_the_last_window(decoder):
    text = b"a prompt longer than the context"
    expected = bytearray(text)
    with torch.no_grad():
        for _ in range(20):
            expected.append(int(decoder(torch.tensor([list(expected[-16:])]))[0, -1].argmax()))
    assert generate(decoder, text, max_new_tokens=20, temperature=0) == bytes(expected[len(text) :])


def test_model_sees_the_last_bytes_that_fit_its_context(decoder):
    seen = []
    decoder.register_forward_pre_hook(lambda _module, args: seen.append(bytes(args[0][0].tolist())))
    prompt = b"fourteen bytes"
    text = prompt + generate(decoder, prompt, max_new_tokens=5)
    assert seen == [text[max(0, end - 16) : end] for end in range(14, 19)]


def test_one_candidate_leaves_nothing_to_draw(decoder):
    greedy = generate(decoder, b"x", max_new_tokens=20, temperature=0)
    assert generate(decoder, b"x", max_new_tokens=20, temperature=5.0, top_k=1, seed=9) == greedy


def test_top_k_draws_only_among_the_likeliest(decoder):
    with torch.no_grad():
        likeliest = set(decoder(torch.tensor([[120]]))[0, -1].topk(3).indices.tolist())
    drawn = {generate(decoder, b"x", max_new_tokens=1, temperature=50.0, top_k=3, seed=seed)[0] for seed in range(60)}
    assert drawn == likeliest


def test_very_low_temperature_is_greedy_and_not_a_number_error(decoder):
    greedy = generate(decoder, b"x", max_new_tokens=10, temperature=0)
    assert generate(decoder, b"x", max_new_tokens=10, temperature=1e-30) == greedy


def test_trained_decoder_continues_the_text_it_has_learned(decoder):
    text = b"abcdefgh" * 4
    tokens = torch.tensor([list(text[:17])])
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        decoder(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    assert generate(decoder, b"abcdefgha", max_new_tokens=7, temperature=0) == b"bcdefgh"


def test_empty_prompt_and_no_new_bytes_are_fine(decoder):
    assert len(generate(decoder, b"", max_new_tokens=3)) == 3
    assert generate(decoder, b"x", max_new_tokens=0) == b""


def test_training_mode_is_restored(decoder):
    generate(decoder, b"x", max_new_tokens=1)
    assert decoder.training


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1, "temperature": -0.1}, "temperature"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k"),
    ],
)
def test_argument_out_of_range_is_refused(decoder, arguments, reason):
    with pytest.raises(ValueError, match=reason):
        generate(decoder, b"x", **arguments)


def test_model_whose_tokens_are_not_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size of 256"):
        generate(Decoder(preset("nano", vocab_size=300)), b"x", max_new_tokens=1)


# ------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_loaded_model_gives_the_same_logits(tmp_path, tie_embeddings):
    config = preset("nano", num_layers=1, dim=32, hidden_dim=48, num_kv_heads=2, tie_embeddings=tie_embeddings)
    decoder = Decoder(config)
    decoder.init_weights(torch.Generator().manual_seed(3))
    save_model(tmp_path, config, decoder.state_dict())
    loaded = load_model(tmp_path)
    tokens = torch.arange(64)[None]
    assert loaded.config == config
    assert not loaded.training
    assert torch.equal(loaded(tokens), decoder(tokens))
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]


def test_dtype_of_the_file_is_kept(decoder, tmp_path):
    save_model(tmp_path, CONFIG, decoder.bfloat16().state_dict())
    assert {parameter.dtype for parameter in load_model(tmp_path).parameters()} == {torch.bfloat16}


def test_files_are_as_readable_as_any_other_file(directory):
    (directory / "other").touch()
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1


def test_new_model_replaces_the_old_one(decoder, directory):
    with torch.no_grad():
        decoder.norm.weight.fill_(0.5)
    save_model(directory, CONFIG, decoder.state_dict())
    assert torch.equal(load_model(directory).norm.weight, torch.full((32,), 0.5))


def test_failed_write_leaves_the_old_model_and_no_scraps(decoder, directory, monkeypatch):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}

    def full_disk(tensors, path):
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate_module, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_model(directory, CONFIG, decoder.state_dict())
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
        save_model(tmp_path / "model", CONFIG, state)
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
        b'{"model_type": "llama"}',
        b'{"model": {"dim": 0}, "weights_blake2b": ""}',
    ],
)
def test_bad_config_is_refused(directory, content):
    (directory / CONFIG_NAME).write_bytes(content)
    with pytest.raises(ModelCorrupted, match="is not a decoder's config") as caught:
        load_model(directory)
    assert caught.value.path == directory / CONFIG_NAME


def test_config_with_an_impossible_shape_is_refused(directory):
    config = json.loads((directory / CONFIG_NAME).read_text())
    config["model"]["num_heads"] = 5
    (directory / CONFIG_NAME).write_text(json.dumps(config))
    with pytest.raises(ModelCorrupted, match="not a multiple of num_heads 5"):
        load_model(directory)


def rewrite_digest(directory):
    config = json.loads((directory / CONFIG_NAME).read_text())
    config["weights_blake2b"] = generate_module._file_digest(directory / WEIGHTS_NAME)
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
