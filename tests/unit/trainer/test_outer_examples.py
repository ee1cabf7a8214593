# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/ do what they say."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from isthmus.collective import view_of
from isthmus.optim import DiLoCo
from tests.unit.trainer.outer_rig import Model, communicators, inner_steps, sgd, together

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


def run(script, *arguments):
    """The finished process."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, capture_output=True, text=True, timeout=55, check=False, env=os.environ | {"PYTHONPATH": paths}
    )


@pytest.fixture
def hf_callback(monkeypatch):
    """The module, imported anew as a script beside the others would."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import hf_callback

    yield hf_callback
    for name in ("hf_callback", "plain_loop"):
        sys.modules.pop(name, None)


@pytest.mark.multiprocess
@pytest.mark.parametrize("script", ["plain_loop.py", "hf_callback.py"])
def test_a_script_starts_two_peers_that_end_with_the_same_shared_state(script):
    if script == "hf_callback.py":
        pytest.importorskip("transformers")
    done = run(script, "--peers", "2", "--steps", "20")
    assert done.returncode == 0, done.stderr
    digests = re.findall(r"peer (\d): [^:]*shared state ([0-9a-f]{12})", done.stdout)
    last = dict(digests)  # two processes share the pipe: their lines may touch
    assert set(last) == {"0", "1"}
    assert last["0"] == last["1"]
    if script == "plain_loop.py":
        assert done.stdout.count("equal on all: True, parameters too: True") == 2


def test_the_script_prints_a_line_for_each_of_two_machines():
    lines = run("plain_loop.py", "--hosts", "10.0.0.1", "10.0.0.2").stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["on 10.0.0.1", "on 10.0.0.2"]
    assert all(f"--rank {rank} --at 10.0.0.1:4000 10.0.0.2:4000" in line for rank, line in enumerate(lines))


def test_the_callback_is_a_loop_between_the_trainers_first_and_last_word(hf_callback, monkeypatch, tmp_path):
    """Transformers' part is played by a stand-in, so that this runs without it: its base class, its order of calls."""
    stand_in = types.ModuleType("transformers")
    stand_in.TrainerCallback = type("TrainerCallback", (), {})
    monkeypatch.setitem(sys.modules, "transformers", stand_in)

    class Wrapped(torch.optim.Optimizer):
        """As accelerate wraps one: hooks on this would never run."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

    def work(rank, communicator, resume_from=None, steps=range(1, 7)):
        args = types.SimpleNamespace(
            per_device_train_batch_size=8, gradient_accumulation_steps=2, output_dir=str(tmp_path / str(rank))
        )
        state, control = types.SimpleNamespace(global_step=steps[-1]), None
        model = Model(seed=rank)
        optimizer = sgd(model)
        if resume_from is not None:
            model.load_state_dict(torch.load(tmp_path / str(rank) / "checkpoint-6" / "model.pt"))
            resume_from = tmp_path / str(rank) / "checkpoint-6"
        callback = hf_callback.outer_loop_callback(
            communicator, DiLoCo(inner_steps=4), resume_from=resume_from, deadline_s=10.0
        )
        assert isinstance(callback, stand_in.TrainerCallback)
        callback.on_train_begin(args, state, control, model=model, optimizer=Wrapped(optimizer), lr_scheduler=None)
        inner_steps(model, optimizer, rank, steps)
        logs = {"loss": 1.0}
        callback.on_log(args, state, control, logs=logs, model=model)
        folder = tmp_path / str(rank) / f"checkpoint-{steps[-1]}"
        folder.mkdir(parents=True)
        torch.save(model.state_dict(), folder / "model.pt")
        callback.on_save(args, state, control, model=model)
        callback.on_train_end(args, state, control, model=model, optimizer=optimizer)
        return logs, model.flat(), callback.loop.shared_digest()

    with communicators(2) as opened:
        found = together(opened, work)
        assert [logs for logs, _, _ in found] == [{"loss": 1.0, "outer_step": 1, "dropped": 0}] * 2
        assert torch.equal(found[0][1], found[1][1])  # the anchor, not the workers that have gone two steps on
        for communicator in opened:
            communicator.install(view_of(1, [one.address for one in opened]))
        resumed = together(opened, lambda rank, one: work(rank, one, resume_from=True, steps=range(7, 13)))
    with communicators(2) as opened:
        for rank in range(2):
            for step in (6, 12):
                (tmp_path / str(rank) / f"checkpoint-{step}").rename(tmp_path / str(rank) / f"old-{step}")
        whole = together(opened, lambda rank, one: work(rank, one, steps=range(1, 13)))
    assert resumed[0][2] == resumed[1][2] == whole[0][2]


def test_a_real_trainer_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(hf_callback, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    lines = torch.randint(16, (64, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": line, "labels": line} for line in lines]

    def train(epoch, folder, resume_from=None):
        alone.install(view_of(epoch, [alone.address]))
        settings = transformers.TrainingArguments(
            str(folder),
            max_steps=12,
            per_device_train_batch_size=4,
            save_steps=6,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        torch.manual_seed(epoch)
        model = transformers.GPT2LMHeadModel(config)
        callback = hf_callback.outer_loop_callback(alone, DiLoCo(inner_steps=4), resume_from=resume_from)
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        assert callback.loop.outer_step == 3
        return callback.loop.shared_digest()

    with communicators(1) as (alone,):
        whole = train(1, tmp_path / "whole")
        assert train(2, tmp_path / "again", tmp_path / "whole" / "checkpoint-6") == whole
