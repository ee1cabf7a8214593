# SPDX-License-Identifier: Apache-2.0
"""What is said beforehand of a daemon's memory, against a real one; and a run that cannot fit is refused."""

from pathlib import Path

import pytest

from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, CheckpointStore
from isthmus.trainer.config.manifest import config_of
from isthmus.trainer.config.memory import needs_of
from tests.multiprocess.processes import LEFT
from tests.multiprocess.run_harness import OPEN_END, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

# The harness's model is tiny; this one is large enough to be seen beside the program, and its steps are short.
MODEL = ["--model.dim", "512", "--model.num_layers", "5", "--model.hidden_dim", "2048", "--model.num_heads", "8"]
ENVIRONMENT = 3


def test_a_daemon_takes_what_was_said_beforehand_and_what_cannot_fit_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        refused = run.command(
            *(
                "up",
                "--model.preset",
                "1b",
                "--model.dim",
                "65536",
                "--node.device",
                "cpu",
                "--dir",
                str(tmp_path / "no"),
            ),
        )
        assert refused.code == ENVIRONMENT
        (sentence,) = refused.sentences
        assert "of memory here, and" in sentence
        assert sentence.endswith("or try all the same with --ignore-memory")

        flags = [*MODEL, "--peers", "2", "--min-peers", "2", "--outer-steps", str(OPEN_END), "--checkpoint.every", "3"]
        founder = run.found(*flags)
        run.wait_for_ticket()
        joiner = run.join()
        run.until("two checkpoints", lambda: len(founder.events("checkpoint")) >= 3, timeout_s=200)
        lines = Path(f"/proc/{founder.popen.pid}/status").read_text().splitlines()
        (most_nbytes,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
        run.leave_all()
        assert founder.outcome().code == joiner.outcome().code == LEFT
        assert "this_run_needs memory=" in founder.console.with_suffix(".err").read_text()
    newest = CheckpointStore(founder.directory / FOLDER_NAME, keep=1).load_newest()
    assert newest is not None
    needs = needs_of(config_of(newest.meta.run_manifest), on_gpu=False)
    assert most_nbytes == pytest.approx(needs.daemon, rel=0.25)
