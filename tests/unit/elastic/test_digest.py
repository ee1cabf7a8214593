# SPDX-License-Identifier: Apache-2.0
import asyncio
import os

import msgspec
import pytest
from blake3 import blake3

from isthmus.elastic.errors import ManifestInvalid
from isthmus.elastic.state.digest import (
    CHUNK_NBYTES,
    Hasher,
    StateManifest,
    TensorManifest,
    chunk_of,
    count_chunks,
    describe_state,
    digest_of,
    root_digest,
)


@pytest.fixture
def hasher():
    hasher = Hasher(num_threads=2, chunk_nbytes=1000)
    yield hasher
    hasher.close()


def _state(hasher, *tensors, outer_step=3):
    parts = hasher.describe([(name, memoryview(data)) for name, data in tensors])
    return describe_state(outer_step, parts, chunk_nbytes=hasher.chunk_nbytes)


def test_every_chunk_has_the_blake3_of_its_own_bytes(hasher):
    data = os.urandom(2500)
    (part,) = hasher.describe([("anchor", memoryview(data))])
    assert part.nbytes == 2500
    assert part.chunk_digests == tuple(blake3(data[i : i + 1000]).digest() for i in (0, 1000, 2000))


@pytest.mark.parametrize(("nbytes", "chunks"), [(0, 0), (1, 1), (999, 1), (1000, 1), (1001, 2), (3000, 3)])
def test_chunks_cover_a_tensor_exactly_once(nbytes, chunks):
    buffer = memoryview(bytes(range(256)) * 12)[:nbytes]
    assert count_chunks(nbytes, 1000) == chunks
    assert b"".join(chunk_of(buffer, chunk, 1000) for chunk in range(chunks)) == bytes(buffer)


def test_digest_does_not_depend_on_the_number_of_threads():
    data = memoryview(os.urandom(CHUNK_NBYTES * 3 + 17))
    digests = set()
    for num_threads in (1, 2, 5):
        hasher = Hasher(num_threads=num_threads)
        digests.add(describe_state(1, hasher.describe([("a", data)])).digest)
        hasher.close()
    assert len(digests) == 1


def test_digest_is_a_fixed_function_of_the_state():
    """Peers of different versions must agree: a change of this value is a change of the wire protocol."""
    hasher = Hasher(num_threads=1)
    manifest = describe_state(7, hasher.describe([("anchor", memoryview(b"abc")), ("momentum", memoryview(b""))]))
    hasher.close()
    assert manifest.digest.hex() == "133adb3f8a8fb0f5349a1a5708801b4fa1a989d9b32939591e1a7c02c16e2c5e"


@pytest.mark.parametrize(
    "other",
    [
        [("anchor", b"a" * 1500), ("momentum", b"b" * 499 + b"c")],
        [("anchor", b"a" * 1500), ("momentum2", b"b" * 500)],
        [("momentum", b"b" * 500), ("anchor", b"a" * 1500)],
        [("anchor", b"a" * 1500)],
        [("anchor", b"a" * 1500), ("momentum", b"b" * 500), ("more", b"")],
        [("anchor", b"a" * 1499), ("momentum", b"b" * 500)],
    ],
)
def test_root_differs_for_every_difference_of_the_state(hasher, other):
    ours = _state(hasher, ("anchor", b"a" * 1500), ("momentum", b"b" * 500))
    assert _state(hasher, *other).digest != ours.digest


def test_root_names_the_outer_step(hasher):
    assert _state(hasher, ("a", b"x"), outer_step=1).digest != _state(hasher, ("a", b"x"), outer_step=2).digest


def test_part_of_an_unchanged_tensor_can_be_used_again(hasher):
    first = hasher.describe([("a", memoryview(b"1" * 1500)), ("b", memoryview(b"2" * 1500))])
    changed = hasher.describe([("b", memoryview(b"3" * 1500))])
    combined = describe_state(2, (first[0], *changed), chunk_nbytes=1000)
    assert combined == _state(hasher, ("a", b"1" * 1500), ("b", b"3" * 1500), outer_step=2)


async def test_event_loop_goes_on_while_a_state_is_hashed():
    hasher = Hasher(num_threads=1)
    data = memoryview(bytes(64 << 20))
    turns = 0
    async with asyncio.TaskGroup() as tasks:
        hashing = tasks.create_task(hasher.describe_async([("a", data)]))
        while not hashing.done():
            await asyncio.sleep(0.001)
            turns += 1
    assert turns >= 3
    assert hashing.result() == hasher.describe([("a", data)])
    hasher.close()


def test_manifest_survives_the_wire(hasher):
    manifest = _state(hasher, ("anchor", b"a" * 1500), ("momentum", b"b" * 500))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=StateManifest)
    decoded.verify()
    assert decoded == manifest
    assert decoded.nbytes == 2000


def test_manifest_with_another_chunk_digest_is_invalid(hasher):
    manifest = _state(hasher, ("anchor", b"a" * 1500))
    part = manifest.tensors[0]
    forged = msgspec.structs.replace(part, chunk_digests=(digest_of(b"forged"), part.chunk_digests[1]))
    with pytest.raises(ManifestInvalid):
        msgspec.structs.replace(manifest, tensors=(forged,)).verify()


def test_manifest_with_too_few_chunks_for_its_size_is_invalid_even_with_a_root_of_its_own():
    part = TensorManifest("anchor", 1 << 40, (digest_of(b"x"),))
    manifest = StateManifest(1, root_digest(1, [part]), (part,))
    with pytest.raises(ManifestInvalid, match="chunk digests"):
        manifest.verify()


def test_manifest_with_a_huge_chunk_size_is_not_decoded(hasher):
    manifest = msgspec.structs.replace(_state(hasher, ("a", b"x")), chunk_nbytes=1 << 40)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=StateManifest)
