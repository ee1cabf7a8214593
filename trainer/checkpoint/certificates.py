# SPDX-License-Identifier: Apache-2.0
"""The commits that this peer can prove, on its disk: from them a run goes on whose coordinator has lost its journal.

One small file in the peer's folder holds the newest `KEPT` certificates, the one that counts last. Rules: it is
replaced in one step, from a thread; training never waits for it, and a disk that refuses is warned of and never ends a
run; what is read back counts only if it is genuine. Must not know what a rebuild is.
"""

import logging
from asyncio import Event
from collections import deque
from pathlib import Path

import msgspec

from isthmus.elastic.core.certificate import Certificate, decode_certificate, encode_certificate
from isthmus.elastic.core.notary import Verifier
from isthmus.trainer.files import write_atomically
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

FILE_NAME = "certificates"
KEPT = 16
_MAX_NBYTES = KEPT * (256 << 10)
"""No certificate is longer than the control message that brought it."""

_FILE: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(list[bytes])


def read_certificates(path: Path) -> list[Certificate | None]:
    """What a file holds, the one that counts last, whoever has made them; None for what is no certificate.

    Raises:
        OSError: it cannot be read, or there is none.
        MsgspecError, RecursionError: it is damaged.
    """
    with path.open("rb") as file:
        content = file.read(_MAX_NBYTES)
    return [decode_certificate(piece) for piece in _FILE.decode(content)[-KEPT:]]


def load_certificates(path: Path, verifier: Verifier) -> list[Certificate]:
    """The certificates of a file, the one that counts last; none if there is no file, or it is damaged.

    Those that this run's keys do not prove are left out: they are of another run, or were changed.
    """
    try:
        read = read_certificates(path)
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        log.warning("certificates_unusable path=%s cause=%r; the others' have to do", path, str(error))
        return []
    good = [item for item in read if item is not None and item.check(verifier)]
    if len(good) < len(read):
        log.warning("certificates_refused path=%s refused=%d of=%d", path, len(read) - len(good), len(read))
    return good


class CertificateKeeper:
    """Writes the newest certificates beside the training.

    Args:
        path: the file.
        known: what is in it already, the newest last.
    """

    def __init__(self, path: Path, known: list[Certificate]) -> None:
        self._path = path
        self._kept = deque(known, maxlen=KEPT)
        self._due = Event()
        self._has_failed = False

    def offer(self, certificate: Certificate) -> None:
        """Keep this one soon. What comes while the disk is busy goes with the next writing."""
        self._kept.append(certificate)
        self._due.set()

    async def run(self) -> None:
        """Writes what is offered until cancelled."""
        while True:
            await self._due.wait()
            await self.drain()

    async def drain(self) -> None:
        """Write what is not on the disk yet."""
        if not self._due.is_set():
            return
        self._due.clear()
        content = msgspec.msgpack.encode([encode_certificate(item) for item in self._kept])
        try:
            await in_thread(_write, self._path, content)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("certificates_not_kept path=%s cause=%r; training goes on", self._path, error.strerror)
            self._has_failed = True


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, content, mode=0o600)
