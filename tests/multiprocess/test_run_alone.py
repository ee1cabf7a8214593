# SPDX-License-Identifier: Apache-2.0
"""One founder from its first line to a text: a run of one peer, its status, its checkpoints, its model."""

import json
import math
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from isthmus.trainer.checkpoint.checkpoint import newest_usable
from tests.multiprocess.processes import Outcome, Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import Run, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

LAST = 120
EVERY = 10
TOKENS = 3 * 2 * 32
"""Of an outer step: inner steps, batch, tokens of a sample."""

_NUMBER = {"type": ["number", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
STATUS_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "schema": {"const": "isthmus.status/1"},
        "run_id": {"type": "string", "pattern": "^run-[0-9a-f]{8}$"},
        "peer_id": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
        "incarnation": _COUNT,
        "pid": _COUNT,
        "phase": {"enum": ["training", "exchanging"]},
        "outer_step": {"type": "integer", "minimum": 1, "maximum": LAST},
        "total_outer_steps": {"const": LAST},
        "inner_step": _COUNT,
        "inner_steps_per_round": {"const": 3},
        "epoch": {"const": 1},
        "members": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "peer_id": {"type": "string"},
                    "incarnation": _COUNT,
                    "address": {"type": "string"},
                    "host": {"type": "null"},
                    "is_dialled": {"type": "null"},
                    "round_trip_ms": {"type": "null"},
                    "is_apart": {"const": False},
                    "is_me": {"const": True},
                    "is_coordinator": {"type": "boolean"},
                },
                "required": ["peer_id", "incarnation", "address", "host", "is_dialled", "round_trip_ms"],
            },
        },
        "coordinator": {"type": "string"},
        "num_commits": {"type": "integer", "minimum": 1, "maximum": LAST},
        "num_inner_steps": {"type": "integer", "minimum": 3},
        "peers_seen": {"const": 0},
        "seconds_left": _NUMBER,
        "first_loss": {"type": "number", "minimum": 0},
        "train_loss": {"type": "number", "minimum": 0},
        "validation_loss": _NUMBER,
        "validation_bits_per_byte": _NUMBER,
        "validation_outer_step": {"type": ["integer", "null"], "minimum": 20},
        "validation_tokens": {"type": ["integer", "null"], "minimum": 20 * TOKENS},
        "losses": {
            "type": "array",
            "minItems": 1,
            "maxItems": 120,
            "items": {"type": "array", "prefixItems": [_COUNT, {"type": "number"}], "minItems": 2, "maxItems": 2},
        },
        "tokens": {"type": "integer", "minimum": 1},
        "tokens_per_s": {"type": "number", "exclusiveMinimum": 0},
        "goodput": {"type": "number", "minimum": 0, "maximum": 1},
        "sent_bytes": {"const": 0},
        "received_bytes": {"const": 0},
        "last_round": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "outer_step": _COUNT,
                "seconds": {"type": "number"},
                "exchange_seconds": {"type": "number"},
                "bytes": _COUNT,
                "num_members": {"const": 1},
                "loss": {"type": "number", "minimum": 0},
                "wait_seconds": {"type": "number", "minimum": 0},
                "predicted_seconds": {"type": ["number", "null"]},
            },
            "required": [
                "outer_step",
                "seconds",
                "exchange_seconds",
                "bytes",
                "num_members",
                "loss",
                "wait_seconds",
                "predicted_seconds",
            ],
        },
        "step": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "seconds": {"type": "number", "exclusiveMinimum": 0},
                "data_seconds": {"type": "number", "minimum": 0},
                "passes_seconds": {"type": "number", "exclusiveMinimum": 0},
                "clip_seconds": {"type": "number", "exclusiveMinimum": 0},
                "update_seconds": {"type": "number", "exclusiveMinimum": 0},
                "tokens_per_s": {"type": "number", "exclusiveMinimum": 0},
                "mfu": {"type": "null"},
            },
            "required": ["seconds", "data_seconds", "passes_seconds", "clip_seconds", "update_seconds", "tokens_per_s"],
        },
        "checkpoint_outer_step": {"type": ["integer", "null"]},
        "metrics_address": {"type": "null"},
        "leaving": {"type": "null"},
        "coordination": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "epoch": {"const": 1},
                "outer_step": _COUNT,
                "num_members": {"const": 1},
                "voted": {"type": "array", "maxItems": 1, "items": {"type": "string"}},
                "num_learners": {"const": 0},
                "num_late": {"const": 0},
            },
        },
        "uptime_s": {"type": "number", "exclusiveMinimum": 0},
    },
}
STATUS_SCHEMA["required"] = list(STATUS_SCHEMA["properties"])  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class Finished:
    """A run of one founder that has ended, and what its status was on the way."""

    run: Run
    founder: Process
    status: Outcome
    code: int


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    with running(tmp_path_factory.mktemp("alone")) as run:
        founder = run.found(
            "--outer-steps", str(LAST), "--checkpoint.every", str(EVERY), "--eval.every", str(20 * TOKENS)
        )
        run.until_step(2, founder)
        status = run.command("status", "--json", "--dir", str(founder.directory))
        (code,) = run.until_ended(founder)
        yield Finished(run, founder, status, code)


def test_a_founder_alone_trains_to_the_end(finished: Finished) -> None:
    founder = finished.founder
    assert finished.code == 0
    assert sorted(founder.commits()) == list(range(1, LAST + 1))
    losses = [event["loss"] for event in founder.events("trained")]
    assert losses[-1] < 0.75 * losses[0]
    judged = founder.events("evaluate")
    assert [event["outer_step"] for event in judged] == list(range(20, LAST + 1, 20))
    assert [event["tokens"] for event in judged] == [step * TOKENS for step in range(20, LAST + 1, 20)]
    assert all(event["bits_per_byte"] == pytest.approx(event["loss"] / math.log(2)) for event in judged)
    assert all(0 < event["held_s"] <= event["seconds"] for event in judged)
    assert founder.events("fault")[1:] == []  # its own goodbye
    assert len(Audit.of(read_journal(founder.directory)).consumed) == LAST * 3 * 2


def test_nobody_but_its_owner_may_look_into_a_peers_folder(finished: Finished) -> None:
    folder = finished.founder.directory
    modes = {path.relative_to(folder): stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}
    open_to_others = {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077}
    assert open_to_others == {}
    assert {"journal.sqlite", "events.jsonl", "checkpoints"} <= {str(path) for path in modes}


def test_status_answers_with_its_schema_while_a_peer_trains(finished: Finished) -> None:
    assert (finished.status.code, finished.status.err) == (0, "")
    status = json.loads(finished.status.out)
    jsonschema.validate(status, STATUS_SCHEMA)
    assert status["pid"] == finished.founder.popen.pid
    assert status["peer_id"] == finished.founder.peer_id
    gone = finished.run.command("status", "--json", "--dir", str(finished.founder.directory))
    assert (gone.code, gone.out) == (4, "")


def test_a_model_is_exported_and_continues_a_text(finished: Finished, tmp_path: Path) -> None:
    run, model = finished.run, tmp_path / "model"
    exported = run.command("export", "--dir", str(finished.founder.directory), "--out", str(model))
    assert (exported.code, exported.out.strip()) == (0, str(model))
    prompt = ("sample", "Peers come", "--model", str(model), "--tokens", "8", "--seed", "1")
    texts = [run.command(*prompt) for _ in range(2)]
    assert [text.code for text in texts] == [0, 0]
    assert texts[0].out.startswith("Peers come")
    assert len(texts[0].out) > len("Peers come\n")
    assert texts[0].out == texts[1].out


def test_a_changed_checkpoint_is_refused_on_resume(finished: Finished, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000120"
    shutil.copytree(finished.founder.directory / "checkpoints" / folder.name, folder)
    state = bytearray((folder / "state.safetensors").read_bytes())
    state[-1] ^= 1
    (folder / "state.safetensors").write_bytes(state)
    refused = finished.run.command("up", "--resume", str(folder), "--dir", str(tmp_path / "resumed"))
    assert refused.code == 9
    assert refused.sentences == [
        f"isthmus: {folder / 'state.safetensors'} was changed since it was written (its SHA-256 differs); "
        "delete it, or resume from another checkpoint"
    ]


def test_a_killed_founders_checkpoint_goes_on_with_two_peers_and_no_sample_twice(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        first = run.found("--outer-steps", str(LAST), "--checkpoint.every", "4")
        run.until("checkpoint", lambda: len(first.events("checkpoint")) > 1)  # the first one is of the beginning
        run.until_step(first.events("checkpoint")[1]["outer_step"] + 2, first)  # steps that no checkpoint has
        first.kill()
        saved = newest_usable(first.directory)
        assert saved is not None
        saved_at = saved.meta.outer_step
        second = run.found("--resume", str(first.directory), "--peers", "2", "--outer-steps", str(saved_at + 8))
        run.wait_for_ticket()
        joiner = run.join()
        assert run.until_ended(second, joiner) == [0, 0]
    old, new = Audit.of(read_journal(first.directory)), Audit.of(read_journal(second.directory))
    assert (new.genesis.outer_step, new.genesis.digest.hex()) == (saved_at, first.commits()[saved_at])
    digests = assert_same_commits(second, joiner)
    assert sorted(digests) == list(range(saved_at + 1, saved_at + 9))
    kept = {index for index, outer_step in old.consumed.items() if outer_step <= saved_at}
    assert kept.isdisjoint(new.consumed)
    # What was only leased, or trained in steps that are lost, comes first.
    left_out = set(range(new.genesis.next_index)) - kept
    assert left_out
    assert min(new.consumed) == min(left_out)
    assert left_out <= set(new.consumed)
