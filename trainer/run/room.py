# SPDX-License-Identifier: Apache-2.0
"""Whether what a run needs fits on this machine, said in one line before anything of it is started.

Must not know how the needs are counted (config/memory.py).

Errors: `EnvironmentFault` (3), with the numbers.
"""

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME as CHECKPOINTS
from isthmus.trainer.checkpoint.private_files import FOLDER_NAME as PRIVATE
from isthmus.trainer.checkpoint.result_files import FOLDER_NAME as RESULTS
from isthmus.trainer.config.memory import Needs, least_needs_of, needs_of
from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.config.settings import Config
from isthmus.trainer.doctor.machine import memory_nbytes
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.workers.devices import choose_device

log = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 60.0
# In a process of its own: whoever asks gets a CUDA context, and the daemon is to have none.
_ASK_GPUS = "import sys, torch; print(min(torch.cuda.mem_get_info(i)[0] for i in range(int(sys.argv[1]))))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free here, in bytes. `device`: on the fullest GPU; None if there is none, or it does not say.

    `disk` includes what the peer's folder holds of the run already: newer files take its place.
    """

    host: int
    device: int | None
    disk: int


def require_room(config: Config, run_dir: Path, *, has_loop: bool) -> None:
    """Say what the run needs here, and refuse to begin where it cannot fit. Blocks for a moment.

    Args:
        config: the run's, with this peer's own part.
        run_dir: of this peer, existing.
        has_loop: whether a loop of one's own trains here: what that needs is not known, nor where.

    Raises:
        EnvironmentFault: it does not fit, and `node.ignore_memory` does not say to try all the same. A peer that comes
            back is not refused for its disk.
    """
    node = config.node
    on_gpu = not has_loop and computes_on_gpu(config)
    needs, room = needs_of(config, on_gpu=on_gpu), room_here(config, run_dir, on_gpu=on_gpu)
    log.info("this_run_needs %s", described(needs, room))
    if misfit(needs, room) is None:
        return
    problem = misfit(least_needs_of(config, on_gpu=on_gpu), room)
    if problem is None:
        log.warning("memory_is_tight; workers halve their micro-batches where it runs out")
        return
    # A disk that others have filled does not keep a peer out that comes back: it trains on without newer checkpoints.
    comes_back = _held_nbytes(run_dir) > 0 and misfit(needs, replace(room, disk=needs.disk)) is None
    if not (node.ignore_memory or comes_back):
        raise EnvironmentFault(problem[0], cure=f"{problem[1]}, or try all the same with --ignore-memory")
    log.warning("does_not_fit reason=%r; it is tried all the same", problem[0])


def computes_on_gpu(config: Config) -> bool:
    """Whether workers of our own compute on GPUs here.

    Raises:
        EnvironmentFault: there are not as many as `[node]` asks for.
    """
    return choose_device(config.node.device, config.node.local_workers) == "cuda"


def room_here(config: Config, run_dir: Path, *, on_gpu: bool) -> Room:
    """What is free. Blocks for a moment.

    Args:
        config: the run's, with this peer's own part.
        run_dir: of the peer, existing; or the folder that it will be made in.
        on_gpu: whether the workers compute on GPUs.
    """
    return Room(
        host=memory_nbytes()[1],
        device=_free_on_gpus(config.node.local_workers) if on_gpu else None,
        disk=shutil.disk_usage(run_dir).free + _held_nbytes(run_dir),
    )


def described(needs: Needs, room: Room) -> str:
    """Both side by side, as a log line has it."""
    parts: list[tuple[str, int, int | None]] = [("memory", needs.host, room.host), ("disk", needs.disk, room.disk)]
    if needs.device:
        parts.insert(0, ("each_gpu", needs.device, room.device))
    shown = [(name, rounded_nbytes(needed), free) for name, needed, free in parts]
    return " ".join(
        f"{name}={needed!r} {name}_free={'unknown' if free is None else rounded_nbytes(free)!r}"
        for name, needed, free in shown
    )


def misfit(needs: Needs, room: Room) -> tuple[str, str] | None:
    """What does not fit and what to do; None if all does."""
    smaller = "a smaller model, a smaller node.micro_batch or more node.activation_checkpointing"
    for name, needed, free, cure in (
        ("of each GPU's memory", needs.device, room.device, f"use more GPUs (--local-workers), {smaller}"),
        ("of memory", needs.host, room.host, f"use a machine with more, {smaller}"),
        ("of disk", needs.disk, room.disk, "give a folder with more room (--dir), or a smaller checkpoint.keep"),
    ):
        if free is not None and needed > free:
            return (
                f"this run needs about {rounded_nbytes(needed)} {name} here, and {rounded_nbytes(free)} are free",
                cure,
            )
    return None


def _free_on_gpus(num_gpus: int) -> int | None:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_GPUS, str(num_gpus)], capture_output=True, timeout=_ASK_TIMEOUT_S, check=True
        )
        return int(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("gpu_memory_unknown cause=%r", str(error))
        return None


def _held_nbytes(run_dir: Path) -> int:
    """What a peer's folder holds of a run."""
    return sum(_nbytes_in(run_dir / name) for name in (CHECKPOINTS, PRIVATE, RESULTS))


def _nbytes_in(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(path) / name).stat().st_size
            except OSError:  # gone meanwhile
                continue
    return total
