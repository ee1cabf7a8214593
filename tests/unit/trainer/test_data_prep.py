# SPDX-License-Identifier: Apache-2.0
"""Preparing a text loses no document and doubles none, however often it is begun and by however many processes."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.trainer.cli.app import run
from isthmus.trainer.config.quantities import parse_nbytes
from isthmus.trainer.data.corpus import DataError
from isthmus.trainer.data.prep.preparing import Progress, Settings, prepare
from isthmus.trainer.data.prepared import PreparedText, load_prepared, require_part, tokens_of
from isthmus.trainer.data.tokenizer import FileTokenizer
from isthmus.trainer.errors import ConfigError, ExitCode, IntegrityError
from tests.unit.trainer.prep_rig import (
    documents,
    real_documents,
    texts_in,
    write_jsonl,
    write_parquet,
    write_saved_dataset,
)

SMALL = 8 << 10
"""Bytes of a shard: several come of little text."""
TEST_NBYTES = parse_nbytes(os.environ.get("ISTHMUS_TEST_PREP", "12MB"))
"""Of the sources in the test of memory; what it promises is of 200MB."""
MOST_NBYTES = 1_000_000_000


def prepared(out: Path, *sources: Path, jobs: int = 1, **settings: object) -> PreparedText:
    values = {"shard_nbytes": SMALL, "validation_fraction": 0.1} | settings
    weighted = tuple((source, 1.0) for source in sources)
    return prepare(Settings(sources=weighted, out=out, jobs=jobs, **values), lambda _progress: None)  # type: ignore[arg-type]


def test_documents_of_every_kind_of_file_are_each_in_it_once(tmp_path: Path) -> None:
    lines, rows, saved = (documents(120, seed=seed) for seed in range(3))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "plain.txt").write_text("".join(documents(1, seed=9)))
    sources = [
        write_jsonl(tmp_path / "lines.jsonl", lines),
        write_parquet(tmp_path / "rows.parquet", rows),
        write_saved_dataset(tmp_path / "saved", saved),
        tmp_path / "folder",
    ]
    text = prepared(tmp_path / "out", *sources)
    trained, held_out = texts_in(text, text.index.train), texts_in(text, text.index.held_out)
    assert Counter(trained + held_out) == Counter([*lines, *rows, *saved, *documents(1, seed=9)])
    assert 0.04 < len(held_out) / 361 < 0.2
    assert [source.num_documents for source in text.index.sources] == [120, 120, 120, 1]
    assert len(text.index.train) > 2
    assert max(shard.num_tokens for shard in text.index.train) == SMALL
    assert (text.index.dtype, text.vocab_size) == ("uint8", 256)


def test_a_long_text_file_is_cut_at_line_ends_and_a_very_long_line_between_letters(tmp_path: Path) -> None:
    lines = "".join(documents(4000))
    source = tmp_path / "long.txt"
    source.write_text(lines + "ä" * (3 << 20))  # beyond what is read at once
    text = prepared(tmp_path / "out", source, shard_nbytes=1 << 20)
    found = texts_in(text, text.index.train) + texts_in(text, text.index.held_out)
    assert sum(map(len, found)) >= len(lines) + (3 << 20)
    assert sum(one.count("ä") for one in found) == lines.count("ä") + (3 << 20)
    assert "�" not in "".join(found)
    assert Counter("".join(found).split())[lines.split()[0]] > 0


def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "lines.jsonl", documents(6000))
    alone, together = (prepared(tmp_path / f"out{jobs}", source, jobs=jobs) for jobs in (1, 3))
    assert alone.digest == together.digest
    for shard in together.index.shards:
        require_part(tmp_path / "out3" / shard.name, shard.digest)


@pytest.mark.timeout(400)
def test_what_is_killed_goes_on_with_the_lots_that_are_left(tmp_path: Path) -> None:
    source = tmp_path / "sources"
    source.mkdir()
    texts = list(real_documents(2_000_000))
    for number in range(16):
        write_parquet(source / f"{number}.parquet", texts[number::16])
    arguments = ["data", "prep", str(source), "--shard-size", "16KiB", "--jobs", "1", "--train-tokenizer", "400"]
    command = [sys.executable, "-P", "-m", "isthmus.trainer.cli", *arguments]
    with subprocess.Popen([*command, "--out", str(tmp_path / "out")], start_new_session=True) as process:
        deadline = time.monotonic() + 200
        while not (done := sorted((tmp_path / "out" / "work").glob("lot-*.json"))):
            assert process.poll() is None, "it was too quick"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert not (tmp_path / "out" / "index.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("train-000000-*.bin")}
    assert kept
    assert run([*arguments, "--out", str(tmp_path / "out")]) == ExitCode.DONE
    assert all(path.stat().st_mtime_ns == changed for path, changed in kept.items()), f"{len(done)} lots were done"
    assert run([*arguments, "--out", str(tmp_path / "again")]) == ExitCode.DONE
    assert load_prepared(tmp_path / "out").digest == load_prepared(tmp_path / "again").digest
    assert not (tmp_path / "out" / "work").exists()


def test_a_weight_says_how_often_a_sources_documents_are_trained_on_and_held_out_ones_are_once(tmp_path: Path) -> None:
    common, rare, half = (documents(200, seed=seed) for seed in range(3))
    sources = {
        write_jsonl(tmp_path / "common.jsonl", common): 1.0,
        write_jsonl(tmp_path / "rare.jsonl", rare): 3.0,
        write_jsonl(tmp_path / "half.jsonl", half): 0.5,
    }
    settings = Settings(
        sources=tuple(sources.items()), out=tmp_path / "out", validation_fraction=0.1, shard_nbytes=SMALL
    )
    text = prepare(settings, lambda _progress: None)
    trained, held_out = Counter(texts_in(text, text.index.train)), Counter(texts_in(text, text.index.held_out))
    assert {trained[one] for one in rare if one not in held_out} == {3}
    assert {trained[one] for one in common if one not in held_out} == {1}
    assert 60 < sum(trained[one] for one in half) < 120
    assert set(held_out.values()) == {1}
    assert not held_out.keys() & trained.keys()


def test_with_a_tokenizer_tokens_are_its_own_and_every_document_ends_with_its_end(tmp_path: Path) -> None:
    texts = documents(400)
    source = write_jsonl(tmp_path / "lines.jsonl", texts)
    text = prepared(tmp_path / "out", source, train_tokenizer=500)
    assert (text.index.dtype, text.vocab_size) == ("uint16", 500)
    assert Counter(texts_in(text, text.index.train) + texts_in(text, text.index.held_out)) == Counter(texts)
    tokenizer = FileTokenizer(tmp_path / "out" / "tokenizer.json")
    num_ends = sum(
        int(np.count_nonzero(tokens_of(tmp_path / "out" / shard.name, text.index, shard) == tokenizer.end_of_document))
        for shard in text.index.shards
    )
    assert num_ends == len(texts)
    sides = (text.index.train, text.index.held_out)
    num_bytes = [sum(len(document.encode()) for document in texts_in(text, side)) for side in sides]
    assert [text.index.train_text_nbytes, text.index.held_out_text_nbytes] == num_bytes
    assert text.bytes_per_token == num_bytes[1] / sum(shard.num_tokens for shard in text.index.held_out)
    # The same file, given: the same text.
    again = prepared(tmp_path / "again", source, tokenizer=tmp_path / "out" / "tokenizer.json")
    assert [shard.digest for shard in again.index.shards] == [shard.digest for shard in text.index.shards]
    with pytest.raises(DataError, match="has no token '<stop>'"):
        prepared(tmp_path / "third", source, tokenizer=tmp_path / "out" / "tokenizer.json", end_of_document="<stop>")


def test_of_few_documents_neither_none_nor_all_are_held_out(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "lines.jsonl", documents(3))
    for fraction in (1e-9, 1 - 1e-9):
        text = prepared(tmp_path / f"out{fraction}", source, validation_fraction=fraction)
        assert {len(texts_in(text, side)) for side in (text.index.train, text.index.held_out)} == {1, 2}
    with pytest.raises(DataError, match="none to hold out"):
        prepared(tmp_path / "one", write_jsonl(tmp_path / "one.jsonl", documents(1)))


def test_mistakes_are_told_with_the_place_and_the_cure(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"body": "bad"}\n')
    for source, sentence in (
        (bad, r"bad line at byte 17: it has no 'text'"),
        (write_parquet(tmp_path / "rows.parquet", documents(3), field="body"), r"no column 'text'.*--field: id, body"),
        (tmp_path / "nothing", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            prepared(tmp_path / "out" / source.name, source)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("grün".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8 text near byte 2"):
        prepared(tmp_path / "out2", latin)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="cannot be read as a table"):
        prepared(tmp_path / "out3", broken)


def test_a_folder_that_was_begun_otherwise_or_holds_another_text_is_refused(tmp_path: Path) -> None:
    source, other = (write_jsonl(tmp_path / f"{name}.jsonl", documents(50)) for name in ("one", "other"))
    text = prepared(tmp_path / "out", source)
    assert prepared(tmp_path / "out", source).digest == text.digest, "it is whole already"
    for changed in ({"validation_fraction": 0.2}, {"shard_nbytes": 2 * SMALL}):
        with pytest.raises(DataError, match="prepared from other sources or otherwise"):
            prepared(tmp_path / "out", source, **changed)
    with pytest.raises(DataError, match="prepared from other sources or otherwise"):
        prepared(tmp_path / "out", other)
    (tmp_path / "begun" / "work").mkdir(parents=True)
    (tmp_path / "begun" / "work" / "plan.json").write_text("{}")
    with pytest.raises(DataError, match="begun with other settings"):
        prepared(tmp_path / "begun", source)
    shard = tmp_path / "out" / text.index.train[0].name
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    with pytest.raises(IntegrityError, match="is damaged"):
        require_part(shard, text.index.train[0].digest)


def test_the_command_says_what_it_has_made_and_names_mistakes_in_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web, code = (write_jsonl(tmp_path / f"{name}.jsonl", documents(100, seed=len(name))) for name in ("web", "code"))
    command = ["data", "prep", str(web), str(code), "--out", str(tmp_path / "out"), "--weight", "code=2", "--jobs", "1"]
    assert run([*command, "--validation-fraction", "0.1"]) == ExitCode.DONE
    said = capsys.readouterr()
    assert said.out.startswith("200 documents, ")
    assert said.out.endswith(f"isthmus up --data {tmp_path / 'out'}\n")
    assert said.err == "", "no bar where there is no terminal"
    assert run([*command, "--validation-fraction", "0.1", "--json"]) == ExitCode.DONE
    report = msgspec.json.decode(capsys.readouterr().out)
    assert report["schema"] == "isthmus.data/1"
    assert report["digest"] == load_prepared(tmp_path / "out").digest
    assert [source["weight"] for source in report["sources"]] == [1.0, 2.0]
    for flags, sentence in (
        (["--weight", "books=2"], "names no source"),
        (["--weight", "code=0"], "is no number from 0 to 1000"),
        (["--train-tokenizer", "100"], "is no size of a vocabulary"),
        (["--shard-size", "1"], "too small or too large"),
        (["--validation-fraction", "1"], "must lie between 0 and 1"),
        (["--train-tokenizer", "1k", "--tokenizer", "x.json"], "exclude each other"),
        (["--tokenizer", str(web)], "is no tokenizer.json"),
    ):
        assert run([*command, *flags]) == ExitCode.USAGE
        assert sentence in capsys.readouterr().err


def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "lines.jsonl", documents(500))
    told: list[Progress] = []
    settings = Settings(sources=((source, 1.0),), out=tmp_path / "out", train_tokenizer=300, shard_nbytes=SMALL)
    prepare(settings, told.append)
    assert {progress.what for progress in told} == {"tokenizer", "shards"}
    assert told[-1].done_nbytes == told[-1].total_nbytes == source.stat().st_size


def test_a_process_that_prepares_does_not_load_torch() -> None:
    asked = "import sys, isthmus.trainer.data.prep.lot_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", asked], check=False).returncode == 0


@pytest.mark.timeout(1800)
def test_much_text_is_prepared_within_a_gigabyte(tmp_path: Path) -> None:
    """ISTHMUS_TEST_PREP=200MB is what the README promises; less text takes less time, and the same limit."""
    assert isinstance(TEST_NBYTES, int)
    sources = [
        write_jsonl(tmp_path / "lines.jsonl", real_documents(TEST_NBYTES // 2)),
        write_parquet(tmp_path / "rows.parquet", real_documents(TEST_NBYTES // 2), rows=200),
    ]
    arguments = ["data", "prep", *map(str, sources), "--out", str(tmp_path / "out"), "--train-tokenizer", "32k"]
    command = [sys.executable, "-P", "-m", "isthmus.trainer.cli", *arguments, "--jobs", "2"]
    began = time.monotonic()
    peaks: dict[int, int] = {}
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            peaks |= {pid: peak for pid in _family(process.pid) if (peak := _peak_nbytes(pid))}
            time.sleep(0.02)
    assert process.returncode == 0
    total, largest = sum(peaks.values()), max(peaks.values())
    print(f"{TEST_NBYTES / 1e6:.0f} MB in {time.monotonic() - began:.0f} s, {total / 1e6:.0f} MB at most: {peaks}")
    text = load_prepared(tmp_path / "out")
    assert sum(source.num_documents for source in text.index.sources) > 500
    assert text.vocab_size <= 32_000
    assert largest > 20e6, "it was measured"
    assert total < MOST_NBYTES


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in _family(int(child)))]


def _peak_nbytes(pid: int) -> int:
    """Most memory that a process has had so far; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
