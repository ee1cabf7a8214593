# SPDX-License-Identifier: Apache-2.0
"""Keys for tests and for the simulator: quick, and nobody has those of another.

HMAC under a secret of each peer stands for its signature. Real keys are in elastic/shell/notary.py.
"""

import hashlib
import hmac

import msgspec

from isthmus.collective.core.types import PeerId
from isthmus.elastic.core.certificate import Certificate, ballot


def certified(certificate: Certificate, keys: "Keys") -> Certificate:
    """Signed by its contributors, and sealed."""
    signed = []
    for item in certificate.contributors:
        words = ballot(certificate.key, certificate.previous, certificate.digest, item.ref, item.weight)
        signed.append(msgspec.structs.replace(item, signature=keys.of(item.peer_id).sign(words)))
    return msgspec.structs.replace(certificate, contributors=tuple(signed)).sealed(keys.of_the_run)


class Keys:
    """What everybody can check. Each `run` has its own."""

    def __init__(self, run: bytes = b"the run") -> None:
        self._run = run

    def of(self, peer_id: PeerId) -> "PeerKeys":
        """Those of one peer."""
        return PeerKeys(peer_id, self._run)

    @property
    def of_the_run(self) -> "RunKeys":
        """Those of its coordinators."""
        return RunKeys(self._run)

    def is_signed_by(self, peer_id: PeerId, words: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(signature, self._made(peer_id.encode(), words))

    def is_sealed(self, words: bytes, seal: bytes) -> bool:
        return hmac.compare_digest(seal, self._made(b"coordinator", words))

    def _made(self, whose: bytes, words: bytes) -> bytes:
        return hmac.digest(hashlib.sha256(self._run + b"\0" + whose).digest(), words, "sha256")


class PeerKeys(Keys):
    """Signs as one peer."""

    def __init__(self, peer_id: PeerId, run: bytes) -> None:
        super().__init__(run)
        self._peer_id = peer_id

    def sign(self, words: bytes) -> bytes:
        return self._made(self._peer_id.encode(), words)


class RunKeys(Keys):
    """Seals."""

    def seal(self, words: bytes) -> bytes:
        return self._made(b"coordinator", words)
