# SPDX-License-Identifier: Apache-2.0
"""A model fine-tuned by two machines over a text that was prepared on one of them, as README tells it."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.multiprocess.processes import Event, Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import running
from tests.multiprocess.test_run_audit import audited
from tests.netns.machines import MARKS, two_machines
from tests.unit.trainer.prep_rig import documents, write_jsonl
from tests.unit.trainer.tiny_models import tiny_model

pytestmark = [*MARKS, pytest.mark.timeout(600)]

STEPS, VOCABULARY = 6, 300
CONFIG = f"""
[run]
outer_steps = {STEPS}
[model]
type = "hf"
path = "BASE"
seq_len = 32
[model.lora]
rank = 2
targets = ["q_proj", "v_proj"]
[data]
shuffle_shards = 1
[inner]
batch_size = 2
[outer]
inner_steps = 3
[members]
start_peers = 2
[checkpoint]
every = 2
[metrics]
port = "none"
"""


def _fetched(process: Process) -> list[Event]:
    return [event for event in process.events("shard") if event["name"].startswith("train-")]


def test_a_qwen_is_fine_tuned_by_two_machines_over_a_text_that_one_of_them_has_prepared(tmp_path: Path) -> None:
    tiny_model("qwen3", tmp_path / "base", vocab_size=VOCABULARY)
    shutil.copytree(tmp_path / "base", tmp_path / "elsewhere")
    source = write_jsonl(tmp_path / "lines.jsonl", documents(800))
    prepared, copies = tmp_path / "prepared", tmp_path / "copies"
    with two_machines() as (left, right), running(tmp_path) as run:
        words = ("--out", str(prepared), "--train-tokenizer", str(VOCABULARY), "--shard-size", "4KiB")
        outcome = run.command("data", "prep", str(source), *words)
        assert outcome.code == 0, outcome.err
        run.config.write_text(CONFIG.replace("BASE", str(tmp_path / "base")))
        founder = run.found("--data", "none", "--node.data", str(prepared), inside=left.inside)  # named to nobody else
        run.wait_for_ticket()
        own = ("--node.model", str(tmp_path / "elsewhere"), "--node.checkpoints", str(copies))
        joiner = run.join(*own, inside=right.inside)
        assert run.until_ended(founder, joiner) == [0, 0], run.story()
        assert len(assert_same_commits(founder, joiner)) == STEPS
        audited(run, founder, joiner)
        out = tmp_path / "tuned"
        exported = run.command("export", "--dir", str(founder.directory), "--out", str(out))
        assert exported.code == 0, exported.err
    assert not _fetched(founder)
    assert _fetched(joiner)
    assert (copies / joiner.peer_id).is_dir()
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    with torch.no_grad():
        logits = model(**tokenizer("Nr. 7", return_tensors="pt", return_token_type_ids=False)).logits
    assert logits.shape[-1] == VOCABULARY
