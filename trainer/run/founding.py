# SPDX-License-Identifier: Apache-2.0
"""What a founder decides before anybody else is there: the run, its terms, and the state it goes on from.

A run lives in its founder's folder: `run.json` (id and secret), `terms.json` (the run manifest, the digest of its
text, its address), and `journal.sqlite` unless etcd has the journal. Starting again in the same folder goes on where
the journal ends, under the same run id, so that peers that are still out there find their run again. `resume` is
another thing: a new lineage from a checkpoint. The same command given again goes on with that lineage, as after a power
cut: the terms say which checkpoint the run began with. A standby keeps the same two files, so that it can start while
nobody else is there to ask.

If the journal is gone, it is made anew from the certificates of the run's peers (elastic/core/rebuild.py). If the whole
folder is gone, that can be done in the folder of any peer, or with a copy of its `membership.json`: a peer keeps in it
what it was told of the run. The secret is lost then, and with it all tickets and the authority over the run's
certificates: who comes from then on is let in by another one, and the heir keeps the certificate by which the members
know it.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from isthmus.collective.transport.certificates import certificate_to_bytes
from isthmus.elastic.journal.archive import archives_of
from isthmus.trainer.checkpoint.certificates import FILE_NAME as CERTIFICATES_NAME
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, Checkpoint, CheckpointStore, load_resumed, newest_usable
from isthmus.trainer.checkpoint.lineages import set_aside
from isthmus.trainer.checkpoint.private_files import FOLDER_NAME as PRIVATE_FOLDER_NAME
from isthmus.trainer.checkpoint.private_files import PrivateFiles
from isthmus.trainer.config.manifest import manifest_diff, manifest_of, manifest_sections
from isthmus.trainer.config.settings import Config
from isthmus.trainer.contact.admission import MAX_AUTHORITIES, RunTerms, authority_of
from isthmus.trainer.contact.identity import PeerFolder, RunIdentity
from isthmus.trainer.contact.ticket import Ticket, encode_ticket
from isthmus.trainer.errors import ConfigError, EnvironmentFault, IntegrityError, RunComplete
from isthmus.trainer.files import MEMBERSHIP_NAME, RUN_NAME, write_atomically

log = logging.getLogger(__name__)

JOURNAL_NAME = "journal.sqlite"
STANDBY_TICKET_NAME = "standby.ticket"
_TERMS_NAME = "terms.json"


class _Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Older versions kept one key more."""

    run_id: str
    authorities: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"_Keys(run_id={self.run_id!r})"


class _SavedTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`keys` where they do not follow from the secret in `run.json`: at a peer, and where a peer's folder was used.

    `address` is where the run's coordinator listens, `others` are where other ones may. `began_with` names
    the checkpoint that the run was resumed from, if it was.
    """

    manifest: str
    data_digest: str
    address: str | None = None
    others: tuple[str, ...] = ()
    keys: _Keys | None = None
    began_with: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Founded:
    """A run as its founder's folder has it.

    Attributes:
        run: its id and secret.
        terms: what its peers are told.
        address: where its coordinator listened last, if it ever did.
        checkpoint: the newest state of this folder.
        has_lost_its_journal: the run had a coordinator here, and its journal is not there any more.
        began_with: which checkpoint the run was resumed from, if it was.
    """

    run: RunIdentity
    terms: RunTerms
    address: str | None
    checkpoint: Checkpoint | None
    has_lost_its_journal: bool = False
    began_with: str | None = None


def found_or_go_on(folder: PeerFolder, config: Config, data_digest: str, resume_dir: Path | None) -> Founded:
    """The run of this folder: made now, or found there.

    Args:
        folder: of the founder.
        config: of the run.
        data_digest: that of its text.
        resume_dir: a peer's folder or a checkpoint to begin with, unless the run there has begun so already; None: the
            run is a new one, or goes on.

    Raises:
        ConfigError: the folder holds a run with other settings, or one that should be resumed from a checkpoint.
        CheckpointCorrupted: `resume_dir` holds no whole checkpoint.
        RunComplete: what it holds is the end of the run.
        IntegrityError: a file of the folder is damaged.
        EnvironmentFault: the disk refuses.
    """
    checkpoint, began_with = None, None
    manifest = manifest_of(config)
    if resume_dir is not None:
        checkpoint = load_resumed(resume_dir)
        _require_unfinished(checkpoint, config, resume_dir)
        began_with = _named(checkpoint)
        is_own = resume_dir.resolve() == folder.path.resolve() and _is_of_this_run(checkpoint, folder)
        if _began_so(_load_terms(folder.path), None if is_own else began_with, manifest, data_digest):
            log.info("goes_on path=%s; its run has been resumed so before, another --dir begins anew", folder.path)
            resume_dir = None
        else:
            with _disk_errors(folder.path):
                _archive(folder.path, checkpoint.meta.outer_step)
    saved = _load_terms(folder.path)
    if saved is not None:
        _require_same(saved, manifest, data_digest, folder.path)
        checkpoint, began_with = newest_usable(folder.path), saved.began_with
    run = folder.found_run(config.run.name)
    if saved is None and resume_dir is None:
        with _disk_errors(folder.path):
            _archive_others(folder.path, run.run_id)
    terms = _terms_of(run, manifest, data_digest, None if saved is None else saved.keys)
    # The journal is made before the terms are kept: terms without a journal had one. Of etcd only the peers can tell.
    has_journal = config.coordinator.store == "etcd" or (folder.path / JOURNAL_NAME).exists()
    return Founded(
        run=run,
        terms=terms,
        address=None if saved is None else saved.address,
        checkpoint=checkpoint,
        has_lost_its_journal=saved is not None and not has_journal,
        began_with=began_with,
    )


def _named(checkpoint: Checkpoint) -> str:
    meta = checkpoint.meta
    return f"{meta.run_id} {meta.outer_step} {meta.digest.hex()}"


def _is_of_this_run(checkpoint: Checkpoint, folder: PeerFolder) -> bool:
    run = folder.load_run()
    return run is not None and checkpoint.meta.run_id == run.run_id


def _began_so(saved: _SavedTerms | None, began_with: str | None, manifest: bytes, data_digest: str) -> bool:
    """Whether this folder's run is what the same command has begun before, with this checkpoint.

    None: with any. A run that was resumed in its own folder has newer checkpoints there by now.
    """
    if saved is None or saved.began_with is None or began_with not in (None, saved.began_with):
        return False
    return (saved.manifest, saved.data_digest) == (manifest.decode(), data_digest)


def _require_unfinished(checkpoint: Checkpoint, config: Config, resume_dir: Path) -> None:
    made, wanted = checkpoint.meta.outer_step, config.run.outer_steps
    if made >= wanted:
        raise RunComplete(
            f"the run in {resume_dir} is complete at outer step {made} of {wanted}: nothing is left to train",
            cure=f"go on with more steps: --run.outer_steps {2 * made}",
        )


def take_over(folder: PeerFolder) -> bytes:
    """Make this folder, of the run's coordinator or of any of its peers, one where its coordinator can live.

    Returns:
        The run manifest.

    Raises:
        ConfigError: the folder knows of no run.
        IntegrityError: a file of the folder is damaged.
        EnvironmentFault: the disk refuses.
    """
    saved = _load_terms(folder.path)
    if saved is None:
        saved = _load_terms(folder.path, MEMBERSHIP_NAME)
        if saved is None or saved.keys is None:
            raise ConfigError(
                f"{folder.path} knows of no run that could be rebuilt",
                cure="name the folder of the run's coordinator or of one of its peers with --dir",
            )
        folder.adopt_run(saved.keys.run_id)
        _save_terms(folder, saved)  # last: a start that was cut short here begins again
    return saved.manifest.encode()


def remember_membership(folder: PeerFolder, terms: RunTerms, coordinators: Sequence[str]) -> None:
    """Keep what a peer was told of its run: to come back without a ticket, or in case that its coordinator is lost.

    Raises:
        EnvironmentFault: the disk refuses.
    """
    address, *others = coordinators
    saved = msgspec.structs.replace(_saved(terms, address, keys=_keys_of(terms)), others=tuple(others))
    _save_terms(folder, saved, MEMBERSHIP_NAME)


def recall_text(path: Path, config: Config, *, is_resumed: bool) -> str | None:
    """Digest of the text of the run that a founder goes on with; None if there is none, or it is to have another text.

    Args:
        path: of its folder.
        config: what it is to found.
        is_resumed: from a checkpoint of the folder, which may be that of a peer.

    Raises:
        IntegrityError: a file of the folder is damaged.
        EnvironmentFault: it cannot be read.
    """
    names = (_TERMS_NAME, MEMBERSHIP_NAME) if is_resumed else (_TERMS_NAME,)
    for saved in (_load_terms(path, name) for name in names):
        if saved is not None:
            asked = manifest_sections(saved.manifest.encode()).get("data")
            return saved.data_digest if asked == config.tree()["data"] else None
    return None


@dataclass(frozen=True, slots=True)
class MembershipKept:
    """What a peer's folder knows of the run that it joined last, and where its coordinators may be."""

    terms: RunTerms
    coordinators: tuple[str, ...]


def recall_membership(path: Path) -> MembershipKept | None:
    """The run that a peer's folder joined last; None if it never did.

    Raises:
        IntegrityError: the file is damaged.
        EnvironmentFault: it cannot be read.
    """
    saved = _load_terms(path, MEMBERSHIP_NAME)
    if saved is None or saved.keys is None or saved.address is None:
        return None
    keys = saved.keys
    terms = RunTerms(
        run_id=keys.run_id,
        manifest=saved.manifest.encode(),
        data_digest=saved.data_digest,
        authorities=keys.authorities,
    )
    return MembershipKept(terms, (saved.address, *saved.others))


def recall_terms(folder: PeerFolder, run_id: str) -> RunTerms | None:
    """What an earlier start in this folder was told of the run it stands by for; None if there was none.

    Raises:
        ConfigError: the folder is of another run.
        IntegrityError: a file of the folder is damaged.
    """
    run, saved = folder.load_run(), _load_terms(folder.path)
    if run is not None and run.run_id != run_id:
        raise ConfigError(f"{folder.path} holds the run {run.run_id}, not {run_id}", cure="give another --dir")
    if run is None or saved is None:
        return None
    return _terms_of(run, saved.manifest.encode(), saved.data_digest, saved.keys)


def find_authorities(path: Path, run_id: str) -> tuple[bytes, ...]:
    """The certificates of this run's authorities, as far as the folder of one of its processes knows. Only reads it."""
    found: list[bytes] = []
    for name in (_TERMS_NAME, MEMBERSHIP_NAME):
        with contextlib.suppress(IntegrityError, EnvironmentFault):
            saved = _load_terms(path, name)
            if saved is not None and saved.keys is not None and saved.keys.run_id == run_id:
                found.extend(saved.keys.authorities)
    with contextlib.suppress(OSError, UnicodeError, msgspec.MsgspecError):
        run = msgspec.json.decode((path / RUN_NAME).read_bytes(), type=RunIdentity)
        if run.run_id == run_id:
            found.append(certificate_to_bytes(authority_of(run).certificate))
    return tuple(dict.fromkeys(found))


def stand_by(folder: PeerFolder, terms: RunTerms, secret: bytes) -> Founded:
    """The run that this folder's process may have to coordinate.

    Raises:
        EnvironmentFault: the disk refuses.
    """
    run = RunIdentity(run_id=terms.run_id, secret=secret)
    folder.keep_run(run)
    remember_terms(folder, terms, None)
    return Founded(run=run, terms=terms, address=None, checkpoint=None)


def _terms_of(run: RunIdentity, manifest: bytes, data_digest: str, keys: _Keys | None) -> RunTerms:
    own = certificate_to_bytes(authority_of(run).certificate)
    known = () if keys is None else keys.authorities
    return RunTerms(
        run_id=run.run_id,
        manifest=manifest,
        data_digest=data_digest,
        authorities=tuple(dict.fromkeys((*known, own)))[-MAX_AUTHORITIES:],
    )


def _keys_of(terms: RunTerms) -> _Keys:
    return _Keys(run_id=terms.run_id, authorities=terms.authorities)


def _saved(terms: RunTerms, address: str | None, *, keys: _Keys | None) -> _SavedTerms:
    return _SavedTerms(manifest=terms.manifest.decode(), data_digest=terms.data_digest, address=address, keys=keys)


def remember_terms(folder: PeerFolder, terms: RunTerms, address: str | None, *, began_with: str | None = None) -> None:
    """Keep what the next start in this folder must agree with, and where it listens if it coordinates the run.

    `began_with` as in `Founded`.

    Raises:
        EnvironmentFault: the disk refuses.
    """
    run = folder.load_run()
    has_secret = run is not None and terms == _terms_of(run, terms.manifest, terms.data_digest, None)
    saved = _saved(terms, address, keys=None if has_secret else _keys_of(terms))
    _save_terms(folder, msgspec.structs.replace(saved, began_with=began_with))


def _save_terms(folder: PeerFolder, saved: _SavedTerms, name: str = _TERMS_NAME) -> None:
    with _disk_errors(folder.path):
        write_atomically(folder.path / name, msgspec.json.encode(saved), mode=0o600)


def save_standby_ticket(folder: PeerFolder, ticket: Ticket, secret: bytes) -> None:
    """Put a ticket for standbys into the folder. It holds the run's secret: for its operator's eyes.

    Raises:
        EnvironmentFault: the disk refuses.
    """
    text = encode_ticket(dataclasses.replace(ticket, secret=secret))
    with _disk_errors(folder.path):
        write_atomically(folder.path / STANDBY_TICKET_NAME, f"{text}\n".encode(), mode=0o600)


def _load_terms(path: Path, name: str = _TERMS_NAME) -> _SavedTerms | None:
    file = path / name
    try:
        with _disk_errors(path):
            return msgspec.json.decode(file.read_bytes(), type=_SavedTerms)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise IntegrityError(f"{file} is damaged", cure="found a new run in another folder") from error


def _require_same(saved: _SavedTerms, manifest: bytes, data_digest: str, path: Path) -> None:
    differing = [key for key, _, _ in manifest_diff(manifest, saved.manifest.encode())]
    if saved.data_digest != data_digest:
        differing.append("the text")
    if differing:
        raise ConfigError(
            f"{path} holds a run with other settings ({', '.join(differing)})",
            cure="give the same settings to go on, --resume to start from its checkpoint, or another --dir",
        )


def _archive(path: Path, outer_step: int) -> None:
    """Put the old lineage aside: its journal and newer checkpoints tell of steps that the one resumed has not."""
    store = CheckpointStore(path / FOLDER_NAME, keep=1)
    own = PrivateFiles(path / PRIVATE_FOLDER_NAME, "", keep=1)
    doomed = [place.path_of(step) for place in (store, own) for step in place.steps() if step > outer_step]
    # The terms go last: a start that was cut short here begins again.
    names = (
        *(f"{JOURNAL_NAME}{end}" for end in ("-wal", "-shm", "", ".lock")),
        STANDBY_TICKET_NAME,
        CERTIFICATES_NAME,
        RUN_NAME,
        _TERMS_NAME,
    )
    doomed += [*archives_of(path / JOURNAL_NAME), *(path / name for name in names if (path / name).exists())]
    set_aside(path, doomed)


def _archive_others(path: Path, run_id: str) -> None:
    """Put other runs' checkpoints aside: the next start must not take one of them for this run's."""
    store = CheckpointStore(path / FOLDER_NAME, keep=1)
    set_aside(path, [store.path_of(step) for step in store.steps() if store.run_of(step) != run_id])


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EnvironmentFault(
            f"the folder {path} cannot be used: {error.strerror}", cure="free some space or give another with --dir"
        ) from error
