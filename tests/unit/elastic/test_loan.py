# SPDX-License-Identifier: Apache-2.0
"""Borrowing private state from real donors over loopback."""

import asyncio
import contextlib

import numpy as np
import pytest

from isthmus.collective.transport import FrameType
from isthmus.elastic.errors import StateMismatch
from isthmus.elastic.learner import loan
from isthmus.elastic.learner.loan import borrow
from isthmus.elastic.state.digest import Hasher
from tests.unit.elastic.harness import QUICK, DonorPeer, NumberReplica, dial_state, tampered, that_dies, totals, until


class Own:
    """A peer's own state: a NumberReplica that nobody commits."""

    def __init__(self, hasher: Hasher, num_steps: int) -> None:
        self.replica = NumberReplica(hasher)
        for step in range(num_steps + 1):
            self.replica.found() if step == 0 else self.replica.commit(totals(step))
        self.has_any = num_steps > 0
        self.is_wanted = True
        self.is_sound = True
        self.num_borrowed = 0
        self.num_received = 0

    def received(self, nbytes):
        self.num_received += nbytes

    async def lend(self):
        return self.replica.pin() if self.has_any else None

    def begin_borrowing(self, manifest):
        self.manifest = manifest
        return self.replica.begin_restore(manifest)

    async def borrowed(self):
        if not self.is_sound:
            raise StateMismatch("nonsense")
        await self.replica.finish_restore(self.manifest)
        self.num_borrowed += 1


@pytest.fixture
def own(hasher):
    return Own(hasher, 0)


def donor_with(hasher, number, num_steps):
    """A donor whose shared state is another than its own."""
    donor = DonorPeer.at_step(number, hasher, 2)
    donor.own = Own(hasher, num_steps)
    donor.donor._private = donor.own
    return donor


@contextlib.asynccontextmanager
async def serving(*donors):
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(donor.serving()) for donor in donors]
        await until(lambda: all(donor.own.replica.num_pins == donor.replica.num_pins == 0 for donor in donors))


def is_of(own, donor):
    return all(np.array_equal(own.replica.tensors[name], array) for name, array in donor.own.replica.tensors.items())


async def test_it_comes_from_the_first_donor_that_has_some(hasher, own):
    poor, rich, unasked = (donor_with(hasher, number, steps) for number, steps in ((1, 0), (2, 7), (3, 8)))
    async with serving(poor, rich, unasked) as members:
        assert await borrow(own, members, dial_state, QUICK, advanced=own.received) == members[1]
    assert is_of(own, rich)
    assert unasked.num_connections == 0
    assert own.num_received >= own.manifest.nbytes, "and all of it was told as progress"


async def test_a_donor_that_dies_on_the_way_is_left_for_the_next(hasher, own):
    dying, rich = that_dies(donor_with(hasher, 1, 6), after=3), donor_with(hasher, 2, 7)
    async with serving(dying, rich) as members:
        assert await borrow(own, members, dial_state, QUICK, advanced=own.received) == members[1]
    assert is_of(own, rich)


async def test_bytes_that_were_changed_on_the_way_are_not_begun_with(hasher, own):
    async def spoil(_channel, frame_type, payload, chunk):
        if frame_type is FrameType.STATE_CHUNK and chunk == 2:
            payload = bytearray(payload)
            payload[5] ^= 1
        return bytes(payload)

    liar, rich = tampered(donor_with(hasher, 1, 6), spoil), donor_with(hasher, 2, 7)
    async with serving(liar, rich) as members:
        assert await borrow(own, members, dial_state, QUICK, advanced=own.received) == members[1]
        assert await borrow(own, members[:1], dial_state, QUICK, advanced=own.received) is None
    assert own.num_borrowed == 1


async def test_with_nobody_who_has_any_the_peer_begins_fresh(hasher, own):
    poor = donor_with(hasher, 1, 0)
    plain = donor_with(hasher, 2, 0)
    plain.donor._private = None
    async with serving(poor, plain) as members:
        assert await borrow(own, members, dial_state, QUICK, advanced=own.received) is None
        assert await borrow(own, [], dial_state, QUICK, advanced=own.received) is None
    assert own.num_borrowed == 0


async def test_what_cannot_be_used_is_dropped_and_the_connection_closed(hasher, own):
    own.is_sound = False
    first, second = donor_with(hasher, 1, 6), donor_with(hasher, 2, 7)
    async with serving(first, second) as members:
        assert await borrow(own, members, dial_state, QUICK, advanced=own.received) is None
        await until(lambda: first.donor.num_connections == second.donor.num_connections == 0)
    assert (first.num_connections, second.num_connections) == (1, 1)


async def test_waiting_for_a_donors_inner_step_is_no_standing_still(hasher, own, monkeypatch):
    monkeypatch.setattr(loan, "_SIGN_S", 0.01)
    busy = donor_with(hasher, 1, 7)
    lend = busy.own.lend

    async def lend_late():
        await until(lambda: own.num_received > 2)
        return await lend()

    busy.own.lend = lend_late
    async with serving(busy) as members:
        assert await borrow(own, members, dial_state, QUICK, advanced=own.received) == members[0]


async def test_a_donor_that_says_nothing_is_left_for_the_next_in_bounded_time(hasher, own, monkeypatch):
    monkeypatch.setattr(loan, "_ANSWER_S", 0.05)
    busy, rich = donor_with(hasher, 1, 7), donor_with(hasher, 2, 7)
    busy.own.lend = asyncio.Event().wait
    async with serving(busy, rich) as members:
        assert await borrow(own, members, dial_state, QUICK, advanced=own.received) == members[1]
    assert own.num_borrowed == 1
