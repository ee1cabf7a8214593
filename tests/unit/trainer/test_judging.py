# SPDX-License-Identifier: Apache-2.0
"""`isthmus eval`: checkpoints and exported models on held-out text, without a run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.elastic.core.messages import IndexRange
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, CheckpointMeta, CheckpointStore
from isthmus.trainer.cli.app import run
from isthmus.trainer.config.manifest import manifest_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import DataSection, DecoderSection
from isthmus.trainer.data.corpus import load_corpus
from isthmus.trainer.data.samples import validation_batches
from isthmus.trainer.errors import ExitCode
from isthmus.trainer.files import MEMBERSHIP_NAME
from isthmus.trainer.model.decoder import Decoder, initial_parameters, named_shapes
from isthmus.trainer.model.evaluate import evaluate
from isthmus.trainer.run.judging import judge_model

SEQ_LEN = 16
TEXT = "Peers come and go, and the run goes on; a bridge is no wider than it must be.\n" * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def config(text: Path) -> Config:
    model = DecoderSection(
        preset="nano", num_layers=1, dim=16, num_heads=2, num_kv_heads=2, hidden_dim=32, seq_len=SEQ_LEN
    )
    return Config(model=model, data=DataSection(path=text, validation_fraction=0.25))


@pytest.fixture
def peer(tmp_path: Path, config: Config) -> Path:
    """The folder of a peer that has left two checkpoints."""
    for outer_step in (3, 6):
        meta = CheckpointMeta(
            run_id="demo-0123abcd",
            outer_step=outer_step,
            digest=bytes(32),
            run_manifest=manifest_of(config),
            next_index=100 * outer_step,
            returned=(IndexRange(10, 30),),
        )
        anchor = initial_parameters(config.model.decoder_config(), seed=outer_step)
        CheckpointStore(tmp_path / "peer" / FOLDER_NAME, keep=3).save(
            meta, {"anchor": anchor, "momentum": torch.zeros_like(anchor)}
        )
    return tmp_path / "peer"


def expected(config: Config, *, seed: int, tokens: np.ndarray) -> float:
    """By all the windows of a decoder that is made of the parameters by hand."""
    shape = config.model.decoder_config()
    decoder, flat = Decoder(shape), initial_parameters(shape, seed=seed)
    state, at = {}, 0
    for name, size in named_shapes(shape):
        numel = math.prod(size)
        state[name] = flat[at : at + numel].view(size)
        at += numel
    decoder.load_state_dict(state)
    return evaluate(decoder, validation_batches(tokens, SEQ_LEN, 5, None))


def test_the_newest_checkpoint_is_judged_on_all_that_its_run_holds_out(
    peer: Path, config: Config, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = load_corpus(text, seq_len=SEQ_LEN, validation_fraction=0.25).validation
    assert run(["eval", str(peer), "--json"]) == ExitCode.DONE
    judged = json.loads(capsys.readouterr().out)
    assert judged["schema"] == "isthmus.eval/1"
    assert (judged["run_id"], judged["outer_step"], judged["is_held_out"]) == ("demo-0123abcd", 6, True)
    assert judged["tokens_trained"] == (600 - 20) * SEQ_LEN
    assert judged["num_tokens"] == (len(held_out) - 1) // SEQ_LEN * SEQ_LEN
    assert judged["loss"] == pytest.approx(expected(config, seed=6, tokens=held_out), rel=1e-5)
    assert judged["bits_per_byte"] == pytest.approx(judged["loss"] / math.log(2))
    assert judged["perplexity"] == pytest.approx(math.exp(judged["loss"]))


def test_one_checkpoint_and_its_export_come_to_the_same(
    peer: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = CheckpointStore(peer / FOLDER_NAME, keep=3).path_of(3)
    assert run(["export", "--dir", str(step), "--out", str(tmp_path / "model")]) == ExitCode.DONE
    of_step = judge_model(step, data=None, num_tokens=None, device="cpu")
    other = tmp_path / "other.txt"
    other.write_text(TEXT[-len(TEXT) // 4 :])
    of_both = [judge_model(place, data=other, num_tokens=None, device="cpu") for place in (step, tmp_path / "model")]
    assert of_step.outer_step == 3
    assert of_both[0].loss == of_both[1].loss
    assert [one.is_held_out for one in of_both] == [False, False]
    assert (of_both[1].run_id, of_both[1].tokens_trained) == (None, None)
    capsys.readouterr()
    assert run(["eval", str(tmp_path / "model")]) == ExitCode.USAGE
    assert "name a text with --data" in capsys.readouterr().err
    assert run(["eval", str(tmp_path / "model"), "--data", str(text), "--tokens", "500"]) == ExitCode.DONE
    assert "bits a byte, perplexity" in capsys.readouterr().out


def test_of_the_runs_own_text_only_what_it_holds_out_is_judged_and_another_one_is_none(
    peer: Path, config: Config, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = load_corpus(text, seq_len=SEQ_LEN, validation_fraction=0.25)
    terms = {"manifest": manifest_of(config).decode(), "data_digest": corpus.digest}  # as a member's folder has them
    (peer / MEMBERSHIP_NAME).write_text(json.dumps(terms))
    copy = text.with_name("copy.txt")
    copy.write_text(TEXT)
    own = judge_model(peer, data=copy, num_tokens=None, device="cpu")
    assert own.is_held_out
    assert own.num_tokens == (len(corpus.validation) - 1) // SEQ_LEN * SEQ_LEN
    text.write_text(TEXT.upper())
    assert run(["eval", str(peer)]) == ExitCode.USAGE
    assert "is not the run's text; name a copy of that with --data" in capsys.readouterr().err


def test_a_folder_without_a_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", str(tmp_path)]) == ExitCode.USAGE
    assert "holds no checkpoint" in capsys.readouterr().err
