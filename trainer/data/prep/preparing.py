# SPDX-License-Identifier: Apache-2.0
"""From sources to a prepared text: what is to be done, by several processes, gone on with where it was cut short.

    <out>/work/plan.json         what it is made of; another one is refused
    <out>/work/lot-000000.json   the record of a lot that is done
    <out>/work/threshold.json    where so little was read that none or all of it would be held out
    <out>/plan.digest            of the plan, when all is done
    <out>/index.json             comes last: there is a text when it is there

Rules: the outcome follows from sources and settings alone, not from the number of processes, nor from how often it was
begun. Memory is that of a shard and a few hundred documents a process. Mixture weights say how often a source's
documents are in the training shards: so a lease needs to know nothing of them, and every copy is trained on once.

Errors: `DataError`, `ConfigError` (2), `EnvironmentFault` (3).
"""

import contextlib
import fcntl
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from isthmus.trainer.data.corpus import DataError
from isthmus.trainer.data.prep.crew import prepare_lots
from isthmus.trainer.data.prep.documents import Piece, documents_in, in_mixed_order, pieces_of
from isthmus.trainer.data.prep.lots import Lot, LotRecord, Task, tokenizer_of
from isthmus.trainer.data.prepared import (
    INDEX_NAME,
    TOKENIZER_NAME,
    Index,
    PreparedText,
    SourceEntry,
    describe_part,
    dtype_of,
    is_prepared,
    load_prepared,
)
from isthmus.trainer.data.tokenizer import FileTokenizer, train_tokenizer
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.files import write_atomically

_WORK: Final = "work"
_PLAN_DIGEST: Final = "plan.digest"
_MODE: Final = 0o644
"""Of files that others may read: a text is no secret of a run."""
_SHARDS_A_LOT: Final = 4
"""What is read for a lot: so many shards' bytes. Tokens are rarely longer than that."""
_LEARNT_NBYTES: Final = 64 << 20
"""Of all sources, that a tokenizer is trained on: pieces in mixed order, so a fair sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is to be prepared and how.

    Attributes:
        sources: files and folders, with the weight of each.
        out: the folder of the text.
        tokenizer: a `tokenizer.json`; None: bytes, or one that is trained.
        train_tokenizer: with so many tokens, on these sources.
        end_of_document: the tokenizer's word for it; None: one that is usual.
        field: of a jsonl line or a table's row.
        validation_fraction: of the documents, by their hash, in (0, 1).
        shard_nbytes: of the tokens of one shard.
        jobs: processes.
    """

    sources: tuple[tuple[Path, float], ...]
    out: Path
    tokenizer: Path | None = None
    train_tokenizer: int | None = None
    end_of_document: str | None = None
    field: str = "text"
    validation_fraction: float = 0.01
    shard_nbytes: int = 16 << 20
    jobs: int = 1


class _Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the outcome follows from. `changed`: when each file was, in nanoseconds of its file system."""

    pieces: tuple[Piece, ...]
    changed: tuple[tuple[str, int], ...]
    weights: tuple[float, ...]
    field: str
    validation_fraction: float
    shard_nbytes: int
    tokenizer: str | None
    train_tokenizer: int | None
    end_of_document: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a preparation is. `what`: in words."""

    what: str
    done_nbytes: int
    total_nbytes: int


def prepare(settings: Settings, tell: Callable[[Progress], None]) -> PreparedText:
    """Prepare a text, or go on with it. One that is whole already is not made again.

    Raises:
        DataError: a source cannot be read, or the folder holds another text.
        EnvironmentFault: a library is missing, or the disk refuses.
    """
    plan = _plan_of(settings)
    out, work = settings.out, settings.out / _WORK
    with _disk_errors(out):
        if is_prepared(out):
            return _whole(out, plan)
        work.mkdir(parents=True, exist_ok=True)
        with _alone(work):
            _begin(work, plan)
            _make_tokenizer(settings, plan, tell)
            records = _records(settings, plan, tell)
            write_atomically(out / _PLAN_DIGEST, _digest_of(plan), mode=_MODE)
            _write_index(settings, plan, records)
            shutil.rmtree(work)
    return load_prepared(out)


def _plan_of(settings: Settings) -> _Plan:
    pieces = [
        piece for number, (path, _) in enumerate(settings.sources) for piece in pieces_of(path, number, settings.field)
    ]
    paths = dict.fromkeys(piece.path for piece in pieces)
    tokenizer = settings.tokenizer
    if tokenizer is not None:
        FileTokenizer(tokenizer, settings.end_of_document)  # a mistake is told before anything is written
    return _Plan(
        pieces=tuple(in_mixed_order(pieces)),
        changed=tuple((path, Path(path).stat().st_mtime_ns) for path in paths),
        weights=tuple(weight for _, weight in settings.sources),
        field=settings.field,
        validation_fraction=settings.validation_fraction,
        shard_nbytes=settings.shard_nbytes,
        tokenizer=None if tokenizer is None else describe_part(tokenizer).digest.hex(),
        train_tokenizer=settings.train_tokenizer,
        end_of_document=settings.end_of_document,
    )


def _whole(out: Path, plan: _Plan) -> PreparedText:
    """The text that is there, if it is the one that is wanted."""
    made = out / _PLAN_DIGEST
    if not made.exists() or made.read_bytes() != _digest_of(plan):
        raise DataError(
            out,
            "holds a text that was prepared from other sources or otherwise",
            cure="name another folder with --out, or delete this one",
        )
    shutil.rmtree(out / _WORK, ignore_errors=True)  # of a start that ended before it was cleared away
    return load_prepared(out)


def _digest_of(plan: _Plan) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(plan), digest_size=32).hexdigest().encode()


def _names(settings: Settings) -> list[str]:
    return [path.name[:256] or str(path)[:256] for path, _ in settings.sources]


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(work.parent, "is being prepared by another process", cure="wait for it") from error
        yield


def _begin(work: Path, plan: _Plan) -> None:
    path, encoded = work / "plan.json", msgspec.json.encode(plan)
    if not path.exists():
        write_atomically(path, encoded)
    elif path.read_bytes() != encoded:
        raise DataError(
            work.parent,
            "was begun with other settings, or its sources have changed",
            cure="repeat the first command, or delete that folder",
        )


# ---------------------------------------------------------------------------------------------------------- tokenizer


def _make_tokenizer(settings: Settings, plan: _Plan, tell: Callable[[Progress], None]) -> None:
    path = settings.out / TOKENIZER_NAME
    if path.exists():
        return
    if settings.tokenizer is not None:
        write_atomically(path, settings.tokenizer.read_bytes(), mode=_MODE)
    elif settings.train_tokenizer is not None:
        partial = path.with_name(f"{path.name}.partial")
        train_tokenizer(_learnt(plan, tell), settings.train_tokenizer, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)


def _learnt(plan: _Plan, tell: Callable[[Progress], None]) -> Iterator[str]:
    total = min(_LEARNT_NBYTES, sum(piece.nbytes for piece in plan.pieces))
    done = 0
    for piece in plan.pieces:
        for document in documents_in(piece, plan.field):
            if done >= _LEARNT_NBYTES:
                return
            yield document
            done += len(document)
            tell(Progress(what="tokenizer", done_nbytes=min(done, total), total_nbytes=total))


# ---------------------------------------------------------------------------------------------------------------- lots


def _records(settings: Settings, plan: _Plan, tell: Callable[[Progress], None]) -> list[LotRecord]:
    """Of all lots, in their order; those that are done are taken over."""
    work = settings.out / _WORK
    lots = _lots_of(plan)
    threshold_path = work / "threshold.json"
    if threshold_path.exists():
        threshold = msgspec.json.decode(threshold_path.read_bytes(), type=float)
        return _prepared(settings, plan, lots, threshold, tell)
    records = _prepared(settings, plan, lots, plan.validation_fraction, tell)
    if not any(record.train or record.held_out for record in records):
        raise DataError(settings.out, "would hold no text: all sources are empty", cure="name sources with text")
    threshold = _fair_threshold(records, plan.validation_fraction)
    if threshold == plan.validation_fraction:
        return records
    write_atomically(threshold_path, msgspec.json.encode(threshold))
    records = _prepared(settings, plan, lots, threshold, tell)
    if not any(record.train for record in records):
        raise DataError(settings.out, "would hold one document, and none to hold out", cure="bring more text")
    return records


def _fair_threshold(records: Sequence[LotRecord], fraction: float) -> float:
    """So that neither none nor all documents are held out."""
    least, largest = min(record.least_share for record in records), max(record.largest_share for record in records)
    if least >= fraction:
        return math.nextafter(least, 1)
    return largest if largest < fraction else fraction


def _lots_of(plan: _Plan) -> list[Lot]:
    lots: list[Lot] = []
    pieces: list[Piece] = []
    for piece in plan.pieces:
        pieces.append(piece)
        if sum(one.nbytes for one in pieces) >= _SHARDS_A_LOT * plan.shard_nbytes:
            lots.append(Lot(number=len(lots), pieces=tuple(pieces)))
            pieces = []
    if pieces:
        lots.append(Lot(number=len(lots), pieces=tuple(pieces)))
    return lots


def _prepared(
    settings: Settings, plan: _Plan, lots: Sequence[Lot], threshold: float, tell: Callable[[Progress], None]
) -> list[LotRecord]:
    work = settings.out / _WORK
    task = _task_of(settings, plan, threshold)
    records = {lot.number: record for lot in lots if (record := _kept(work, lot, threshold)) is not None}
    rest = [lot for lot in lots if lot.number not in records]
    total = sum(lot.nbytes for lot in lots)
    done = total - sum(lot.nbytes for lot in rest)

    def advanced(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        tell(Progress(what="shards", done_nbytes=min(done, total), total_nbytes=total))

    for record in prepare_lots(task, rest, settings.jobs, advanced):
        write_atomically(_record_path(work, record.number), msgspec.json.encode(record))
        records[record.number] = record
    return [records[lot.number] for lot in lots]


def _task_of(settings: Settings, plan: _Plan, threshold: float) -> Task:
    return Task(
        out=str(settings.out),
        has_tokenizer=plan.tokenizer is not None or plan.train_tokenizer is not None,
        end_of_document=plan.end_of_document,
        field=plan.field,
        weights=plan.weights,
        threshold=threshold,
        shard_nbytes=plan.shard_nbytes,
    )


def _record_path(work: Path, number: int) -> Path:
    return work / f"lot-{number:06d}.json"


def _kept(work: Path, lot: Lot, threshold: float) -> LotRecord | None:
    """The record of a lot whose documents all stand on the sides where this threshold puts them."""
    try:
        record = msgspec.json.decode(_record_path(work, lot.number).read_bytes(), type=LotRecord)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    low, high = sorted((record.threshold, threshold))
    return record if low == high or record.least_share >= high or record.largest_share < low else None


# --------------------------------------------------------------------------------------------------------------- index


def _write_index(settings: Settings, plan: _Plan, records: Sequence[LotRecord]) -> None:
    tokenizer_path = settings.out / TOKENIZER_NAME
    task = _task_of(settings, plan, plan.validation_fraction)
    tokenizer = tokenizer_of(task)
    index = Index(
        dtype=dtype_of(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        tokenizer=describe_part(tokenizer_path).digest.hex() if task.has_tokenizer else None,
        validation_fraction=plan.validation_fraction,
        sources=tuple(
            SourceEntry(
                name=name,
                weight=weight,
                num_documents=sum(record.documents[number] for record in records),
                num_tokens=sum(record.tokens[number] for record in records),
            )
            for number, (name, weight) in enumerate(zip(_names(settings), plan.weights, strict=True))
        ),
        train=tuple(shard for record in records for shard in record.train),
        held_out=tuple(shard for record in records for shard in record.held_out),
        train_text_nbytes=sum(record.train_text_nbytes for record in records),
        held_out_text_nbytes=sum(record.held_out_text_nbytes for record in records),
    )
    names = {shard.name for shard in index.shards}
    for path in settings.out.glob("*.bin*"):  # of lots that were prepared again, or cut short
        if path.name not in names:
            path.unlink()
    write_atomically(
        settings.out / INDEX_NAME, msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n", mode=_MODE
    )


@contextlib.contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"the text cannot be prepared in {out}: {error.strerror or error}", cure="free some space there"
        ) from error
