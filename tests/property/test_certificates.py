# SPDX-License-Identifier: Apache-2.0
"""No bit of a certificate can be changed without being noticed."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from isthmus.collective.core.types import RoundKey
from isthmus.elastic.core.certificate import Certificate, Contributor, decode_certificate, encode_certificate
from isthmus.elastic.core.messages import DataPosition, IndexRange
from tests.keys import Keys, certified

KEYS = Keys()
digests = st.binary(min_size=32, max_size=32)
naturals = st.integers(0, 2**53)
contributors = st.builds(
    Contributor,
    st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}"),
    naturals,
    st.floats(0, 1e15),
)
certificates = st.builds(
    Certificate,
    key=st.builds(RoundKey, st.integers(0, 2**32), st.integers(0, 2**32), st.integers(0, 2**16)),
    previous=digests,
    digest=digests,
    contributors=st.lists(contributors, min_size=1, max_size=4, unique_by=lambda item: item.peer_id).map(tuple),
    final=st.booleans(),
    position=st.builds(
        DataPosition, naturals, st.lists(st.builds(IndexRange, naturals, naturals), max_size=4).map(tuple)
    ),
    parent=digests,
).map(lambda item: certified(item, KEYS))


def is_refused(data: bytes) -> bool:
    certificate = decode_certificate(data)
    return certificate is None or not certificate.check(KEYS)


@given(certificates)
def test_certificate_comes_back_from_its_bytes(certificate: Certificate) -> None:
    read = decode_certificate(encode_certificate(certificate))
    assert read == certificate
    assert not is_refused(encode_certificate(certificate))


@given(certificates, st.data())
def test_any_flipped_bit_is_refused(certificate: Certificate, data: st.DataObject) -> None:
    content = bytearray(encode_certificate(certificate))
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    assert is_refused(bytes(content))


def test_every_single_bit_of_one_certificate_counts() -> None:
    unsigned = Certificate(
        key=RoundKey(70_000, 300, 1),
        previous=b"p" * 32,
        digest=b"d" * 32,
        contributors=(Contributor("00000000000000aa", 10**13, 3.0), Contributor("00000000000000bb", 5, 0.5)),
        final=False,
        position=DataPosition(5000, (IndexRange(3, 200), IndexRange(300, 70_000))),
        parent=b"q" * 32,
    )
    content = encode_certificate(certified(unsigned, KEYS))
    assert not is_refused(content)
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        assert is_refused(bytes(flipped)), bit


@given(certificates, st.integers(0, 10_000))
def test_certificate_that_was_cut_is_refused(certificate: Certificate, cut: int) -> None:
    content = encode_certificate(certificate)
    assert is_refused(content[: cut % len(content)])


@given(certificates)
def test_other_spelling_of_the_same_values_is_refused(certificate: Certificate) -> None:
    fields = msgspec.msgpack.decode(encode_certificate(certificate))
    spelt = b"\xdc\x00\x08" + b"".join(msgspec.msgpack.encode(item) for item in fields)  # array 16 instead of fixarray
    assert decode_certificate(spelt) is None
