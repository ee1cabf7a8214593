# SPDX-License-Identifier: Apache-2.0
"""The text that the fleet reads: real, and on every machine that has this project.

Without a file it is a sample of the running interpreter's own standard library (trainer/data/corpus.py), so bytes are
tokens and whole files are held out. Its digest goes with the figures: another Python has another text.

Two others are there as well for whoever has torch (`installed_texts`): what the installed packages say of themselves,
and the sources of sympy, which torch needs. Choose no setting with these: the standard library, torch's C++ headers
(`include`, a folder like any) and the docstrings of its modules have been used for that.

Who reads what follows from the seed, the worker's name and the global inner step alone.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from isthmus.trainer.data.corpus import load_corpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from isthmus.trainer.data.corpus import TokenArray

TEXT_NBYTES: Final = 3 << 20
"""Read at most this much: several times what a run trains on."""
HELD_OUT_FRACTION: Final = 0.05
VOCAB_SIZE: Final = 256
_OF_PACKAGES: Final = ("METADATA", "LICEN[CS]E*", "NOTICE*", "COPYING*", "AUTHORS*")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """Tokens to train on, tokens held out."""

    train: TokenArray
    held_out: TokenArray
    digest: str
    description: str

    def held_out_samples(self, count: int, *, length: int) -> Tensor:
        """The same for everybody: [count, length + 1] int64, evenly spread."""
        starts = np.linspace(0, len(self.held_out) - length - 1, count).astype(np.int64)
        return _windows(self.held_out, starts, length)


def load_text(path: Path | None = None, *, length: int) -> Text:
    """The standard library, or a file or directory of one's own; see trainer.data.corpus.load_corpus.

    Raises:
        DataError: it cannot be read, or is too short for `length`.
    """
    corpus = load_corpus(path, seq_len=length, validation_fraction=HELD_OUT_FRACTION, limit_nbytes=TEXT_NBYTES)
    return Text(train=corpus.train, held_out=corpus.validation, digest=corpus.digest, description=corpus.description)


def installed_texts(folder: Path) -> dict[str, Path]:
    """Write them into this folder, a line of JSON a file, as `load_text` reads them: path by name."""
    packages = Path(torch.__file__).parents[1]
    found = {
        "packages": [file for pattern in _OF_PACKAGES for file in sorted(packages.glob(f"*.dist-info/**/{pattern}"))],
        "sympy": [file for file in sorted(packages.glob("sympy/**/*.py")) if "tests" not in file.parts],
    }
    for name, files in found.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(
                json.dumps({"text": file.read_text(encoding="utf-8", errors="replace")}) + "\n" for file in files
            )
    return {name: folder / f"{name}.jsonl" for name in found}


class Reader:
    """Hands out what workers read.

    Args:
        text: from which.
        seed: of the run.
        num_steps: global inner steps, the most that will be asked for.
        batch_size: samples of a worker and step.
        length: tokens of a sample.
    """

    def __init__(self, text: Text, *, seed: int, num_steps: int, batch_size: int, length: int) -> None:
        self._tokens, self._length = text.train, length
        self._seed, self._size = seed, (num_steps + 1, batch_size)
        self._starts: dict[str, npt.NDArray[np.int64]] = {}

    def __call__(self, workers: Sequence[str], step: int) -> Tensor:
        """[len(workers), batch_size, length + 1] int64, from random places."""
        return _windows(self._tokens, np.stack([self._starts_of(worker)[step] for worker in workers]), self._length)

    def _starts_of(self, worker: str) -> npt.NDArray[np.int64]:
        if worker not in self._starts:
            generator = np.random.default_rng((self._seed, zlib.crc32(worker.encode())))
            self._starts[worker] = generator.integers(len(self._tokens) - self._length, size=self._size)
        return self._starts[worker]


def _windows(tokens: TokenArray, starts: npt.NDArray[np.int64], length: int) -> Tensor:
    return torch.from_numpy(tokens[starts[..., None] + np.arange(length + 1)].astype(np.int64))
