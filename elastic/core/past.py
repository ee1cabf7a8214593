# SPDX-License-Identifier: Apache-2.0
"""A committed state that the run can go back to."""

import msgspec

from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.values import DataPosition, Digest, Held


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
