# SPDX-License-Identifier: Apache-2.0
"""What a commit leaves with every peer: enough to go on from it when the coordinator's disk is lost.

A certificate says of one commit what was made out of what, by whom, and where the data stood. Each one names the
hash of the one before it, back to the genesis. It carries the ballots of the members that agreed, each signed with its
sender's own key, and the seal of the run's coordinator over all the rest.

What it proves: more than half of the members of that round have voted for this result, and a coordinator of this run
has counted them and says where the data stands. A stranger cannot make one, nor whoever may write to a disk or a bucket
where certificates lie, nor any member: it has one key of many, and not the coordinator's. A coordinator cannot make one
alone either.

The chain proves order: two certificates that follow the same parent are two histories of one run, and whoever sees
both knows it. Their order over rebuilds is by (epoch, outer step): a rebuilt run begins with an epoch that the lost
journal cannot have reached.
"""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.collective.core.types import Epoch, Incarnation, OuterStep, PeerId, PeerRef, RoundKey
from isthmus.elastic.core.notary import Sealer, Verifier
from isthmus.elastic.core.values import DataPosition, Digest, Held, Signature, Weight

MAX_CONTRIBUTORS = 1024

_BALLOT_DOMAIN = b"isthmus ballot 1\0"
_SEAL_DOMAIN = b"isthmus commit certificate 2\0"
_LINK_DOMAIN = b"isthmus certificate chain 1\0"
_GENESIS_DOMAIN = b"isthmus genesis 1\0"
_ENCODER = msgspec.msgpack.Encoder()


class Contributor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One member of the committed round, the weight of what it put in, and its ballot's signature if it agreed."""

    peer_id: PeerId
    incarnation: Incarnation
    weight: Weight
    signature: Signature = b""

    @property
    def ref(self) -> PeerRef:
        """The start of the peer that it was."""
        return PeerRef(self.peer_id, self.incarnation)


class Certificate(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One commit. See the module's docstring.

    Attributes:
        key: the round that was committed; its commit made step `key.outer_step + 1`.
        previous: digest of the shared state that the round started from.
        digest: digest of the shared state that it made.
        contributors: all members of the round's view, by rank.
        final: whether the run ends with it.
        position: which samples no commit up to this one has consumed, those that are leased included.
        parent: `link` of the certificate before it; of the first one, `genesis_link`.
        seal: of a coordinator of the run; empty in one that was not sealed yet, which nobody believes.
    """

    key: RoundKey
    previous: Digest
    digest: Digest
    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=MAX_CONTRIBUTORS)]
    final: bool
    position: DataPosition
    parent: Digest
    seal: Signature = b""

    @property
    def made(self) -> Held:
        """The state that the commit made."""
        return Held(OuterStep(self.key.outer_step + 1), self.digest)

    @property
    def order(self) -> tuple[Epoch, OuterStep]:
        """Sorts the certificates of one run from the oldest to the newest, over rebuilds too."""
        return self.key.epoch, OuterStep(self.key.outer_step + 1)

    @property
    def link(self) -> bytes:
        """What the next certificate names as its parent: a hash of everything but the seal and signatures, 32 bytes."""
        return hashlib.sha256(_LINK_DOMAIN + self._body()).digest()

    def sealed(self, sealer: Sealer) -> "Certificate":
        """The same under this run's seal."""
        return msgspec.structs.replace(self, seal=sealer.seal(_SEAL_DOMAIN + self._body()))

    def check(self, verifier: Verifier) -> bool:
        """Whether a coordinator of the run has sealed it, and more than half of its members have voted for it."""
        if not verifier.is_sealed(_SEAL_DOMAIN + self._body(), self.seal):
            return False
        agreed = set[PeerId]()
        for item in self.contributors:
            if item.signature:
                words = ballot(self.key, self.previous, self.digest, item.ref, item.weight)
                if not verifier.is_signed_by(item.peer_id, words, item.signature):
                    return False
                agreed.add(item.peer_id)
        return 2 * len(agreed) > len(self.contributors)

    def follows(self, parent: "Certificate") -> bool:
        """Whether it is the next commit after `parent`, by its own words."""
        return self.parent == parent.link and self.previous == parent.digest and self.key.outer_step == parent.order[1]

    def _body(self) -> bytes:
        # Weights may have come as whole numbers; their bytes must not depend on that.
        shares = [(item.peer_id, item.incarnation, float(item.weight)) for item in self.contributors]
        fields = (self.key, self.previous, self.digest, shares, self.final, self.position, self.parent)
        return _ENCODER.encode(fields)


_DECODER: msgspec.msgpack.Decoder[Certificate] = msgspec.msgpack.Decoder(Certificate)


def ballot(key: RoundKey, previous: Digest, digest: Digest, voter: PeerRef, weight: float) -> bytes:
    """What a member signs when it votes.

    Args:
        key: of the round.
        previous: digest of the shared state that the round started from.
        digest: of the one that the member has made.
        voter: this start of it.
        weight: of its part.
    """
    return _BALLOT_DOMAIN + _ENCODER.encode((key, previous, digest, voter, float(weight)))


def genesis_link(held: Held, position: DataPosition) -> bytes:
    """What the first certificate names as its parent: the state and the data that the run began with."""
    return hashlib.sha256(_GENESIS_DOMAIN + _ENCODER.encode((held, position))).digest()


def encode_certificate(certificate: Certificate) -> bytes:
    """Its bytes for a file. There is one way to write each certificate."""
    return _ENCODER.encode(certificate)


def decode_certificate(data: bytes) -> Certificate | None:
    """A certificate from bytes that anybody may have written; None if they are none. Signatures are not looked at."""
    try:
        certificate = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return None
    # Other bytes for the same values are no work of ours.
    return certificate if encode_certificate(certificate) == data else None
