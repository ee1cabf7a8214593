# SPDX-License-Identifier: Apache-2.0
"""What the workers have that no commit holds, between peers: a copy for who asks, and another's to begin with.
A peer that comes back may find its own on its disk (own_state.py).

These are the inner optimizer's moments, and the parameters themselves where the method shares none (pairs).

    a donor      asked ─► after its next inner step the workers write theirs into the mailbox ─► copied, hashed
    a newcomer   memory for them ─► filled from a donor ─► checked ─► parameters first, then moments: the workers'

Rules: a donor's workers stand still for the copy and no longer; one copy serves all who ask while it is used. A copy is
in nobody's commit, so a newcomer takes nothing on trust: what is no number, or no mean of squares, is refused.
It must not know connections.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from isthmus.elastic.errors import StateMismatch
from isthmus.elastic.state.digest import Hasher, StateManifest, chunk_of, describe_state
from isthmus.optim.inner import state_names
from isthmus.optim.outer import PARAM
from isthmus.trainer.engine.own_state import InnerState, OwnState, copy_inner_state, give_inner_state
from isthmus.trainer.engine.state_version import byte_view
from isthmus.trainer.threads import in_thread
from isthmus.trainer.workers.pool import WorkerPool

log = logging.getLogger(__name__)

MOMENTS: Final = state_names("adamw")
_STEPS: Final = "own_steps"
_MAX_STEPS: Final = 1 << 24
"""Exact in fp32."""
_LEND_S: Final = 30.0
"""What whoever asks waits for the next inner step; beyond it this peer is not training."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Copy:
    """What they had after some inner step; `num_users` count who reads it."""

    tensors: dict[str, Tensor]
    manifest: StateManifest
    when_idle: Callable[[], None]
    num_users: int = 0

    def chunk(self, tensor: int, chunk: int) -> memoryview:
        """The bytes of one chunk, in manifest order."""
        whole = byte_view(self.tensors[self.manifest.tensors[tensor].name])
        return chunk_of(whole, chunk, self.manifest.chunk_nbytes)

    def release(self) -> None:
        """One user less. The last one gives the memory back."""
        self.num_users -= 1
        if self.num_users == 0:
            self.when_idle()


@dataclass(slots=True, kw_only=True, eq=False)
class Moments:
    """`elastic.state.replica.PrivateState` over the workers.

    Attributes:
        mailbox: [numel] fp32, shared with the workers.
        hasher: for what is lent.
        are_shared: whether the run's newcomers begin with a donor's moments; if not, nobody gets any.
        first_parameters: makes those of a new run, [numel]; None: parameters are in the shared state, and are
            not lent.
        least_steps: moments of fewer inner steps are not lent: they are as good as fresh ones.
        has_trained: whether this peer has made an inner step.
        is_first_round: whether the run has committed nothing: newcomers begin with what it began with, even if this
            peer's workers have gone on from there and wait for others.
    """

    mailbox: Tensor
    hasher: Hasher
    are_shared: bool
    least_steps: int
    has_trained: Callable[[], bool]
    is_first_round: Callable[[], bool] = lambda: False
    first_parameters: Callable[[], Awaitable[Tensor]] | None = None
    _asked: asyncio.Future[dict[str, Tensor] | None] | None = field(default=None, init=False)
    _lending: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _copy: _Copy | None = field(default=None, init=False)
    _destinations: dict[str, Tensor] | None = field(default=None, init=False)
    _borrowed: dict[str, Tensor] | None = field(default=None, init=False)

    # -------------------------------------------------------------------------------- to and from other peers

    @property
    def is_wanted(self) -> bool:
        """Whether this peer would begin with another's."""
        is_of_use = self.are_shared or self.first_parameters is not None
        return is_of_use and self._borrowed is None and not self.has_trained()

    async def lend(self) -> _Copy | None:
        """A copy of what they have after the next inner step, or the one that is being read; None if there is none."""
        async with self._lending:
            if self._copy is None:
                self._copy = await self._make_copy()
            if self._copy is not None:
                self._copy.num_users += 1
            return self._copy

    async def _make_copy(self) -> _Copy | None:
        if self.has_trained() and not self.is_first_round():
            tensors = await self._asked_of_workers()
        else:
            tensors = await self._first_ones()
        if not tensors:
            return None
        parts = await self.hasher.describe_async([(name, byte_view(tensor)) for name, tensor in tensors.items()])
        manifest = describe_state(0, parts, chunk_nbytes=self.hasher.chunk_nbytes)
        return _Copy(tensors=tensors, manifest=manifest, when_idle=self._forget)

    async def _asked_of_workers(self) -> dict[str, Tensor] | None:
        if not self.are_shared and self.first_parameters is None:
            return None
        self._asked = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(self._asked, _LEND_S)
        except TimeoutError:
            return None
        finally:
            self._asked = None

    async def _first_ones(self) -> dict[str, Tensor]:
        """The run is where it began: parameters as the run begins with them, and no moments."""
        if self.first_parameters is None:
            return {}
        return {PARAM: await self.first_parameters()}

    def _forget(self) -> None:
        self._copy = None

    def begin_borrowing(self, manifest: StateManifest) -> tuple[memoryview, ...]:
        """See PrivateState."""
        numel = self.mailbox.numel()
        sizes = dict.fromkeys(MOMENTS, numel) | {_STEPS: 1} if self.are_shared else {}
        ours = {PARAM: numel} if self.first_parameters is not None else {}
        given = sorted((part.name, part.nbytes) for part in manifest.tensors)
        if not given or all(given != _nbytes_of(choice) for choice in (sizes | ours, ours)):
            raise StateMismatch("what its workers lend has other names or sizes")
        sizes |= ours
        self._destinations = {part.name: torch.empty(sizes[part.name]) for part in manifest.tensors}
        return tuple(byte_view(tensor) for tensor in self._destinations.values())

    async def borrowed(self) -> None:
        """See PrivateState."""
        tensors, self._destinations = self._destinations, None
        assert tensors is not None, "nothing was borrowed"
        if not await in_thread(_are_sound, tensors):
            raise StateMismatch("its workers' parameters are no numbers, or its moments no moments")
        self._borrowed = tensors

    def take_parameters(self) -> Tensor | None:
        """The parameters that were borrowed, [numel], once; None if none were."""
        return None if self._borrowed is None else self._borrowed.pop(PARAM, None)

    # -------------------------------------------------------------------------------- to and from the workers

    async def after_step(self, pool: WorkerPool) -> None:
        """An inner step is done, and nobody asks for another one: copy what they have, if somebody wants it."""
        asked = self._asked
        if asked is None or asked.done():
            return
        tensors: dict[str, Tensor] = {}
        if self.are_shared:
            state = await copy_inner_state(pool, self.mailbox, MOMENTS)
            if state.own_steps >= self.least_steps:
                tensors = {**state.tensors, _STEPS: torch.tensor([float(state.own_steps)])}
        if self.first_parameters is not None:
            await pool.store()
            tensors[PARAM] = await in_thread(self.mailbox.clone)
        if not asked.done():
            asked.set_result(tensors)

    async def begin(self, pool: WorkerPool, own: OwnState | None = None) -> None:
        """The workers have their first parameters: give them moments, if there are any.

        Its own of this very state come first, then a donor's, then its own of a little earlier.

        Args:
            pool: the workers.
            own: what the disk knows, if these are workers that know nothing.
        """
        borrowed, self._borrowed = self._borrowed, None
        inner = None if own is None else own.inner
        if inner is not None and own is not None and (own.is_exact or borrowed is None or _STEPS not in borrowed):
            await give_inner_state(pool, self.mailbox, inner)
            log.info("moments_remembered outer_step=%d own_steps=%d", own.outer_step, inner.own_steps)
        elif borrowed is not None and _STEPS in borrowed:
            own_steps = int(borrowed[_STEPS].item())
            state = InnerState(own_steps=own_steps, tensors={name: borrowed[name] for name in MOMENTS})
            await give_inner_state(pool, self.mailbox, state)
            log.info("moments_borrowed own_steps=%d", own_steps)


def _nbytes_of(sizes: dict[str, int]) -> list[tuple[str, int]]:
    return sorted((name, 4 * numel) for name, numel in sizes.items())


def _are_sound(tensors: dict[str, Tensor]) -> bool:
    # A sum is finite only if all its terms are; no number below zero is a mean of squares.
    if not all(math.isfinite(tensor.sum(dtype=torch.float64).item()) for tensor in tensors.values()):
        return False
    return _STEPS not in tensors or (
        tensors["exp_avg_sq"].min().item() >= 0.0 and 1 <= tensors[_STEPS].item() <= _MAX_STEPS
    )
