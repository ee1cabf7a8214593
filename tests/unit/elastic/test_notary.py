# SPDX-License-Identifier: Apache-2.0
"""Real signatures: nobody signs in the name of another, in another run, or for the run."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.collective.core.types import Epoch, Incarnation, OuterStep, PeerRef, RoundKey
from isthmus.collective.transport import Authority
from isthmus.collective.transport.certificates import peer_id_of_key
from isthmus.elastic.core.certificate import Certificate, Contributor, ballot
from isthmus.elastic.core.messages import DataPosition
from isthmus.elastic.core.values import MAX_SIGNATURE_NBYTES
from isthmus.elastic.shell.notary import PeerSigner, RunSealer, RunVerifier

AUTHORITY, NEWER, STRANGE = Authority(b"a" * 32), Authority(b"b" * 32), Authority(b"c" * 32)
WORDS = b"words"
BOTH = (AUTHORITY.certificate, NEWER.certificate)


def peer(number: int, run_id: str = "run-1") -> tuple[PeerRef, PeerSigner]:
    key = Ed25519PrivateKey.from_private_bytes(number.to_bytes(32))
    ref = PeerRef(peer_id_of_key(key.public_key().public_bytes_raw()), Incarnation(1))
    return ref, PeerSigner(key, run_id, lambda: BOTH)


def verifier(run_id: str = "run-1") -> RunVerifier:
    return RunVerifier(run_id, lambda: BOTH)


def sealer(authority: Authority = AUTHORITY) -> RunSealer:
    return RunSealer(authority, "run-1", lambda: BOTH)


def test_a_signature_is_of_one_peer_one_run_and_these_words() -> None:
    (one, signer), (other, _) = peer(1), peer(2)
    signature = signer.sign(WORDS)
    assert len(signature) <= MAX_SIGNATURE_NBYTES
    assert signature == signer.sign(WORDS)
    assert verifier().is_signed_by(one.peer_id, WORDS, signature)
    assert not verifier().is_signed_by(other.peer_id, WORDS, signature)
    assert not verifier("run-2").is_signed_by(one.peer_id, WORDS, signature)
    assert not verifier().is_signed_by(one.peer_id, WORDS + b"!", signature)


@pytest.mark.parametrize("place", [0, 31, 32, 95])
def test_a_changed_bit_of_a_signature_is_noticed(place: int) -> None:
    one, signer = peer(1)
    signature = bytearray(signer.sign(WORDS))
    signature[place] ^= 1
    assert not verifier().is_signed_by(one.peer_id, WORDS, bytes(signature))


@pytest.mark.parametrize("signature", [b"", b"k" * 32, b"k" * 95, b"k" * 96])
def test_what_is_no_signature_is_none(signature: bytes) -> None:
    one, _ = peer(1)
    assert not verifier().is_signed_by(one.peer_id, WORDS, signature)
    assert not verifier().is_sealed(WORDS, signature)


def test_every_authority_of_the_run_seals_and_no_other() -> None:
    for authority in (AUTHORITY, NEWER):
        assert verifier().is_sealed(WORDS, sealer(authority).seal(WORDS))
    assert not verifier().is_sealed(WORDS, sealer(STRANGE).seal(WORDS))
    assert not verifier("run-2").is_sealed(WORDS, sealer().seal(WORDS))
    assert len(sealer().seal(WORDS)) <= MAX_SIGNATURE_NBYTES


def test_a_peer_cannot_seal() -> None:
    _, signer = peer(1)
    assert not hasattr(signer, "seal")
    assert not verifier().is_sealed(WORDS, signer.sign(WORDS))
    assert not verifier().is_sealed(WORDS, signer.sign(WORDS)[32:])


def voted(*numbers: int, members: int = 3) -> Certificate:
    """Of a round of so many members, of whom these have signed; not sealed."""
    key, previous, digest = RoundKey(Epoch(1), OuterStep(1_000_000), 0), b"p" * 32, b"d" * 32
    contributors = []
    for number in range(1, members + 1):
        ref, signer = peer(number)
        signature = signer.sign(ballot(key, previous, digest, ref, 1.0)) if number in numbers else b""
        contributors.append(Contributor(ref.peer_id, ref.incarnation, 1.0, signature))
    position = DataPosition(10)
    return Certificate(
        key=key,
        previous=previous,
        digest=digest,
        contributors=tuple(contributors),
        final=False,
        position=position,
        parent=bytes(32),
    )


@pytest.mark.parametrize(("numbers", "members"), [((1, 2), 3), ((1, 2, 3), 3), ((2, 3, 4), 5), ((1,), 1)])
def test_more_than_half_of_the_members_and_a_coordinator_make_a_certificate(
    numbers: tuple[int, ...], members: int
) -> None:
    assert voted(*numbers, members=members).sealed(sealer()).check(verifier())


@pytest.mark.parametrize(("numbers", "members"), [((), 1), ((1,), 2), ((1,), 3), ((1, 2), 4), ((), 0)])
def test_a_coordinator_and_half_of_the_members_or_less_make_none(numbers: tuple[int, ...], members: int) -> None:
    assert not voted(*numbers, members=members).sealed(sealer()).check(verifier())


def test_all_members_without_a_coordinator_make_none() -> None:
    assert not voted(1, 2, 3).check(verifier())
    assert not voted(1, 2, 3).sealed(sealer(STRANGE)).check(verifier())


def test_one_member_twice_is_no_majority() -> None:
    once = voted(1, members=3)
    twice = (once.contributors[0], once.contributors[0], once.contributors[2])
    padded = Certificate(
        key=once.key,
        previous=once.previous,
        digest=once.digest,
        contributors=twice,
        final=False,
        position=once.position,
        parent=once.parent,
    )
    assert not padded.sealed(sealer()).check(verifier())
