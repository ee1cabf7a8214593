# SPDX-License-Identifier: Apache-2.0
"""A process that prepares lots: `python -m isthmus.trainer.data.prep.lot_process`, started by preparing.py.

stdin: the `Task`, then one `Lot` a line. stdout: `Advanced` for each piece, then `LotRecord` or `Failed`, one a line.
It ends when stdin does, and so with whoever started it.
"""

import sys

import msgspec

from isthmus.trainer.data.prep.lots import Lot, LotRecord, Task, prepare_lot, tokenizer_of
from isthmus.trainer.errors import ConfigError, EnvironmentFault, IsthmusError


class Advanced(msgspec.Struct, frozen=True, tag=True):
    """A piece of so many bytes is done."""

    nbytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The lot is."""

    record: LotRecord


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An operator's error; nothing else comes."""

    problem: str
    cure: str
    is_environment: bool


Word = Advanced | Done | Failed
WORDS: msgspec.json.Decoder[Word] = msgspec.json.Decoder(Word)


def failure_of(error: IsthmusError | OSError) -> Failed:
    """An error as it is told."""
    if isinstance(error, OSError):
        return Failed(f"a shard cannot be written: {error.strerror or error}", "free some space there", True)
    return Failed(error.problem, error.cure, isinstance(error, EnvironmentFault))


def error_of(failed: Failed) -> IsthmusError:
    """The other way round."""
    kind = EnvironmentFault if failed.is_environment else ConfigError
    return kind(failed.problem, cure=failed.cure)


def main() -> None:
    """Until stdin ends."""

    def say(word: Word) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
        sys.stdout.buffer.flush()

    try:
        task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
        tokenizer = tokenizer_of(task)
        while line := sys.stdin.buffer.readline():
            lot = msgspec.json.decode(line, type=Lot)
            say(Done(prepare_lot(task, lot, tokenizer, lambda nbytes: say(Advanced(nbytes)))))
    except BrokenPipeError:
        pass  # whoever started this process is gone
    except (IsthmusError, OSError) as error:
        say(failure_of(error))


if __name__ == "__main__":
    main()
