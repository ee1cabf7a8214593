# SPDX-License-Identifier: Apache-2.0
"""The command `isthmus`.

Rules: stdout is the result, stderr is logs and progress; a command imports what it needs when it runs, so that help,
status and leave answer at once; every flag is known or an error. What the commands do stands elsewhere.

Exit codes: see `trainer.errors.ExitCode`. What talks to a running peer ends with 0, or 4 where none runs; with 5 where
it is not done.
"""

import contextlib
import errno
import io
import os
import resource
import sys
from typing import Annotated

import typer

from isthmus.trainer.cli import audit as cli_audit
from isthmus.trainer.cli import checkpoints as cli_checkpoints
from isthmus.trainer.cli import config as cli_config
from isthmus.trainer.cli import data as cli_data
from isthmus.trainer.cli import doctor as cli_doctor
from isthmus.trainer.cli import models as cli_models
from isthmus.trainer.cli import operator as cli_operator
from isthmus.trainer.cli import peers as cli_peers
from isthmus.trainer.cli import plan as cli_plan
from isthmus.trainer.cli import top as cli_top
from isthmus.trainer.cli import tracking as cli_tracking
from isthmus.trainer.cli.completion import TakesConfig
from isthmus.trainer.cli.config import invocation_of
from isthmus.trainer.cli.support import PROGRAM, TAKES_CONFIG, report, take_apart
from isthmus.trainer.errors import ConfigError, EnvironmentFault, ExitCode
from isthmus.trainer.threads import spin_briefly

_MANY_FILES = 1 << 16

app = typer.Typer(
    name=PROGRAM,
    help="Train one model on machines far apart, badly connected and unreliable.",
    epilog="Any config key can be given as a flag (--inner.lr 3e-4); --debug shows tracebacks.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at the configuration.", rich_markup_mode=None)
app.add_typer(config_app, name="config")
data_app = typer.Typer(help="Prepare texts to train on.", rich_markup_mode=None)
app.add_typer(data_app, name="data")
ckpt_app = typer.Typer(help="Look at checkpoints, or remove some.", rich_markup_mode=None)
app.add_typer(ckpt_app, name="ckpt")

for command in (
    cli_config.init,
    cli_doctor.doctor,
    cli_plan.plan,
    cli_peers.up,
    cli_peers.join,
    cli_peers.coordinator,
    cli_peers.leave,
    cli_peers.status,
    cli_top.top,
    cli_operator.peers,
    cli_operator.evict,
    cli_operator.ban,
    cli_operator.ticket,
    cli_tracking.track,
    cli_audit.audit,
    cli_models.export,
    cli_models.sample,
):
    app.command(cls=TakesConfig if command.__name__ in TAKES_CONFIG else None)(command)
app.command("eval")(cli_models.evaluate)
config_app.command(cls=TakesConfig)(cli_config.show)
config_app.command()(cli_config.reference)
data_app.command()(cli_data.prep)
ckpt_app.command("list")(cli_checkpoints.list_)
ckpt_app.command()(cli_checkpoints.verify)
ckpt_app.command()(cli_checkpoints.prune)


@data_app.callback()
def about_data() -> None:
    """A group, though there is one command in it so far."""


def main() -> None:
    """The console script."""
    _have_descriptors()
    _write_whatever_comes()
    _allow_many_files()
    spin_briefly()  # here, since a config may load torch
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """One command line; returns the exit code. Whatever happens, people get a sentence."""
    debug, as_json = "--debug" in argv, "--json" in argv
    try:
        invocation = take_apart(argv)
        outcome = typer.main.get_command(app).main(
            args=list(invocation.arguments), prog_name=PROGRAM, standalone_mode=False, obj=invocation
        )
        _flush()
    except BrokenPipeError:
        _drop_output()  # whoever reads has read enough, as in `isthmus audit … | head`
        return int(ExitCode.DONE)
    except SystemExit as ending:
        if not isinstance(ending.__context__, BrokenPipeError):
            raise
        _drop_output()  # likewise, in the middle of a long output: Typer ends the process by itself
        return int(ExitCode.DONE)
    except (KeyboardInterrupt, typer.Abort):
        return int(ExitCode.FORCED)
    except Exception as error:  # noqa: BLE001 - the root: every error becomes a sentence and an exit code
        return report(_as_fault(error), debug=debug, as_json=as_json)
    return int(outcome) if isinstance(outcome, int) else int(ExitCode.DONE)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise EnvironmentFault(
            f"the result cannot be written to standard output: {error.strerror}", cure="free some space there"
        ) from error


def _as_fault(error: Exception) -> Exception:
    """The sentence about a full disk; standard output may be on it, in the middle of a long result."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return error
    _drop_output()
    return EnvironmentFault(f"what this command writes has no room: {error.strerror}", cure="free some space there")


def _drop_output() -> None:
    """Python writes at its end what could not be written before, and complains."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _have_descriptors() -> None:
    """Put the null device where stdin, stdout or stderr were closed: a socket must not get their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the smallest number that is free
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115 - open as long as the process
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def _write_whatever_comes() -> None:
    """Spell what the terminal's encoding does not have, as a locale without UTF-8, in escapes: a result is one."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _allow_many_files() -> None:
    """Raise the limit of open files, for this process and all that it starts, as far as may be or as is of any use.

    Each connection is a file, and a login shell allows 1,024. Without end it would be of harm: where a program has no
    better way (`os.closerange` on an old libc), it closes each number up to the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system with a bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Look at what all commands share."""
    if version:
        from importlib.metadata import version as version_of

        print(f"{PROGRAM} {version_of(PROGRAM)}")
        raise typer.Exit
    command = context.invoked_subcommand
    if command is None:
        print(context.get_help())
    elif (given := invocation_of(context).overrides) and command not in TAKES_CONFIG:
        raise ConfigError(f"no such option --{given[0][0]}", cure=f"{PROGRAM} {command} takes no configuration")
