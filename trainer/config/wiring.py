# SPDX-License-Identifier: Apache-2.0
"""From the configuration to the parts' own settings: pure, no part is started here.

One function a part, so that a reader finds in one place what a key of the configuration does.
"""

from typing import assert_never

import msgspec

from isthmus.collective import BulkOptions
from isthmus.elastic.core.config import CoordinatorConfig, MemberConfig
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.notary import Sealer
from isthmus.optim.fragments import Fragment
from isthmus.optim.inner import state_names
from isthmus.optim.outer import GRAD, PARAM, Outer
from isthmus.trainer.config.base_model import model_of
from isthmus.trainer.config.job import OptimizerJob, ScheduleJob, TrainingJob
from isthmus.trainer.config.outer_method import fragment_table, method_of, pace_of, tokens_per_sample
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import (
    AdamW,
    Adopt,
    ConstantSchedule,
    DecoderSection,
    HuggingFaceSection,
    LoopInner,
    LoopModelSection,
    Muon,
    Sgd,
    WsdSchedule,
)
from isthmus.trainer.errors import ConfigError

__all__ = [
    "bulk_options",
    "coordinator_config",
    "fragment_table",
    "fragments_of",
    "kept_kinds",
    "member_config",
    "model_of",
    "outer_of",
    "require_kinds",
    "samples_in_stock",
    "tokens_per_sample",
    "training_job",
    "with_vocabulary",
]


_MEET_TIMEOUT_S = 10.0
"""A newcomer that has no link with a member by then is sent home. Somebody waits for the answer at a terminal, and one
attempt by both sides takes six seconds."""


def outer_of(config: Config) -> Outer:
    """`[outer]`: the method, with all settings known.

    Raises:
        ConfigError: see `trainer.config.outer_method`; likewise below.
    """
    return method_of(config).outer


def fragments_of(config: Config) -> tuple[Fragment, ...]:
    """What is exchanged: each parameter is in exactly one fragment of each kind."""
    return method_of(config).fragments


def with_vocabulary(config: Config, vocab_size: int, end_of_document: int | None = None) -> Config:
    """The configuration of a run over a text with these tokens: the own decoder's vocabulary follows the text's.

    A Hugging Face model must have at least that. With `data.document_masks` the decoder knows the token behind a
    document.

    Raises:
        ConfigError: the model has fewer tokens than the text, or there is no such token, or no model that heeds it.
    """
    config = _with_document_end(config, end_of_document)
    model = config.model
    if isinstance(model, LoopModelSection):
        return config
    has = model.description().vocab_size
    if has >= vocab_size:
        return config
    if isinstance(model, HuggingFaceSection):
        raise ConfigError(
            f"the text has {vocab_size} tokens, and the model in {model.path} knows {has}",
            cure="prepare the text with the model's own tokenizer: isthmus data prep --tokenizer",
            key="model.path",
        )
    if model.vocab_size is not None:
        raise ConfigError(
            f"the text has {vocab_size} tokens, and model.vocab_size is {has}",
            cure="leave it out: then the vocabulary follows the text",
            key="model.vocab_size",
        )
    return config.model_copy(update={"model": model.model_copy(update={"vocab_size": vocab_size})})


def _with_document_end(config: Config, end_of_document: int | None) -> Config:
    model = config.model
    if not config.data.document_masks:
        return config
    if not isinstance(model, DecoderSection) or (end_of_document is None and model.document_end is None):
        raise ConfigError(
            "data.document_masks needs the model of type decoder and a text with a token behind every document",
            cure="prepare the text with a tokenizer (isthmus data prep), or leave it out",
            key="data.document_masks",
        )
    if model.document_end is not None:
        return config
    return config.model_copy(update={"model": model.model_copy(update={"document_end": end_of_document})})


def training_job(config: Config) -> TrainingJob:
    """`[model]`, `[inner]`, `[eval]` and `[node]`: what the workers do. A loop of one's own has none."""
    model = model_of(config)
    inner, node = config.inner, config.node
    whole_share = -(-inner.batch_size // node.local_workers)
    assert not isinstance(inner, LoopInner), "it goes with a model that cannot be built here"
    return TrainingJob(
        model=model,
        seq_len=model.max_seq_len,
        data_seed=config.run.seed,
        optimizer=_optimizer_job(inner),
        schedule=_schedule_job(config),
        micro_batch=whole_share if node.micro_batch == "auto" else min(node.micro_batch, whole_share),
        halves_micro_batch=node.micro_batch == "auto",
        grad_clip=inner.grad_clip or None,
        precision=node.precision,
        has_tf32=node.tf32,
        activation_checkpointing=node.activation_checkpointing,
        is_compiled=node.compile,
        eval_batch=inner.batch_size,
        num_eval_batches=config.eval.batches,
    )


def require_kinds(config: Config) -> None:
    """Demand that the workers have what the method exchanges.

    Raises:
        ConfigError: the inner optimizer does not keep something of it.
    """
    kinds = dict.fromkeys(fragment.kind for fragment in fragments_of(config))
    if not isinstance(config.inner, LoopInner):
        training_job(config).optimizer.require_kinds(kinds)
        return
    kept = (PARAM, GRAD, *config.inner.states)
    for kind in kinds:
        if kind not in kept:
            raise ConfigError(
                f"outer exchanges {kind!r}, which the loop's optimizer does not keep (it keeps {', '.join(kept[2:])})",
                cure="take another outer, or an optimizer that keeps it",
                key="outer",
            )


def kept_kinds(config: Config) -> tuple[str, ...] | None:
    """What the inner optimizer keeps for each parameter, for the peer's disk; None: a loop sees to that itself."""
    if isinstance(config.inner, LoopInner):
        return None
    job = _optimizer_job(config.inner)
    return state_names(job.type, job.betas)


def _optimizer_job(inner: AdamW | Adopt | Muon | Sgd) -> OptimizerJob:
    job = OptimizerJob(type=inner.type, lr=inner.lr, weight_decay=inner.weight_decay)
    match inner:
        case Sgd():
            return job
        case AdamW(betas=betas, eps=eps):
            return msgspec.structs.replace(job, betas=betas, eps=eps)
        case Adopt(betas=betas, eps=eps, omegas=omegas):
            return msgspec.structs.replace(job, betas=betas, eps=eps, omegas=omegas)
        case Muon(betas=betas, eps=eps, momentum=momentum):
            return msgspec.structs.replace(job, betas=betas, eps=eps, momentum=momentum)
        case _:
            assert_never(inner)


def _schedule_job(config: Config) -> ScheduleJob:
    schedule, pace = config.inner.schedule, pace_of(config)
    return ScheduleJob(
        type=schedule.type,
        total_steps=pace.total_inner_steps,
        warmup_steps=pace.warmup_steps,
        min_ratio=1.0 if isinstance(schedule, ConstantSchedule) else schedule.min_ratio,
        decay_steps=pace.decay_steps if isinstance(schedule, WsdSchedule) else None,
    )


def coordinator_config(
    config: Config,
    terms_digest: bytes,
    sealer: Sealer,
    *,
    authorities: tuple[bytes, ...] = (),
    first_index: int,
    returned: tuple[IndexRange, ...],
    rebuild_salt: int = 0,
) -> CoordinatorConfig:
    """`[members]`: how patient and how demanding the coordinator is."""
    members = config.members
    return CoordinatorConfig(
        manifest_digest=terms_digest,
        sealer=sealer,
        authorities=authorities,
        rebuild_salt=rebuild_salt,
        outer_steps=config.run.outer_steps,
        round_inner_steps=pace_of(config).longest_stretch,
        min_peers=members.min_peers,
        start_peers=members.start_peers,
        first_index=first_index,
        first_free=returned,
        heartbeat_timeout_s=members.heartbeat_timeout_s,
        suspect_silence_s=2.5 * members.heartbeat_interval_s,
        reconnect_grace_s=members.reconnect_grace_s,
        recover_s=members.recover_s,
        meet_timeout_s=_MEET_TIMEOUT_S,
        stall_floor_s=members.stall_timeout_s,
        round_quorum=members.quorum,
        grace_floor_s=members.grace_s,
        weight_per_sample=float(tokens_per_sample(config.model)),  # weights are tokens
        samples_per_round=_samples_per_round(config),
        norm_guard=members.norm_guard,
    )


def member_config(config: Config) -> MemberConfig:
    """`[members]`: how often a peer speaks and how long it waits."""
    members = config.members
    return MemberConfig(
        heartbeat_interval_s=members.heartbeat_interval_s,
        resend_interval_s=members.heartbeat_interval_s,
        coordinator_timeout_s=members.outage_s,
    )


def bulk_options(config: Config) -> BulkOptions:
    """`[node]`: how much of its line this machine gives to exchanges."""
    node = config.node
    return BulkOptions(max_upload=node.max_upload_bytes_per_s, max_download=node.max_download_bytes_per_s)


def samples_in_stock(config: Config) -> int:
    """How many samples a peer keeps leased, to go on while the coordinator is away.

    Twice what it trains on, at most, until it must wait for a commit.
    """
    return 2 * _samples_per_round(config)


def _samples_per_round(config: Config) -> int:
    """How many samples a peer trains on without a commit: to the next outer step, and on until that is due.

    Of its own batches; who is faster than the others makes no more of them than the plan has.
    """
    pace = pace_of(config)
    return (pace.longest_stretch + pace.longest_delay) * config.inner.batch_size
