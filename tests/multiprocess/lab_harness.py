# SPDX-License-Identifier: Apache-2.0
"""`scripts/lab` as a process, for tests. Not a test."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAB = (sys.executable, "-m", "scripts.runlab.cli")
ISTHMUS = str(Path(sys.executable).parent / "isthmus")
TIMEOUT_S = 120.0
SMALL = (
    *("--model.dim", "16", "--model.num_layers", "1", "--model.num_heads", "2", "--model.hidden_dim", "32"),
    *("--model.seq_len", "32", "--inner.batch_size", "2", "--outer.inner_steps", "3", "--eval.every", "0"),
    *("--outer-steps", "100000", "--data.limit", "100kB", "--node.metrics_port", "none"),
)


class Lab:
    """One that runs, in a folder of its own."""

    def __init__(self, folder: Path, popen: "subprocess.Popen[str]", console: Path) -> None:
        self.folder, self.popen, self._console = folder, popen, console

    def order(self, *words: str, code: int = 0) -> str:
        command = [*LAB, *words, "--folder", str(self.folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.popen.poll() is None, f"the lab has ended\n{self.told()}"
            assert time.monotonic() < deadline, f"{what}\n{self.told()}"
            time.sleep(0.1)

    def told(self) -> str:
        return self._console.read_text()

    def standing(self, number: int) -> str:
        row = next(line for line in self.order("status").splitlines() if line.startswith(f"peer {number}"))
        return re.split(r"\s{2,}", row)[1]

    def step(self) -> int:
        found = re.findall(r"^outer step (\d+)", self.order("status"), re.MULTILINE)
        return int(found[0])


@contextmanager
def running(tmp_path: Path, *flags: str) -> Iterator[Lab]:
    folder, console = tmp_path / "lab", tmp_path / "console"
    with console.open("w") as out:
        command = [*LAB, "up", "--folder", str(folder), *flags, *SMALL]
        popen = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, text=True)
    lab = Lab(folder, popen, console)
    try:
        lab.until("orders are taken", (folder / "orders").exists)
        yield lab
    finally:
        if popen.poll() is None:  # a test has failed
            popen.terminate()
            popen.wait(TIMEOUT_S)


def all_are_members(lab: Lab, *numbers: int) -> bool:
    return all(f"peer {number} is a member" in lab.told() for number in numbers)
