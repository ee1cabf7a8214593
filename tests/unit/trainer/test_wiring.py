# SPDX-License-Identifier: Apache-2.0
"""What a key of the configuration does, part by part."""

import pytest
import torch

from isthmus.elastic.core.messages import IndexRange
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.streaming import Streaming
from isthmus.trainer.config.job import OptimizerJob
from isthmus.trainer.config.outer_method import method_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import Override, load_config
from isthmus.trainer.config.wiring import (
    bulk_options,
    coordinator_config,
    fragment_table,
    fragments_of,
    member_config,
    outer_of,
    samples_in_stock,
    training_job,
    with_vocabulary,
)
from isthmus.trainer.errors import ConfigError

SMALL = {"dim": 16, "num_layers": 1, "num_heads": 2, "hidden_dim": 32, "seq_len": 32}


def config(**keys: object) -> Config:
    """The defaults on a small model; `section__key` names what differs."""
    tree = {f"model__{key}": value for key, value in SMALL.items()} | keys
    names = {key: key.replace("__", ".") for key in tree}
    return load_config(overrides=[Override(names[key], str(value), key) for key, value in tree.items()]).config


def test_the_outer_method_takes_its_settings_and_its_learning_rate_goes_by_the_members_of_a_round() -> None:
    given = outer_of(config(outer__lr=0.5, outer__momentum=0.8, outer__inner_steps=7))
    assert given == DiLoCo(lr=0.5, momentum=0.8, inner_steps=7)
    assert outer_of(config(members__start_peers=5, outer__inner_steps=7)) == DiLoCo(lr=None, inner_steps=7)


def test_a_method_is_told_how_many_peers_there_are_and_how_they_train() -> None:
    made = config(
        members__start_peers=5,
        run__outer_steps=9,
        inner__lr=2e-3,
        inner__schedule__type="wsd",
        inner__schedule__warmup_steps=3,
        inner__schedule__decay_steps=4,
    )
    facts = method_of(made).facts
    assert (facts.num_peers, facts.outer_steps, facts.peak_lr) == (5, 9, 2e-3)
    assert (facts.schedule, facts.warmup_steps, facts.min_ratio, facts.decay_steps) == ("wsd", 3, 0.0, 4)
    constant = method_of(config(inner__schedule__type="constant")).facts
    assert (constant.schedule, constant.min_ratio, constant.decay_steps) == ("constant", 1.0, None)


def test_streaming_takes_its_settings_and_its_fragments_are_the_model() -> None:
    keys = {"outer__type": "streaming", "outer__inner_steps": 12, "model__num_layers": 4}
    given = config(**keys, outer__num_fragments=3, outer__delay=2, outer__keep=0.25, outer__pattern="sequential")
    expected = {"inner_steps": 12, "num_fragments": 3, "delay": 2, "keep": 0.25, "pattern": "sequential"}
    assert outer_of(given) == Streaming(lr=None, momentum=None, **expected)
    fragments = fragments_of(given)
    assert [fragment.index for fragment in fragments] == [0, 1, 2]
    assert sum(fragment.numel for fragment in fragments) == fragment_table(given.model).numel
    assert len(fragments_of(config(**keys))) == 2
    assert len(fragments_of(config())) == 1


def test_more_fragments_than_layers_are_told() -> None:
    with pytest.raises(ConfigError, match=r"does not fit the model or the run: 2 fragments need as many layers"):
        fragments_of(config(outer__type="streaming", outer__num_fragments=2))


def test_the_fragment_table_is_as_long_as_the_initial_parameters() -> None:
    section = config().model
    model = section.description()
    assert fragment_table(section).numel == model.initial_parameters(0).numel()
    assert torch.equal(model.initial_parameters(3), model.initial_parameters(3))


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ({"inner__type": "adamw", "inner__lr": 1e-3, "inner__weight_decay": 0.2}, ("adamw", 1e-3, 0.2)),
        ({"inner__type": "sgd", "inner__lr": 0.1, "inner__weight_decay": 0.0}, ("sgd", 0.1, 0.0)),
        ({"inner__type": "adopt", "inner__lr": 2e-3}, ("adopt", 2e-3, 0.1)),
        ({"inner__type": "muon", "inner__lr": 2e-3, "inner__momentum": 0.9}, ("muon", 2e-3, 0.1)),
    ],
)
def test_the_workers_get_the_inner_optimizer(inner: dict[str, object], expected: tuple[object, ...]) -> None:
    optimizer = training_job(config(**inner)).optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == expected


def test_what_belongs_to_one_inner_optimizer_reaches_it() -> None:
    def of(**inner: object) -> OptimizerJob:
        return training_job(config(**inner)).optimizer

    assert (of().betas, of().eps) == ((0.9, 0.99), 1e-8)
    assert (of(inner__type="adopt").betas, of(inner__type="adopt").eps) == ((0.9, 0.9999), 1e-6)
    many = of(inner__type="adopt", inner__betas="[0.9, 0.99, 0.999]", inner__omegas="[0.25, 0.5]")
    assert (many.betas, many.omegas) == ((0.9, 0.99, 0.999), (0.25, 0.5))
    muon = of(inner__type="muon", inner__momentum=0.9, inner__betas="[0.8, 0.95]")
    assert (muon.momentum, muon.betas) == (0.9, (0.8, 0.95))
    assert of(inner__type="sgd").betas is None


def test_a_workers_micro_batch_is_its_share_unless_node_says_less_and_no_clipping_is_none() -> None:
    job = training_job(config(inner__batch_size=6, inner__grad_clip=0.0))
    assert (job.micro_batch, job.halves_micro_batch) == (6, True)
    assert (job.grad_clip, job.eval_batch, job.seq_len) == (None, 6, 32)
    assert training_job(config(inner__batch_size=7, node__local_workers=2)).micro_batch == 4
    told = training_job(config(inner__batch_size=6, node__micro_batch=3))
    assert (told.micro_batch, told.halves_micro_batch) == (3, False)
    assert training_job(config(inner__batch_size=6, node__micro_batch=30)).micro_batch == 6


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_a_schedule_spans_the_whole_run_whatever_its_kind(kind: str) -> None:
    flat = {"inner__schedule__min_ratio": 0.25} if kind != "constant" else {}
    made = config(run__outer_steps=40, outer__inner_steps=10, inner__schedule__type=kind, **flat)
    schedule = training_job(made).schedule
    assert (schedule.type, schedule.total_steps, schedule.warmup_steps) == (kind, 400, 20)
    assert schedule.decay_steps == (80 if kind == "wsd" else None)
    assert schedule.min_ratio == (1.0 if kind == "constant" else 0.25)


def test_how_workers_compute_is_the_nodes_to_say() -> None:
    job = training_job(
        config(
            node__precision="bf16", node__activation_checkpointing="selective", node__compile="true", node__tf32="false"
        )
    )
    assert (job.precision, job.activation_checkpointing) == ("bf16", "selective")
    assert (job.is_compiled, job.has_tf32) == (True, False)
    plain = training_job(config())
    assert (plain.precision, plain.activation_checkpointing) == ("auto", "none")
    assert (plain.is_compiled, plain.has_tf32) == (False, True)


def test_the_coordinator_is_as_patient_as_the_members_section_says() -> None:
    made = config(
        run__outer_steps=9,
        members__min_peers=2,
        members__start_peers=3,
        members__heartbeat_interval="2s",
        members__heartbeat_timeout="11s",
        members__reconnect_grace="4s",
        members__stall_timeout="33s",
        members__outage="44s",
    )
    free = (IndexRange(1, 2),)
    rules = coordinator_config(made, b"d" * 32, b"k" * 32, first_index=5, returned=free)
    assert (rules.outer_steps, rules.min_peers, rules.start_peers) == (9, 2, 3)
    assert (rules.first_index, rules.first_free, rules.manifest_digest) == (5, free, b"d" * 32)
    assert (rules.heartbeat_timeout_s, rules.reconnect_grace_s, rules.stall_floor_s) == (11.0, 4.0, 33.0)
    assert rules.suspect_silence_s == 5.0
    assert (rules.weight_per_sample, rules.norm_guard) == (float(made.model.seq_len), 10.0)
    member = member_config(made)
    assert (member.heartbeat_interval_s, member.coordinator_timeout_s) == (2.0, 44.0)


def test_the_defaults_make_settings_that_the_machines_accept() -> None:
    rules = coordinator_config(Config(), b"d" * 32, b"k" * 32, first_index=0, returned=())
    assert member_config(Config()).heartbeat_interval_s < rules.suspect_silence_s < rules.heartbeat_timeout_s


@pytest.mark.parametrize(
    ("outer", "furthest"),
    [
        ({"inner_steps": 1}, 1),
        ({"inner_steps": 30}, 30),
        ({"type": "streaming", "inner_steps": 12, "num_fragments": 4, "delay": 2}, 3 + 2),
        ({"type": "streaming", "inner_steps": 10, "num_fragments": 3, "delay": 1}, 4 + 1),
    ],
)
def test_the_stock_lasts_twice_as_long_as_a_peer_goes_on_without_a_commit(
    outer: dict[str, object], furthest: int
) -> None:
    made = config(**{f"outer__{key}": value for key, value in outer.items()}, inner__batch_size=4, model__num_layers=4)
    assert samples_in_stock(made) == 2 * furthest * 4


def test_exchanges_keep_within_the_caps_of_this_machine() -> None:
    assert (bulk_options(Config()).max_upload, bulk_options(Config()).max_download) == (None, None)
    capped = bulk_options(config(node__max_upload="20mbit", node__max_download="6MB"))
    assert (capped.max_upload, capped.max_download) == (2.5e6, 6e6)


def test_the_vocabulary_of_the_own_decoder_follows_the_text_and_one_that_is_too_small_is_refused() -> None:
    bytes_, tokens = Config(), with_vocabulary(Config(), 32_000)
    assert with_vocabulary(bytes_, 256) == bytes_, "a run over bytes has the manifest that it always had"
    assert tokens.model.description().vocab_size == 32_000
    assert with_vocabulary(tokens, 32_000) == tokens
    padded = load_config(overrides=[Override("model.vocab_size", "32064", "--model.vocab_size")]).config
    assert with_vocabulary(padded, 32_000) == padded
    with pytest.raises(ConfigError, match=r"the text has 40000 tokens, and model\.vocab_size is 32064"):
        with_vocabulary(padded, 40_000)


def test_attention_stays_within_documents_where_that_is_asked_and_the_text_can_tell_them_apart() -> None:
    asked = load_config(overrides=[Override("data.document_masks", "true", "--data.document_masks")]).config
    assert with_vocabulary(asked, 32_000, 7).model.description().document_end == 7
    assert with_vocabulary(Config(), 32_000, 7).model.description().document_end is None
    with pytest.raises(ConfigError, match="prepare the text with a tokenizer"):
        with_vocabulary(asked, 256, None)
