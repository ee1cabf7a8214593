# SPDX-License-Identifier: Apache-2.0
"""This peer's own state on its disk, beside its checkpoints: what no other peer has. It is what the method keeps for
itself, such as residuals, and what the workers' inner optimizer keeps: its moments.

::

    private/step-00000012.safetensors    what this peer had when its workers had landed outer step 12

        "3/residual"     of the fragment at place 3
        "inner/exp_avg"  of the inner optimizer, [numel] in the canonical order: any number of workers takes it

Rules: training waits for a copy in memory, never for the disk; while one is being written another is left out; a file
is there whole or not at all, and is checked before it is used; a disk that refuses is told and ends nothing. A residual
counts only together with the very shared state that the file names. Moments are means over many steps: those of a
state that is a few outer steps older are used as well. Must not know what the tensors mean.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.messages import Held
from isthmus.optim.outer import Tensors
from isthmus.trainer.checkpoint.tensor_files import checksum, write_tensors
from isthmus.trainer.engine.own_state import InnerState, OwnState
from isthmus.trainer.errors import CheckpointCorrupted
from isthmus.trainer.files import make_private_folder, sync_folder
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

FOLDER_NAME: Final = "private"
_NAME = re.compile(r"step-(\d{8,16})\.safetensors")
_INNER: Final = "inner"

Private = Mapping[int, Tensors]
"""By place of the fragment; see `WorkerValues.private`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the header of a file says: of which run it is, and the digest of the shared state that it goes with."""

    run_id: str
    digest: str
    sha256: str
    own_steps: int | None

    def as_text(self) -> dict[str, str]:
        """For the header."""
        own_steps = {} if self.own_steps is None else {"own_steps": str(self.own_steps)}
        return {"run_id": self.run_id, "digest": self.digest, "sha256": self.sha256, **own_steps}


class PrivateFiles:
    """See the module.

    Args:
        folder: made with the first file.
        run_id: of the run.
        keep: how many stay, at least 1.
        max_age: by how many outer steps moments may be older than the state that they are used with.
        on_saved: told the outer step of every file that is on the disk.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        *,
        keep: int,
        max_age: int = 0,
        on_saved: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._keep = keep
        self._max_age = max_age
        self._on_saved = on_saved
        self._due: asyncio.Queue[tuple[Held, dict[str, Tensor], int | None]] = asyncio.Queue(1)
        self._is_busy = False

    @property
    def is_busy(self) -> bool:
        """Whether what was offered last is not on the disk yet: another one would be left out."""
        return self._is_busy

    async def offer(self, held: Held, private: Private, inner: InnerState | None = None) -> None:
        """Write this state soon; or leave it, if another one is not on the disk yet.

        Args:
            held: the shared state that it goes with.
            private: copied.
            inner: not copied: nobody may write to it any more.
        """
        if self._is_busy or (not private and inner is None):
            return
        self._is_busy = True
        tensors = await in_thread(_flattened, private)
        if inner is not None:
            tensors |= {f"{_INNER}/{kind}": tensor for kind, tensor in inner.tensors.items()}
        self._due.put_nowait((held, tensors, None if inner is None else inner.own_steps))

    async def run(self) -> None:
        """Write what is offered until cancelled."""
        while True:
            held, tensors, own_steps = await self._due.get()
            try:
                await in_thread(self._save, held, tensors, own_steps)
                self._on_saved(held.outer_step)
            except OSError as error:
                log.warning("private_state_not_kept outer_step=%d cause=%r", held.outer_step, str(error))
            finally:
                del tensors  # two copies of the parameters, with AdamW
                self._is_busy = False
                self._due.task_done()

    async def drain(self) -> None:
        """Wait until what was offered is on the disk or has failed."""
        await self._due.join()

    def steps(self) -> tuple[int, ...]:
        """Of which outer steps there are files, oldest first, whole or not."""
        if not self._folder.is_dir():
            return ()
        matches = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir())
        return tuple(sorted(int(match[1]) for match in matches if match is not None))

    def recall(self, held: Held) -> OwnState | None:
        """What this peer had when it held this state, or one that is at most `max_age` older; None if nothing is known.

        A file of another run counts if it names the very same state, as after `--resume`. Damaged ones are warned of.
        """
        for step in reversed(self.steps()):
            if held.outer_step - self._max_age <= step <= held.outer_step:
                found = self._recall(step, held)
                if found is not None:
                    return found
        return None

    def _recall(self, step: int, held: Held) -> OwnState | None:
        path = self.path_of(step)
        try:
            about = read_about(path)
            is_exact = step == held.outer_step and about.digest == held.digest.hex()
            if about.run_id != self._run_id and not (is_exact and step > 0):  # two new runs may begin alike
                return None
            if step == held.outer_step and not is_exact:
                return None
            private, inner = _read(path, about)
        except CheckpointCorrupted as fault:
            log.warning("private_state_damaged path=%s reason=%r; it begins anew", path, fault.reason)
            return None
        return OwnState(outer_step=OuterStep(step), is_exact=is_exact, private=private, inner=inner)

    def path_of(self, outer_step: int) -> Path:
        """Where the file of a step is, or would be."""
        return self._folder / f"step-{outer_step:08d}.safetensors"

    def _save(self, held: Held, tensors: dict[str, Tensor], own_steps: int | None) -> None:
        about = About(
            run_id=self._run_id, digest=held.digest.hex(), sha256=checksum(tensors), own_steps=own_steps
        ).as_text()
        make_private_folder(self._folder)
        path = self.path_of(held.outer_step)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            write_tensors(temporary, tensors, about)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self._folder)
        steps = [step for step in self.steps() if step <= held.outer_step]
        for step in {*self.steps()} - {*steps[-self._keep :]}:
            self.path_of(step).unlink(missing_ok=True)


def read_about(path: Path) -> About:
    """What the header of a file says.

    Raises:
        CheckpointCorrupted: it is missing, cut, or not ours.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = file.metadata() or {}
        own_steps = text.get("own_steps")
        return About(
            run_id=text["run_id"],
            digest=text["digest"],
            sha256=text["sha256"],
            own_steps=None if own_steps is None else int(own_steps),
        )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointCorrupted(path, f"is no state of a peer's own: {error}") from error


def verify_private_file(path: Path) -> About:
    """Check one file: every byte is what was written.

    Raises:
        CheckpointCorrupted: it is missing, cut, changed, or not ours.
    """
    about = read_about(path)
    _read(path, about)
    return about


def _read(path: Path, about: About) -> tuple[dict[int, dict[str, Tensor]], InnerState | None]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointCorrupted(path, str(error)) from error
    if any(part.dtype != torch.float32 for part in tensors.values()) or about.sha256 != checksum(tensors):
        raise CheckpointCorrupted(path, "was changed since it was written (its SHA-256 differs)")
    private: dict[int, dict[str, Tensor]] = {}
    moments: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place, _, own = name.partition("/")
        if place == _INNER:
            moments[own] = tensor
        else:
            private.setdefault(int(place), {})[own] = tensor
    inner = None if about.own_steps is None else InnerState(own_steps=about.own_steps, tensors=moments)
    return private, inner


def _flattened(private: Private) -> dict[str, Tensor]:
    return {f"{place}/{name}": part.clone() for place, state in private.items() for name, part in state.items()}
