"""The checkpoints in the peers' folders, against the journal: whole, of a committed step, at the right sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.audit import Finding, RecordIndex, Verdict, judge
from elastic.audit.coverage import all_but, used_up
from elastic.audit.findings import short
from elastic.core.records import Record
from trainer.checkpoint import FOLDER_NAME, CheckpointStore, Manifest
from trainer.checkpoint_proof import prove_checkpoint
from trainer.errors import CheckpointCorrupted


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
    saved: Sequence[SavedState], run_id: str | None, records: Sequence[Record], index: RecordIndex
) -> Verdict:
    """I1, I3, I7, I9: a checkpoint of this run is whole, and the state and the position in the data of its step."""
    ours = [item for item in saved if isinstance(item.found, CheckpointCorrupted) or item.found.run_id == run_id]
    findings = [finding for item in ours for finding in _compare(item, records, index)]
    return judge("checkpoints", ("I1", "I3", "I7", "I9"), findings, num_looked_at=len(ours), unit="checkpoints")


def _compare(saved: SavedState, records: Sequence[Record], index: RecordIndex) -> Iterator[Finding]:
    manifest = saved.found
    if isinstance(manifest, CheckpointCorrupted):
        yield Finding(invariant="I9", slot=None, sentence=manifest.problem)
        return
    step, path = manifest.outer_step, saved.path
    if (found := index.states.get(step)) is None:
        if index.is_whole and not index.rebuilt_epoch:
            said = f"{path} holds step {step}, the journal does not"
            yield Finding(invariant="I3", slot=None, sentence=said)
        return
    slot, digest = found
    if digest.hex() != manifest.digest:
        if index.rebuilt_epoch:
            return  # of a commit that was given up when the journal was lost
        said = f"{path} holds step {step} as {manifest.digest[:12]}, the journal has {short(digest)}"
        yield Finding(invariant="I1", slot=slot, sentence=said)
    elif all_but(manifest.returned, manifest.next_index) != used_up(records, step):
        said = f"{path} names other samples as used up by step {step} than the journal"
        yield Finding(invariant="I7", slot=slot, sentence=said)
