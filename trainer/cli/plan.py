# SPDX-License-Identifier: Apache-2.0
"""The command that says what a run will take before there is one."""

import asyncio
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.trainer.cli.config import AsJson, ConfigFiles, Dir, resolve
from isthmus.trainer.cli.flags import (
    Data,
    Device,
    LocalWorkers,
    MaxDownload,
    MaxUpload,
    OuterSteps,
    Peers,
    limit_flags,
    node_flags,
    run_flags,
)
from isthmus.trainer.cli.support import RUNS_FOLDER
from isthmus.trainer.config.quantities import parse_rate, parse_seconds
from isthmus.trainer.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from isthmus.optim.recommend import Links
    from isthmus.trainer.config.settings import Config

_LINK_CURE = "say rate and round trip, as --link 38mbit/90ms; with a ticket, isthmus doctor measures them"


def plan(
    context: typer.Context,
    config: ConfigFiles = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="What the slowest peer's line carries, and the time there and back: 38mbit/90ms. Where it sends "
            "slower than it receives: --max-upload too.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="How long an inner step takes the slowest peer: 800ms. Default: a few are timed here.",
            show_default=False,
        ),
    ] = None,
    data: Data = None,
    peers: Peers = None,
    outer_steps: OuterSteps = None,
    directory: Dir = None,
    local_workers: LocalWorkers = None,
    device: Device = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    as_json: AsJson = False,
) -> int:
    """Say what a run will take over given links: bytes, waiting, time, memory. Founds nothing."""
    resolved = resolve(
        context,
        files=config,
        flags=run_flags(None, data, peers, None, outer_steps)
        | node_flags(directory, local_workers, device, None, None)
        | limit_flags(max_upload, max_download),
    )
    links = _links(link, resolved.config)
    step_s = None if step is None else _quantity("--step", step, parse_seconds)
    import msgspec

    from isthmus.trainer.forecast.planning import plan as make
    from isthmus.trainer.forecast.report import render

    if step_s is None and sys.stderr.isatty():
        print("a few inner steps are timed here; --step 800ms leaves that out", file=sys.stderr)
    node = resolved.config.node
    made = asyncio.run(make(resolved.config, links, step_s=step_s, folder=_existing(node.dir or RUNS_FOLDER)))
    print(msgspec.json.encode(made).decode() if as_json else render(made))
    return int(ExitCode.DONE)


def _links(link: str | None, config: "Config") -> "Links":
    """The line, and what `[node]` gives of it."""
    from isthmus.optim.recommend import Links

    if link is None:
        raise ConfigError("nothing is known of the links", cure=_LINK_CURE)
    rate_text, slash, round_trip_text = link.rpartition("/")
    if not slash:
        raise ConfigError(f"--link {link!r} has no round trip", cure=_LINK_CURE)
    rate = _quantity("--link", rate_text, parse_rate)
    round_trip_s = _quantity("--link", round_trip_text, parse_seconds, may_be_zero=True)
    node = config.node
    return Links(
        upload=min(rate, node.max_upload_bytes_per_s or rate),
        download=min(rate, node.max_download_bytes_per_s or rate),
        round_trip_s=round_trip_s,
    )


def _quantity(flag: str, text: str, parse: "Callable[[object], object]", *, may_be_zero: bool = False) -> float:
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} cannot be read", cure=str(error)) from error
    assert isinstance(value, int | float)
    if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
        raise ConfigError(f"{flag}: {text!r} is not possible", cure="give a number above zero")
    return float(value)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
