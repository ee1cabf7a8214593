# SPDX-License-Identifier: Apache-2.0
"""A committed state that the run can go back to, and how a snapshot of the journal keeps its certificate."""

import msgspec

from elastic.core.certificate import SEAL_KEY_NBYTES, Certificate
from elastic.core.values import DataPosition, Digest, Held

_UNSEALED = bytes(SEAL_KEY_NBYTES)
"""In place of the seal of a certificate that has none yet: whoever reads one without any takes it for damaged."""


class Past(msgspec.Struct, frozen=True):
    """A committed state that the run can go back to. Without a certificate it is the one that the run began with."""

    held: Held
    position: DataPosition
    link: Digest
    certificate: Certificate | None = None


def is_of(past: Past, certificate: Certificate | None) -> bool:
    """Whether this certificate, under whatever seal, is of that state."""
    if certificate is None or past.certificate is None:
        return certificate is past.certificate
    return certificate.link == past.link


def written(certificate: Certificate) -> Certificate:
    """As a snapshot holds it."""
    return certificate if certificate.seal else msgspec.structs.replace(certificate, seal=_UNSEALED)


def read_back(certificate: Certificate) -> Certificate:
    """What it was before it was `written`."""
    return certificate if certificate.seal != _UNSEALED else msgspec.structs.replace(certificate, seal=b"")
