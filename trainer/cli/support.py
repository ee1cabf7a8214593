# SPDX-License-Identifier: Apache-2.0
"""What every command needs: arguments that Typer cannot know, one sentence for an error, the folder of a run.

Rules: an operator's error is one sentence on stderr and its exit code; our bug is exit code 1 and a file with the
story. Must import quickly: no torch here.
"""

import contextlib
import difflib
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from isthmus.trainer.errors import ConfigError, IsthmusError, NothingRuns, leaves, operator_error, require_ours

if TYPE_CHECKING:
    from isthmus.trainer.run.control_socket import ControlClient

PROGRAM = "isthmus"
RUNS_FOLDER = Path("runs")
TAKES_CONFIG = frozenset({"up", "join", "coordinator", "config", "show", "doctor", "plan"})
"""Commands with `--section.key` flags."""

# A command line's mistakes, in every version of Typer (which moved them from one package to another).
UsageMistake: type[Exception] = typer.BadParameter.__mro__[1]

_PLAIN_FLAG = re.compile(r"--[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+(?==|$)")
_DOTTED_FLAG = re.compile(r"--([A-Za-z0-9_]+(?:\.[A-Za-z0-9_-]+)+)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command line, taken apart.

    Attributes:
        arguments: what Typer gets.
        overrides: (dotted key, text) of every `--section.key value` and `--section.key=value`, in order.
        debug: tracebacks instead of sentences.
    """

    arguments: tuple[str, ...]
    overrides: tuple[tuple[str, str], ...] = field(default=())
    debug: bool = False


def take_apart(argv: Sequence[str]) -> Invocation:
    """Separate the config's flags, which have a dot in their name, from the commands' own, which have none.

    Dashes and underscores in the name of a flag mean the same.

    Typer could only be made to let them through together with every misspelt flag.

    Raises:
        ConfigError: a config flag without a value.
    """
    arguments: list[str] = []
    overrides: list[tuple[str, str]] = []
    debug = False
    rest = iter(argv)
    for argument in rest:
        if argument == "--":
            arguments += [argument, *rest]
        elif argument == "--debug":
            debug = True
        elif (match := _PLAIN_FLAG.match(argument)) is not None:
            arguments.append(match[0].replace("_", "-") + argument[match.end() :])
        elif (match := _DOTTED_FLAG.fullmatch(argument)) is not None:
            value = match[2] if match[2] is not None else next(rest, None)
            if value is None or (match[2] is None and value.startswith("--")):
                raise ConfigError(f"--{match[1]} needs a value", cure=f"write --{match[1]} VALUE", key=match[1])
            overrides.append((match[1].replace("-", "_"), value))
        else:
            arguments.append(argument)
    return Invocation(arguments=tuple(arguments), overrides=tuple(overrides), debug=debug)


# ------------------------------------------------------------------------------------------------------------ errors


def report(error: BaseException, *, debug: bool, as_json: bool = False) -> int:
    """Tell people what went wrong, on stderr: a sentence a mistake, or one JSON object. Returns the exit code."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    known = _as_operator_error(error)
    if as_json:
        _write_line(_error_as_json(known))
    else:
        for fault in _faults_of(known):
            complain(str(fault))
    return int(known.exit_code)


def _as_operator_error(error: BaseException) -> IsthmusError:
    known = operator_error(error)
    if known is not None:
        return known
    if isinstance(error, UsageMistake):
        return ConfigError(_usage_sentence(error))
    leaf = leaves(error)[0]
    what = f"{type(leaf).__name__}: {leaf}".split("\n", 1)[0]
    return IsthmusError(f"this is a bug in isthmus ({what[:200]})", cure=f"please report it with {_write_story(error)}")


def _faults_of(error: IsthmusError) -> Sequence[IsthmusError]:
    return error.faults if isinstance(error, ConfigError) else (error,)


def _error_as_json(error: IsthmusError) -> str:
    """Schema `isthmus.error/1`, on one line."""
    faults = [
        {
            "sentence": str(fault),
            "cure": fault.cure or None,
            "key": getattr(fault, "key", None),
            "origin": getattr(fault, "origin", None),
        }
        for fault in _faults_of(error)
    ]
    return json.dumps({"schema": "isthmus.error/1", "exit_code": int(error.exit_code), "errors": faults})


def complain(sentence: str) -> None:
    """One sentence on stderr."""
    _write_line(f"{PROGRAM}: {sentence}")


def _write_line(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        print(line, file=sys.stderr, flush=True)


def _suggestions(error: Exception) -> Sequence[str]:
    """What was meant, where that is likely: Typer's own ideas go further."""
    possibilities: Sequence[str] = getattr(error, "possibilities", None) or ()
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or not hasattr(error, "possibilities"):
        return possibilities
    if context.info_name in TAKES_CONFIG:
        from isthmus.trainer.config.keys import keys_called

        keys = keys_called(option.lstrip("-").replace("-", "_"))
        if keys:
            return [f"--{key}" for key in keys]
    known = [name for parameter in context.command.params for name in parameter.opts]
    return difflib.get_close_matches(option, known, n=2, cutoff=0.75)


def _usage_sentence(error: Exception) -> str:
    possibilities = _suggestions(error)
    option = getattr(error, "option_name", None) if hasattr(error, "possibilities") else None
    if option is not None:
        message = f"no such option: {option}"
    else:
        message = str(getattr(error, "message", "")) if possibilities else ""
    if not message:
        format_message = getattr(error, "format_message", error.__str__)
        message = str(format_message())
    message = " ".join(message.split()).rstrip(".").replace(". Did you mean", "; did you mean")
    command = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
    hint = (
        f"did you mean {' or '.join(sorted(possibilities))}?" if possibilities else f"{command} -h lists what there is"
    )
    return f"{message[:1].lower()}{message[1:]}" + ("" if "did you mean" in message else f"; {hint}")


def _write_story(error: BaseException) -> str:
    story = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(prefix="isthmus-crash-", suffix=".txt")
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{' '.join(sys.argv[:2])}\n{story}")
    except OSError:
        # Better a traceback on the terminal than none.
        print(story, file=sys.stderr)
        return "the traceback above"
    return path


# ------------------------------------------------------------------------------------------------- the run's folder


def choose_folder(
    given: Path | None,
    *,
    holding: str,
    or_else: type[IsthmusError],
    prefer: Callable[[Path], bool] = lambda _: True,
) -> Path:
    """The folder a command works on: the one given, or the only one under `runs/` that holds a certain entry.

    Args:
        given: `--dir`.
        holding: name of a file or folder that tells the right one, such as `peer.json`.
        or_else: what to raise where there is none.
        prefer: the others are looked at only if none is like this.

    Raises:
        IsthmusError: there is none.
        ConfigError: there are several.
        NotOurs: this user may not open the one given, or one where there may be a run.
    """
    if given is not None:
        require_ours(given)
        return given
    found = sorted(path.parent for path in RUNS_FOLDER.glob(f"*/{holding}"))
    for folder in () if found else (RUNS_FOLDER, *sorted(RUNS_FOLDER.glob("*/"))):
        require_ours(folder)
    candidates = [folder for folder in found if prefer(folder)] or found
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(str(path) for path in candidates[:8])
        raise ConfigError(f"there are several runs here: {names}", cure="choose one with --dir")
    raise or_else(f"there is no run under {RUNS_FOLDER}/ here", cure="name its folder with --dir")


def client_of(given: Path | None, *, of_coordinator: bool = False) -> "ControlClient":
    """The daemon a command talks to: of `--dir`, or the only one that runs under `runs/`.

    Args:
        given: `--dir`.
        of_coordinator: whether only one where a coordinator lives can answer.

    Raises:
        NothingRuns: none runs; says how the last one ended, if the folder knows.
        ConfigError: there are several.
    """
    from isthmus.trainer.files import RUN_NAME
    from isthmus.trainer.record.event_log import FILE_NAME
    from isthmus.trainer.record.last_known import last_known, nothing_runs
    from isthmus.trainer.run.control_socket import PEER_FILE_NAME, ControlClient, is_running

    def is_right(folder: Path) -> bool:
        return is_running(folder) and (not of_coordinator or (folder / RUN_NAME).exists())

    try:
        return ControlClient(choose_folder(given, holding=PEER_FILE_NAME, or_else=NothingRuns, prefer=is_right))
    except NothingRuns as nothing:
        folder = choose_folder(given, holding=FILE_NAME, or_else=NothingRuns)
        past = last_known(folder)
        if past is None:
            raise
        raise nothing_runs(folder, past) from nothing
