# SPDX-License-Identifier: Apache-2.0
"""The command that proves what a run did."""

from pathlib import Path
from typing import Annotated

import typer

from trainer.cli_config import AsJson
from trainer.errors import ExitCode, IntegrityError


def audit(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNDIR...", help="Folders of the run's peers, its founder's or coordinator's among them."
        ),
    ],
    as_json: AsJson = False,
) -> int:
    """Prove from a run's journal and what its peers kept what it did. Exit code 9 if something does not hold."""
    from trainer.audit import audit_run
    from trainer.audit_report import audit_as_json, render_audit, sentence_of

    found = audit_run(folders)
    print(audit_as_json(found) if as_json else render_audit(found))
    if not found.holds:
        more = sum(verdict.num_findings for verdict in found.verdicts) - 1
        raise IntegrityError(
            sentence_of(found.findings[0]) + (f", and {more} more" if more else ""),
            cure="do not go on from this run before it is known why",
        )
    return int(ExitCode.DONE)
