# SPDX-License-Identifier: Apache-2.0
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from isthmus.trainer.model.decoder import PRESETS, Decoder, ModelConfig, preset
from isthmus.trainer.model.evaluate import evaluate
from isthmus.trainer.model.layers import Attention, FeedForward, RMSNorm, RotaryTable, rotate

SMALL = ModelConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=24, max_seq_len=12)
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 256


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_decoder(config: ModelConfig = SMALL) -> Decoder:
    decoder = Decoder(config)
    decoder.init_weights(seeded())
    return decoder


# ------------------------------------------------------------------------------------------------------- formulas


def test_rms_norm_divides_by_the_root_mean_square():
    x = torch.randn(3, 5, 16, generator=seeded())
    norm = RMSNorm(16, eps=1e-3)
    norm.weight.data = torch.linspace(-1, 2, 16)
    by_hand = torch.stack(
        [row / math.sqrt(sum(value**2 for value in row.tolist()) / 16 + 1e-3) for row in x.reshape(-1, 16)]
    ).reshape(3, 5, 16)
    torch.testing.assert_close(norm(x), by_hand * norm.weight)


def test_rms_norm_of_bfloat16_is_computed_in_fp32():
    x = torch.randn(4, 16, generator=seeded()).bfloat16()
    norm = RMSNorm(16, eps=1e-5)
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


def test_feed_forward_is_swiglu():
    layer = FeedForward(dim=16, hidden_dim=24)
    x = torch.randn(2, 3, 16, generator=seeded())
    gate = x @ layer.gate.weight.T
    by_hand = (gate * torch.sigmoid(gate) * (x @ layer.up.weight.T)) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), by_hand)


def test_rotation_is_multiplication_by_a_unit_complex_number():
    cos, sin = RotaryTable(head_dim=6, max_seq_len=9, theta=100.0).on(torch.device("cpu"))
    x = torch.randn(1, 9, 2, 6, generator=seeded())
    rotated = rotate(x, cos, sin)
    for position in range(9):
        for pair in range(3):
            angle = position * 100.0 ** (-2 * pair / 6)
            value = complex(x[0, position, 1, pair], x[0, position, 1, pair + 3])
            expected = value * complex(math.cos(angle), math.sin(angle))
            got = complex(rotated[0, position, 1, pair], rotated[0, position, 1, pair + 3])
            assert got == pytest.approx(expected, abs=1e-5)


def test_rotated_products_depend_only_on_the_distance_between_positions():
    cos, sin = RotaryTable(head_dim=8, max_seq_len=32, theta=10_000.0).on(torch.device("cpu"))
    query, key = torch.randn(2, 8, generator=seeded())
    queries = rotate(query.expand(1, 32, 1, 8), cos, sin)[0, :, 0]
    keys = rotate(key.expand(1, 32, 1, 8), cos, sin)[0, :, 0]
    scores = queries @ keys.T
    for distance in range(-31, 32):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-5)
    assert scores[0].std() > 0.1


def test_attention_equals_softmax_written_out():
    rotary = RotaryTable(head_dim=8, max_seq_len=7, theta=10_000.0)
    attention = Attention(dim=16, num_heads=2, num_kv_heads=2, head_dim=8, rotary=rotary)
    x = torch.randn(1, 7, 16, generator=seeded())
    cos, sin = rotary.on(x.device)
    q, k = (rotate(p(x).view(1, 7, 2, 8), cos, sin)[0] for p in (attention.query, attention.key))
    v = attention.value(x).view(7, 2, 8)
    mixed = torch.empty(7, 2, 8)
    for head in range(2):
        for position in range(7):
            scores = k[: position + 1, head] @ q[position, head] / math.sqrt(8)
            mixed[position, head] = torch.softmax(scores, 0) @ v[: position + 1, head]
    torch.testing.assert_close(attention(x)[0], attention.output(mixed.reshape(7, 16)))


def test_grouped_heads_equal_repeated_key_and_value_heads():
    grouped = small_decoder()
    config = ModelConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=4, hidden_dim=24, max_seq_len=12)
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith(("key.weight", "value.weight"))]:
        state[name] = state[name].view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    full = Decoder(config)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(TOKENS), full(TOKENS))


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_loss_of_targets_is_mean_cross_entropy_of_the_scores(tie_embeddings):
    decoder = small_decoder(msgspec.structs.replace(SMALL, tie_embeddings=tie_embeddings))
    scores = decoder(TOKENS)
    by_hand = -torch.log_softmax(scores, -1).gather(-1, TOKENS.roll(-1, 1)[..., None]).mean()
    torch.testing.assert_close(decoder(TOKENS, TOKENS.roll(-1, 1)), by_hand)


def test_fresh_decoder_is_as_uncertain_as_a_uniform_guess():
    loss = small_decoder()(TOKENS, TOKENS.roll(-1, 1)).item()
    assert loss == pytest.approx(math.log(256), rel=0.02)


# ------------------------------------------------------------------------------------------------------ behaviour


@pytest.mark.parametrize("changed", [1, 5, 11])
def test_later_token_never_changes_earlier_logits(changed):
    decoder = small_decoder()
    before = decoder(TOKENS)
    tokens = TOKENS.clone()
    tokens[:, changed] = (tokens[:, changed] + 1) % 256
    after = decoder(tokens)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed:], after[:, changed:])


def test_too_long_sequence_is_refused():
    with pytest.raises(ValueError, match="13 tokens, but max_seq_len is 12"):
        small_decoder()(torch.zeros(1, 13, dtype=torch.int64))


def test_tied_head_is_the_embedding_itself():
    decoder = small_decoder()
    names = [name for name, _ in decoder.named_parameters()]
    assert names == list(decoder.state_dict())
    assert "head.weight" not in names
    hidden = []
    decoder.norm.register_forward_hook(lambda _module, _args, output: hidden.append(output))
    logits = decoder(TOKENS)
    torch.testing.assert_close(logits, hidden[0] @ decoder.embedding.weight.T)


def test_untied_head_has_its_own_weight():
    untied = preset("nano", tie_embeddings=False)
    assert untied.num_parameters() - preset("nano").num_parameters() == 256 * 128
    assert untied.named_shapes()[-1] == ("head.weight", (256, 128))
    decoder = Decoder(untied)
    decoder.embedding.weight.data.zero_()
    decoder.norm.weight.data.fill_(1.0)
    assert decoder(TOKENS).abs().max() == 0
    decoder.init_weights(seeded())
    assert not torch.equal(decoder.embedding.weight, decoder.head.weight)


def test_meta_decoder_initialised_later_equals_one_built_directly():
    direct = small_decoder()
    with torch.device("meta"):
        later = Decoder(SMALL)
    assert all(parameter.is_meta for parameter in later.parameters())
    later = later.to_empty(device="cpu")
    later.init_weights(seeded())
    for (name, expected), (other_name, got) in zip(direct.named_parameters(), later.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(expected, got)
    assert torch.equal(direct(TOKENS), later(TOKENS))


def test_forward_on_meta_device_does_not_spoil_the_rotary_table():
    expected = small_decoder()(TOKENS)
    with torch.device("meta"):
        decoder = Decoder(SMALL)
    assert decoder(TOKENS.to("meta")).is_meta
    decoder.to_empty(device="cpu").init_weights(seeded())
    assert torch.equal(decoder(TOKENS), expected)


def test_rotary_table_is_no_state_and_survives_a_cast():
    decoder = small_decoder()
    decoder.init_buffers(torch.device("cpu"))
    assert not list(decoder.buffers())
    exact = [table.clone() for table in decoder.rotary.on(torch.device("cpu"))]
    decoder.bfloat16()
    assert decoder(TOKENS).dtype == torch.bfloat16
    cast = decoder.rotary.on(torch.device("cpu"))
    assert all(torch.equal(before, after) for before, after in zip(exact, cast, strict=True))


def test_table_built_in_inference_mode_can_be_trained_with():
    decoder = small_decoder()
    with torch.inference_mode():
        decoder(TOKENS)
    decoder(TOKENS, TOKENS).backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_activation_checkpointing_gives_the_same_gradients():
    plain, recomputed = small_decoder(), small_decoder()
    for block in recomputed.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    for decoder in (plain, recomputed):
        decoder(TOKENS, TOKENS).backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_sharded_decoder_trains_and_evaluates_like_a_plain_one(tmp_path: Path, tie_embeddings):
    config = preset("nano", num_layers=2, dim=32, hidden_dim=40, tie_embeddings=tie_embeddings)
    plain = small_decoder(config)
    with torch.device("meta"):
        sharded = Decoder(config)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        sharded.to_empty(device="cpu")
        with torch.no_grad():
            for parameter, values in zip(sharded.parameters(), plain.parameters(), strict=True):
                parameter.to_local().copy_(values)
        batches = [(TOKENS[:, :-1], TOKENS[:, 1:])]
        assert evaluate(sharded, batches) == evaluate(plain, batches)
        for decoder in (plain, sharded):
            decoder(TOKENS, TOKENS).backward()
        for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad.to_local())
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------- parameters and their order


def test_canonical_order_is_the_order_of_the_state():
    decoder = small_decoder()
    assert SMALL.named_shapes() == [(name, tuple(value.shape)) for name, value in decoder.state_dict().items()]
    assert [name for name, _ in SMALL.named_shapes()][:3] == [
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention.query.weight",
    ]


def test_initial_parameters_are_the_initialised_decoder_laid_flat():
    decoder = Decoder(SMALL)
    decoder.init_weights(seeded(5))
    flat = SMALL.initial_parameters(5)
    assert flat.dtype == torch.float32
    assert torch.equal(flat, torch.cat([parameter.flatten() for parameter in decoder.parameters()]))
    assert torch.equal(flat, SMALL.initial_parameters(5))
    assert not torch.equal(flat, SMALL.initial_parameters(6))


def test_initial_parameters_leave_the_global_random_state_alone():
    before = torch.get_rng_state()
    SMALL.initial_parameters(0)
    assert torch.equal(before, torch.get_rng_state())


def test_initial_spread_is_smaller_where_a_layer_writes_into_the_residual_stream():
    config = preset("nano", num_layers=8)
    decoder = Decoder(config)
    decoder.init_weights(seeded())
    block = decoder.blocks[3]
    assert block.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert block.feed_forward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert torch.equal(block.attention_norm.weight, torch.ones(128))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny", 1.0e6),
        ("nano", 0.82e6),
        ("10m", 10.7e6),
        ("50m", 50e6),
        ("150m", 154e6),
        ("500m", 504e6),
        ("1b", 974e6),
    ],
)
def test_preset_has_the_parameters_its_name_says(name, expected):
    config = preset(name)
    attention = config.dim * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    per_layer = attention + 3 * config.dim * config.hidden_dim + 2 * config.dim
    assert config.num_parameters() == 256 * config.dim + config.num_layers * per_layer + config.dim
    assert config.num_parameters() == pytest.approx(expected, rel=0.02)


def test_every_preset_is_counted():
    assert set(PRESETS) == {"tiny", "nano", "10m", "50m", "150m", "500m", "1b"}


def test_flops_are_six_per_matmul_weight_and_the_square_of_attention():
    tied, untied = preset("nano"), preset("nano", tie_embeddings=False)
    assert tied.num_flops_per_token(64) == 6 * tied.num_parameters() + 12 * 4 * 128 * 64
    assert untied.num_flops_per_token(64) == tied.num_flops_per_token(64)


def test_backward_takes_the_flops_that_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    decoder = small_decoder()

    def of_product_in_place(_total, one, other, **_more):
        return 2 * one[0] * one[1] * other[1]  # the head's gradient is summed up so; torch does not count that

    in_place = {torch.ops.aten.addmm_: of_product_in_place}
    counting = FlopCounterMode(display=False, custom_mapping=in_place)
    with counting as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        decoder(TOKENS, TOKENS).backward()
    num_norm_weights = sum(math.prod(shape) for name, shape in SMALL.named_shapes() if "norm" in name)
    expected = SMALL.num_flops_per_token(seq_len=12) - 6 * num_norm_weights
    assert counter.get_total_flops() / TOKENS.numel() == pytest.approx(expected, rel=1e-6)


# ----------------------------------------------------------------------------------------------------- configuration


def test_unknown_preset_names_the_closest_one():
    with pytest.raises(ValueError, match="did you mean '150m'"):
        preset("15m0")


def test_unknown_field_names_the_closest_one():
    with pytest.raises(ValueError, match="did you mean 'num_layers'"):
        preset("tiny", num_layer=3)


def test_override_replaces_one_field_only():
    config = preset("tiny", max_seq_len=512)
    assert config.max_seq_len == 512
    assert preset("tiny", max_seq_len=128) == PRESETS["tiny"]
    assert config.dim == PRESETS["tiny"].dim


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1"),
        ({"dim": 128.5}, "dim must be a whole number"),
        ({"dim": 130}, "dim 130 is not a multiple of num_heads 4"),
        ({"dim": 12}, "rotary positions need an even number"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"rope_theta": 0.0}, "rope_theta must be positive"),
        ({"norm_eps": float("nan")}, "norm_eps must be positive"),
    ],
)
def test_impossible_shape_is_refused(overrides, reason):
    with pytest.raises(ValueError, match=reason):
        preset("tiny", **overrides)


def test_gradient_reaches_every_parameter_and_matches_a_finite_difference():
    config = ModelConfig(dim=8, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=8, max_seq_len=6)
    decoder = small_decoder(config)
    tokens = TOKENS[:, :6]
    decoder(tokens, tokens.roll(-1, 1)).backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    weight, step = decoder.blocks[0].feed_forward.up.weight, 0.05
    at = divmod(int(weight.grad.abs().argmax()), 8)
    with torch.no_grad():
        losses = []
        for sign in (1, -1):
            weight[at] += sign * step
            losses.append(float(F.cross_entropy(decoder(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())))
            weight[at] -= sign * step
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(weight.grad[at]), rel=0.05)


def test_a_peer_knows_its_shapes_without_torchs_compiler() -> None:
    code = "import sys; from isthmus.trainer.model.decoder import *; ModelConfig(**CONFIG).named_shapes()"
    code = code.replace("CONFIG", repr(msgspec.structs.asdict(SMALL))) + "; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_with_a_documents_end_nothing_depends_on_another_document_and_within_one_all_is_as_alone():
    end = 5
    masked, alone = small_decoder(msgspec.structs.replace(SMALL, document_end=end)), small_decoder()
    first, second = [9, 1, 7, end], [2, 8, 8, 3]
    whole = torch.tensor([[*first, *second]])
    other = torch.tensor([[6, 6, 6, end, *second]])
    logits, changed = masked(whole), masked(other)
    assert torch.equal(logits[:, 4:], changed[:, 4:])
    assert not torch.equal(logits[:, :4], changed[:, :4])
    torch.testing.assert_close(logits[:, :4], alone(torch.tensor([first])))
    torch.testing.assert_close(logits[:, 4:], alone(torch.tensor([second])))
    torch.testing.assert_close(masked(torch.tensor([second])), alone(torch.tensor([second])))
