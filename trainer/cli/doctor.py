# SPDX-License-Identifier: Apache-2.0
"""The command that says what is wrong with a machine, and with the way from it to a run."""

import asyncio
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.trainer.cli.config import AsJson, ConfigFiles, Dir, resolve
from isthmus.trainer.cli.flags import (
    Advertise,
    Device,
    Insecure,
    Listen,
    LocalWorkers,
    MaxDownload,
    MaxUpload,
    OwnCopy,
    Tls,
    limit_flags,
    net_flags,
    node_flags,
    place_of,
)
from isthmus.trainer.cli.support import RUNS_FOLDER
from isthmus.trainer.errors import ExitCode

if TYPE_CHECKING:
    from isthmus.trainer.doctor.report import Check


def doctor(
    context: typer.Context,
    ticket: Annotated[
        list[str] | None,
        typer.Argument(
            help="The ticket, @FILE that holds it, or - for standard input. Without one this machine alone is looked "
            "at.",
            show_default=False,
        ),
    ] = None,
    config: ConfigFiles = None,
    data: OwnCopy = None,
    directory: Dir = None,
    local_workers: LocalWorkers = None,
    device: Device = None,
    listen: Listen = None,
    advertise: Advertise = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    tls: Tls = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> int:
    """Look at this machine, and with a ticket at the way to its run. Changes nothing; exit code 3 if something fails.

    Two seconds of traffic each way show what the line carries.
    """
    resolved = resolve(
        context,
        files=config,
        flags={"node.data": ("--data", place_of(data))}
        | node_flags(directory, local_workers, device, listen, advertise)
        | limit_flags(max_upload, max_download)
        | net_flags(tls, None, insecure=insecure),
    )
    import msgspec

    from isthmus.trainer.doctor.python import python
    from isthmus.trainer.doctor.report import render_check, report_of

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    checks: list[Check] = []

    def tell(check: "Check") -> None:
        checks.append(check)
        if not as_json:
            print(render_check(check, width=width), flush=True)

    tell(python())
    if checks[0].level != "fail":
        from isthmus.trainer.doctor.doctor import DoctorOptions, examine

        options = DoctorOptions(
            resolved=resolved,
            run_dir=(resolved.config.node.dir or RUNS_FOLDER / resolved.config.run.name).absolute(),
            ticket="".join(ticket) if ticket else None,
        )
        asyncio.run(examine(options, tell))
    report = report_of(checks)
    if as_json:
        print(msgspec.json.encode(report).decode())
    return int(ExitCode.DONE if report.ok else ExitCode.ENVIRONMENT)
