# SPDX-License-Identifier: Apache-2.0
"""What no commit holds yet: of all work, and of each fragment's."""

import pytest

from isthmus.trainer.engine.tally import Tally, Trained


def test_work_since_the_emission_belongs_to_the_next_step() -> None:
    tally = Tally()
    tally.stepped(2.0, 10)
    tally.stepped(4.0, 10)
    tally.took(1.5)
    first = tally.emit([0])
    tally.stepped(9.0, 7)
    assert (
        tally.work_in(first)
        == first.shares[0]
        == Trained(inner_steps=2, num_tokens=20, loss=6.0, num_losses=2, train_s=1.5)
    )
    assert tally.work_in(first).mean_loss == pytest.approx(3.0)
    tally.settle(first)
    assert tally.unsettled == Trained(inner_steps=1, num_tokens=7, loss=9.0, num_losses=1)


def test_a_mean_is_that_of_the_losses_that_were_told() -> None:
    tally = Tally()
    for loss in (None, 2.0, 4.0):
        tally.stepped(loss, 1)
    assert tally.unsettled.mean_loss == pytest.approx(3.0)
    assert Trained(inner_steps=2).mean_loss is None


def test_a_fragments_share_is_what_was_done_since_its_own_last_payload() -> None:
    tally = Tally()
    for place in (0, 1, 0):
        tally.stepped(1.0, 5)
        emission = tally.emit([place])
        work = tally.work_in(emission)
        tally.settle(emission)
    assert (work.num_tokens, emission.shares[0].num_tokens) == (5, 10)


def test_steps_that_are_out_at_once_hold_each_their_own_work() -> None:
    tally = Tally()
    emissions = []
    for _ in range(3):
        tally.stepped(1.0, 5)
        emissions.append(tally.emit([0]))
    assert [emission.shares[0].num_tokens for emission in emissions] == [5, 5, 5]
    for emission in emissions:
        assert tally.work_in(emission).num_tokens == 5
        tally.settle(emission)


def test_work_of_a_step_that_was_missed_goes_with_the_next_of_each_of_its_fragments() -> None:
    tally = Tally()
    tally.stepped(1.0, 5)
    tally.missed(tally.emit([0, 2]))
    tally.stepped(1.0, 5)
    other = tally.emit([1])
    assert tally.work_in(other).num_tokens == 10
    tally.settle(other)
    again = tally.emit([0])
    assert (tally.work_in(again).num_tokens, again.shares[0].num_tokens) == (0, 10)
    assert tally.work_in(again).mean_loss is None
    tally.stepped(1.0, 5)
    assert [share.num_tokens for share in tally.emit([0, 2]).shares] == [5, 15]


def test_a_payload_that_was_made_before_another_was_missed_holds_nothing_of_it() -> None:
    tally = Tally()
    missed, out = [(tally.stepped(1.0, tokens), tally.emit([0]))[1] for tokens in (5, 7)]
    tally.missed(missed, [out])
    assert (tally.work_in(out).num_tokens, out.shares[0].num_tokens) == (7, 7)
    tally.stepped(1.0, 11)
    later = tally.emit([0])
    tally.settle(out)
    assert tally.unsettled.num_tokens == 5 + 11
    assert (tally.work_in(later).num_tokens, later.shares[0].num_tokens) == (16, 16)
    tally.settle(later)
    assert tally.unsettled.num_tokens == 0
