# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from isthmus.trainer.data.samples import validation_batches
from isthmus.trainer.model.decoder import Decoder, preset
from isthmus.trainer.model.evaluate import evaluate

CONFIG = preset("nano", num_layers=1, dim=16, num_heads=2, num_kv_heads=2, hidden_dim=16)
TOKENS = (torch.arange(700) ** 2 % 251).to(torch.uint8).numpy()


@pytest.fixture
def decoder():
    decoder = Decoder(CONFIG)
    decoder.init_weights(torch.Generator().manual_seed(3))
    return decoder


def test_loss_is_the_mean_over_tokens_even_if_the_last_batch_is_smaller(decoder):
    batches = validation_batches(TOKENS, 64, 4, 100)
    assert [len(inputs) for inputs, _ in batches] == [4, 4, 2]
    inputs = torch.cat([inputs for inputs, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    with torch.no_grad():
        expected = float(decoder(inputs, targets))
    assert evaluate(decoder, batches) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_restored(decoder, training):
    decoder.train(training)
    modes = []
    decoder.register_forward_pre_hook(lambda module, _args: modes.append(module.training))
    evaluate(decoder, validation_batches(TOKENS, 64, 4, 2))
    assert modes == [False, False]
    assert decoder.training is training
    assert decoder.blocks[0].training is training


def test_training_mode_is_restored_when_the_forward_fails(decoder):
    too_long = torch.zeros(1, 65, dtype=torch.int64)
    with pytest.raises(ValueError, match="max_seq_len"):
        evaluate(decoder, [(too_long, too_long)])
    assert decoder.training


def test_no_gradient_is_kept(decoder):
    evaluate(decoder, validation_batches(TOKENS, 64, 4, 1))
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_evaluation_without_a_batch_is_refused(decoder):
    with pytest.raises(ValueError, match="at least one batch"):
        evaluate(decoder, [])
