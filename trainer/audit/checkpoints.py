# SPDX-License-Identifier: Apache-2.0
"""The checkpoints in the peers' folders, against the journal: whole, of a committed step, at the right sample.

One of a step that the run has gone back behind is as good as others: it was committed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.audit import Finding, RecordIndex, Verdict, judge
from isthmus.elastic.audit.coverage import all_but, used_up
from isthmus.elastic.audit.findings import short
from isthmus.elastic.core.certificate import decode_certificate
from isthmus.elastic.core.messages import Held
from isthmus.elastic.core.notary import Verifier
from isthmus.elastic.core.records import Record
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, CheckpointStore, Manifest
from isthmus.trainer.checkpoint.proof import prove_checkpoint
from isthmus.trainer.errors import CheckpointCorrupted


@dataclass(frozen=True, slots=True)
class SavedState:
    """A checkpoint: what its manifest says, or what is wrong with its files."""

    path: Path
    found: Manifest | CheckpointCorrupted


def read_checkpoints(folders: Sequence[Path]) -> list[SavedState]:
    """Look at every checkpoint in these peers' folders. Reads all their bytes, loads none."""
    return [saved for folder in folders for saved in _read(folder)]


def _read(folder: Path) -> Iterator[SavedState]:
    store = CheckpointStore(folder / FOLDER_NAME, keep=1)
    for step in store.steps():
        path = store.path_of(step)
        try:
            yield SavedState(path, prove_checkpoint(path))
        except CheckpointCorrupted as fault:
            if path.exists():  # else a peer that runs has made room for a newer one meanwhile
                yield SavedState(path, fault)


def audit_checkpoints(
    saved: Sequence[SavedState],
    run_id: str | None,
    records: Sequence[Record],
    index: RecordIndex,
    verifier: Verifier | None,
) -> Verdict:
    """I1, I3, I7, I9: a checkpoint of this run is whole, and the state and the position in the data of its step.

    If it has a certificate, that is of this state, and genuine as far as the `verifier` can say.
    """
    ours = [item for item in saved if isinstance(item.found, CheckpointCorrupted) or item.found.run_id == run_id]
    findings = [finding for item in ours for finding in _compare(item, records, index)]
    findings += [finding for item in ours for finding in _check_certificate(item, verifier)]
    return judge("checkpoints", ("I1", "I3", "I7", "I9"), findings, num_looked_at=len(ours), unit="checkpoints")


def _compare(saved: SavedState, records: Sequence[Record], index: RecordIndex) -> Iterator[Finding]:
    manifest = saved.found
    if isinstance(manifest, CheckpointCorrupted):
        yield Finding(invariant="I9", slot=None, sentence=manifest.problem)
        return
    step, path = manifest.outer_step, saved.path
    states = index.states.get(step, [])
    same = [slot for slot, digest in states if digest.hex() == manifest.digest]
    if same:
        used = all_but(manifest.returned, manifest.next_index)
        if all(used != used_up(records, slot) for slot in same):
            said = f"{path} names other samples as used up by step {step} than the journal"
            yield Finding(invariant="I7", slot=same[-1], sentence=said)
    elif index.rebuilt_epoch or not (states or index.is_whole):
        return  # of a commit that was given up when the journal was lost, or that is behind its break
    elif step <= index.since[1] and not states:
        return  # of one that the records are not here of
    elif states:
        slot, digest = states[-1]
        said = f"{path} holds step {step} as {manifest.digest[:12]}, the journal has {short(digest)}"
        yield Finding(invariant="I1", slot=slot, sentence=said)
    else:
        yield Finding(invariant="I3", slot=None, sentence=f"{path} holds step {step}, the journal does not")


def _check_certificate(saved: SavedState, verifier: Verifier | None) -> Iterator[Finding]:
    manifest = saved.found
    if isinstance(manifest, CheckpointCorrupted) or not manifest.certificate:
        return
    certificate = decode_certificate(manifest.certificate)
    made = None if certificate is None else certificate.made
    if certificate is None or made != Held(OuterStep(manifest.outer_step), bytes.fromhex(manifest.digest)):
        said = f"{saved.path} has a certificate of another state than its own"
        yield Finding(invariant="I9", slot=None, sentence=said)
    elif verifier is not None and not certificate.check(verifier):
        said = f"{saved.path} has a certificate that the run's keys do not prove"
        yield Finding(invariant="I9", slot=None, sentence=said)
