# SPDX-License-Identifier: Apache-2.0
"""The command that proves what a run did."""

from pathlib import Path
from typing import Annotated

import typer

from isthmus.trainer.cli.config import AsJson
from isthmus.trainer.errors import ExitCode, IntegrityError


def audit(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNDIR...", help="Folders of runs' peers, their founders' or coordinators' among them."
        ),
    ],
    as_json: AsJson = False,
) -> int:
    """Prove from runs' journals and what their peers kept what they did. Exit code 9 if something does not hold.

    With --json every run is an object in a line of its own.
    """
    from isthmus.trainer.audit.audit import audit_runs
    from isthmus.trainer.audit.report import audit_as_json, render_audit, sentence_of

    found = audit_runs(folders)
    print("\n".join(map(audit_as_json, found)) if as_json else "\n\n".join(map(render_audit, found)))
    wrong = [finding for run in found for finding in run.findings]
    if wrong:
        more = sum(verdict.num_findings for run in found for verdict in run.verdicts) - 1
        raise IntegrityError(
            sentence_of(wrong[0]) + (f", and {more} more" if more else ""),
            cure="do not go on from this run before it is known why",
        )
    return int(ExitCode.DONE)
