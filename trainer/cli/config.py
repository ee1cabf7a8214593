# SPDX-License-Identifier: Apache-2.0
"""The layers of the configuration as a command line gives them, and `isthmus config`.

Rules: a command's own flags (`--listen`) stand below the config's (`--node.listen`), and say which flag they are.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.trainer.cli.support import Invocation
from isthmus.trainer.errors import ConfigError, EnvironmentFault, ExitCode

if TYPE_CHECKING:
    from isthmus.trainer.config.sources import ResolvedConfig

ConfigFiles = Annotated[
    list[Path] | None, typer.Option("--config", "-c", help="TOML file; repeat it, later ones win.", show_default=False)
]
Dir = Annotated[
    Path | None, typer.Option("--dir", help="Folder of this peer. Default: under runs/.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable, with a versioned schema.")]


def show(
    context: typer.Context,
    config: ConfigFiles = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print the configuration that all layers make together, as TOML, with what each key means."""
    from isthmus.trainer.config.show import as_json_text, as_toml

    resolved = resolve(context, files=config, flags={})
    print(as_json_text(resolved) if as_json else as_toml(resolved, with_origin=origin), end="")
    return int(ExitCode.DONE)


def reference() -> int:
    """Print a page about every key: its default, and what it means (Markdown)."""
    from isthmus.trainer.config.reference import as_reference

    print(as_reference(), end="")
    return int(ExitCode.DONE)


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("run.toml"),
) -> int:
    """Write a configuration to begin with: every key with its meaning and its default."""
    from isthmus.trainer.config.show import as_template

    try:
        with file.open("x") as new:
            try:
                new.write(as_template())
                new.flush()
            except OSError:
                file.unlink()  # half of it would count as one that exists already
                raise
    except FileExistsError as error:
        raise ConfigError(f"{file} exists already", cure="name another file, or take this one away first") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise ConfigError(f"{file.parent} is no folder", cure="name a file in a folder that is there") from error
        raise EnvironmentFault(f"{file} cannot be written: {error.strerror}", cure="name another file") from error
    print(f"{file} is written: every key is in it, with its meaning and its default; isthmus up -c {file} founds a run")
    return int(ExitCode.DONE)


def resolve(
    context: typer.Context,
    *,
    files: list[Path] | None,
    flags: dict[str, tuple[str, object]],
    resume: str | None = None,
) -> "ResolvedConfig":
    """All layers together.

    Args:
        context: of the command; knows the `--section.key` flags.
        files: `--config`.
        flags: dotted key → (flag, its value or None) of the command's own flags.
        resume: where a run is taken up again; its manifest is the lowest layer.

    Raises:
        IsthmusError: see `load_config` and `load_resumed`.
    """
    from isthmus.trainer.config.sources import Override, load_config

    overrides = [Override(key, str(value), flag) for key, (flag, value) in flags.items() if value is not None]
    overrides += [Override(key, text, f"--{key}") for key, text in invocation_of(context).overrides]
    manifest = None
    if resume is not None:
        from isthmus.trainer.config.manifest import without_key

        # "With any number of peers": the first start's wish for company does not bind a later one.
        manifest = without_key(_resumed_manifest(resume), "members", "start_peers")
    return load_config(files=files or (), environ=os.environ, overrides=overrides, manifest=manifest)


def _resumed_manifest(resume: str) -> bytes:
    from isthmus.trainer.checkpoint.remote import find_resumed, is_url, reaching

    if is_url(resume):
        folder, step = find_resumed(resume)
        with reaching(resume):
            return folder.manifest(step).run_manifest.encode()
    from isthmus.trainer.checkpoint.checkpoint import load_resumed

    return load_resumed(Path(resume)).meta.run_manifest


def invocation_of(context: typer.Context) -> Invocation:
    """The command line that this command is part of."""
    invocation = context.find_root().obj
    assert isinstance(invocation, Invocation)
    return invocation
