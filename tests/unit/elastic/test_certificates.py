# SPDX-License-Identifier: Apache-2.0
"""What a certificate proves, and what it does not let pass."""

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest

from isthmus.collective.core.types import Epoch, OuterStep, PeerId
from isthmus.collective.transport import FrameType
from isthmus.collective.transport.wire import ON_CONTROL
from isthmus.elastic.core.certificate import (
    MAX_CONTRIBUTORS,
    Certificate,
    Contributor,
    decode_certificate,
    encode_certificate,
    genesis_link,
)
from isthmus.elastic.core.chain import Chain
from isthmus.elastic.core.messages import Commit, DataPosition, Held, IndexRange, Join, LeaseGrant, LeaseRequest
from isthmus.elastic.core.records import CommitRecord, Genesis
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.values import MAX_SIGNATURE_NBYTES
from isthmus.elastic.wire import encode
from tests.unit.elastic.machines import KEYS, MANIFEST, OTHERS, CoordinatorDriver, certificate, held, key, ref

ONE = certificate(3, 4, 1, 2)
NEXT = certificate(3, 5, 1, 2, parent=ONE)


def chain(newest: Certificate | None = None) -> Chain:
    return Chain(KEYS, newest, Counter())


# ------------------------------------------------------------------------ the seal


def test_certificate_has_the_seal_of_its_run_and_of_no_other() -> None:
    assert ONE.check(KEYS)
    assert not ONE.check(OTHERS)
    assert not msgspec.structs.replace(ONE, seal=b"").check(KEYS)
    assert not certificate(3, 4, 1, 2, keys=OTHERS).check(KEYS)


@pytest.mark.parametrize(
    "change",
    [
        {"key": key(4, 4)},
        {"key": key(3, 5)},
        {"key": key(3, 4, 1)},
        {"previous": held(9).digest},
        {"digest": held(9).digest},
        {"contributors": ONE.contributors[:1]},
        {"contributors": ONE.contributors[::-1]},
        {"contributors": (msgspec.structs.replace(ONE.contributors[0], weight=2.5), ONE.contributors[1])},
        {"contributors": (msgspec.structs.replace(ONE.contributors[0], incarnation=2), ONE.contributors[1])},
        {"contributors": (msgspec.structs.replace(ONE.contributors[0], peer_id=ref(7).peer_id), ONE.contributors[1])},
        {"final": True},
        {"position": DataPosition(101, ONE.position.unconsumed)},
        {"position": DataPosition(100, (IndexRange(40, 51),))},
        {"position": DataPosition(100, ())},
        {"parent": held(9).digest},
    ],
)
def test_change_of_any_field_breaks_the_seal_and_the_chain(change: dict[str, Any]) -> None:
    changed = msgspec.structs.replace(ONE, **change)
    assert not changed.check(KEYS)
    assert changed.link != ONE.link
    assert not NEXT.follows(changed)


def test_every_field_but_the_seal_is_in_the_test_above() -> None:
    (marker,) = test_change_of_any_field_breaks_the_seal_and_the_chain.pytestmark
    changed = {name for change in marker.args[1] for name in change}
    assert changed == set(Certificate.__struct_fields__) - {"seal"}


def test_whole_weight_and_the_same_weight_as_a_fraction_have_one_seal() -> None:
    whole = tuple(msgspec.structs.replace(item, weight=2) for item in ONE.contributors)
    assert msgspec.structs.replace(ONE, contributors=whole).check(KEYS)


# ------------------------------------------------------------------------ the chain


def test_next_certificate_names_the_one_before_and_what_it_made() -> None:
    assert NEXT.follows(ONE)
    assert not ONE.follows(NEXT)
    assert not certificate(3, 5, parent=certificate(3, 4, kind=1)).follows(ONE)
    assert not certificate(3, 6, parent=ONE).follows(ONE), "it starts from another step"


def test_peer_follows_the_chain_and_takes_repeats() -> None:
    mine = chain()
    assert all(mine.take(item) for item in (ONE, ONE, NEXT, NEXT))
    assert mine.newest == NEXT


def test_peer_that_missed_commits_takes_a_later_one() -> None:
    mine = chain(ONE)
    later = certificate(5, 9)
    assert mine.take(later)
    assert mine.newest == later


@pytest.mark.parametrize(
    ("other", "counter"),
    [
        (certificate(3, 5, parent=certificate(3, 4, kind=1)), "broken_chain"),
        (certificate(3, 4, kind=1), "broken_chain"),
        (certificate(4, 4), "broken_chain"),
        (certificate(3, 3), "old_certificate"),
        (certificate(2, 9), "old_certificate"),
        (certificate(3, 5, parent=ONE, keys=OTHERS), "forged_certificate"),
    ],
)
def test_what_does_not_continue_the_chain_is_refused_and_counted(other: Certificate, counter: str) -> None:
    mine = chain(ONE)
    assert not mine.take(other)
    assert mine.newest == ONE
    assert mine._counters[counter] == 1


def test_certificate_from_the_disk_without_the_runs_seal_is_dropped() -> None:
    assert chain(certificate(3, 4, keys=OTHERS)).newest is None


# ------------------------------------------------------------------------ where they come from


def test_replayed_journal_gives_the_same_certificate_bit_for_bit() -> None:
    driver = CoordinatorDriver(first_index=7, first_free=(IndexRange(1, 3),)).with_members(1, 2)
    driver.vote(1)
    driver.vote(2)
    told = driver.told(1, Commit).certificate
    again = RunState.replay(driver.journal).certificate
    assert again is not None
    assert encode_certificate(again.sealed(KEYS.of_the_run)) == encode_certificate(told)
    assert driver.recovered().machine.state.certificate == again


def test_chain_of_a_run_reaches_back_to_its_genesis() -> None:
    driver = CoordinatorDriver(first_index=7, first_free=(IndexRange(1, 3),)).with_members(1)
    told = []
    for _ in range(3):
        driver.vote(1)
        told.append(driver.told(1, Commit).certificate)
    state, certificates = RunState(), []
    for record in driver.journal:
        state.apply(record)
        if isinstance(record, CommitRecord):
            certificates.append(state.certificate)
    (genesis,) = driver.records(Genesis)
    begin = Held(genesis.outer_step, genesis.digest)
    assert certificates[0].parent == genesis_link(begin, DataPosition(7, (IndexRange(1, 3),)))
    assert all(after.follows(before) for before, after in itertools.pairwise(certificates))
    assert [item.link for item in told] == [item.link for item in certificates[-3:]]


def test_certificate_counts_leased_samples_as_not_consumed() -> None:
    driver = CoordinatorDriver().with_members(1)
    driver.says(1, LeaseRequest(epoch=driver.machine.state.epoch, serial=1, num_samples=10))
    assert driver.told(1, LeaseGrant).ranges == (IndexRange(0, 10),)
    driver.vote(1, None, IndexRange(0, 4))
    assert driver.told(1, Commit).certificate.position == DataPosition(10, (IndexRange(4, 10),))


# ------------------------------------------------------------------------ bytes


def test_largest_run_fits_into_one_control_message() -> None:
    signed = MAX_CONTRIBUTORS // 2 + 1
    contributors = tuple(
        Contributor(PeerId(f"{n:016x}"), 10**13, n + 0.1, bytes(MAX_SIGNATURE_NBYTES) if n < signed else b"")
        for n in range(MAX_CONTRIBUTORS)
    )
    spans = tuple(IndexRange(2**31 + 10 * n, 2**31 + 10 * n + 5) for n in range(4 * MAX_CONTRIBUTORS))
    large = msgspec.structs.replace(
        ONE,
        contributors=contributors,
        position=DataPosition(2**32, spans),
        key=key(Epoch(2**32 - 1), OuterStep(2**32 - 1)),
        seal=bytes(MAX_SIGNATURE_NBYTES),
    )
    join = Join(address="a" * 256, manifest_digest=MANIFEST, held=held(4), certificate=large)
    limit = ON_CONTROL[FrameType.CONTROL]
    assert len(encode(Commit(certificate=large))) < limit
    assert len(encode(join)) < limit


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x98", b"\xdd\xff\xff\xff\xff", encode_certificate(ONE) + b"\0"])
def test_bytes_that_are_no_certificate_are_none(data: bytes) -> None:
    assert decode_certificate(data) is None


def test_bytes_of_a_certificate_are_read_back() -> None:
    assert decode_certificate(encode_certificate(NEXT)) == NEXT
