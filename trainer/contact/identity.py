# SPDX-License-Identifier: Apache-2.0
"""Who this peer is, and which run a coordinator serves: what a peer's folder keeps from one start to the next.

::

    <dir>/lock           one daemon at a time
    <dir>/key.pem        this peer's own key, made at the first start; who has it is this peer
    <dir>/peer_id        16 hexadecimal digits of the key's hash, for people and scripts
    <dir>/certificate.pem  of the run that this peer joined last, by which it comes back without a ticket
    <dir>/incarnation    number of the last start
    <dir>/run.json       run id and secret; only where a coordinator lives, or stands by

Rules: a folder that is made here is 0700, all files are 0600 and replaced in one step; a later start always has the
larger incarnation, also when the file is lost; nothing here goes over the network but the certificate, the peer id, the
incarnation and the run id. Must not know tickets.

Errors: `EnvironmentFault` (3) where the folder is not ours to use; `IntegrityError` (9) for a file that was changed.
"""

import fcntl
import os
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Meta

from isthmus.collective.core.types import PEER_ID_PATTERN, Incarnation, PeerId, PeerRef
from isthmus.collective.transport.certificates import key_from_pem, key_to_pem, peer_id_of_key
from isthmus.trainer.errors import EnvironmentFault, IntegrityError
from isthmus.trainer.files import PRIVATE_MODE, RUN_NAME, make_private_folder, write_atomically

_SECRET_NBYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """One start of this peer."""

    peer_id: PeerId
    incarnation: Incarnation
    key: Ed25519PrivateKey = field(repr=False)

    @property
    def ref(self) -> PeerRef:
        """As the other layers name it."""
        return PeerRef(self.peer_id, self.incarnation)


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run. Who knows the secret can make tickets for it, and certificates. Only its coordinators do."""

    run_id: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\Z")]
    secret: Annotated[bytes, Meta(min_length=_SECRET_NBYTES, max_length=_SECRET_NBYTES)]

    def __repr__(self) -> str:
        return f"RunIdentity(run_id={self.run_id!r})"


@dataclass(slots=True)
class PeerFolder:
    """The folder of a peer, locked as long as this object is open (`close`, or a with block).

    Two daemons that share an identity would throw each other out of the run for ever, hence the lock. The system
    releases it when the process ends, however it ends.
    """

    path: Path
    _lock_fd: int = field(init=False, default=-1, repr=False)

    def __post_init__(self) -> None:
        try:
            make_private_folder(self.path)
            self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_MODE)
        except OSError as error:
            raise EnvironmentFault(
                f"the folder {self.path} cannot be used: {error.strerror}", cure="give another with --dir"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise EnvironmentFault(
                f"another isthmus works in {self.path}", cure="leave it with isthmus leave, or give another with --dir"
            ) from error

    def __enter__(self) -> "PeerFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; may be called twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def start_identity(self) -> PeerIdentity:
        """This peer's key and id, made if there are none, with the incarnation of a new start.

        Call it once a start: each call counts one up.

        Raises:
            IntegrityError: a file does not hold what it should.
            EnvironmentFault: the disk refuses.
        """
        written = self._read("peer_id", PEER_ID_PATTERN)
        key = self._own_key(is_new=written is None)
        peer_id = peer_id_of_key(key.public_key().public_bytes_raw())
        if written is not None and written != peer_id:
            raise self._damaged(self.path / "peer_id")
        last = int(self._read("incarnation", r"^[0-9]{1,15}$") or 0)
        # The clock alone may go back, the file alone may be lost; a start is later than the last by both.
        incarnation = max(last + 1, time.time_ns() // 1_000_000)
        self._write("peer_id", peer_id.encode())
        self._write("incarnation", str(incarnation).encode())
        return PeerIdentity(peer_id=peer_id, incarnation=Incarnation(incarnation), key=key)

    def load_certificate(self) -> x509.Certificate | None:
        """The certificate that this peer got last, or None. It may be of another run, and may be withdrawn.

        Raises:
            IntegrityError: it is damaged.
        """
        pem = self._read_bytes("certificate.pem")
        try:
            return None if pem is None else x509.load_pem_x509_certificate(pem)
        except ValueError as error:
            raise self._damaged(self.path / "certificate.pem", "join with a ticket again") from error

    def keep_certificate(self, certificate: x509.Certificate) -> None:
        """Let the next start show this one. Raises EnvironmentFault."""
        self._write("certificate.pem", certificate.public_bytes(Encoding.PEM))

    def load_run(self) -> RunIdentity | None:
        """The run that was founded in this folder, or None.

        Raises:
            IntegrityError: `run.json` is damaged.
        """
        path = self.path / RUN_NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=RunIdentity)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise IntegrityError(f"{path} is damaged: {error}", cure="found a new run in another folder") from error
        except OSError as error:
            raise EnvironmentFault(f"{path} cannot be read: {error.strerror}", cure="check its permissions") from error

    def found_run(self, name: str) -> RunIdentity:
        """The run of this folder, made if there is none.

        Args:
            name: `run.name`; the run id is this and eight random digits.
        """
        run = self.load_run()
        if run is None:
            run = RunIdentity(run_id=f"{name}-{secrets.token_hex(4)}", secret=secrets.token_bytes(_SECRET_NBYTES))
            self._write(RUN_NAME, msgspec.json.encode(run))
        return run

    def keep_run(self, run: RunIdentity) -> None:
        """Let this folder be one of a run that was founded elsewhere.

        Raises:
            EnvironmentFault: the disk refuses.
        """
        self._write(RUN_NAME, msgspec.json.encode(run))

    def adopt_run(self, run_id: str) -> None:
        """Make this the folder of a run whose secret is lost. Tickets for it are made with a new one from now on."""
        run = self.load_run()
        if run is None or run.run_id != run_id:
            run = RunIdentity(run_id=run_id, secret=secrets.token_bytes(_SECRET_NBYTES))
            self._write(RUN_NAME, msgspec.json.encode(run))

    def _read(self, name: str, pattern: str) -> str | None:
        content = self._read_bytes(name)
        if content is None:
            return None
        text = content.decode("ascii", errors="replace").strip()
        if re.search(pattern, text) is None:
            raise self._damaged(self.path / name)
        return text

    def _own_key(self, *, is_new: bool) -> Ed25519PrivateKey:
        pem, path = self._read_bytes("key.pem"), self.path / "key.pem"
        if pem is None and not is_new:
            raise IntegrityError(
                f"{self.path} has a peer id and no key: its key.pem is lost, or an older isthmus made the folder",
                cure="join from an empty folder (--dir)",
            )
        if pem is None:
            key = Ed25519PrivateKey.generate()
            self._write("key.pem", key_to_pem(key))
            return key
        try:
            return key_from_pem(pem)
        except ValueError as error:
            raise IntegrityError(f"{path} is damaged", cure="join from an empty folder (--dir)") from error

    def _read_bytes(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EnvironmentFault(f"{path} cannot be read: {error.strerror}", cure="check its permissions") from error

    def _damaged(self, path: Path, then: str = "") -> IntegrityError:
        return IntegrityError(f"{path} is damaged", cure=f"delete it; {then or f'the peer gets a new {path.name}'}")

    def _write(self, name: str, content: bytes) -> None:
        path = self.path / name
        try:
            write_atomically(path, content, mode=PRIVATE_MODE)
        except OSError as error:
            raise EnvironmentFault(
                f"{path} cannot be written: {error.strerror}", cure="free some space or give another folder with --dir"
            ) from error
