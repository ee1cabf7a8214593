# SPDX-License-Identifier: Apache-2.0
"""How much memory a peer's daemon takes, in copies of the fp32 parameters: two peers on this machine, int8.

    scripts/bench memory --millions 100 --json memory.json

Both peers are loops of their own (`isthmus.attach`) whose inner step is nothing but an SGD update and a rest. The most
that a daemon has had at once is told beyond what one has of a model of a million parameters. The loop's own memory is
not in it; the mailbox, which the two share, is. At that moment it was

    shared   with other processes: the mailbox, and what exchanges within a machine go through
    own      shared state, the next one, payloads, results

Checkpoints are made as often as usual. Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import isthmus
from scripts.bench_outer import MILLION, model_of, run_pair

_INNER_STEPS = 8
_REST_S = 0.25
"""After every inner step. Without it exchanges follow one another faster than in any run."""
_LOOK_S = 0.005
_NUMEL_NBYTES = 4
_CASES = {
    "diloco": ([], 5.0),
    "streaming, P = 2": (["--outer.type", "streaming", "--outer.num-fragments", "2"], 4.0 + 2 / 2),
    "streaming, P = 4": (["--outer.type", "streaming", "--outer.num-fragments", "4"], 4.0 + 2 / 4),
}
"""By name: the words of the command, and the most copies that it shall have."""


def main() -> int:
    """Measure and print; returns the exit code."""
    options = _options()
    if options.rank is not None:
        _loop(options.millions)
        return 0
    rows = []
    print(f"{options.millions} M parameters: copies {'most':>6} {'aim':>6} {'shared':>8} {'own':>6}")
    for name, (words, aim) in _CASES.items():
        base, peak = (_measured(millions, words, options.outer_steps) for millions in (1, options.millions))
        copy_nbytes = _NUMEL_NBYTES * MILLION * (options.millions - 1)
        row: dict[str, Any] = {part: (peak[part] - base[part]) / copy_nbytes for part in ("most", "shared", "own")}
        row |= {"method": name, "millions": options.millions, "aim": aim}
        rows.append(row)
        print(f"{name:>24} {row['most']:6.2f} {aim:6.2f} {row['shared']:8.2f} {row['own']:6.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))
    return 0


def _measured(millions: int, words: list[str], outer_steps: int) -> dict[str, float]:
    words = [*words, "--outer-steps", str(outer_steps), "--outer.inner-steps", str(_INNER_STEPS)]

    def start(rank: int, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.bench_memory", "--rank", str(rank), "--millions", str(millions)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"ISTHMUS_COMMAND": command},
        )

    return run_pair(start, words)[0]


def _loop(millions: int) -> None:
    """Train as one peer; print the bytes of its daemon."""
    model, optimizer = model_of(millions)
    with isthmus.attach(model, optimizer) as session:
        (daemon,) = psutil.Process().children()
        watch = _Watch(daemon.pid)
        watch.start()
        while not session.is_over:
            optimizer.step()
            time.sleep(_REST_S)
        watch.ends.set()
        watch.join()
    print(json.dumps(watch.most))


class _Watch(threading.Thread):
    """Looks at a process until it `ends`; `most` is what it had when it had most."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._path = Path(f"/proc/{pid}/status")
        self.ends = threading.Event()
        self.most = {"most": 0, "shared": 0, "own": 0}

    def run(self) -> None:
        resident = 0
        while not self.ends.wait(_LOOK_S):
            lines = (line.split() for line in self._path.read_text().splitlines() if line.endswith(" kB"))
            nbytes = {name: int(kilobytes) << 10 for name, kilobytes, _ in lines}
            if nbytes["VmRSS:"] > resident:
                resident = nbytes["VmRSS:"]
                self.most = {"shared": nbytes["RssShmem:"], "own": nbytes["RssAnon:"]}
            self.most["most"] = nbytes["VmHWM:"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench memory", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--millions", type=int, default=100, metavar="N", help="parameters; 100")
    parser.add_argument("--outer-steps", type=int, default=12, help="of a run; 12")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
