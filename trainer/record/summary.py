# SPDX-License-Identifier: Apache-2.0
"""A peer's figures for people who watch it train: one line while it does, and five when it has ended.

Must not know where they are shown.
"""

import os
from pathlib import Path

from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.errors import ExitCode
from isthmus.trainer.record.status import Status, count, figure

_ENDS = {ExitCode.DONE: "is complete", ExitCode.LEFT: "was left"}


def live_line(status: Status) -> str:
    """What is going on, in less than 80 columns unless the run is very large."""
    is_training = status.phase in ("training", "exchanging")
    parts: list[str] = [] if is_training else [status.phase]
    parts.append(f"step {status.outer_step}/{status.total_outer_steps}")
    if is_training:
        parts.append(f"round {status.inner_step}/{status.inner_steps_per_round}")
    if status.train_loss is not None:
        parts.append(f"loss {status.train_loss:.3f}")
    if status.tokens_per_s:
        parts.append(f"{_short(status.tokens_per_s)} tok/s")
    parts.append(count(len(status.members), "peer"))
    if status.seconds_left is not None:
        parts.append(f"{format_duration(status.seconds_left)} left")
    return ", ".join(parts)


def summary(status: Status, code: int, checkpoint: Path | None, next_command: str | None) -> str:
    """How it went, in five lines, and the command to type next.

    Args:
        status: at the end.
        code: the process's exit code.
        checkpoint: the newest one of this peer; None if there is none.
        next_command: None if no command helps.
    """
    end = _ENDS.get(ExitCode(code), f"ended here with {code}") if code in list(ExitCode) else f"ended here with {code}"
    last = status.train_loss if status.last_round is None else status.last_round.loss
    held_out = "" if status.validation_loss is None else f", held out {status.validation_loss:.4f}"
    rate = "" if status.tokens_per_s is None else f", {status.tokens_per_s:,.0f} a second"
    where = "none" if checkpoint is None else f"{shown(checkpoint)}"
    lines = [
        f"run {status.run_id} {end}",
        f"  steps       {status.outer_step} of {status.total_outer_steps}, {status.num_commits:,} commits and "
        f"{status.num_inner_steps:,} inner steps here",
        f"  loss        {figure(status.first_loss, '.4f')} -> {figure(last, '.4f')}{held_out}",
        f"  tokens      {status.tokens:,} in {format_duration(status.uptime_s)}{rate}",
        f"  peers       {count(status.peers_seen, 'other peer')}, {rounded_nbytes(status.sent_bytes)} sent, "
        f"{rounded_nbytes(status.received_bytes)} received",
        f"  checkpoint  {where}",
    ]
    return "\n".join(lines if next_command is None else [*lines, f"next: {next_command}"])


def format_duration(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown(path: Path) -> str:
    """A path as people type it: from here, if it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _short(value: float) -> str:
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.0f}"
