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
from isthmus.trainer.config.base_model import model_of, with_base_model
from isthmus.trainer.config.manifest import manifest_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import DataSection, DecoderSection, HuggingFaceSection
from isthmus.trainer.config.wiring import with_vocabulary
from isthmus.trainer.data.corpus import DataError, load_corpus
from isthmus.trainer.data.prep.preparing import Settings, prepare
from isthmus.trainer.data.prepared import PreparedText, tokens_of
from isthmus.trainer.data.samples import validation_batches
from isthmus.trainer.errors import ExitCode
from isthmus.trainer.files import MEMBERSHIP_NAME
from isthmus.trainer.model.decoder import Decoder
from isthmus.trainer.model.evaluate import evaluate
from isthmus.trainer.run.judging import judge_model
from tests.unit.trainer.prep_rig import documents, texts_in, write_jsonl
from tests.unit.trainer.tiny_models import tiny_model

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
    return leave_checkpoints(tmp_path / "peer", config)


def leave_checkpoints(folder: Path, config: Config) -> Path:
    for outer_step in (3, 6):
        meta = CheckpointMeta(
            run_id="demo-0123abcd",
            outer_step=outer_step,
            digest=bytes(32),
            run_manifest=manifest_of(config),
            next_index=100 * outer_step,
            returned=(IndexRange(10, 30),),
        )
        anchor = model_of(config).initial_parameters(outer_step)
        CheckpointStore(folder / FOLDER_NAME, keep=3).save(
            meta, {"anchor": anchor, "momentum": torch.zeros_like(anchor)}
        )
    return folder


def expected(config: Config, *, seed: int, tokens: np.ndarray) -> float:
    """By all the windows of a decoder that is made of the parameters by hand."""
    shape = config.model.description()
    decoder, flat = Decoder(shape), shape.initial_parameters(seed=seed)
    state, at = {}, 0
    for name, size in shape.named_shapes():
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


@pytest.mark.parametrize("num_tokens", [1, 100, 5_000, 20_000, 32_000])
def test_about_as_many_tokens_are_judged_as_were_asked_for(peer: Path, tmp_path: Path, num_tokens: int) -> None:
    (tmp_path / "long").write_text(TEXT * 20)
    judged = judge_model(peer, data=tmp_path / "long", num_tokens=num_tokens, device="cpu")
    assert judged.num_tokens == pytest.approx(num_tokens, rel=0.01, abs=SEQ_LEN)


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


def prepared(out: Path, seed: int, tokenizer: Path | None = None) -> PreparedText:
    """Of several held-out shards."""
    source = write_jsonl(out.with_suffix(".jsonl"), documents(300, seed=seed))
    settings = Settings(
        sources=((source, 1.0),),
        out=out,
        tokenizer=tokenizer,
        train_tokenizer=None if tokenizer is not None else 400,
        validation_fraction=0.2,
        shard_nbytes=2048,
    )
    return prepare(settings, lambda _progress: None)


def test_of_a_prepared_text_those_held_out_shards_are_judged_that_are_here(tmp_path: Path, config: Config) -> None:
    folder = tmp_path / "text"
    text = prepared(folder, seed=1)
    run_config = with_vocabulary(
        config.model_copy(update={"data": DataSection(path=folder)}), text.vocab_size, text.index.end_of_document
    )
    peer = leave_checkpoints(tmp_path / "peer", run_config)
    terms = {"manifest": manifest_of(run_config).decode(), "data_digest": text.digest}
    (peer / MEMBERSHIP_NAME).write_text(json.dumps(terms))
    (peer / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())

    held_out = text.index.held_out
    assert len(held_out) > 1
    judged = judge_model(peer, data=None, num_tokens=None, device="cpu")
    assert judged.is_held_out
    assert judged.num_tokens == sum((shard.num_tokens - 1) // SEQ_LEN * SEQ_LEN for shard in held_out)
    num_bytes = sum(len(document.encode()) for document in texts_in(text, held_out))
    num_tokens = sum(shard.num_tokens for shard in held_out)
    assert judged.bits_per_byte == pytest.approx(judged.loss / math.log(2) * num_tokens / num_bytes)

    # The same documents as a plain text are put into the model's tokens; only the ends of documents are missing then.
    plain = tmp_path / "plain.txt"
    plain.write_text("".join(texts_in(text, held_out)))
    of_plain = judge_model(peer, data=plain, num_tokens=None, device="cpu")
    assert not of_plain.is_held_out
    assert 0.8 * num_tokens < of_plain.num_tokens <= num_tokens
    assert of_plain.bits_per_byte == pytest.approx(judged.bits_per_byte, rel=0.1)

    for shard in held_out[1:]:
        (folder / shard.name).unlink()
    of_one = judge_model(peer, data=None, num_tokens=None, device="cpu")
    assert of_one.loss == pytest.approx(
        expected(run_config, seed=6, tokens=tokens_of(folder / held_out[0].name, text.index, held_out[0])), rel=1e-5
    )
    assert of_one.text.endswith(f"1 of {len(held_out)} shards")


def test_another_prepared_text_is_judged_as_a_whole_if_it_has_the_models_tokens(tmp_path: Path, config: Config) -> None:
    own = prepared(tmp_path / "own", seed=1)
    run_config = with_vocabulary(config, own.vocab_size, own.index.end_of_document)
    peer = leave_checkpoints(tmp_path / "peer", run_config)
    (peer / "tokenizer.json").write_bytes((tmp_path / "own" / "tokenizer.json").read_bytes())
    other = prepared(tmp_path / "other", seed=2, tokenizer=tmp_path / "own" / "tokenizer.json")
    judged = judge_model(peer, data=tmp_path / "other", num_tokens=None, device="cpu")
    shards = list(other.index.shards)
    assert judged.num_tokens == sum((shard.num_tokens - 1) // SEQ_LEN * SEQ_LEN for shard in shards)
    num_bytes = sum(len(document.encode()) for document in documents(300, seed=2))
    num_tokens = sum(shard.num_tokens for shard in shards)
    assert judged.bits_per_byte == pytest.approx(judged.loss / math.log(2) * num_tokens / num_bytes)
    prepared(tmp_path / "foreign", seed=3)
    with pytest.raises(DataError, match="another tokenizer"):
        judge_model(peer, data=tmp_path / "foreign", num_tokens=None, device="cpu")


def test_a_hugging_face_model_and_its_export_come_to_the_same(tmp_path: Path, text: Path) -> None:
    base = tmp_path / "base"
    tiny_model("llama", base)
    config = with_base_model(Config(model=HuggingFaceSection(path=base, seq_len=SEQ_LEN), data=DataSection(path=text)))
    peer = leave_checkpoints(tmp_path / "peer", config)
    assert run(["export", "--dir", str(peer), "--out", str(tmp_path / "model")]) == ExitCode.DONE
    other = tmp_path / "other.txt"
    other.write_text(TEXT)
    of_run = judge_model(peer, data=other, num_tokens=None, device="cpu")
    assert of_run.num_tokens == (len(TEXT) - 1) // SEQ_LEN * SEQ_LEN
    exported = judge_model(tmp_path / "model", data=other, num_tokens=None, device="cpu")
    assert exported.loss == pytest.approx(of_run.loss, rel=0.05)  # its samples are longer


def test_a_folder_without_a_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", str(tmp_path)]) == ExitCode.USAGE
    assert "holds no checkpoint" in capsys.readouterr().err
