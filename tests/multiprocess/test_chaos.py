# SPDX-License-Identifier: Apache-2.0
"""`scripts/chaos` itself, for less than a minute: it does faults, judges what is left, and leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
CHAOS = (sys.executable, "-m", "scripts.chaoslab.cli")
TIMEOUT_S = 500.0
POLL_INTERVAL_S = 0.05


def test_four_peers_survive_half_a_minute_of_chaos(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    kept = tmp_path / "kept"
    options = ["--minutes", "0.4", "--peers", "4", "--seed", "7", "--json", str(figures), "--keep", str(kept)]
    done = subprocess.run([*CHAOS, *options], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert figures.exists(), done.stdout + done.stderr
    told = json.loads(figures.read_text())
    wrong = {name: sentences for name, sentences in told["wrong"].items() if sentences}
    # How long something takes is measured on a machine that does nothing else.
    assert wrong.keys() <= {"recovery", "waits", "gaps"}, done.stdout
    gaps_s = [
        float(seconds) for sentence in wrong.get("gaps", ()) for seconds in re.findall(r"for ([\d.]+) s", sentence)
    ]
    assert max(gaps_s, default=0.0) < 90.0, done.stdout
    assert done.returncode == (1 if wrong else 0), done.stdout + done.stderr
    assert told["faults"]
    assert told["checked"]["commits"] > 10
    assert told["checked"]["digests"] > 4 * 10
    assert _living_in(kept) == []
    assert (kept / "site-0" / "1" / "journal.sqlite").exists()  # what was on a disk of its own is kept, too


def test_an_interrupted_chaos_leaves_no_process_behind(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with subprocess.Popen(
        [*CHAOS, "--minutes", "5", "--peers", "4", "--keep", str(kept)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while len(_living_in(kept)) < 2 and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        assert len(_living_in(kept)) >= 2  # the coordinator and a peer
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    assert _living_in(kept) == []
    assert "kept" not in Path("/proc/self/mounts").read_text()


def _living_in(folder: Path) -> list[int]:
    """Processes whose command line names this folder, but for `scripts/chaos`."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(part.startswith(f"{folder}/".encode()) for part in command):
            found.append(int(name))
    return found
