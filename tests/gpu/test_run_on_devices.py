# SPDX-License-Identifier: Apache-2.0
"""Two real peers whose workers compute on the same device: their anchors stay equal, and the audit holds."""

from pathlib import Path

import pytest
import torch

for name in ("msgspec", "blake3", "cryptography", "zmq", "pydantic", "typer"):
    pytest.importorskip(name)

from tests.multiprocess.run_audit import assert_same_commits  # noqa: E402 - where all that is installed
from tests.multiprocess.run_harness import running  # noqa: E402 - where all that is installed

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

LAST = 8


def test_two_peers_on_one_device_commit_the_same_bits_and_learn(device: torch.device, tmp_path: Path) -> None:
    flags = ["--node.device", device.type, "--model.seq-len", "32", "--inner.lr", "1e-2"]
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", str(LAST), *flags)
        run.wait_for_ticket()
        joiner = run.join("--device", device.type)
        assert run.until_ended(founder, joiner) == [0, 0]
        commits = assert_same_commits(founder, joiner)
        assert sorted(commits) == list(range(1, LAST + 1))
        assert len(set(commits.values())) == LAST
        for peer in (founder, joiner):
            losses = [event["loss"] for event in peer.events("trained")]
            assert losses[-1] < losses[0] - 0.2
            (log,) = peer.directory.glob("**/worker-0*.log")
            assert f"device='{device.type}" in log.read_text()
        assert run.command("audit", str(founder.directory), str(joiner.directory)).code == 0
