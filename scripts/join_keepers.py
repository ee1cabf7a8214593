# SPDX-License-Identifier: Apache-2.0
"""What a peer of `scripts/bench join` and `commit` keeps of the results, and how it proves who it is, or does not."""

import asyncio
from pathlib import Path

from isthmus.collective.core.types import PeerId, RoundKey
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.messages import Held
from isthmus.elastic.donor.commit_log import CommitLog
from isthmus.elastic.state.replica import CommitEntry
from isthmus.trainer.checkpoint.certificates import CertificateKeeper
from isthmus.trainer.checkpoint.durability import Durability, Origin
from isthmus.trainer.engine.outer_state import OuterState
from isthmus.trainer.errors import CheckpointFailed


class MemoryKeeper:
    """Keeps results for learners alone: whatever ends this process ends them."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def founded(self, held: Held) -> None:
        """Nothing to keep."""

    async def before_vote(self, key: RoundKey, entry: CommitEntry) -> None:
        """Nothing to wait for."""

    def committed(self, previous: bytes, entry: CommitEntry) -> None:
        """For learners that are a few steps behind."""
        del previous
        self._log.append(entry)


class DiskKeeper(MemoryKeeper):
    """Keeps them as a daemon does, and the newest certificates: files in this folder, written beside the training."""

    def __init__(self, log: CommitLog, folder: Path, run_id: str, state: OuterState) -> None:
        super().__init__(log)
        folder.mkdir(parents=True)
        self._durability = Durability(
            folder,
            Origin(run_id=run_id, run_manifest=b""),
            state=state,
            commit_log=CommitLog(0),
            every=1_000_000,
            keep=1,
            before_votes=False,
            on_saved=lambda _step, _seconds: None,
            on_failed=_raise,
        )
        self._certificates = CertificateKeeper(folder / "certificates", [])

    def founded(self, held: Held) -> None:
        """See ResultKeeper."""
        self._durability.founded(held)

    async def before_vote(self, key: RoundKey, entry: CommitEntry) -> None:
        """See ResultKeeper."""
        await self._durability.before_vote(key, entry)

    def committed(self, previous: bytes, entry: CommitEntry) -> None:
        """See ResultKeeper."""
        super().committed(previous, entry)
        self._durability.committed(previous, entry)

    def certified(self, certificate: Certificate) -> None:
        """Of the newest commit."""
        self._durability.certified(certificate)
        self._certificates.offer(certificate)

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._durability.run())
            tasks.create_task(self._certificates.run())


def _raise(failure: CheckpointFailed) -> None:
    raise failure


class NoKeys:
    """What signs and seals in a run without signatures: nothing is proved, everything is believed."""

    def sign(self, words: bytes) -> bytes:
        """See notary.Signer."""
        del words
        return b"."

    def seal(self, words: bytes) -> bytes:
        """See notary.Sealer."""
        del words
        return b"."

    def is_signed_by(self, peer_id: PeerId, words: bytes, signature: bytes) -> bool:
        """See notary.Verifier."""
        del peer_id, words, signature
        return True

    def is_sealed(self, words: bytes, seal: bytes) -> bool:
        """See notary.Verifier."""
        del words, seal
        return True
