# SPDX-License-Identifier: Apache-2.0
"""Sources to prepare texts from, and what is in a prepared one. Not a test."""

import itertools
import json
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.trainer.data.prepared import PreparedText, ShardEntry, starts_of, tokens_of
from isthmus.trainer.data.tokenizer import Bytes, FileTokenizer


def documents(count: int, *, seed: int = 0) -> list[str]:
    """Short ones, no two alike, with letters of more than a byte."""
    words = random.Random(seed)
    return [
        f"Nr. {seed}/{number} – {' '.join(_word(words) for _ in range(words.randrange(3, 60)))}\n"
        for number in range(count)
    ]


def _word(words: random.Random) -> str:
    return "".join(words.choice("abcdeäß ") for _ in range(words.randrange(1, 9)))


def real_documents(nbytes: int) -> Iterator[str]:
    """The standard library's sources, again and again, with other numbers and another order of their parts."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    words, done = random.Random(1), 0
    while True:
        for path in sources:
            text = path.read_text("utf-8", "replace")
            parts = text.split("\n\n")
            words.shuffle(parts)
            document = re.sub(r"[0-9]+", lambda match: str(words.randrange(10 ** len(match[0]))), "\n\n".join(parts))
            if not document:
                continue
            done += len(document.encode("utf-8", "replace"))
            yield document
            if done >= nbytes:
                return


def write_jsonl(path: Path, texts: Sequence[str] | Iterator[str], *, field: str = "text") -> Path:
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({field: text, "other": 1}) + "\n")
    return path


def write_parquet(path: Path, texts: Sequence[str] | Iterator[str], *, rows: int = 50, field: str = "text") -> Path:
    schema = pa.schema([("id", pa.int64()), (field, pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        group: list[str] = []
        for text in texts:
            group.append(text)
            if len(group) == rows:
                writer.write_table(_table(group, schema))
                group = []
        if group:
            writer.write_table(_table(group, schema))
    return path


def _table(texts: list[str], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(range(len(texts)), pa.int64()), pa.array(texts)], schema=schema)


def write_saved_dataset(folder: Path, texts: Sequence[str], *, rows: int = 20) -> Path:
    """As the datasets library's `save_to_disk` does: Arrow streams and two files that describe them."""
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start in range(0, len(texts), rows):
            for batch in _table(list(texts[start : start + rows]), schema).to_batches():
                writer.write_batch(batch)
    return folder


def texts_in(text: PreparedText, shards: Sequence[ShardEntry]) -> list[str]:
    """The documents of shards, whole: what does not end in one shard is put together with what the next begins with."""
    folder, index = text.folder, text.index
    assert folder is not None, "it was prepared here"
    tokenizer = Bytes() if index.tokenizer is None else FileTokenizer(folder / "tokenizer.json")
    end = ord("\n") if index.end_of_document is None else index.end_of_document
    found: list[str] = []
    pending: list[int] = []
    for shard in shards:
        tokens = tokens_of(folder / shard.name, index, shard)
        starts = [*starts_of(folder / shard.name, index, shard).tolist(), len(tokens)]
        assert starts[0] == 0
        for start, stop in itertools.pairwise(starts):
            pending += tokens[start:stop].tolist()
            if pending[-1] == end:
                found.append(tokenizer.decode(pending if index.end_of_document is None else pending[:-1]))
                pending = []
    assert not pending
    return found
