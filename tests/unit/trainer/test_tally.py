# SPDX-License-Identifier: Apache-2.0
"""What no commit holds yet: of all work, and of each fragment's."""

import pytest

from isthmus.trainer.tally import Done, Tally


def test_work_since_the_emission_belongs_to_the_next_round() -> None:
    tally = Tally()
    tally.stepped(2.0, 10)
    tally.stepped(4.0, 10)
    tally.took(1.5)
    first = tally.hand_in(0)
    tally.stepped(9.0, 7)
    tally.settle(first)
    assert first.work == first.share == Done(inner_steps=2, num_tokens=20, loss=6.0, train_s=1.5)
    assert first.work.mean_loss == pytest.approx(3.0)
    assert tally.unsettled == Done(inner_steps=1, num_tokens=7, loss=9.0)


def test_a_fragments_share_is_what_was_done_since_its_own_last_commit() -> None:
    tally = Tally()
    for fragment in (0, 1, 0):
        tally.stepped(1.0, 5)
        handed_in = tally.hand_in(fragment)
        tally.settle(handed_in)
    assert (handed_in.work.num_tokens, handed_in.share.num_tokens) == (5, 10)


def test_what_was_handed_in_in_vain_is_handed_in_again() -> None:
    tally = Tally()
    tally.stepped(1.0, 5)
    tally.hand_in(0)
    tally.stepped(1.0, 5)
    other = tally.hand_in(1)
    tally.settle(other)
    again = tally.hand_in(0)
    assert other.work.num_tokens == 10
    assert (again.work.num_tokens, again.share.num_tokens) == (0, 10)
    assert again.work.mean_loss is None
