# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/bench_convergence.py against plain versions of what they do."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from isthmus.collective.codec import NotFinite, codec_named
from isthmus.optim import GRAD, PARAM, FragmentKey, FragmentTable, Op, Round, build_inner_optimizer, outer_types
from isthmus.optim.schedule import cosine
from isthmus.trainer.model.decoder import Decoder, ModelConfig
from scripts import bench_convergence
from scripts.convergence import defaults
from scripts.convergence.cases import CASES, RUNS_PER_SWEEP, Case, Tuned
from scripts.convergence.cell import Cell, fit, run_cell
from scripts.convergence.claims import Claim
from scripts.convergence.codec_wire import CodecWire, formula_nbytes
from scripts.convergence.fleet import EXP_AVG, EXP_AVG_SQ, Architecture, Fleet, InnerSettings
from scripts.convergence.report import judge, summarise
from scripts.convergence.text import Reader, installed_texts, load_text
from scripts.convergence.trial import Budget, run_trial, start

CONFIG = ModelConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=2, hidden_dim=24, max_seq_len=8, vocab_size=32)
BUDGET = Budget(
    start_steps=6,
    num_steps=30,
    warmup_steps=3,
    batch_size=1,
    dim=16,
    num_layers=2,
    num_heads=2,
    hidden_dim=16,
    length=16,
    held_out_samples=8,
    curve_points=2,
    curve_samples=4,
)
SHORT = dataclasses.replace(BUDGET, num_steps=16, warmup_steps=1, start_steps=3)
"""Where it does not matter what comes of a run; long enough for a round of each."""
TABLE = {case.name: case for case in CASES}


def random_tokens(*shape, seed=0):
    return torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def random_rows(rows, dtype=torch.float32, seed=0):
    """Parameters of several workers that have nothing in common but their size."""
    start = CONFIG.initial_parameters(seed=0).to(dtype)
    noise = torch.randn(rows, start.numel(), generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return start + 0.1 * noise


# --------------------------------------------------------------------------------------------------------- the model


class PlainDecoder(nn.Module):
    """One worker's decoder, written again from the formulas, in any precision."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        dim, hidden = config.dim, config.hidden_dim
        self.embedding = nn.Embedding(config.vocab_size, dim)
        self.blocks = nn.ModuleList()
        for _ in range(config.num_layers):
            block = nn.Module()
            block.attention_norm = nn.RMSNorm(dim, eps=config.norm_eps)
            block.attention = nn.ModuleDict({n: nn.Linear(dim, dim, bias=False) for n in ("query", "key", "value")})
            block.attention["output"] = nn.Linear(dim, dim, bias=False)
            block.feed_forward_norm = nn.RMSNorm(dim, eps=config.norm_eps)
            gates = {"gate": nn.Linear(dim, hidden, bias=False), "up": nn.Linear(dim, hidden, bias=False)}
            block.feed_forward = nn.ModuleDict({**gates, "down": nn.Linear(hidden, dim, bias=False)})
            self.blocks.append(block)
        self.norm = nn.RMSNorm(dim, eps=config.norm_eps)

    def load_flat(self, flat):
        nn.utils.vector_to_parameters(flat, self.parameters())
        return self

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + self.attend(block.attention, block.attention_norm(x))
            inside, y = block.feed_forward, block.feed_forward_norm(x)
            x = x + inside["down"](F.silu(inside["gate"](y)) * inside["up"](y))
        return self.norm(x) @ self.embedding.weight.T

    def attend(self, layers, x):
        head_dim, length = self.config.head_dim, x.shape[1]
        future = torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)
        mixed = []
        for head in range(self.config.num_heads):
            part = slice(head * head_dim, (head + 1) * head_dim)
            query, key = (self.turn(layers[name](x)[..., part]) for name in ("query", "key"))
            scores = query @ key.transpose(1, 2) / math.sqrt(head_dim) + future
            mixed.append(scores.softmax(-1) @ layers["value"](x)[..., part])
        return layers["output"](torch.cat(mixed, -1))

    def turn(self, x):
        half = self.config.head_dim // 2
        rates = [self.config.rope_theta ** (-pair / half) for pair in range(half)]
        angles = torch.outer(torch.arange(x.shape[1]).double(), torch.tensor(rates).double())
        cos, sin = angles.cos().float().to(x.dtype), angles.sin().float().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    def loss(self, tokens):
        return token_loss_as(self(tokens[:, :-1]), tokens[:, 1:])


def token_loss_as(logits, targets):
    return -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()


def test_gradients_of_a_fleet_are_those_of_each_workers_plain_module_in_double_precision():
    architecture, tokens = Architecture(CONFIG), random_tokens(3, 2, 9)
    flat = random_rows(3, torch.float64).requires_grad_()
    losses = architecture.losses(architecture.weights(flat), tokens)
    (grads,) = torch.autograd.grad(losses.sum(), flat)
    for row in range(3):
        plain = PlainDecoder(CONFIG).double().load_flat(flat[row].detach())
        loss = plain.loss(tokens[row])
        loss.backward()
        torch.testing.assert_close(losses[row], loss, rtol=1e-9, atol=0)  # the tables of angles are in fp32
        expected = nn.utils.parameters_to_vector([parameter.grad for parameter in plain.parameters()])
        torch.testing.assert_close(grads[row], expected, rtol=1e-7, atol=1e-9)


def test_a_row_of_the_fleet_is_the_trainers_own_decoder():
    flat, tokens = random_rows(2), random_tokens(2, 2, 9)
    fleet = a_fleet(2, tokens)
    fleet.tensors[PARAM].copy_(flat)
    fleet.backward([0, 1], [1, 1])
    for row in range(2):
        decoder = Decoder(CONFIG)
        nn.utils.vector_to_parameters(flat[row].clone(), decoder.parameters())
        decoder(tokens[row, :, :-1], tokens[row, :, 1:]).backward()
        expected = nn.utils.parameters_to_vector([parameter.grad for parameter in decoder.parameters()])
        torch.testing.assert_close(fleet.tensors[GRAD][row], expected, rtol=1e-4, atol=1e-6)


def a_fleet(rows, tokens, **inner):
    """Whose workers are named by their rows, and read the same in every step."""
    settings = InnerSettings(total_steps=20, **inner)
    fleet = Fleet(
        Architecture(CONFIG), rows=rows, inner=settings, batches=lambda workers, _: tokens[[int(w) for w in workers]]
    )
    for row in range(rows):
        fleet.begin(row, str(row))
    return fleet


def test_only_the_rows_that_are_asked_for_are_computed_and_it_matters_not_which_lie_together():
    flat, tokens = random_rows(4), random_tokens(4, 1, 9)
    whole, part = a_fleet(4, tokens), a_fleet(4, tokens)
    for fleet in (whole, part):
        fleet.tensors[PARAM].copy_(flat)
    whole.backward([0, 1, 2, 3], [1] * 4)
    part.tensors[GRAD].fill_(7.0)
    part.backward([0, 3], [1, 1])
    torch.testing.assert_close(part.tensors[GRAD][[0, 3]], whole.tensors[GRAD][[0, 3]], rtol=1e-4, atol=1e-6)
    assert (part.tensors[GRAD][[1, 2]] == 7.0).all()
    part.backward([1, 2], [1, 1])
    torch.testing.assert_close(part.tensors[GRAD], whole.tensors[GRAD], rtol=1e-4, atol=1e-6)
    assert part.num_tokens == whole.num_tokens == 4 * 8


# --------------------------------------------------------------------------------------------------- inner optimizers

INNERS = {
    "adamw": ({"betas": (0.9, 0.95)}, {"betas": (0.9, 0.95)}),
    "adopt": ({"betas": (0.95, 0.99), "omega": 0.7}, {"betas": (0.95, 0.99), "omegas": (0.7,)}),
    "sgd": ({"weight_decay": 0.0}, {"weight_decay": 0.0}),
}


@pytest.mark.parametrize("kind", INNERS)
def test_a_row_follows_the_ordinary_optimizer_of_that_name_with_schedule_and_clipping(kind):
    ours, theirs = INNERS[kind]
    flat, tokens = random_rows(2), random_tokens(2, 1, 9)
    fleet = a_fleet(2, tokens, type=kind, lr=0.02, clip=0.5, warmup_steps=3, **ours)
    fleet.tensors[PARAM].copy_(flat)
    decoder = Decoder(CONFIG)
    nn.utils.vector_to_parameters(flat[1].clone(), decoder.parameters())
    optimizer = build_inner_optimizer(decoder.named_parameters(), type=kind, lr=0.02, **theirs)
    schedule = cosine(total_steps=20, warmup_steps=3, min_ratio=0.1)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * schedule(step)
        fleet.backward([0, 1], [step + 1] * 2)
        # The same gradient for both, or small differences of sign would grow: the formula is under test.
        for parameter, grad in zip(decoder.parameters(), split_like(fleet.tensors[GRAD][1], decoder), strict=True):
            parameter.grad = grad.clone()
        nn.utils.clip_grad_norm_(decoder.parameters(), 0.5)
        optimizer.step()
        fleet.update([0, 1], [step + 1] * 2)
        expected = nn.utils.parameters_to_vector(decoder.parameters()).detach()
        torch.testing.assert_close(fleet.tensors[PARAM][1], expected, rtol=1e-5, atol=1e-6)
    if kind != "sgd":
        for name in (EXP_AVG, EXP_AVG_SQ):
            states = [optimizer.state[parameter][name] for parameter in decoder.parameters()]
            torch.testing.assert_close(
                fleet.tensors[name][1], nn.utils.parameters_to_vector(states), rtol=1e-4, atol=1e-6
            )


def split_like(flat, module):
    sizes = [parameter.numel() for parameter in module.parameters()]
    return [part.view_as(p) for part, p in zip(flat.split(sizes), module.parameters(), strict=True)]


def test_who_takes_a_row_begins_with_fresh_states_and_warms_up():
    fleet = a_fleet(1, random_tokens(1, 1, 9), warmup_steps=3, clip=None, weight_decay=0.0)
    for step in range(1, 9):
        fleet.tensors[PARAM][0] = before = random_rows(1)[0]
        fleet.backward([0], [step])
        fleet.update([0], [step])
    fleet.begin(0, "0")
    assert not fleet.tensors[EXP_AVG].any()
    fleet.tensors[PARAM][0] = before
    fleet.backward([0], [1])
    fleet.update([0], [1])
    # Adam's first step has the size of the learning rate: a quarter of the peak, though the run is long warm.
    assert (fleet.tensors[PARAM][0] - before).abs().max().item() == pytest.approx(3e-3 / 4, rel=1e-2)


# ----------------------------------------------------------------------------------------------------------- the wire

NUMEL = 3 * 4096 + 1001
FRAGMENT = FragmentTable.from_named_shapes([("w", (NUMEL,))]).whole()


def a_round(op, codec=None, num_notes=0):
    return Round(fragment=FragmentKey(kind=PARAM, index=0), op=op, inner_step=3, codec=codec, num_notes=num_notes)


def payloads(count):
    generator = torch.Generator().manual_seed(0)
    return {f"peer{index}": torch.randn(NUMEL, generator=generator) for index in range(count)}


def exchange(op, codec, count=3, weights=None, **settings):
    given = payloads(count)
    weights = weights or dict.fromkeys(given, 1.0)
    return given, CodecWire().exchange(a_round(op, codec, **settings), FRAGMENT, given, weights)


@pytest.mark.parametrize(
    ("codec", "nbytes"),
    [
        ("raw", 4 * NUMEL),
        ("bf16", 2 * NUMEL),
        ("int8", NUMEL + 4 * 52),
        ("e3m0", 6645 + 4 * 52),  # 52 scales of blocks begun, 4 bits an element
        ("twobit", 3323 + 4 * 52),
        ("topk:64", 8 * 4 + 52 + 312),  # 208 of 13289 are kept: 2 bits and 12 bits each, 4 pairs of levels
    ],
)
def test_bytes_of_a_payload_are_those_of_the_document(codec, nbytes):
    assert formula_nbytes(codec, NUMEL) == nbytes
    assert codec_named(codec).wire_nbytes(NUMEL) == nbytes
    for op in (Op.MEAN, Op.GATHER, Op.PAIR):
        if op is Op.MEAN and codec.startswith("topk"):
            continue  # cut into slices, each of which rounds up what it keeps
        _, delivery = exchange(op, codec)
        assert delivery.payload_nbytes == nbytes
        sent = {Op.MEAN: 2 * nbytes * 2 / 3, Op.GATHER: 2 * nbytes, Op.PAIR: nbytes * 2 / 3}[op]
        assert delivery.sent_nbytes == pytest.approx(sent)


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 4095, 4096, 4097, 8191, 139_712])
@pytest.mark.parametrize("codec", ["raw", "bf16", "int8", "e3m0", "twobit", "topk:64", "topk:1", "topk:33"])
def test_the_formula_knows_every_length(codec, numel):
    assert formula_nbytes(codec, numel) == codec_named(codec).wire_nbytes(numel)


def test_the_wire_refuses_to_count_what_the_formula_does_not_say(monkeypatch):
    monkeypatch.setattr("scripts.convergence.codec_wire.formula_nbytes", lambda codec, numel: 4 * numel - 1)
    with pytest.raises(RuntimeError, match="the formula says"):
        exchange(Op.GATHER, "raw")


def test_without_a_lossy_codec_a_mean_is_the_weighted_mean():
    weights = {"peer0": 1.0, "peer1": 3.0, "peer2": 0.5}
    given, delivery = exchange(Op.MEAN, "raw", weights=weights)
    exact = sum(given[name].double() * weight for name, weight in weights.items()) / 4.5
    torch.testing.assert_close(delivery.values["peer1"].double(), exact, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(delivery.delivered[name], given[name]) for name in given)


def test_a_mean_quantises_parts_on_their_way_and_the_result_once():
    weights = {"peer0": 1.0, "peer1": 3.0, "peer2": 0.5}
    given, delivery = exchange(Op.MEAN, "int8", weights=weights)
    # The slices of three members: blocks of 256 are dealt out evenly.
    for root, span in enumerate([slice(0, 17 * 256), slice(17 * 256, 35 * 256), slice(35 * 256, NUMEL)]):
        total = torch.zeros(span.stop - span.start)
        for index, (name, weight) in enumerate(weights.items()):
            part = given[name][span]
            arrives = part if index == root else round_trip("int8", part)
            torch.testing.assert_close(delivery.delivered[name][span], arrives, rtol=0, atol=0)
            total += weight * arrives
        torch.testing.assert_close(
            delivery.values["peer0"][span], round_trip("int8", total / 4.5), rtol=1e-6, atol=2e-2
        )
        # What everybody holds is what the codec can say: encoding it again changes nothing.
        held = delivery.values["peer0"][span]
        torch.testing.assert_close(round_trip("int8", held), held, rtol=1e-5, atol=1e-7)


def round_trip(codec, values):
    codec, out = codec_named(codec), torch.empty_like(values)
    codec.decode(codec.encode(values.clone(), torch.empty(codec.wire_nbytes(len(values)), dtype=torch.uint8)), out)
    return out


@pytest.mark.parametrize("codec", ["int8", "topk:64"])
def test_gathered_payloads_are_their_wire_forms_for_their_senders_too(codec):
    given, delivery = exchange(Op.GATHER, codec)
    for row, (name, payload) in zip(delivery.values["peer0"], given.items(), strict=True):
        assert torch.equal(row, round_trip(codec, payload))
        assert torch.equal(delivery.delivered[name], row)


def test_a_pair_gets_each_others_wire_form():
    given, delivery = exchange(Op.PAIR, "int8", count=4)
    assert len(delivery.partners) == 4
    for name, partner in delivery.partners.items():
        assert torch.equal(delivery.values[name], round_trip("int8", given[partner]))


def test_notes_cost_eight_bytes_to_each_of_the_others():
    _, without = exchange(Op.MEAN, "int8")
    _, noted = exchange(Op.MEAN, "int8", num_notes=2)
    assert noted.payload_nbytes - without.payload_nbytes == 16
    assert noted.sent_nbytes - without.sent_nbytes == 32


def test_a_payload_that_is_not_finite_ends_the_run():
    given = payloads(2)
    given["peer1"][5] = math.nan
    for codec in ("raw", "int8"):
        with pytest.raises(NotFinite):
            CodecWire(codec).exchange(a_round(Op.MEAN), FRAGMENT, given, dict.fromkeys(given, 1.0))


# ------------------------------------------------------------------------------------------------- text and whole runs


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(" ".join(f"{number} squared is {number * number}." for number in range(2000)))
    return load_text(path, length=BUDGET.length)


def test_what_a_worker_reads_depends_on_its_name_the_step_and_the_seed_alone(text):
    settings = {"num_steps": 9, "batch_size": 2, "length": 16}
    reader, again = Reader(text, seed=1, **settings), Reader(text, seed=1, **settings)
    both = reader(["ash", "birch"], 3)
    assert both.shape == (2, 2, 17)
    assert torch.equal(again(["birch"], 3)[0], both[1])
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(both[0], reader(["ash"], 4)[0])
    assert not torch.equal(both[0], Reader(text, seed=2, **settings)(["ash"], 3)[0])


def test_without_a_file_the_text_is_pythons_own():
    text = load_text(length=64)
    assert len(text.train) > 500_000
    assert "standard library" in text.description
    samples = text.held_out_samples(50, length=64)
    assert samples.shape == (50, 65)
    assert len({bytes(row.tolist()) for row in samples}) == 50


def train(name, text, tuned=None, budget=BUDGET):
    case = TABLE[name] if isinstance(name, str) else name
    tuned = tuned or TABLE[case.base or case.name].sweep[0]
    return run_trial(case, tuned, num_workers=4 if case.churns or case.speeds else 2, seed=0, budget=budget, text=text)


def test_a_run_says_what_it_cost_in_bytes_of_the_formula(text):
    run = train("diloco int8", text)
    numel = Architecture(BUDGET.model).table.numel
    assert run["rounds"] == 2
    assert run["tokens"] == 2 * 30 * 16
    # Both rounds, one payload for each 15 steps of 16 tokens; two members send half of it twice.
    assert run["payload_nbytes_per_token"] == pytest.approx(formula_nbytes("int8", numel) / 15 / 16)
    assert run["sent_nbytes_per_token"] == pytest.approx(run["payload_nbytes_per_token"])
    assert [step for step, _ in run["curve"]] == [0, 15, 30]


def test_a_run_is_the_same_when_it_is_run_again(text):
    first, again = (train("streaming e3m0", text) for _ in range(2))
    assert first["loss"] == again["loss"]
    assert first["curve"] == again["curve"]


def test_a_data_parallel_step_of_sgd_is_diloco_that_averages_every_step(text):
    inner = {"type": "sgd", "clip": None, "weight_decay": 0.0}
    tuned = Tuned(inner_lr=0.1)
    one = train(Case(name="a", type="data_parallel", inner=inner), text, tuned)
    diloco = {"inner_steps": 1, "lr": 1.0, "momentum": 0.0}
    other = train(Case(name="b", type="diloco", inner=inner, settings=diloco), text, tuned)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert one["loss"] < one["curve"][0][1]


def test_who_is_slow_or_away_does_not_lessen_the_tokens(text):
    budget = dataclasses.replace(BUDGET, num_steps=120, num_layers=1, start_steps=0)
    calm, async_, churn = (train(name, text, budget=budget) for name in ("diloco", "async", "diloco churn"))
    for run in (async_, churn):
        assert run["steps"] > calm["steps"]
        assert run["tokens"] < run["steps"] * run["workers"] * 16
        # As near as whole rounds of a short run allow.
        assert run["tokens"] == pytest.approx(run["workers"] * 120 * 16, rel=0.06)


def test_all_start_from_the_same_trained_weights(text):
    assert torch.equal(start(BUDGET, 0, text), start(BUDGET, 0, text))
    assert not torch.equal(start(BUDGET, 0, text), BUDGET.model.initial_parameters(0))
    first, other = (train(name, text)["curve"][0] for name in ("diloco", "local_adam"))
    assert first == other
    assert first[1] < train("diloco", text, budget=dataclasses.replace(BUDGET, start_steps=0))["curve"][0][1]


def test_a_run_that_diverges_is_a_result(text):
    run = train(Case(name="wild", type="diloco", settings={"inner_steps": 15}), text, Tuned(inner_lr=1e30))
    assert run["loss"] is None
    assert run["diverged"]


@pytest.mark.parametrize("case", [case for case in CASES if case.type in outer_types()], ids=lambda case: case.name)
def test_every_case_runs(case, text):
    assert train(case.name, text)["loss"] < 6.0


# --------------------------------------------------------------------------------------------------- table and claims


def test_every_method_is_tuned_with_as_many_runs():
    for case in CASES:
        assert len(set(map(str, case.sweep))) == (0 if case.base else RUNS_PER_SWEEP), case.name
        assert case.base is None or TABLE[case.base].sweep


def a_run(case, seed, loss, sent=100.0):
    return {
        "case": case,
        "workers": 4,
        "seed": seed,
        "tuned": {"inner lr": 1e-3},
        "loss": loss,
        "curve": [(0, 5.0), (10, loss)],
        "rounds": 3,
        "dropped": 0,
        "payload_nbytes_per_token": sent / 1.5,
        "sent_nbytes_per_token": sent,
    }


def test_rows_hold_paired_differences_and_reductions_against_fp32_data_parallel():
    runs = [a_run("data_parallel", 0, 2.0, 75.0), a_run("data_parallel", 1, 3.0, 75.0)]
    runs += [a_run("diloco", 0, 2.2, 1.5), a_run("diloco", 1, 3.3, 1.5), a_run("diloco", 2, None)]
    rows = {row.case: row for row in summarise(runs, numel=100, tokens_per_step=8)}
    assert rows["data_parallel"].sent_reduction == pytest.approx(1.0)
    assert rows["data_parallel"].payload_reduction == pytest.approx(1.0)
    assert rows["diloco"].sent_reduction == pytest.approx(50.0)
    assert rows["diloco"].against_data_parallel == pytest.approx(0.1)
    assert rows["diloco"].spread == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("losses", "settings", "holds"),
    [
        ((2.005, 2.005), {"at_most": 0.005}, True),
        ((2.03, 2.03), {"at_most": 0.005}, False),
        ((1.9, 1.9), {"at_most": 0.005}, True),
        ((1.9, 1.9), {"at_most": 0.005, "is_two_sided": True}, False),
        ((2.03, 2.03), {"or_spread": True}, True),
        ((2.2, 2.2), {"or_spread": True}, False),
    ],
)
def test_a_claim_holds_within_what_it_allows(losses, settings, holds):
    runs = [a_run("right", seed, loss) for seed, loss in enumerate((1.95, 2.05))]
    runs += [a_run("left", seed, loss) for seed, loss in enumerate(losses)]
    rows = summarise(runs, numel=1, tokens_per_step=1)
    claim = Claim(text="", left="left", right="right", source="", **settings)
    assert claim.judge({(row.case, row.workers): row for row in rows}, 4)["holds"] is holds


@pytest.mark.parametrize(("sent", "holds"), [(50.0, True), (51.0, False)])
def test_a_claim_of_bytes_is_judged_by_itself(sent, holds):
    runs = [a_run("data_parallel", 0, 2.0, 100.0), a_run("left", 0, 2.0, sent), a_run("right", 0, 2.0, 100.0)]
    rows = {(row.case, row.workers): row for row in summarise(runs, numel=100, tokens_per_step=6)}
    half = Claim(text="", left="left", right="right", source="", most_bytes=0.5)
    # Gradients of 400 bytes for 6 tokens, one and a half times sent: 100 bytes a token.
    twice = Claim(text="", left="left", right="right", source="", least_reduction=2.0)
    for claim in (half, twice):
        found = claim.judge(rows, 4)
        assert found["holds"]
        assert found["bytes_hold"] is holds


def test_claims_whose_sides_were_not_run_are_left_out():
    rows = summarise([a_run("diloco", 0, 2.0), a_run("data_parallel", 0, 1.9)], numel=1, tokens_per_step=1)
    assert [claim["claim"] for claim in judge(rows)] == ["data parallel is the floor"]


def test_a_variant_brings_its_base_and_an_unknown_case_is_refused():
    assert [case.name for case in bench_convergence.chosen_cases(["diloco int8"])] == ["diloco", "diloco int8"]
    with pytest.raises(ValueError, match="no case 'dilocco'"):
        bench_convergence.chosen_cases(["dilocco"])


class Here:
    """A pool whose work is done at once."""

    def submit(self, function, *args):
        from concurrent.futures import Future

        future = Future()
        future.set_result(function(*args))
        return future


def test_the_bench_tunes_repeats_and_enlarges(text, monkeypatch, capsys):
    monkeypatch.setattr(bench_convergence, "_text", text)
    cases = bench_convergence.chosen_cases(["diloco int8", "data_parallel"])
    bench = bench_convergence.Bench(pool=Here(), budget=SHORT, seeds=range(2))
    bench.tune(cases, 2)
    bench.repeat(cases)
    bench.enlarge(cases)
    final = [run for run in bench.runs if run["phase"] == "final"]
    assert sorted((run["case"], run["workers"], run["seed"]) for run in final) == sorted(
        (case.name, workers, seed) for case in cases for workers in (4, 8) for seed in (0, 1)
    )
    tuned_on = {run["seed"] for run in bench.runs if run["phase"] == "sweep"}
    assert tuned_on.isdisjoint(run["seed"] for run in final), "a seed that was tuned on is not reported"
    rows = summarise(final, numel=Architecture(BUDGET.model).table.numel, tokens_per_step=BUDGET.tokens_per_step)
    for row in rows:
        if row.case == "data_parallel":
            assert (row.sent_reduction, row.payload_reduction) == pytest.approx((1.0, 1.0))
    json.dumps(bench.runs)
    assert "M=8" in capsys.readouterr().out


def test_the_headline_has_all_seeds_and_the_others_two(text, monkeypatch):
    monkeypatch.setattr(bench_convergence, "_text", text)
    cases = bench_convergence.chosen_cases(["diloco", "diloco H=60"])
    bench = bench_convergence.Bench(pool=Here(), budget=SHORT, seeds=range(3))
    bench.tune(cases, 1)
    bench.repeat(cases)
    seeds = sorted((run["case"], run["seed"]) for run in bench.runs if run["phase"] == "final")
    assert seeds == [("diloco", 0), ("diloco", 1), ("diloco", 2), ("diloco H=60", 0), ("diloco H=60", 1)]


def test_a_case_that_cannot_run_is_stated_and_the_others_go_on(text, monkeypatch, capfd):
    monkeypatch.setattr(bench_convergence, "_text", text)
    monkeypatch.setitem(bench_convergence.TABLE, "new", Case(name="new", type="not_yet"))
    task = bench_convergence.Task(case="new", tuned=Tuned(inner_lr=1.0), workers=2, seed=0, phase="sweep")
    run = bench_convergence.do(task, BUDGET)
    assert run["loss"] is None
    assert "unknown outer optimizer 'not_yet'" in run["error"]
    assert "not_yet" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------- the defaults


def cell(method, **shape):
    given = {"text": "t", "members": 2, "h": 3, "rounds": 4, "seed": 0, "inner_lr": 2e-3}
    return Cell(method=method, **{**given, **shape})


def test_a_method_with_the_settings_of_averaging_ends_where_averaging_does(text):
    averaging = cell(defaults.AVERAGING)
    expected = run_cell(averaging, defaults.settings_of(averaging), text, BUDGET)
    same = {"type": "streaming", "lr": 1.0, "momentum": 0.0, "delay": 0, "num_fragments": 1}
    found = run_cell(cell("streaming"), same, text, BUDGET)
    assert (expected["steps"], expected["exchanges"]) == (12, 4)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    late = run_cell(cell("streaming"), same | {"delay": 1}, text, BUDGET)
    assert late["exchanges"] == 4, "the last one lands as well"
    alone = cell(defaults.ALONE, members=1)
    assert run_cell(alone, defaults.settings_of(alone), text, BUDGET)["loss"] != expected["loss"]


def test_a_run_has_the_length_that_its_rounds_need_and_the_method_knows_it():
    table = Architecture(BUDGET.model).table
    outer, facts, num_steps = fit({"type": "streaming", "num_fragments": 2}, table, cell("streaming", h=4))
    assert (num_steps, facts.outer_steps) == (16, 8), "two fragments, in turn after every second step"
    assert sum(1 for step in range(num_steps + 1) if outer.plan(step)) == facts.outer_steps
    _, facts, num_steps = fit({"type": "qsr"}, table, cell("qsr", h=4, rounds=20))
    assert facts.outer_steps < 20, "rounds that grow are fewer"
    assert 40 < num_steps <= 80


@pytest.mark.parametrize("method", ["diloco", "streaming", "decoupled", "delayed", "qsr"])
def test_a_method_is_compared_with_averaging_by_as_many_exchanges(text, method):
    own = run_cell(cell(method, rounds=8), {"type": method}, text, BUDGET)
    baseline = defaults.as_run(cell(defaults.baseline_of(method), rounds=8))
    averaged = run_cell(baseline, defaults.settings_of(baseline), text, BUDGET)
    assert averaged["exchanges"] == own["exchanges"]
    assert own["steps"] <= averaged["steps"] < own["steps"] + baseline.rounds
    assert (baseline.rounds < 8) == (method == "qsr"), "rounds that grow are fewer"


def test_what_cannot_run_is_a_cell_without_a_loss(text):
    found = run_cell(cell("diloco"), {"type": "diloco", "lr": 1e30}, text, BUDGET)
    assert found["loss"] is None
    assert "diverged" in found


def test_cells_are_compared_with_averaging_and_with_one_worker_of_the_same_shape(capsys):
    def row(method, loss, **shape):
        return dataclasses.asdict(cell(method, **shape)) | {"loss": loss}

    rows = [
        row(defaults.ALONE, 4.0, members=1),
        row(defaults.AVERAGING, 2.0),
        row(defaults.AVERAGING, 1.0, members=4),
        row("diloco", 2.02),
        row("diloco", 1.001, members=4),
        row("streaming", None),
    ]
    table = defaults.compared(rows)
    assert [entry["against_averaging"] for entry in table] == [pytest.approx(0.01), pytest.approx(0.001), None]
    assert [entry["against_alone"] for entry in table[:2]] == [pytest.approx(-0.495), pytest.approx(1.001 / 4 - 1)]
    lines = list(defaults.summary(table))
    assert "more than 0.5 % worse in 1 of 2" in lines[0]
    assert lines[1].split()[:2] == ["+1.00", "%"]
    assert "1 without a loss" in lines[2]


def test_a_part_of_the_grid_can_be_chosen():
    options = defaults.parse(["--methods", "diloco,eager", "--members", "2,4", "--h", "8", "--rounds", "10,40"])
    cells = defaults.cells_of(options, ["a", "b"])
    assert len(cells) == 2 * 2 * (1 + 4 * 2), "two texts and lengths: one worker, two averagings and two methods"
    assert {one.members for one in cells if one.method == defaults.ALONE} == {1}
    with pytest.raises(SystemExit):
        defaults.parse(["--methods", "dilocoo"])


def test_what_is_installed_beside_torch_is_text_enough(tmp_path):
    for path in installed_texts(tmp_path).values():
        text = load_text(path, length=64)
        assert len(text.train) > 500_000
        assert len(text.held_out) > 20_000
