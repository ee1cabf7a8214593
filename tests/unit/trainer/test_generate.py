# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from isthmus.trainer.model.decoder import Decoder, preset
from isthmus.trainer.model.generate import generate

CONFIG = preset("nano", num_layers=1, dim=32, hidden_dim=48, max_seq_len=16)


@pytest.fixture
def decoder():
    decoder = Decoder(CONFIG)
    decoder.init_weights(torch.Generator().manual_seed(3))
    return decoder


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
    assert generate(decoder, text, max_new_tokens=20, temperature=0) == list(expected[len(text) :])


def test_model_sees_the_last_bytes_that_fit_its_context(decoder):
    seen = []
    decoder.register_forward_pre_hook(lambda _module, args: seen.append(bytes(args[0][0].tolist())))
    prompt = b"fourteen bytes"
    text = prompt + bytes(generate(decoder, prompt, max_new_tokens=5))
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
    assert generate(decoder, b"abcdefgha", max_new_tokens=7, temperature=0) == list(b"bcdefgh")


def test_no_new_tokens_are_fine_and_nothing_cannot_be_continued(decoder):
    assert generate(decoder, b"x", max_new_tokens=0) == []
    with pytest.raises(ValueError, match="no token"):
        generate(decoder, b"", max_new_tokens=3)


def test_an_end_ends_it_and_tokens_without_a_meaning_are_not_drawn(decoder):
    greedy = generate(decoder, b"x", max_new_tokens=10, temperature=0)
    assert generate(decoder, b"x", max_new_tokens=10, temperature=0, end=greedy[0]) == []
    few = generate(decoder, b"x", max_new_tokens=50, temperature=50.0, vocab_size=7)
    assert set(few) <= set(range(7))
    assert len(few) == 50


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
