# SPDX-License-Identifier: Apache-2.0
"""What every start is asked for: its command line, and the settings of the run (a state of 300 KB, short rounds)."""

from pathlib import Path

from scripts.chaoslab.evidence import COORDINATOR

HANG_TIMEOUT_S = 20.0
"""After which workers that do not answer are replaced; longer than any freeze."""
_OPEN_END = 1_000_000
"""Outer steps: the run is ended from outside."""
_COMPACT_EVERY = 200
"""Records: so that the journal is compacted now and then, whatever happens at the time."""
_CONFIG = """
[model]
dim = 32
num_layers = 2
num_heads = 2
hidden_dim = 64
seq_len = 32
[inner]
batch_size = 2
schedule.type = "constant"
[outer]
inner_steps = 6
[checkpoint]
every = 10
keep = 2
[eval]
every = 0
[metrics]
port = "none"
"""


def write_settings(folder: Path, text: str) -> None:
    """Lay down what all starts read: the run's settings, and what it trains on."""
    (folder / "run.toml").write_text(_CONFIG)
    (folder / "text.txt").write_text(text)


def ticket(folder: Path) -> Path:
    """Where the coordinator leaves it."""
    return folder / "ticket"


def role(site: int, folder: Path, *, num_peers: int, min_peers: int) -> list[str]:
    """Command and flags of the site's process, without its own place."""
    if site != COORDINATOR:
        hang = ["--node.hang_timeout", f"{HANG_TIMEOUT_S:g}s"]
        return ["join", f"@{ticket(folder)}", "--node.threads", "1", *hang]
    numbers = ["--outer-steps", str(_OPEN_END), "--peers", str(num_peers), "--min-peers", str(min_peers)]
    numbers += ["--coordinator.compact_every", str(_COMPACT_EVERY)]
    files = ["-c", str(folder / "run.toml"), "--data.path", str(folder / "text.txt")]
    return ["coordinator", "--ticket-file", str(ticket(folder)), *files, *numbers]
