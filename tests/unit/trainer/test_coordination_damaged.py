# SPDX-License-Identifier: Apache-2.0
"""A damaged journal ends its coordinator, unless the operator wants the run rebuilt: then it is moved aside."""

import asyncio
import logging
from pathlib import Path

import pytest

from isthmus.collective.core.types import Incarnation, PeerId, PeerRef
from isthmus.elastic.core.config import CoordinatorConfig, RebuildRule
from isthmus.trainer.config.settings import CoordinatorSection
from isthmus.trainer.errors import IntegrityError
from isthmus.trainer.run.coordination import Coordination
from tests.unit.elastic.machines import KEYS

RUN_ID = "run-0123abcd"


async def open_with(folder: Path, rebuild: RebuildRule | None) -> bool:
    """Whether the coordinator rebuilds its run."""
    coordination = Coordination(
        CoordinatorSection(),
        CoordinatorConfig(manifest_digest=b"m" * 32, sealer=KEYS.of_the_run, min_peers=1, outer_steps=9),
        run_id=RUN_ID,
        me=PeerRef(PeerId("5" * 16), Incarnation(1)),
        run_dir=folder,
        rebuild=rebuild,
        observe=lambda _: None,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            shell = await coordination.open(tasks, address="127.0.0.1:1", stands_by=False, closing=asyncio.Event())
            assert shell is not None
            return shell.status().is_rebuilding
    finally:
        coordination.close()


async def test_damaged_journal_is_moved_aside_for_a_rebuild_and_never_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / "journal.sqlite"
    for number, damaged in enumerate((b"no database, " * 1000, b"neither is this, " * 1000), start=1):
        journal.write_bytes(damaged)
        with pytest.raises(BaseExceptionGroup) as caught:
            await open_with(tmp_path, None)
        assert caught.group_contains(IntegrityError, match="rebuild")
        assert journal.read_bytes() == damaged
        with caplog.at_level(logging.WARNING):
            assert await open_with(tmp_path, RebuildRule.MAJORITY)
        aside = tmp_path / f"journal.sqlite.damaged-{number}"
        assert aside.read_bytes() == damaged
        assert f"journal_set_aside to={aside}" in caplog.text
        journal.unlink()
