# SPDX-License-Identifier: Apache-2.0
"""An outer step beside inner ones, in real daemons, int8: one peer alone, then two whose workers share the device.

For an outer step a peer's workers stand still (`outer_step_s`): copies to and from the mailbox, payload, exchange,
outer optimizer and digest. Alone, nothing is exchanged. Two peers exchange through memory of this machine; their inner
steps take longer than alone, since both compute at once, and one waits for the other.
"""

import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.trainer.record.event_log import FILE_NAME, read_events
from scripts.bench_outer import run_two
from scripts.gpubench.task import Figures, Task

_WARM_UP = 2
_STORY_CHARS = 2000


def measure(task: Task) -> Figures:
    """Medians over the founder's outer steps but for the first two."""
    outer_steps, inner_steps, batch = (10, 16, 16) if task.is_cuda else (4, 2, 2)
    words = [
        *("--outer-steps", str(outer_steps), "--outer.inner-steps", str(inner_steps), "--outer.codec", "int8"),
        *("--model.preset", task.preset, "--inner.batch-size", str(batch), "--inner.lr", "1e-4"),
        # Whoever is slower is waited for: both shall have trained in every step.
        *("--members.quorum", "1", "--members.patience", "100"),
        *("--checkpoint.every", "0", "--eval.every", "0", "--metrics.port", "none", "--data.limit", "4MB"),
    ]

    def start(_rank: int, command: str) -> "subprocess.Popen[str]":
        return _start([*shlex.split(command), "--device", task.device_type])

    alone = _figures(_alone(words, task))
    _, events = run_two(start, words)
    pair = _figures(events)
    return {
        "preset": task.preset,
        "inner_steps": inner_steps,
        "alone": alone,
        "pair": pair,
        "largest_process_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
        "ok": alone["outer_steps"] == pair["outer_steps"] == outer_steps,
    }


def _start(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "isthmus.trainer.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _alone(words: Sequence[str], task: Task) -> list[dict[str, Any]]:
    """The events of a run of one peer."""
    with tempfile.TemporaryDirectory() as folder:
        place = ("--listen", "127.0.0.1:0", "--dir", f"{folder}/0", "--device", task.device_type)
        process = _start(["up", *words, *place])
        try:
            _, errors = process.communicate(timeout=task.limit_s)
        finally:
            process.kill()
        if process.returncode:
            raise SystemExit(f"a peer ended with {process.returncode}:\n{errors[-_STORY_CHARS:]}")
        return list(read_events(Path(folder, "0", FILE_NAME)))


def _figures(events: Sequence[Mapping[str, Any]]) -> Figures:
    trained = [event for event in events if event["event"] == "trained"]
    counted = trained[_WARM_UP:]
    rounds = [event for event in events if event["event"] == "round"][_WARM_UP:]
    if not counted:
        return {"outer_steps": len(trained)}
    figures: Figures = {
        "outer_steps": len(trained),
        "inner_steps_s": round(statistics.median(event["train_s"] for event in counted), 3),
        "outer_step_s": round(statistics.median(event["wait_s"] for event in counted), 3),
        "tokens_per_s": round(statistics.median(event["tokens"] / event["train_s"] for event in counted)),
        "losses": [round(event["loss"], 3) for event in trained],
    }
    if rounds:
        figures["exchange_s"] = round(statistics.median(event["seconds"] for event in rounds), 3)
        figures["sent_mb"] = round(statistics.median(event["bytes_sent"] for event in rounds) / 1e6, 1)
    return figures
