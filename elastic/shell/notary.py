# SPDX-License-Identifier: Apache-2.0
"""Real keys under votes and certificates: Ed25519, those that peers have anyway and the one of the run's authority.

A signature is the public key and 64 bytes, so whoever knows a peer's id, which is the key's hash, needs nothing else to
check it. A seal is 64 bytes that one of the run's authorities has made: there are two where the run has lost the secret
of its first one. The run's id is signed with all words: a peer's key may be of several runs.
"""

from collections.abc import Callable, Iterable

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from isthmus.collective.core.types import PeerId
from isthmus.collective.transport import Authority
from isthmus.collective.transport.certificates import KEY_NBYTES, key_in, peer_id_of_key

_DOMAIN = b"isthmus words 1\0"


class RunVerifier:
    """Checks signatures and seals of one run.

    Args:
        run_id: of it.
        authorities: whose seals count, as known now.
    """

    def __init__(self, run_id: str, authorities: Callable[[], Iterable[x509.Certificate]]) -> None:
        self._prefix = _DOMAIN + run_id.encode() + b"\0"
        self._authorities = authorities

    def is_signed_by(self, peer_id: PeerId, words: bytes, signature: bytes) -> bool:
        """See notary.Verifier."""
        key, proof = signature[:KEY_NBYTES], signature[KEY_NBYTES:]
        return peer_id_of_key(key) == peer_id and _is_proven(key, proof, self._prefix + words)

    def is_sealed(self, words: bytes, seal: bytes) -> bool:
        """See notary.Verifier."""
        return any(_is_proven(key_in(authority), seal, self._prefix + words) for authority in self._authorities())


class PeerSigner(RunVerifier):
    """Signs as the peer with this key.

    Args:
        key: the peer's own.
        run_id, authorities: see RunVerifier.
    """

    def __init__(
        self, key: Ed25519PrivateKey, run_id: str, authorities: Callable[[], Iterable[x509.Certificate]]
    ) -> None:
        super().__init__(run_id, authorities)
        self._key = key
        self._public_key = key.public_key().public_bytes_raw()

    def sign(self, words: bytes) -> bytes:
        """See notary.Signer."""
        return self._public_key + self._key.sign(self._prefix + words)


class RunSealer(RunVerifier):
    """Seals for the run.

    Args:
        authority: the run's.
        run_id, authorities: see RunVerifier.
    """

    def __init__(
        self, authority: Authority, run_id: str, authorities: Callable[[], Iterable[x509.Certificate]]
    ) -> None:
        super().__init__(run_id, authorities)
        self._authority = authority

    def seal(self, words: bytes) -> bytes:
        """See notary.Sealer."""
        return self._authority.sign(self._prefix + words)


def _is_proven(public_key: bytes, proof: bytes, words: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(proof, words)
    except (InvalidSignature, ValueError):
        return False
    return True
