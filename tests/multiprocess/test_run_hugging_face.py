# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models fine-tuned by real peers, exported, and loaded by transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from isthmus.trainer.checkpoint.export import restore
from isthmus.trainer.config.wiring import model_of
from isthmus.trainer.model.language_model import whole_model
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import Run, running
from tests.multiprocess.test_run_audit import audited
from tests.unit.trainer.tiny_models import tiny_model

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

USAGE, ENVIRONMENT, REFUSED = 2, 3, 5
STEPS = 6
TOKENS = torch.arange(32).reshape(2, 16) * 7 % 256
CONFIG = f"""
[run]
outer_steps = {STEPS}
[model]
type = "hf"
path = "MODEL"
seq_len = 32
[inner]
lr = 3e-3
batch_size = 2
[outer]
inner_steps = 3
[members]
start_peers = 2
[checkpoint]
every = 2
[eval]
every = 0
[metrics]
port = "none"
"""


def _configure(run: Run, model: Path, more: str = "") -> None:
    run.config.write_text(CONFIG.replace("MODEL", str(model)) + more)


def _own_logits(process: Process) -> Tensor:
    """Of the newest checkpoint of this peer, by the model that the workers train."""
    restored = restore(process.directory)
    with torch.no_grad():
        return whole_model(model_of(restored.config), restored.parameters).eval()(TOKENS)


def _logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(TOKENS).logits
    return logits


def _loss(model: torch.nn.Module, text: Path) -> float:
    tokens = torch.tensor([list(text.read_bytes()[:64])])
    with torch.no_grad():
        return float(model.eval()(tokens, labels=tokens).loss)


def _exported(run: Run, process: Process, *flags: str) -> Path:
    out = run.folder / f"model-of-{process.name}{''.join(flags)}"
    outcome = run.command("export", "--dir", str(process.directory), "--out", str(out), *flags)
    assert outcome.code == 0, outcome.err
    return out


def _adapt(base: torch.nn.Module, adapters: Path) -> None:
    """What PEFT makes of the folder: each named layer gets B A alpha / r."""
    config = json.loads((adapters / "adapter_config.json").read_text())
    tensors = load_file(adapters / "adapter_model.safetensors")
    for layer in config["target_modules"]:
        a, b = (tensors.pop(f"base_model.model.{layer}.lora_{half}.weight") for half in "AB")
        assert (a.shape[0], b.shape[1]) == (config["r"], config["r"])
        with torch.no_grad():
            base.get_submodule(layer).weight.add_(config["lora_alpha"] / config["r"] * b @ a)
    assert not tensors


def _bytes_sent(process: Process) -> int:
    return sum(event["bytes_sent"] for event in process.events("round"))


def test_a_llama_is_fine_tuned_whole_by_two_peers_of_which_one_never_had_it(tmp_path: Path) -> None:
    base = tiny_model("llama", tmp_path / "base")
    with running(tmp_path) as run:
        _configure(run, tmp_path / "base")
        founder = run.found()
        run.wait_for_ticket()
        joiner = run.join("--node.model", "/nowhere")
        assert run.until_ended(founder, joiner) == [0, 0], run.story()
        assert len(assert_same_commits(founder, joiner)) == STEPS
        audited(run, founder, joiner)
        (tmp_path / "base").rename(tmp_path / "away")
        out = _exported(run, joiner)
        sampled = run.command("sample", "Peers come", "--model", str(out), "--tokens", "8", "--temperature", "0")
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(_logits(loaded), _own_logits(founder), rtol=1e-5, atol=1e-5)
    assert (_logits(loaded) - _logits(base)).abs().max() > 0.05
    assert _loss(loaded, run.text) < _loss(base, run.text) - 0.3
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    begun = tokenizer("Peers come", return_tensors="pt")
    with torch.no_grad():
        ours = loaded.generate(**begun, max_new_tokens=8, do_sample=False)[0]
    assert sampled.out.rstrip("\n") == tokenizer.decode(ours)


def test_of_a_qwen_s_adapters_nothing_else_is_exchanged(tmp_path: Path) -> None:
    base = tiny_model("qwen3", tmp_path / "base")
    tiny_model("qwen3", tmp_path / "other", seed=1)
    copy = shutil.copytree(tmp_path / "base", tmp_path / "copy")
    with running(tmp_path) as run:
        _configure(run, tmp_path / "base", '[model.lora]\nrank = 2\ntargets = ["q_proj", "v_proj"]\n')
        founder = run.found()
        run.wait_for_ticket()
        stranger, without = run.join("--node.model", str(tmp_path / "other")), run.join("--node.model", "/nowhere")
        refused, lacking = stranger.outcome(), without.outcome()
        joiner = run.join("--node.model", str(copy), "--local-workers", "2")  # each has a part of what is frozen
        assert run.until_ended(founder, joiner) == [0, 0], run.story()
        assert len(assert_same_commits(founder, joiner)) == STEPS
        audited(run, founder, joiner)
        out, adapters = _exported(run, founder), _exported(run, founder, "--adapters")
        elsewhere = run.command("export", "--dir", str(joiner.directory), "--base", str(tmp_path / "other"))
        beside = run.command("export", "--adapters", "--dir", str(founder.directory), "--out", str(out))
    assert refused.code == REFUSED
    assert "is not the run's base model: its weights differ; copy the run's base model" in refused.sentences[-1]
    assert lacking.code == ENVIRONMENT
    assert "there is no folder /nowhere; copy the run's base model" in lacking.sentences[-1]
    assert elsewhere.code == REFUSED
    assert (beside.code, "holds a whole model" in beside.err) == (USAGE, True)
    # 2 layers × (q: 2 × 32 + 64 × 2, v: 2 × 32 + 32 × 2) values, in int8 a byte each; a message is up to 4 kB.
    numel = 2 * (2 * 32 + 64 * 2 + 2 * 32 + 32 * 2)
    whole = sum(one.numel() for one in base.parameters())
    assert founder.events("started")[0]["num_parameters"] == numel
    for peer in (founder, joiner):
        assert 0 < _bytes_sent(peer) / STEPS < 2 * numel < whole / 10
    merged = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    torch.testing.assert_close(_logits(merged), _own_logits(joiner), rtol=1e-4, atol=1e-5)
    assert (_logits(merged) - _logits(base)).abs().max() > 1e-3
    assert set(load_file(out / "model.safetensors")) == set(load_file(tmp_path / "base" / "model.safetensors"))
    _adapt(base, adapters)
    torch.testing.assert_close(_logits(base), _own_logits(joiner), rtol=1e-4, atol=1e-5)
