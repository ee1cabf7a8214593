# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a peer's folder, for people: which there are, whether they are whole and proved; fewer of them.

Reading needs no lock: a peer that runs may make room for a newer one meanwhile, which is no fault. Whoever prunes has
the folder's lock (contact/identity.py).
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.certificate import decode_certificate
from isthmus.elastic.core.messages import Held
from isthmus.elastic.core.notary import Verifier
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, MANIFEST_NAME, CheckpointStore, Manifest, read_manifest
from isthmus.trainer.checkpoint.private_files import FOLDER_NAME as PRIVATE_FOLDER_NAME
from isthmus.trainer.checkpoint.private_files import PrivateFiles, verify_private_file
from isthmus.trainer.checkpoint.proof import prove_checkpoint
from isthmus.trainer.errors import CheckpointCorrupted

VerifierOf = Callable[[str], Verifier | None]


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, as a command tells of it.

    Attributes:
        outer_step, run_id, digest: as its manifest says; of a damaged one the latter two are empty.
        saved_at: when it was written, ISO 8601 in UTC.
        size_bytes: of all its files, this peer's own state too.
        has_own_state: whether the peer's own state of that step is beside it.
        certified: whether it holds the certificate of its commit, made by more than half of the members and the
            coordinator; None where this folder does not know the run's keys, so that nobody can tell.
        fault: what is wrong with it, if that was looked for.
        path: its folder.
    """

    outer_step: int
    run_id: str
    digest: str
    saved_at: str
    size_bytes: int
    has_own_state: bool
    certified: bool | None
    fault: str | None
    path: str


def list_saved(folder: Path, verifier_of: VerifierOf, *, prove: bool) -> list[Saved]:
    """All checkpoints of a peer's folder, oldest first.

    Args:
        folder: the peer's.
        verifier_of: of a run's certificates, by its id; None if its keys are not known here.
        prove: whether every byte is read: of the state, which must have the digest that was voted for, and of what is
            this peer's own. Else only manifests are.
    """
    return list(_saved(folder, verifier_of, prove=prove))


def _saved(folder: Path, verifier_of: VerifierOf, *, prove: bool) -> Iterator[Saved]:
    store, own = _stores(folder)
    for step in store.steps():
        path, own_path = store.path_of(step), own.path_of(step)
        manifest, fault = None, None
        try:
            manifest = prove_checkpoint(path) if prove else read_manifest(path / MANIFEST_NAME)
            if prove and own_path.exists():
                verify_private_file(own_path)
        except CheckpointCorrupted as damage:
            fault = str(damage.problem)
        if not path.exists():
            continue
        certified = None if manifest is None else _is_certified(manifest, verifier_of(manifest.run_id))
        if fault is None and certified is False and manifest is not None and manifest.certificate:
            fault = f"{path} has a certificate that the run's keys do not prove of this state"
        files = [*path.iterdir(), *([own_path] if own_path.exists() else [])]
        yield Saved(
            outer_step=step,
            run_id="" if manifest is None else manifest.run_id,
            digest="" if manifest is None else manifest.digest,
            saved_at=datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds"),
            size_bytes=sum(file.stat().st_size for file in files),
            has_own_state=own_path.exists(),
            certified=certified,
            fault=fault,
            path=str(path),
        )


def _is_certified(manifest: Manifest, verifier: Verifier | None) -> bool | None:
    if not manifest.certificate:
        return False
    certificate = decode_certificate(manifest.certificate)
    made = Held(OuterStep(manifest.outer_step), bytes.fromhex(manifest.digest))
    if certificate is None or certificate.made != made:
        return False
    return None if verifier is None else certificate.check(verifier)


def surplus(folder: Path, *, keep: int) -> list[int]:
    """Outer steps of the checkpoints that would go if so many stayed: the newest that have a sound manifest.

    Args:
        folder: the peer's.
        keep: at least 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    store, _ = _stores(folder)
    sound = [step for step in store.steps() if _is_sound(store.path_of(step))]
    first_kept = sound[-keep:][0] if sound else 0
    return [step for step in store.steps() if step < first_kept]


def prune(folder: Path, steps: list[int]) -> None:
    """Remove these checkpoints, and what is this peer's own beside them.

    Raises:
        OSError: the disk refuses.
    """
    store, own = _stores(folder)
    for step in steps:
        store.remove(step)
        own.path_of(step).unlink(missing_ok=True)


def _is_sound(path: Path) -> bool:
    try:
        read_manifest(path / MANIFEST_NAME)
    except CheckpointCorrupted:
        return False
    return True


def _stores(folder: Path) -> tuple[CheckpointStore, PrivateFiles]:
    return CheckpointStore(folder / FOLDER_NAME, keep=1), PrivateFiles(folder / PRIVATE_FOLDER_NAME, "", keep=1)
