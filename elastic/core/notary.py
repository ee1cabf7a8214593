# SPDX-License-Identifier: Apache-2.0
"""Who can prove what to whom: the signatures under votes and certificates, as the machines see them.

Every peer signs with a key of its own, and the run's coordinators seal with the authority's, which no member has.
Everybody can check both. All words are of one run: what was signed in another one is no signature here. Real keys are
in elastic/shell/notary.py; the machines know only that nobody signs in the name of another.
"""

from typing import Protocol

from isthmus.collective.core.types import PeerId


class Verifier(Protocol):
    """Checks. Words are bytes that begin with what they are about, so that none can be taken for others."""

    def is_signed_by(self, peer_id: PeerId, words: bytes, signature: bytes) -> bool:
        """Whether this peer has signed these words."""

    def is_sealed(self, words: bytes, seal: bytes) -> bool:
        """Whether a coordinator of this run has sealed these words."""


class Signer(Verifier, Protocol):
    """A member's: signs as one peer."""

    def sign(self, words: bytes) -> bytes:
        """This peer's signature, at most `MAX_SIGNATURE_NBYTES`. The same words have the same one."""


class Sealer(Verifier, Protocol):
    """A coordinator's: seals for the run."""

    def seal(self, words: bytes) -> bytes:
        """The run's seal, at most `MAX_SIGNATURE_NBYTES`. The same words have the same one."""
