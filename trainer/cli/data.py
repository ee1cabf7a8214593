# SPDX-License-Identifier: Apache-2.0
"""The commands about texts: `isthmus data prep`."""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.trainer.cli.config import AsJson
from isthmus.trainer.cli.support import PROGRAM
from isthmus.trainer.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from isthmus.trainer.data.prep.preparing import Progress
    from isthmus.trainer.data.prepared import PreparedText

_BAR_LENGTH = 24
_INTERVAL_S = 0.2


def prep(
    sources: Annotated[list[Path], typer.Argument(help="Files or folders: text, .jsonl, .parquet, .arrow.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the prepared text.")],
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A tokenizer.json. Default: bytes.", show_default=False)
    ] = None,
    train_tokenizer: Annotated[
        str | None,
        typer.Option("--train-tokenizer", metavar="SIZE", help="Train one on the text: 32k.", show_default=False),
    ] = None,
    end_of_document: Annotated[
        str | None,
        typer.Option("--end-of-document", help="The tokenizer's token for it.", show_default="a usual one"),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            "--weight",
            metavar="SOURCE=NUMBER",
            help="How often a source's documents are taken: web=2, or 0.5 for half of them.",
            show_default="1 each",
        ),
    ] = None,
    field: Annotated[str, typer.Option("--field", help="With the text, in a line or a row.")] = "text",
    validation_fraction: Annotated[
        float, typer.Option("--validation-fraction", help="Share of the documents that is held out.")
    ] = 0.01,
    shard_size: Annotated[str, typer.Option("--shard-size", help="Of the tokens of one file.")] = "16MiB",
    jobs: Annotated[int | None, typer.Option("--jobs", help="Processes.", min=1, show_default="one a CPU")] = None,
    as_json: AsJson = False,
) -> int:
    """Turn texts into token shards that runs train on (--data). Goes on where it was cut short."""
    from isthmus.trainer.control_groups import num_processors
    from isthmus.trainer.data.prep.preparing import Settings, prepare

    if tokenizer is not None and train_tokenizer is not None:
        raise ConfigError("--tokenizer and --train-tokenizer exclude each other", cure="give one of them")
    if not 0 < validation_fraction < 1:
        raise ConfigError("--validation-fraction must lie between 0 and 1", cure="give a fraction such as 0.01")
    settings = Settings(
        sources=_weighted(sources, weight or []),
        out=out,
        tokenizer=tokenizer,
        train_tokenizer=None if train_tokenizer is None else _vocabulary(train_tokenizer),
        end_of_document=end_of_document,
        field=field,
        validation_fraction=validation_fraction,
        shard_nbytes=_shard_nbytes(shard_size),
        jobs=jobs or num_processors(),
    )
    bar = _Bar()
    try:
        text = prepare(settings, bar.show)
    finally:
        bar.close()
    _print(text, out, as_json=as_json)
    return int(ExitCode.DONE)


def _weighted(sources: Sequence[Path], weights: Sequence[str]) -> tuple[tuple[Path, float], ...]:
    found = dict.fromkeys(sources, 1.0)
    for text in weights:
        name, _, number = text.rpartition("=")
        chosen = [source for source in found if name in (str(source), source.name, source.stem)]
        if len(chosen) != 1:
            raise ConfigError(
                f"--weight {text} names {'no' if not chosen else 'more than one'} source",
                cure=f"write --weight SOURCE=NUMBER with one of {', '.join(map(str, sources))}",
            )
        try:
            found[chosen[0]] = float(number)
        except ValueError:
            found[chosen[0]] = 0.0
        if not 0 < found[chosen[0]] <= 1000:
            raise ConfigError(f"--weight {text} is no number from 0 to 1000", cure="write for example --weight web=2")
    return tuple(found.items())


def _vocabulary(text: str) -> int:
    from isthmus.trainer.config.quantities import parse_count
    from isthmus.trainer.data.prepared import MAX_VOCAB_SIZE

    try:
        size = parse_count(text)
    except ValueError as error:
        raise ConfigError(f"--train-tokenizer: {error}") from error
    if not isinstance(size, int) or not 257 <= size <= MAX_VOCAB_SIZE:
        raise ConfigError(
            f"--train-tokenizer {text} is no size of a vocabulary",
            cure=f"give 257 (all bytes and the end of a document) to {MAX_VOCAB_SIZE}",
        )
    return size


def _shard_nbytes(text: str) -> int:
    from isthmus.trainer.config.quantities import parse_nbytes

    try:
        nbytes = parse_nbytes(text)
    except ValueError as error:
        raise ConfigError(f"--shard-size: {error}") from error
    if not isinstance(nbytes, int) or not 1 << 12 <= nbytes <= 1 << 30:
        raise ConfigError(f"--shard-size {text} is too small or too large", cure="give 4KiB to 1GiB")
    return nbytes


def _print(text: "PreparedText", out: Path, *, as_json: bool) -> None:
    import msgspec

    index = text.index
    num_tokens = sum(shard.num_tokens for shard in index.train)
    num_held_out = sum(shard.num_tokens for shard in index.held_out)
    if as_json:
        result = {
            "schema": "isthmus.data/1",
            "directory": str(out),
            "digest": text.digest,
            "vocab_size": text.vocab_size,
            "dtype": index.dtype,
            "num_tokens": num_tokens,
            "num_held_out_tokens": num_held_out,
            "num_shards": len(index.train),
            "sources": [msgspec.to_builtins(source) for source in index.sources],
        }
        print(msgspec.json.encode(result).decode())
        return
    num_documents = sum(source.num_documents for source in index.sources)
    print(f"{num_documents:,} documents, {num_tokens:,} tokens to train on and {num_held_out:,} held out")
    print(f"{len(index.train) + len(index.held_out)} shards of {index.dtype}, a vocabulary of {text.vocab_size:,}")
    print(f"{PROGRAM} up --data {out}")


class _Bar:
    """A line on stderr, where that is a terminal: how far it is, how fast, how long it takes."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._clock: Callable[[], float] = time.monotonic
        self._what = ""
        self._began_at = self._next_at = -math.inf
        self._before_nbytes = 0

    def show(self, progress: "Progress") -> None:
        now = self._clock()
        if not self._is_shown or (now < self._next_at and progress.done_nbytes < progress.total_nbytes):
            return
        if progress.what != self._what:
            self._what, self._began_at, self._before_nbytes = progress.what, now, progress.done_nbytes
        self._next_at = now + _INTERVAL_S
        share = progress.done_nbytes / max(1, progress.total_nbytes)
        rate = (progress.done_nbytes - self._before_nbytes) / max(now - self._began_at, 1e-3)
        left = f", {(progress.total_nbytes - progress.done_nbytes) / rate:.0f} s left" if rate else ""
        filled = "#" * round(share * _BAR_LENGTH)
        line = f"{progress.what:<10}[{filled:<{_BAR_LENGTH}}] {share:4.0%}, {rate / 1e6:.1f} MB/s{left}"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the line away."""
        if self._is_shown and self._what:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
