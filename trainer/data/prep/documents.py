# SPDX-License-Identifier: Apache-2.0
"""Documents of text, jsonl, Parquet and Arrow files, read in pieces that any process can read by itself.

A `Piece` is a part of one file: bytes of a text or jsonl file, row groups of a Parquet file, record batches of an Arrow
file. Rules: every document belongs to exactly one piece; a piece is read in bounded memory; the same files give the
same pieces and documents on every machine. Must not know tokens.

Documents: a line of jsonl and a row of a table has one in its text field. A text file is one; a longer one than
`LONGEST_TEXT` is cut at line ends. A folder saved by the datasets library (`save_to_disk`) is its Arrow files.

Errors: `DataError` (2), which names file and line or row; `EnvironmentFault` (3) where pyarrow is missing.
"""

import codecs
import contextlib
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from isthmus.trainer.data.corpus import DataError
from isthmus.trainer.errors import EnvironmentFault

if TYPE_CHECKING:
    import pyarrow as pa

LONGEST_TEXT = 64 << 10
"""Bytes of a text file that are one document."""
PIECE_NBYTES = 8 << 20
"""Of a file, about: what one piece holds."""
_ROWS = 256
"""Of a table that are in memory at once, at most."""
_BLOCK_NBYTES = 1 << 20

Kind = Literal["text", "jsonl", "parquet", "arrow"]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one file. `start`, `stop`: bytes, row groups or record batches, as the kind has it."""

    source: int
    """Index of the source that it belongs to."""
    path: str
    kind: Kind
    start: int
    stop: int
    nbytes: int
    """About, of what is read for it."""


# ------------------------------------------------------------------------------------------------------------- pieces


def files_of(source: Path) -> list[tuple[Path, Kind]]:
    """The files of a source, sorted: itself, or what a folder holds. Hidden files are left out.

    Raises:
        DataError: it does not exist, or holds no files.
    """
    if not source.exists():
        raise DataError(source, "does not exist", cure="check its spelling")
    if source.is_file():
        return [(source, _kind_of(source))]
    found = [
        path
        for path in sorted(source.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(source).parts)
    ]
    tables = [path for path in found if path.suffix == ".arrow" and not path.name.startswith("cache-")]
    if tables and any(path.name in ("dataset_info.json", "state.json") for path in found):
        found = tables  # saved by the datasets library: the rest describes them
    if not found:
        raise DataError(source, "holds no files", cure="name a folder with text, jsonl, Parquet or Arrow files")
    return [(path, _kind_of(path)) for path in found]


def _kind_of(path: Path) -> Kind:
    kinds: dict[str, Kind] = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
    return kinds.get(path.suffix.lower(), "text")


def pieces_of(source: Path, number: int, field: str) -> Iterator[Piece]:
    """All pieces of a source; `number` is written into them.

    Raises:
        DataError: a file cannot be read, or a table has no such field.
        EnvironmentFault: pyarrow is missing.
    """
    for path, kind in files_of(source):
        try:
            for start, stop, nbytes in _parts_of(path, kind, field):
                yield Piece(source=number, path=str(path), kind=kind, start=start, stop=stop, nbytes=nbytes)
        except OSError as error:
            raise _unreadable(path, error) from error


def _parts_of(path: Path, kind: Kind, field: str) -> Iterator[tuple[int, int, int]]:
    if kind in ("text", "jsonl"):
        size = path.stat().st_size
        for start in range(0, size, PIECE_NBYTES):
            stop = min(start + PIECE_NBYTES, size)
            yield start, stop, stop - start
        return
    sizes = _row_group_sizes(path, field) if kind == "parquet" else _batch_sizes(path, field)
    start = total = 0
    for number, nbytes in enumerate(sizes):
        total += nbytes
        if total >= PIECE_NBYTES or number == len(sizes) - 1:
            yield start, number + 1, total
            start, total = number + 1, 0


def _row_group_sizes(path: Path, field: str) -> list[int]:
    with _table_errors(path):
        file = _pyarrow(path, "parquet").ParquetFile(path)
        _require_field(path, file.schema_arrow, field)
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        return [
            sum(
                group.column(column).total_uncompressed_size
                for column in range(group.num_columns)
                if group.column(column).path_in_schema == field
            )
            for group in groups
        ]


def _batch_sizes(path: Path, field: str) -> list[int]:
    with _table_errors(path), _Batches(path) as batches:
        _require_field(path, batches.schema, field)
        return [batch.column(field).nbytes for batch in batches]


def _require_field(path: Path, schema: "pa.Schema", field: str) -> None:
    import pyarrow as pa

    if field not in schema.names:
        raise DataError(path, f"has no column {field!r}", cure=f"name one with --field: {', '.join(schema.names)}")
    kind = schema.field(field).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(path, f"has a column {field!r} of {kind}", cure="name a column of texts with --field")


# ---------------------------------------------------------------------------------------------------------- documents


def documents_in(piece: Piece, field: str) -> Iterator[str]:
    """The documents of a piece, in order; empty ones are left out.

    Raises:
        DataError: one cannot be read.
        EnvironmentFault: pyarrow is missing.
    """
    path = Path(piece.path)
    read: Callable[[Path, Piece, str], Iterator[str]] = {
        "text": _text_documents,
        "jsonl": _line_documents,
        "parquet": _row_documents,
        "arrow": _batch_documents,
    }[piece.kind]
    try:
        yield from (document for document in read(path, piece, field) if document)
    except OSError as error:
        raise _unreadable(path, error) from error


def _lines(path: Path, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Those that begin in the piece, with the byte at which they do; a very long one comes in blocks."""
    with path.open("rb") as file:
        at = piece.start
        if at:  # the line that reaches over the beginning is the piece's before
            file.seek(at - 1)
            while (skipped := file.readline(_BLOCK_NBYTES)) and not skipped.endswith(b"\n"):
                pass
            at = file.tell()
        while at < piece.stop and (line := file.readline(_BLOCK_NBYTES if piece.kind == "text" else -1)):
            yield at, line
            at += len(line)
            while piece.kind == "text" and not line.endswith(b"\n") and (line := file.readline(_BLOCK_NBYTES)):
                yield at, line  # the rest of it, which may reach beyond the piece
                at += len(line)


def _text_documents(path: Path, piece: Piece, _field: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    document: list[str] = []
    length, at = 0, piece.start
    try:
        for begins_at, line in _lines(path, piece):
            if length >= LONGEST_TEXT:
                yield "".join(document)
                document, length = [], 0
            at = begins_at
            document.append(decoder.decode(line))  # a block of a very long line may end within a letter
            length += len(line)
        document.append(decoder.decode(b"", final=True))
    except UnicodeDecodeError as error:
        raise DataError(
            path,
            f"is not UTF-8 text near byte {at + error.start}",
            cure="convert it (iconv -t utf-8), or take it out if it is not text",
        ) from error
    yield "".join(document)


def _line_documents(path: Path, piece: Piece, field: str) -> Iterator[str]:
    for at, line in _lines(path, piece):
        if not line.strip():
            continue
        try:
            text = msgspec.json.decode(line)[field]
            if not isinstance(text, str):
                raise TypeError(f"{field!r} is no string")
            yield text
        except (msgspec.MsgspecError, UnicodeError, KeyError, TypeError) as error:
            cause = f"it has no {field!r}" if isinstance(error, KeyError) else str(error)
            raise DataError(
                path,
                f"has a bad line at byte {at}: {cause}",
                cure=f'every line must be a JSON object in UTF-8 with a string "{field}" (--field names another)',
            ) from error


def _row_documents(path: Path, piece: Piece, field: str) -> Iterator[str]:
    with _table_errors(path):
        file = _pyarrow(path, "parquet").ParquetFile(path, memory_map=True, pre_buffer=False)
        groups = list(range(piece.start, piece.stop))
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[field], use_threads=False):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)


def _batch_documents(path: Path, piece: Piece, field: str) -> Iterator[str]:
    with _table_errors(path), _Batches(path) as batches:
        for number, batch in enumerate(batches):
            if number >= piece.stop:
                return
            if number >= piece.start:
                column = batch.column(field)
                for start in range(0, len(column), _ROWS):
                    rows = column.slice(start, _ROWS).to_pylist()
                    yield from (text for text in rows if text is not None)


class _Batches:
    """The record batches of an Arrow file, in the format of a stream (as the datasets library has it) or of a file."""

    def __init__(self, path: Path) -> None:
        arrow = _pyarrow(path, "ipc")
        import pyarrow as pa

        self._memory = pa.memory_map(str(path))
        try:
            self._reader: Any = arrow.open_stream(self._memory)
            self._is_stream = True
        except pa.ArrowInvalid:
            self._reader = arrow.open_file(self._memory)
            self._is_stream = False
        self.schema: pa.Schema = self._reader.schema

    def __iter__(self) -> Iterator[Any]:
        if self._is_stream:
            yield from self._reader
        else:
            for number in range(self._reader.num_record_batches):
                yield self._reader.get_batch(number)

    def __enter__(self) -> "_Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()


@contextlib.contextmanager
def _table_errors(path: Path) -> Iterator[None]:
    """pyarrow's errors as sentences about the file."""
    _pyarrow(path, "lib")
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        cause = str(error).split("\n", 1)[0]
        raise DataError(path, f"cannot be read as a table: {cause}", cure="check the file") from error


def _pyarrow(path: Path, module: str) -> ModuleType:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise EnvironmentFault(
            f"{path} is a table, and pyarrow, which reads it, is not installed", cure="pip install pyarrow"
        ) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(path, f"cannot be read: {error.strerror or error}", cure="check its permissions and its disk")


def share_of(text: str, purpose: bytes) -> float:
    """A number in [0, 1) that follows from a document alone; independent between purposes."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=purpose).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def in_mixed_order(pieces: list[Piece]) -> list[Piece]:
    """The pieces of all sources in an order that follows from them alone, so that every shard has some of each."""
    return sorted(
        pieces,
        key=lambda piece: hashlib.blake2b(
            json.dumps([piece.source, Path(piece.path).name, piece.start, piece.stop]).encode(), digest_size=16
        ).digest(),
    )
