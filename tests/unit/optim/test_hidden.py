# SPDX-License-Identifier: Apache-2.0
"""Which matrices are hidden, in models that are laid out and named as well-known ones are."""

import pytest
import torch
from torch import nn

from isthmus.optim.hidden import hidden_matrices
from isthmus.optim.inner import build_inner_optimizer
from isthmus.trainer.model.decoder import Decoder, ModelConfig


def _bag(**modules):
    """A module of these parts, in this order."""
    bag = nn.Module()
    for name, module in modules.items():
        bag.add_module(name, module)
    return bag


def _linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Conv1D(nn.Module):
    """A linear layer as in Hugging Face's GPT-2: the weight is transposed."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


def _llama_block(dim):
    return _bag(
        input_layernorm=nn.RMSNorm(dim),
        self_attn=_bag(q_proj=_linear(dim, dim), k_proj=_linear(dim, dim // 2), o_proj=_linear(dim, dim)),
        mlp=_bag(gate_proj=_linear(dim, 3 * dim), down_proj=_linear(3 * dim, dim)),
    )


LLAMA_HIDDEN = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"}


def _llama(dim=8, vocab=20, *, is_tied=False):
    model = _bag(
        model=_bag(
            embed_tokens=nn.Embedding(vocab, dim),
            layers=nn.ModuleList(_llama_block(dim) for _ in range(2)),
            norm=nn.RMSNorm(dim),
        ),
        lm_head=_linear(dim, vocab),
    )
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _expected(prefix, parts, layers=2):
    return {f"{prefix}.{layer}.{part}.weight" for layer in range(layers) for part in parts}


# Also where tables have as many rows as layers are wide, which says nothing about the layers.
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("vocab", [20, 8, 4, 24])
def test_llama(vocab, is_tied):
    model = _llama(vocab=vocab, is_tied=is_tied)
    assert hidden_matrices(model) == _expected("model.layers", LLAMA_HIDDEN)


@pytest.mark.parametrize("positions", [16, 8])
@pytest.mark.parametrize("has_head", [True, False])
def test_gpt2(positions, has_head):
    dim, vocab = 8, 30

    def block():
        return _bag(
            ln_1=nn.LayerNorm(dim),
            attn=_bag(c_attn=Conv1D(3 * dim, dim), c_proj=Conv1D(dim, dim)),
            mlp=_bag(c_fc=Conv1D(4 * dim, dim), c_proj=Conv1D(dim, 4 * dim)),
        )

    tables = {"wte": nn.Embedding(vocab, dim), "wpe": nn.Embedding(positions, dim)}
    model = _bag(transformer=_bag(**tables, h=nn.ModuleList(block() for _ in range(2)), ln_f=nn.LayerNorm(dim)))
    if has_head:
        model.lm_head = _linear(dim, vocab)
        model.lm_head.weight = tables["wte"].weight
    parts = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert hidden_matrices(model) == _expected("transformer.h", parts)


def test_gpt_neox():
    dim, vocab = 8, 30

    def layer():
        return _bag(
            attention=_bag(query_key_value=nn.Linear(dim, 3 * dim), dense=nn.Linear(dim, dim)),
            mlp=_bag(dense_h_to_4h=nn.Linear(dim, 4 * dim), dense_4h_to_h=nn.Linear(4 * dim, dim)),
        )

    layers = nn.ModuleList(layer() for _ in range(2))
    model = _bag(gpt_neox=_bag(embed_in=nn.Embedding(vocab, dim), layers=layers), embed_out=_linear(dim, vocab))
    parts = {"attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}
    assert hidden_matrices(model) == _expected("gpt_neox.layers", parts)


def test_bloom_whose_head_is_tied():
    layers = nn.ModuleList(_bag(dense=nn.Linear(8, 8)) for _ in range(2))
    model = _bag(transformer=_bag(word_embeddings=nn.Embedding(30, 8), h=layers), lm_head=_linear(8, 30))
    model.lm_head.weight = model.transformer.word_embeddings.weight
    assert hidden_matrices(model) == {"transformer.h.0.dense.weight", "transformer.h.1.dense.weight"}


def test_torchtitan_whose_layers_are_in_a_dict_and_have_an_output_of_their_own():
    def block():
        return _bag(attention=_bag(wq=_linear(8, 8), output=_linear(8, 8)), feed_forward=_bag(w2=_linear(24, 8)))

    layers = nn.ModuleDict({str(number): block() for number in range(2)})
    model = _bag(tok_embeddings=nn.Embedding(30, 8), layers=layers, norm=nn.RMSNorm(8), output=_linear(8, 30))
    assert hidden_matrices(model) == _expected("layers", {"attention.wq", "attention.output", "feed_forward.w2"})


@pytest.mark.parametrize("width", [8, 5])
def test_an_output_layer_may_be_narrower_than_the_table_or_come_first(width):
    model = _bag(output=_linear(width, 30), table=nn.Embedding(30, 8), layers=nn.Sequential(_linear(8, 24)))
    assert hidden_matrices(model) == {"layers.0.weight"}


def test_several_heads_are_all_outputs():
    heads = nn.ModuleList(_linear(8, 30) for _ in range(3))
    model = _bag(table=nn.Embedding(30, 8), body=_linear(8, 8), heads=heads)
    assert hidden_matrices(model) == {"body.weight"}


def test_a_weight_that_is_tied_the_other_way_round_is_a_table_all_the_same():
    model = _bag(head=_linear(8, 30), body=_linear(8, 8), table=nn.Embedding(30, 8))
    model.table.weight = model.head.weight
    assert hidden_matrices(model) == {"body.weight"}
    optimizer = build_inner_optimizer(model, type="muon", lr=0.1)
    assert [group["param_names"] for group in optimizer.param_groups] == [["body.weight"], ["head.weight"]]


def test_without_tables_all_linear_layers_are_hidden_and_other_matrices_are_not():
    model = nn.Sequential(nn.Linear(8, 4), nn.Conv2d(1, 1, 3), nn.Bilinear(4, 4, 2), nn.Linear(2, 2))
    model.positions = nn.Parameter(torch.zeros(16, 8))
    assert hidden_matrices(model) == {"0.weight", "3.weight"}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("shape", [{"dim": 16}, {"dim": 8, "vocab_size": 8}, {"dim": 16, "vocab_size": 8}])
def test_our_own_decoder(shape, is_tied):
    config = ModelConfig(
        num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=12, max_seq_len=8, tie_embeddings=is_tied, **shape
    )
    parts = {"attention.query", "attention.key", "attention.value", "attention.output"}
    parts |= {"feed_forward.gate", "feed_forward.up", "feed_forward.down"}
    assert hidden_matrices(Decoder(config)) == _expected("blocks", parts)
