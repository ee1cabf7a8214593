"""Who is who: a run's authority, made from a secret that all its members have, and the certificates it signs.

No certificate is ever asked for or handed out. The authority's private key follows from the secret, so every member
has it, and signs a certificate for itself that says `peer:<peer_id>`.

Rules: Ed25519 everywhere. The authority's certificate is the same bytes on every member and never expires; a peer's is
valid from a day before to two days after it was made, so clocks may differ by a day. A private key goes to no disk.
Everything that comes from a certificate of the other side is untrusted until `is_signed_by` or the TLS library has
said yes. Knows no socket.
"""

import contextlib
import datetime
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from collective.core.types import PEER_ID_PATTERN, PeerId

SECRET_NBYTES = 32
LIFE = datetime.timedelta(days=2)
CLOCKS_DIFFER = datetime.timedelta(days=1)

_AUTHORITY_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus run authority")])
_BEGINNING = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
_PREFIX = "peer:"


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """A peer's certificate with its private key."""

    certificate: x509.Certificate
    key: Ed25519PrivateKey = field(repr=False)

    @property
    def fingerprint(self) -> bytes:
        """What others pin, see `fingerprint_of`."""
        return fingerprint_of(self.certificate)

    @contextlib.contextmanager
    def as_file(self) -> Iterator[str]:
        """A path of a PEM file with key and certificate, for `ssl`, which takes them no other way.

        It lies in anonymous memory of this process and is gone afterwards.
        """
        key = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        fd = os.memfd_create("identity", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            file.write(key + self.certificate.public_bytes(serialization.Encoding.PEM))
            file.flush()
            yield f"/proc/self/fd/{fd}"


class Authority:
    """Signs the certificates of one run.

    Args:
        secret: 32 bytes that the members of the run share, and nobody else.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_NBYTES:
            raise ValueError(f"the secret must have {SECRET_NBYTES} bytes, not {len(secret)}")
        seed = HKDF(hashes.SHA256(), length=32, salt=None, info=b"isthmus run authority 1").derive(secret)
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.certificate = (
            _certificate(_AUTHORITY_NAME, self._key.public_key(), self._key.public_key(), _BEGINNING, _END, serial=1)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True), critical=True)
            .sign(self._key, None)
        )

    @property
    def public_key(self) -> bytes:
        """32 bytes by which somebody without the secret knows a certificate of this run: see `is_signed_by`."""
        return self._key.public_key().public_bytes_raw()

    def issue(
        self,
        peer_id: PeerId,
        now: datetime.datetime,
        *,
        key: Ed25519PrivateKey | None = None,
        life: datetime.timedelta = LIFE,
    ) -> TlsIdentity:
        """A certificate for this peer.

        Args:
            peer_id: goes into it as the only name.
            now: the wall clock, in UTC.
            key: the peer's; a new one if None.
            life: how long it is valid from now on.
        """
        key = key or Ed25519PrivateKey.generate()
        name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_PREFIX + peer_id)])
        builder = _certificate(x509.Name([]), key.public_key(), self._key.public_key(), now - CLOCKS_DIFFER, now + life)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        builder = builder.add_extension(name, critical=True)  # the subject is empty
        return TlsIdentity(builder.sign(self._key, None), key)


def peer_id_in(certificate: x509.Certificate) -> PeerId | None:
    """The peer that a certificate speaks of. None unless it holds exactly one name and that is a peer's."""
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


def fingerprint_of(certificate: x509.Certificate) -> bytes:
    """SHA-256 of the public key, 32 bytes. Of the key and not the certificate, so it outlives a renewal."""
    spki = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).digest()


def is_signed_by(authority_public_key: bytes, certificate: x509.Certificate, now: datetime.datetime) -> bool:
    """Whether the authority with this key (32 bytes) has signed the certificate and it is valid now.

    For a stranger, who has no certificate of the authority that the TLS library could check against.
    """
    try:
        Ed25519PublicKey.from_public_bytes(authority_public_key).verify(
            certificate.signature, certificate.tbs_certificate_bytes
        )
        return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
    except (InvalidSignature, ValueError):
        return False


def _certificate(
    subject: x509.Name,
    key: Ed25519PublicKey,
    issuer_key: Ed25519PublicKey,
    not_before: datetime.datetime,
    not_after: datetime.datetime,
    serial: int | None = None,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_AUTHORITY_NAME)
        .public_key(key)
        .serial_number(serial or x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
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
