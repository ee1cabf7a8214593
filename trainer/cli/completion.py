# SPDX-License-Identifier: Apache-2.0
"""What a shell completes beyond Typer: the config's flags, and what a `type` can be.

Must import quickly; the keys are looked at when a shell asks for them.
"""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer
import typer.core


@dataclass(frozen=True, slots=True)
class _Word:
    """As Typer writes it for a shell."""

    value: str
    help: str | None = None
    type: str = "plain"


class TakesConfig(typer.core.TyperCommand):
    """A command with `--section.key` flags."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:  # noqa: ANN401 - of another package in each Typer
        """Its own flags, the config's that begin so, and after `--section.type` the types."""
        return [*super().shell_complete(ctx, incomplete), *_config_words(_word_before(), incomplete)]


def _config_words(before: str, incomplete: str) -> Iterator[_Word]:
    from isthmus.trainer.config.keys import KNOWN_KEYS

    key = before.removeprefix("--").replace("-", "_")
    if key.endswith(".type") and key in KNOWN_KEYS:
        (types,) = KNOWN_KEYS[key].values()
        yield from (_Word(name) for name in sorted(types) if name.startswith(incomplete))
    elif len(incomplete) > len("--"):  # there are a hundred of them
        begun = incomplete.removeprefix("--").replace("-", "_")
        yield from (_Word(f"--{known}") for known in KNOWN_KEYS if known.startswith(begun))


def _word_before() -> str:
    """The word before the one that is completed: bash tells all words and a number, other shells the line so far."""
    line = os.environ.get("COMP_WORDS")
    try:
        if line is not None:
            return shlex.split(line)[int(os.environ["COMP_CWORD"]) - 1]
        line = os.environ.get("_TYPER_COMPLETE_ARGS", "")
        words = shlex.split(line)
        return words[-1 if line.endswith(" ") else -2]
    except (ValueError, KeyError, IndexError):  # an open quote, a line of one word
        return ""
