# SPDX-License-Identifier: Apache-2.0
"""This peer's own state on its disk, beside its checkpoints: what no other peer has, such as residuals.

::

    private/step-00000012.safetensors    what this peer had when it held outer step 12

Rules: training waits for a copy in memory, never for the disk; while one is being written another is left out; a file
is there whole or not at all, and counts only together with the very shared state that it names; a disk that refuses is
told and ends nothing. Must not know what the tensors mean.
"""

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isthmus.elastic.core.messages import Held
from isthmus.optim.outer import Tensors
from isthmus.trainer.files import make_private_folder, sync_file, sync_folder
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

FOLDER_NAME: Final = "private"
_NAME = re.compile(r"step-(\d{8,16})\.safetensors")

Private = Mapping[int, Tensors]
"""By place of the fragment; see `WorkerValues.private`."""


class PrivateFiles:
    """See the module.

    Args:
        folder: made with the first file.
        run_id: of the run; what is of another one is not read.
        keep: how many stay, at least 1.
    """

    def __init__(self, folder: Path, run_id: str, *, keep: int) -> None:
        self._folder = folder
        self._run_id = run_id
        self._keep = keep
        self._due: asyncio.Queue[tuple[Held, dict[str, Tensor]]] = asyncio.Queue(1)
        self._is_busy = False

    async def offer(self, held: Held, private: Private) -> None:
        """Copy this state, and write it soon; or leave it, if another one is not on the disk yet."""
        if not private or self._is_busy:
            return
        self._is_busy = True
        copies = await in_thread(_flattened, private)
        self._due.put_nowait((held, copies))

    async def run(self) -> None:
        """Write what is offered until cancelled."""
        while True:
            held, tensors = await self._due.get()
            try:
                await in_thread(self._save, held, tensors)
            except OSError as error:
                log.warning("private_state_not_kept outer_step=%d cause=%r", held.outer_step, str(error))
            finally:
                self._is_busy = False
                self._due.task_done()

    async def drain(self) -> None:
        """Wait until what was offered is on the disk or has failed."""
        await self._due.join()

    def load(self, held: Held) -> Private | None:
        """What this peer had when it held this state; None if that is not known."""
        path = self._path_of(held.outer_step)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                if (about.get("run_id"), about.get("digest")) != (self._run_id, held.digest.hex()):
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except (SafetensorError, OSError) as error:
            log.warning("private_state_damaged path=%s reason=%r; it begins anew", path, str(error))
            return None
        if about.get("sha256") != _checksum(tensors) or any(part.dtype != torch.float32 for part in tensors.values()):
            log.warning("private_state_damaged path=%s reason='it was changed'; it begins anew", path)
            return None
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            place, _, own = name.partition("/")
            found.setdefault(int(place), {})[own] = tensor
        return found

    def _save(self, held: Held, tensors: dict[str, Tensor]) -> None:
        about = {"run_id": self._run_id, "digest": held.digest.hex(), "sha256": _checksum(tensors)}
        make_private_folder(self._folder)
        path = self._path_of(held.outer_step)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            save_file(tensors, temporary, metadata=about)
            sync_file(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self._folder)
        steps = sorted(int(match[1]) for entry in self._folder.iterdir() if (match := _NAME.fullmatch(entry.name)))
        for step in steps[: -self._keep] + [step for step in steps if step > held.outer_step]:
            self._path_of(step).unlink(missing_ok=True)

    def _path_of(self, outer_step: int) -> Path:
        return self._folder / f"step-{outer_step:08d}.safetensors"


def _flattened(private: Private) -> dict[str, Tensor]:
    return {f"{place}/{name}": part.clone() for place, state in private.items() for name, part in state.items()}


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.numel()};".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
