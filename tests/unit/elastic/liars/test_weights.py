# SPDX-License-Identifier: Apache-2.0
"""Members that lie about their weight, sign nothing, or tell others different weights: each loses only itself."""

import pytest

from isthmus.elastic.core.certificate import ballot
from isthmus.elastic.core.events import PeerSaid
from isthmus.elastic.core.messages import (
    Commit,
    Evicted,
    NewView,
    Vote,
)
from tests.unit.elastic.liars.members import OTHER, lease, members
from tests.unit.elastic.machines import KEYS, MemberDriver, held, key, payload, ref, view


def test_a_weight_that_the_leases_allow_is_counted_and_a_larger_one_puts_its_sender_out() -> None:
    driver = members(1, 2, 3, weight_per_sample=1.0)
    leases = {number: lease(driver, number, number) for number in (1, 2, 3)}
    step = driver.step
    for number in (1, 2):
        driver.votes(number, consumed=leases[number])
    driver.votes(3, weight=1e12, consumed=leases[3])
    assert driver.member_numbers() == [1, 2]
    assert driver.is_struck(3)
    assert "claims weight 1e+12 where its leases allow 3" in driver.told(3, Evicted).reason
    for number in (1, 2):
        driver.votes(number, consumed=leases[number])
    assert driver.step == step + 1, "the others go on at once"


def test_samples_of_another_member_are_behind_nobodys_weight() -> None:
    driver = members(1, 2, weight_per_sample=1.0)
    stolen = lease(driver, 1, 100)
    driver.votes(2, consumed=stolen)
    assert driver.member_numbers() == [1]


def test_with_fragments_the_samples_of_several_votes_are_behind_a_weight_and_each_counts_once_a_fragment() -> None:
    driver = members(1, weight_per_sample=1.0)
    first, second = lease(driver, 1, 10), lease(driver, 1, 10, serial=1)
    driver.votes(1, weight=10.0, consumed=first, fragment=0)
    step = driver.step
    driver.votes(1, weight=20.0, consumed=second, fragment=1)
    assert driver.step == step + 1
    restarted = driver.recovered()
    assert restarted.machine.state.work.num_samples(ref(1), 0, ()) == 10
    assert restarted.machine.state.work.num_samples(ref(1), 1, ()) == 0


@pytest.mark.parametrize("signature", [b"", b"s" * 96, KEYS.of(ref(1).peer_id).sign(b"something else")])
def test_a_member_that_has_not_signed_what_it_votes_for_is_put_out_and_the_others_go_on(signature: bytes) -> None:
    driver = members(1, 2, 3)
    step, current = driver.step, driver.machine.state.view
    vote = Vote(
        key=key(current.epoch, current.outer_step),
        digest=held(current.outer_step + 1).digest,
        weight=3.0,
        num_tokens=1,
        consumed=(),
        signature=signature,
    )
    driver.feed(PeerSaid(sender=ref(3), message=vote))
    assert driver.member_numbers() == [1, 2]
    assert driver.is_struck(3)
    assert "has not signed what it votes for" in driver.told(3, Evicted).reason
    driver.all_vote_but()
    assert driver.step == step + 1


def test_a_vote_that_another_member_has_signed_is_not_that_members() -> None:
    driver = members(1, 2)
    current = driver.machine.state.view
    words = ballot(key(current.epoch, current.outer_step), current.digest, held(9).digest, ref(2), 1.0)
    vote = Vote(
        key=key(current.epoch, current.outer_step),
        digest=held(9).digest,
        weight=1.0,
        num_tokens=1,
        consumed=(),
        signature=KEYS.of(ref(1).peer_id).sign(words),
    )
    driver.feed(PeerSaid(sender=ref(2), message=vote))
    assert driver.member_numbers() == [1]


def test_the_certificate_carries_the_ballots_of_a_majority_and_none_of_who_was_overruled() -> None:
    driver = members(1, 2, 3, 4, 5)
    for number in (1, 2, 4):
        driver.votes(number)
    for number in (3, 5):
        driver.votes(number, digest=OTHER)
    certificate = driver.told(1, Commit).certificate
    assert certificate.check(KEYS)
    assert [bool(item.signature) for item in certificate.contributors] == [True, True, False, True, False]
    restarted = driver.recovered().machine.state.certificate
    assert restarted is not None
    assert restarted.contributors == certificate.contributors


def test_a_member_that_tells_everybody_another_weight_is_put_out_and_the_round_is_tried_again_without_it() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but(1, 2)
    driver.votes(1, seen={4: 40.0})
    driver.votes(2, seen={4: 44.0})
    assert driver.member_numbers() == [1, 2, 3]
    assert driver.is_struck(4)
    step = driver.step
    driver.all_vote_but()
    assert driver.step == step + 1


@pytest.mark.parametrize("numbers", [(1, 2), (1, 2, 3)])
def test_of_two_that_differ_about_a_weight_nobody_goes_and_the_coordinator_says_the_weights(
    numbers: tuple[int, ...],
) -> None:
    driver = members(*numbers)
    epoch, step = driver.machine.state.epoch, driver.step
    driver.all_vote_but(1)
    driver.votes(1, seen={2: 20.0})
    assert (driver.machine.state.epoch, driver.member_numbers()) == (epoch + 1, list(numbers))
    for number in numbers:
        assert driver.told(number, NewView).weights == tuple(map(float, numbers))
    driver.all_vote_but()
    assert driver.step == step + 1
    assert not driver.machine.state.strikes.of(ref(1).peer_id)


def test_who_counts_with_other_weights_than_it_was_told_is_put_out() -> None:
    driver = members(1, 2, 3)
    for _ in range(2):
        driver.all_vote_but(1)
        driver.votes(1, seen={2: 20.0})
    assert driver.member_numbers() == [2, 3]
    assert driver.is_struck(1)


def test_who_says_of_one_member_after_the_other_that_it_lies_is_put_out_itself() -> None:
    driver = members(1, 2, 3)
    driver.all_vote_but(1)
    driver.votes(1, seen={2: 20.0})
    driver.all_vote_but()
    driver.all_vote_but(1)
    driver.votes(1, seen={3: 30.0})
    assert driver.member_numbers() == [2, 3]


def test_who_says_nothing_of_what_it_saw_is_put_out() -> None:
    driver = members(1, 2, 3)
    driver.all_vote_but(2)
    driver.vote(2)
    assert driver.member_numbers() == [1, 3]


def test_weights_that_were_told_are_of_the_views_first_round_only() -> None:
    driver = MemberDriver(held(4))
    mine = view(3, 4, 1, 2)
    driver.active_in(view(2, 4, 1, 2))
    driver.hears(NewView(view=mine, weights=(2.0, 5.0)))
    (start,) = [item for item in driver.feed(payload(4)) if hasattr(item, "weights")]
    assert start.weights == (2.0, 5.0)
    driver.hears(NewView(view=view(4, 4, 1, 2)))
    (start,) = [item for item in driver.effects if hasattr(item, "weights")]
    assert start.weights == ()
