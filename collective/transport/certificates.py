# SPDX-License-Identifier: Apache-2.0
"""Who is who: every peer's own key, and the certificates by which a run's authority lets its peers in.

A peer makes its key itself, and its id is the beginning of the key's hash, so nobody can take the name of another. The
authority's private key follows from the run's secret, which only its coordinators have. It signs what a peer shows
everybody else: that this key is one of the run's.

Rules: Ed25519 everywhere. Certificates do not expire: whoever still has its key could renew one at any time, so an end
would only ever hit the wrong peer. They are withdrawn by number instead: a later one has a larger number. The
authority's certificate is the same bytes wherever its secret is. Everything that comes from a certificate of the other
side is untrusted until `is_signed_by` or the TLS library has said yes. Knows no socket and no clock.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.collective.core.types import PEER_ID_PATTERN, PeerId

SECRET_NBYTES = 32
KEY_NBYTES = 32
"""Of a public key, raw."""

_AUTHORITY_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus run authority")])
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_PREFIX = "peer:"


def peer_id_of_key(public_key: bytes) -> PeerId:
    """The id of the peer with this key (`KEY_NBYTES` bytes): 16 hexadecimal digits of its SHA-256."""
    return PeerId(hashlib.sha256(public_key).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a peer shows, what it proves it with, and whom it believes.

    Attributes:
        key: its own.
        certificate: of that key, by one of the authorities.
        authorities: whose certificates count. There are two where a run has lost the secret of its first one.
    """

    key: Ed25519PrivateKey = field(repr=False)
    certificate: x509.Certificate
    authorities: tuple[x509.Certificate, ...]

    @contextlib.contextmanager
    def as_file(self) -> Iterator[str]:
        """A path of a PEM file with key and certificate, for `ssl`, which takes them no other way.

        It lies in anonymous memory of this process and is gone afterwards.
        """
        fd = os.memfd_create("identity", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            file.write(key_to_pem(self.key) + self.certificate.public_bytes(serialization.Encoding.PEM))
            file.flush()
            yield f"/proc/self/fd/{fd}"


class Authority:
    """Signs the certificates of one run.

    Args:
        secret: 32 bytes that the coordinators of the run share, and nobody else.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_NBYTES:
            raise ValueError(f"the secret must have {SECRET_NBYTES} bytes, not {len(secret)}")
        seed = HKDF(hashes.SHA256(), length=32, salt=None, info=b"isthmus run authority 1").derive(secret)
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.certificate = (
            _certificate(_AUTHORITY_NAME, self._key.public_key(), self._key.public_key(), serial=1)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True), critical=True)
            .sign(self._key, None)
        )

    @property
    def public_key(self) -> bytes:
        """32 bytes by which somebody with a ticket knows a certificate of this run: see `is_signed_by`."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, words: bytes) -> bytes:
        """64 bytes. The words must begin with what they are about: no certificate begins so."""
        return self._key.sign(words)

    def issue(self, public_key: Ed25519PublicKey, number: int, *, peer_id: PeerId | None = None) -> x509.Certificate:
        """A certificate for the peer with this key.

        Args:
            public_key: the peer's.
            number: from 1 to 2**53, larger than that of every earlier certificate of this peer.
            peer_id: the only name in it. None, and nothing else where peers are strangers to each other: the key's.
        """
        peer_id = peer_id or peer_id_of_key(public_key.public_bytes_raw())
        name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_PREFIX + peer_id)])
        builder = _certificate(x509.Name([]), public_key, self._key.public_key(), number)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        return builder.add_extension(name, critical=True).sign(self._key, None)  # critical: the subject is empty


def key_to_pem(key: Ed25519PrivateKey) -> bytes:
    """A private key as `key_from_pem` reads it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_from_pem(pem: bytes) -> Ed25519PrivateKey:
    """A private key from its file. Raises ValueError: it is none, or of another kind."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise ValueError("no private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("no Ed25519 key")
    return key


def certificate_to_bytes(certificate: x509.Certificate) -> bytes:
    """As it goes over the network and to the disk."""
    return certificate.public_bytes(serialization.Encoding.DER)


def certificate_from_bytes(der: bytes) -> x509.Certificate:
    """The reverse. Raises ValueError."""
    return x509.load_der_x509_certificate(der)


def key_in(certificate: x509.Certificate) -> bytes:
    """The public key that a certificate is about, raw; empty if it is of a kind that no peer has."""
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        return b""
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else b""


def name_in(certificate: x509.Certificate) -> PeerId | None:
    """The name in a certificate. None unless it holds exactly one and that is a peer's. `peer_id_in` proves it."""
    try:
        names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (x509.ExtensionNotFound, ValueError):  # ValueError: it cannot be parsed
        return None
    if len(names) != 1 or not isinstance(names[0], x509.UniformResourceIdentifier):
        return None
    prefix, peer_id = names[0].value[: len(_PREFIX)], names[0].value[len(_PREFIX) :]
    if prefix != _PREFIX or re.fullmatch(PEER_ID_PATTERN.removeprefix("^").removesuffix("$"), peer_id) is None:
        return None
    return PeerId(peer_id)


def peer_id_in(certificate: x509.Certificate) -> PeerId | None:
    """The peer that a certificate speaks of: the name in it, if that is its key's. Else None."""
    name = name_in(certificate)
    return name if name is not None and name == peer_id_of_key(key_in(certificate)) else None


def is_signed_by(authority_public_key: bytes, certificate: x509.Certificate) -> bool:
    """Whether the authority with this key (32 bytes) has signed the certificate."""
    try:
        Ed25519PublicKey.from_public_bytes(authority_public_key).verify(
            certificate.signature, certificate.tbs_certificate_bytes
        )
    except (InvalidSignature, ValueError):
        return False
    return True


def signer_of(certificate: x509.Certificate, authorities: Iterable[x509.Certificate]) -> bytes | None:
    """The public key of that one of the authorities which has signed a certificate; None if none of them has."""
    return next((key for one in authorities if is_signed_by(key := key_in(one), certificate)), None)


def _certificate(
    subject: x509.Name,
    key: Ed25519PublicKey,
    issuer_key: Ed25519PublicKey,
    serial: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_AUTHORITY_NAME)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(_BEGINNING)
        .not_valid_after(_END)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
