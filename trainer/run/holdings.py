# SPDX-License-Identifier: Apache-2.0
"""What this peer holds of the run, in memory and on its disk: the shared state, the newest results, its own state,
the certificates of what was committed.

Must not know connections, workers or why a state changes.
"""

from collections.abc import Coroutine
from typing import Any

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.messages import Held
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.shell.notary import PeerSigner
from isthmus.elastic.state.digest import Hasher
from isthmus.optim.outer import Outer
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.checkpoint.certificates import FILE_NAME as CERTIFICATES_NAME
from isthmus.trainer.checkpoint.certificates import CertificateKeeper, load_certificates
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME as CHECKPOINTS_NAME
from isthmus.trainer.checkpoint.checkpoint import CheckpointStore
from isthmus.trainer.checkpoint.copier import CheckpointCopier
from isthmus.trainer.checkpoint.durability import Durability, Origin
from isthmus.trainer.checkpoint.private_files import FOLDER_NAME as PRIVATE_FOLDER_NAME
from isthmus.trainer.checkpoint.private_files import PrivateFiles
from isthmus.trainer.checkpoint.remote import RemoteFolder
from isthmus.trainer.config.wiring import fragments_of
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.engine.own_state import OwnState
from isthmus.trainer.engine.training_loop import RoundReport
from isthmus.trainer.engine.worker_values import WorkerValues
from isthmus.trainer.record import events
from isthmus.trainer.record.chronicle import Chronicle
from isthmus.trainer.run.preparation import Start
from isthmus.trainer.threads import in_thread


class Holdings:
    """See the module. `outer`, `plan`: the method, fitted, and its outer steps."""

    def __init__(self, start: Start, chronicle: Chronicle, outer: Outer, plan: OuterPlan) -> None:
        config, terms, run_dir = start.config, start.terms, start.options.run_dir
        self._chronicle = chronicle
        self.hasher = Hasher()
        self.state = OuterState(outer, fragments_of(config), plan, self.hasher)
        self.commit_log = CommitLog(max_nbytes=0)  # results are on the disk, see Durability
        self.durability = Durability(
            run_dir,
            Origin(run_id=terms.run_id, run_manifest=terms.manifest),
            state=self.state,
            commit_log=self.commit_log,
            every=config.checkpoint.every,
            keep=config.checkpoint.keep,
            before_votes=config.members.durable,
            on_saved=self._saved,
            on_failed=lambda failure: chronicle.emit(events.CheckpointFailed(cause=str(failure))),
        )
        self._private_files = PrivateFiles(
            run_dir / PRIVATE_FOLDER_NAME,
            terms.run_id,
            keep=config.checkpoint.keep,
            max_age=config.checkpoint.every,
            on_saved=self._own_saved,
        )
        self._copier = self._make_copier(start)
        self._newest_saved: int | None = None
        self._kept: Held | None = None
        """With which shared state the newest own one was offered to the disk."""
        self.signer = PeerSigner(start.security.key, terms.run_id, lambda: start.security.authorities)
        known = load_certificates(run_dir / CERTIFICATES_NAME, self.signer)
        self._certificates = CertificateKeeper(run_dir / CERTIFICATES_NAME, known)
        self.certificate = known[-1] if known else None
        """Of the newest commit that this peer knew of when it started."""
        if known:
            self.durability.certified(known[-1])

    def _make_copier(self, start: Start) -> CheckpointCopier | None:
        """What copies checkpoints to `node.checkpoints`, if there is one."""
        place, run_dir, keep = start.config.node.checkpoints, start.options.run_dir, start.config.checkpoint.keep
        if place is None:
            return None
        remote = RemoteFolder(f"{place.rstrip('/')}/{start.me.peer_id}")
        store = CheckpointStore(run_dir / CHECKPOINTS_NAME, keep=keep)
        own, chronicle = self._private_files, self._chronicle
        return CheckpointCopier(
            lambda step: remote.put(store.path_of(step), own.path_of(step), keep=keep),
            on_copied=lambda step, s: chronicle.emit(events.CheckpointCopied(outer_step=step, seconds=s)),
            on_failed=lambda cause: chronicle.emit(events.CheckpointNotCopied(cause=cause)),
        )

    def _saved(self, outer_step: int, seconds: float) -> None:
        self._chronicle.emit(events.Checkpoint(outer_step=outer_step, seconds=seconds))
        self._newest_saved = outer_step
        if self._copier is not None:
            self._copier.offer(outer_step)

    def _own_saved(self, outer_step: int) -> None:
        """It comes to the disk after the checkpoint that it belongs to, or before."""
        if self._copier is not None and outer_step == self._newest_saved:
            self._copier.offer(outer_step)

    async def recall(self, held: Held) -> OwnState | None:
        """What the disk knows of this peer's own state, when it held this shared one or one a little earlier."""
        return await in_thread(self._private_files.recall, held)

    def work(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """What must run, as tasks, until `finish` has returned."""
        always = self.durability.run(), self._private_files.run(), self._certificates.run()
        return always if self._copier is None else (*always, self._copier.run())

    def certified(self, certificate: Certificate) -> None:
        """This is the newest commit that this peer has heard of."""
        self.durability.certified(certificate)
        self._certificates.offer(certificate)
        if certificate.made.outer_step < self.commit_log.span.stop - 1:
            self.commit_log.clear()  # the run went back behind commits that nobody else has heard of

    def committed(self, report: RoundReport) -> None:
        """A commit holds this peer's work."""
        self.durability.reported(report.outer_step, report.digest, report.position)

    async def landed(self, report: RoundReport, values: WorkerValues, *, may_be_last: bool) -> None:
        """Its workers are where that has brought them: their own state goes beside a checkpoint of the shared one.

        Args:
            report: of the commit.
            values: the workers.
            may_be_last: whether a checkpoint of this commit may follow that nobody has begun yet.
        """
        held = Held(OuterStep(report.outer_step), report.digest)
        if may_be_last:
            await self._private_files.drain()
        if (may_be_last or self.durability.is_saving(held)) and not self._private_files.is_busy:
            await self._private_files.offer(held, values.private, await values.inner_state())
            self._kept = held

    async def finish(self, values: WorkerValues) -> None:
        """Put what is held at the end on the disk. Moments that went on since the last landing are not kept."""
        await self.durability.finish()
        await self._private_files.drain()
        if values.has_base and self.durability.is_saving(values.base.held) and self._kept != values.base.held:
            await self._private_files.offer(values.base.held, values.private)
            await self._private_files.drain()
        if self._copier is not None:
            await self._copier.drain()

    async def drain(self) -> None:
        """Write the last certificates: nothing runs any more."""
        await self._certificates.drain()

    def close(self) -> None:
        """End the threads that hash."""
        self.hasher.close()
