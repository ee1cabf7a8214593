# SPDX-License-Identifier: Apache-2.0
"""What this peer's disk holds of the run: a checkpoint now and then, and the results of the newest commits.

    commit ─► its result goes to the disk, beside the training ─► written before this peer votes for the next one
    every `checkpoint.every` commits, and where the results do not continue from what is on the disk ─► a checkpoint

The results serve this peer when it starts again, and learners that are some commits behind. So they stay since the
newest checkpoint, and as long as all of them together are no larger than the state.

So after a power cut a peer goes on from the newest commit, or from the one before it. With `members.durable` a result
is on the disk before this peer votes for it, and the state that it continues from; no commit is lost while one of its
voters' disks lives.

Rules: a disk that refuses is told and never ends a run; results are replayed only onto the very state that they were
made for, and must reach the committed digest; the results since a checkpoint are never more than `_MAX_STATES` copies
of the state. With `checkpoint.every = 0` the results are for learners alone, no vote waits for them, and of the states
only the last one is kept. Must not know connections.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isthmus.collective.core.types import OuterStep, RoundKey
from isthmus.collective.errors import CollectiveError
from isthmus.elastic.core.certificate import Certificate, encode_certificate
from isthmus.elastic.core.messages import DataPosition, Held
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.errors import StateDiverged, StateMismatch
from isthmus.elastic.state.replica import CommitEntry
from isthmus.trainer.checkpoint.checkpoint import (
    FOLDER_NAME,
    Checkpoint,
    CheckpointMeta,
    CheckpointStore,
    newest_usable,
)
from isthmus.trainer.checkpoint.checkpointer import Checkpointer
from isthmus.trainer.checkpoint.result_files import FOLDER_NAME as RESULTS_NAME
from isthmus.trainer.checkpoint.result_files import ResultFiles
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.errors import CheckpointFailed
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

_MAX_STATES = 8
"""Results that need more than so many copies of the state are replaced by a checkpoint, whatever `every` says."""

_MAX_QUEUED = 4
"""Results that wait for the disk. Votes wait for them, so only a learner that replays many can have more."""

_PATIENCE_S = 10.0
"""A vote waits no longer for a disk that has stopped: it would keep everybody waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a checkpoint says of its run."""

    run_id: str
    run_manifest: bytes


class Durability:
    """Keeps the shared state of one peer on its disk, and brings it back.

    Args:
        run_dir: the peer's folder.
        origin: the run.
        state: what is kept.
        commit_log: says what learners can have of the results.
        every: `checkpoint.every`.
        keep: `checkpoint.keep`.
        before_votes: `members.durable`.
        on_saved: told (outer step, seconds) of every checkpoint on the disk.
        on_failed: told of every one that could not be written.
    """

    def __init__(
        self,
        run_dir: Path,
        origin: Origin,
        *,
        state: OuterState,
        commit_log: CommitLog,
        every: int,
        keep: int,
        before_votes: bool,
        on_saved: Callable[[int, float], None],
        on_failed: Callable[[CheckpointFailed], None],
    ) -> None:
        self._run_dir = run_dir
        self._origin = origin
        self._state = state
        self._commit_log = commit_log
        self._every = every
        self._before_votes = before_votes
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._checkpoints = Checkpointer(
            CheckpointStore(run_dir / FOLDER_NAME, keep=keep), on_saved=self._saved, on_failed=self._failed
        )
        self._files = ResultFiles(run_dir / RESULTS_NAME, origin.run_id, is_for_later=every > 0)
        self._queue: deque[tuple[bytes, CommitEntry]] = deque()
        self._is_due, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_idle.set()
        self._end: Held | None = None
        """The state that the disk leads to, once all that is queued is written; None: to none that is of use."""
        self._results_nbytes = 0  # since the newest checkpoint
        self._unsaved: CheckpointMeta | None = None
        self._saving: Held | None = None
        self._newest: Certificate | None = None
        self._unneeded_before = 0
        self._has_failed = False
        self._has_checkpoint = False  # of this run, from this start or an older one
        self._is_recovering = False
        state.on_replayed = self.committed

    # -------------------------------------------------------------------------------- coming back

    async def recover(self, given: Checkpoint | None) -> tuple[RoundKey, CommitEntry] | None:
        """Begin with what the disk has of the run: the others send only what this peer has missed since.

        Args:
            given: the checkpoint that a founder resumes from; None: the newest usable one of the folder.

        Returns:
            A result that this peer voted for and that continues from what is held; whether it was committed is for
            others to say.
        """
        checkpoint = given or await in_thread(newest_usable, self._run_dir, run_id=self._origin.run_id)
        if checkpoint is None:
            return None
        meta = checkpoint.meta
        try:
            held = await self._state.adopt(meta.outer_step, checkpoint.tensors, digest=meta.digest)
        except StateMismatch as error:
            log.warning("checkpoint_unusable path=%s cause=%r", checkpoint.path, str(error))
            return None
        log.info("checkpoint_adopted outer_step=%d path=%s", meta.outer_step, checkpoint.path)
        if checkpoint.path.parent != self._run_dir / FOLDER_NAME or meta.run_id != self._origin.run_id:
            self._unsaved = self._meta(held, DataPosition(meta.next_index, meta.returned))
            self._save()
            return None
        self._is_recovering, self._has_checkpoint = True, True
        held = await self._replay(held)
        self._is_recovering = False
        if not self._every:
            return None
        self._end = held
        return await in_thread(self._files.load_voted, held.outer_step + 1, held.digest)

    async def _replay(self, held: Held) -> Held:
        """Apply the results that continue from this state; returns what is held then."""
        first = held.outer_step
        while (found := await in_thread(self._files.load, held.outer_step + 1, held.digest)) is not None:
            stored, entry = found
            try:
                held = await self._state.replay(entry)
            except (StateDiverged, CollectiveError) as error:
                log.warning("result_unusable outer_step=%d cause=%r", entry.outer_step, str(error))
                break
            self._commit_log.append(stored)
            self._results_nbytes += entry.nbytes
        if held.outer_step > first:
            log.info("results_replayed from_step=%d to_step=%d", first, held.outer_step)
        return held

    # -------------------------------------------------------------------------------- what happens

    def founded(self, held: Held) -> None:
        """This peer has made the run's first state."""
        self._unsaved = self._meta(held, DataPosition(OuterStep(0)))
        if self._every:
            self._save()

    def committed(self, previous: bytes, entry: CommitEntry) -> None:
        """This commit was installed, or replayed, onto the state with digest `previous`."""
        if self._is_recovering:
            return
        self._commit_log.append(entry)
        follows = self._end == Held(OuterStep(entry.outer_step - 1), previous)
        is_refused = self._has_failed and self._every > 0 and not follows  # until a checkpoint shows that there is room
        if is_refused or len(self._queue) >= _MAX_QUEUED:
            self._end = None  # a checkpoint is due: see `reported`
            return
        self._end = Held(entry.outer_step, entry.digest) if follows else None
        self._results_nbytes += entry.nbytes if follows else 0
        self._queue.append((previous, entry))
        self._is_idle.clear()
        self._is_due.set()

    def reported(self, outer_step: int, digest: bytes, position: DataPosition | None) -> None:
        """A commit holds this peer's work. `position`: the data's after it, if that is known."""
        if position is None:
            return
        held = Held(OuterStep(outer_step), digest)
        self._unsaved = self._meta(held, position)
        is_due = self._every and outer_step % self._every == 0
        is_broken = self._every and self._end != held and not self._has_failed
        is_long = self._results_nbytes > _MAX_STATES * self._state.live.manifest.nbytes
        if is_due or is_broken or is_long:
            self._save()

    def is_saving(self, held: Held) -> bool:
        """Whether the newest checkpoint that was begun, or offered, is of this state."""
        return self._saving == held

    def certified(self, certificate: Certificate) -> None:
        """This is the newest commit that this peer has heard of."""
        self._newest = certificate

    def save_held(self) -> None:
        """Offer the state to the disk, also if it came from others and no commit of ours follows it."""
        held, newest = self._state.held(), self._newest
        if held is not None and held != self._end:
            if newest is not None and newest.made == held:
                self._unsaved = self._meta(held, newest.position)
            elif held.outer_step == 0:
                self._unsaved = self._meta(held, DataPosition(OuterStep(0)))
        self._save()

    async def before_vote(self, key: RoundKey, entry: CommitEntry) -> None:
        """This result is staged: what was committed before it is on the disk when this returns, or cannot be.

        With `members.durable` it is there as well, behind the state that it continues from: what a newcomer voted for
        could not be replayed after a power cut, since the state that it had fetched was nowhere.
        """
        if not self._every:
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._is_idle.wait()
        except TimeoutError:
            self._refused(f"the disk has not taken a result for {_PATIENCE_S:.0f} s")
        if not self._before_votes:
            return
        if not self._has_checkpoint or self._end != self._state.held():
            await self._save_before_vote()
        try:
            await in_thread(self._files.save_voted, key, self._state.live.held.digest, entry)
        except OSError as error:
            self._refused(str(error))

    async def _save_before_vote(self) -> None:
        self.save_held()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._checkpoints.drain()
        except TimeoutError:
            log.warning("checkpoint_slow seconds=%.0f; this vote does not wait longer for it", _PATIENCE_S)

    async def run(self) -> None:
        """Write what is due until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._checkpoints.run())
            tasks.create_task(self._write_results())

    async def finish(self) -> None:
        """Put the last state on the disk, if it is not there; `run` still runs."""
        await self._is_idle.wait()
        await self._checkpoints.drain()
        self.save_held()
        await self._checkpoints.drain()

    # -------------------------------------------------------------------------------- writing

    async def _write_results(self) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            try:
                while self._queue:
                    self._commit_log.stored(await in_thread(self._files.save, *self._queue[0]))
                    self._queue.popleft()
                    self._has_failed = False
                await self._forget()
            except OSError as error:
                self._queue.clear()
                self._refused(str(error))
            if not self._queue:
                self._is_idle.set()

    async def _forget(self) -> None:
        """Remove the results that this peer does not need, and learners no more: the whole state is fewer bytes."""
        first = self._commit_log.first_within(self._state.live.manifest.nbytes)
        if self._every:
            first = min(first, self._unneeded_before)
        self._commit_log.forget_before(first)
        await in_thread(self._files.forget_before, first)

    def _refused(self, cause: str) -> None:
        self._end = None
        if not self._has_failed:
            log.warning("result_not_kept cause=%r; training goes on", cause)
        self._has_failed = True

    def _save(self) -> None:
        """Offer the live state to the disk, unless it is there already or no commit of ours made it."""
        meta = self._unsaved
        if meta is None or self._state.held() != Held(OuterStep(meta.outer_step), meta.digest):
            return
        if self._checkpoints.offer(meta, self._state.live):
            self._unsaved = None
            self._saving = Held(OuterStep(meta.outer_step), meta.digest)
            self._results_nbytes = 0
            self._end = Held(OuterStep(meta.outer_step), meta.digest)

    def _saved(self, outer_step: int, seconds: float) -> None:
        self._has_failed, self._has_checkpoint = False, True
        self._on_saved(outer_step, seconds)
        self._unneeded_before = outer_step - 1  # the two before it stay for peers that are one commit behind
        self._is_due.set()

    def _failed(self, failure: CheckpointFailed) -> None:
        self._end = None
        self._has_failed = True
        self._on_failed(failure)

    def _meta(self, held: Held, position: DataPosition) -> CheckpointMeta:
        proof = self._newest if self._newest is not None and self._newest.made == held else None
        return CheckpointMeta(
            run_id=self._origin.run_id,
            outer_step=held.outer_step,
            digest=held.digest,
            run_manifest=self._origin.run_manifest,
            next_index=position.next_index,
            returned=position.unconsumed,
            certificate=b"" if proof is None else encode_certificate(proof),
        )
