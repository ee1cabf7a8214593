# SPDX-License-Identifier: Apache-2.0
import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from isthmus.trainer.data.corpus import Corpus, DataError, load_corpus

SENTENCE = "The quick brown fox jumps over the lazy dog; číslo. "


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(SENTENCE * 40, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    """Thirty files, each holding its own name over and over."""
    root = tmp_path / "books"
    for index in range(30):
        path = root / f"shelf{index % 3}" / f"book{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{path.name}>" * 50, encoding="utf-8")
    return root


def names_in(tokens):
    return set(bytes(tokens).decode().replace("\n", "").strip("<>").split("><"))


# ------------------------------------------------------------------------------------------------------------ files


def test_last_tenth_of_a_file_is_held_out(text_file):
    corpus = load_corpus(text_file, seq_len=16)
    raw = text_file.read_bytes()
    assert corpus.train.dtype == np.uint8
    assert bytes(corpus.train) + bytes(corpus.validation) == raw
    assert len(corpus.train) == int(len(raw) * 0.9)


def test_file_is_mapped_and_not_copied(text_file):
    corpus = load_corpus(text_file, seq_len=16)
    assert isinstance(corpus.train, np.memmap)
    assert np.shares_memory(corpus.train, corpus.train.base)
    assert not corpus.train.flags.writeable


def test_digest_names_the_text_and_the_split(text_file, tmp_path):
    copy = tmp_path / "elsewhere.md"
    copy.write_bytes(text_file.read_bytes())
    digest = load_corpus(text_file, seq_len=16).digest
    assert load_corpus(copy, seq_len=16).digest == digest
    assert load_corpus(text_file, seq_len=16, validation_fraction=0.2).digest != digest
    copy.write_bytes(text_file.read_bytes().replace(b"fox", b"fax", 1))
    assert load_corpus(copy, seq_len=16).digest != digest


def test_character_across_a_read_block_is_still_utf8(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * ((1 << 20) - 1) + "čx".encode())
    assert len(load_corpus(path, seq_len=16).validation) > 0


def test_limit_nbytes_keeps_the_head_of_a_file(text_file):
    corpus = load_corpus(text_file, seq_len=16, limit_nbytes=500)
    assert bytes(corpus.train) + bytes(corpus.validation) == text_file.read_bytes()[:500]


# ------------------------------------------------------------------------------------------------------ directories


def test_no_file_of_a_directory_is_on_both_sides(folder):
    corpus = load_corpus(folder, seq_len=16)
    train, validation = names_in(corpus.train), names_in(corpus.validation)
    assert train.isdisjoint(validation)
    assert train | validation == {path.name for path in folder.rglob("*.txt")}
    assert 1 <= len(validation) <= 10
    assert len(corpus.train) + len(corpus.validation) == sum(path.stat().st_size + 1 for path in folder.rglob("*.txt"))


def test_new_file_moves_no_other_across_the_split(folder):
    before = names_in(load_corpus(folder, seq_len=16).validation)
    for index in range(5):
        (folder / f"new{index}.txt").write_text(f"<new{index}.txt>" * 50)
    after = names_in(load_corpus(folder, seq_len=16).validation)
    assert {name for name in after if name.startswith("book")} == before


def test_place_of_the_directory_does_not_matter(folder, tmp_path):
    digest = load_corpus(folder, seq_len=16).digest
    assert load_corpus(folder.rename(tmp_path / "moved"), seq_len=16).digest == digest


@pytest.mark.parametrize("fraction", [0.001, 0.999])
@pytest.mark.parametrize("count", [2, 3])
def test_few_files_still_give_both_sides(tmp_path, fraction, count):
    for index in range(count):
        (tmp_path / f"{index}.txt").write_text(f"<{index}>" * 50)
    corpus = load_corpus(tmp_path, seq_len=16, validation_fraction=fraction)
    num_held_out = 1 if fraction < 0.5 else count - 1
    assert len(names_in(corpus.validation)) == num_held_out
    assert len(names_in(corpus.train)) == count - num_held_out


def test_single_file_of_a_directory_is_cut_like_a_file(tmp_path):
    (tmp_path / "only.txt").write_text(SENTENCE * 40, encoding="utf-8")
    from_folder = load_corpus(tmp_path, seq_len=16)
    assert from_folder.digest == load_corpus(tmp_path / "only.txt", seq_len=16).digest


def test_hidden_files_are_left_out(folder):
    digest = load_corpus(folder, seq_len=16).digest
    (folder / ".notes").write_bytes(b"\xff")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    assert load_corpus(folder, seq_len=16).digest == digest


def test_limit_nbytes_takes_whole_files_from_all_folders(folder):
    corpus = load_corpus(folder, seq_len=16, limit_nbytes=9_000)
    text = bytes(corpus.train) + bytes(corpus.validation)
    names = names_in(corpus.train) | names_in(corpus.validation)
    assert len(text) == sum(50 * len(f"<{name}>") + 1 for name in names)
    assert 7_500 < len(text) <= 9_000 + len(names)
    assert {int(name[4:6]) % 3 for name in names} == {0, 1, 2}


def test_corpus_is_read_once_and_held_once(folder):
    corpus = load_corpus(folder, seq_len=16)
    assert isinstance(corpus, Corpus)
    assert corpus.train.nbytes + corpus.validation.nbytes <= sum(
        path.stat().st_size + 1 for path in folder.rglob("*") if os.path.isfile(path)
    )


# ------------------------------------------------------------------------------------------------------------ jsonl


def write_lines(path, texts):
    path.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)) + "\n\n")
    return path


def test_lines_are_split_whole(tmp_path):
    path = write_lines(tmp_path / "lines.jsonl", [f"<line {i} č>" * 5 for i in range(200)])
    corpus = load_corpus(path, seq_len=16)
    train, validation = names_in(corpus.train), names_in(corpus.validation)
    assert train.isdisjoint(validation)
    assert train | validation == {f"line {i} č" for i in range(200)}
    assert 8 <= len(validation) <= 40


def test_equal_lines_stand_on_the_same_side(tmp_path):
    path = write_lines(tmp_path / "lines.jsonl", [f"<{i % 7}>" * 5 for i in range(70)])
    corpus = load_corpus(path, seq_len=8)
    assert names_in(corpus.train).isdisjoint(names_in(corpus.validation))
    assert names_in(corpus.train) | names_in(corpus.validation) == set("0123456")


def test_limit_nbytes_keeps_the_first_lines(tmp_path):
    path = write_lines(tmp_path / "lines.jsonl", [f"<{i:03}>" * 10 for i in range(100)])
    corpus = load_corpus(path, seq_len=8, limit_nbytes=1_000)
    assert names_in(corpus.train) | names_in(corpus.validation) == {f"{i:03}" for i in range(20)}


def test_directory_may_hold_json_lines(folder):
    write_lines(folder / "more.jsonl", ["<more>" * 20, "<and more>" * 20])
    corpus = load_corpus(folder, seq_len=16)
    sides = [names_in(corpus.train), names_in(corpus.validation)]
    assert sum({"more", "and more"} <= side for side in sides) == 1


@pytest.mark.parametrize("line", ["not json", '"a string"', '{"words": "x"}', '{"text": 3}', '{"text": "\\ud800"}'])
def test_bad_line_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r'bad line 3.* string "text"') as caught:
        load_corpus(path, seq_len=16)
    assert caught.value.path == path


# ------------------------------------------------------------------------------------------------- standard library


@pytest.fixture(scope="module")
def library():
    return load_corpus(None, seq_len=128)


def test_standard_library_is_the_default_corpus(library):
    train = bytes(library.train)
    assert len(train) > 4_000_000
    assert (Path(sysconfig.get_path("stdlib")) / "abc.py").read_bytes() in train + bytes(library.validation)
    assert 0.002 < len(library.validation) / len(train) < 0.08
    assert "standard library" in library.description


def test_standard_library_comes_without_tests_packages_and_machine_paths(library):
    root = Path(sysconfig.get_path("stdlib"))
    text = bytes(library.train) + bytes(library.validation)
    left_out = [*root.glob("_sysconfigdata*.py"), *root.glob("test/test_ab*.py"), *root.glob("unittest/test/*.py")]
    assert left_out
    for path in left_out:
        source = path.read_bytes()
        assert len(source) < 200 or source not in text, path


def test_standard_library_is_the_same_every_time(library):
    assert load_corpus(None, seq_len=128).digest == library.digest


def test_capped_standard_library_is_a_part_of_it(library):
    capped = load_corpus(None, seq_len=128, limit_nbytes=500_000)
    assert 300_000 < len(capped.train) + len(capped.validation) <= 510_000
    assert bytes(capped.validation[:500]) in bytes(library.train) + bytes(library.validation)


def test_interpreter_without_sources_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"holds no Python sources.*--data PATH"):
        load_corpus(None, seq_len=128)


# ----------------------------------------------------------------------------------------------------------- errors


def make_empty(path):
    path.write_bytes(b"")


def make_empty_folder(path):
    path.mkdir()


def make_short(path):
    path.write_text("too short")


def make_latin1(path):
    path.write_bytes("ünïcode ".encode("latin-1") * 100)


def make_cut_character(path):
    path.write_bytes(b"a" * 1000 + "č".encode()[:1])


def make_nothing(path):
    pass


@pytest.mark.parametrize(
    ("make", "problem", "cure"),
    [
        (make_nothing, "does not exist", "--data"),
        (make_empty, "is empty", "text in it"),
        (make_empty_folder, "holds no files", "put text files"),
        (make_short, "8 training tokens, too few for one sample of 17", "shorten the sequence"),
        (make_latin1, "is not UTF-8 text near byte 0", "iconv"),
        (make_cut_character, "is not UTF-8 text near byte", "iconv"),
    ],
)
def test_unusable_path_is_named_with_problem_and_cure(tmp_path, make, problem, cure):
    path = tmp_path / "data"
    make(path)
    with pytest.raises(DataError) as caught:
        load_corpus(path, seq_len=16)
    assert caught.value.path == path
    assert problem in caught.value.reason
    assert cure in caught.value.cure
    assert str(caught.value) == f"{path} {caught.value.reason}; {caught.value.cure}"


def test_empty_json_lines_are_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n\n")
    with pytest.raises(DataError, match="holds no text"):
        load_corpus(path, seq_len=16)


def test_undecodable_file_of_a_directory_is_named_itself(folder):
    (folder / "shelf1" / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(DataError, match="is not UTF-8") as caught:
        load_corpus(folder, seq_len=16)
    assert caught.value.path == folder / "shelf1" / "photo.jpg"


def test_held_out_side_too_short_for_a_sample_is_refused(text_file):
    with pytest.raises(DataError, match="held-out tokens"):
        load_corpus(text_file, seq_len=400)


def test_unreadable_file_is_named(text_file, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(DataError, match="cannot be read: Permission denied") as caught:
        load_corpus(text_file, seq_len=16)
    assert caught.value.path == text_file
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("arguments", [{"validation_fraction": 0.0}, {"validation_fraction": 1.0}, {"limit_nbytes": 0}])
def test_argument_out_of_range_is_refused(text_file, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        load_corpus(text_file, seq_len=16, **arguments)
