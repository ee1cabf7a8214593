# SPDX-License-Identifier: Apache-2.0
"""A slower peer makes as many inner steps as fit, so that all come together."""

from dataclasses import dataclass, field
from statistics import fmean, median

import pytest

from isthmus.optim.diloco import DiLoCo
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.speed import Speed

LENGTH = 20


@dataclass
class Peer:
    """One that trains by a clock of its own, as the training loop does: how long a step takes, and all between them."""

    step_s: float
    rest_s: float = 0.0
    length: int = LENGTH
    now: float = 0.0
    outer_step: int = 0
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.speed = Speed(OuterPlan(DiLoCo(inner_steps=self.length)), lambda: self.now)
        self.speed.begin()

    def train(self) -> float:
        """Until its payload is made; returns when that is."""
        self.outer_step += 1
        self.now += self.rest_s
        number = 0
        while number < self.length and not (number and self.speed.is_enough(self.outer_step)):
            self.now += self.step_s
            self.speed.trained(self.step_s)
            number += 1
        self.speed.emitted(self.outer_step)
        self.made.append(number)
        return self.now

    def wait(self, until: float) -> None:
        self.speed.stood_still(until - self.now)
        self.now = until


def run(*peers: Peer, rounds: int = 12) -> list[list[float]]:
    """Which share of each round each peer stood still."""
    shares = []
    for _ in range(rounds):
        began = max(peer.now for peer in peers)
        arrived = [peer.train() for peer in peers]
        told = [peer.speed.planned_s for peer in peers]
        for peer in peers:
            peer.wait(max(arrived))
            peer.speed.heard(told)
        shares.append([(max(arrived) - own) / (max(arrived) - began) for own in arrived])
    return shares


def test_peers_of_different_speed_come_together_and_the_fastest_makes_all_steps() -> None:
    peers = Peer(0.1), Peer(0.15), Peer(0.2), Peer(1.1)
    first, *_, last = run(*peers)
    assert max(first) > 0.9, "nobody knows anything before the first round"
    assert max(last) < 0.1
    fast, medium, slow, slowest = ([*peer.made] for peer in peers)
    assert fast == [LENGTH] * 12
    assert {median(medium[1:]), median(slow[1:]), median(slowest[1:])} == {13, 10, 2}


def test_what_lies_between_inner_steps_counts_as_well() -> None:
    # Who judges the anchor in every round has less time to train.
    judge, other = Peer(0.1, rest_s=0.5), Peer(0.1)
    assert max(run(judge, other)[-1]) < 0.1
    assert median(judge.made[1:]) == 15


def test_peers_that_differ_by_less_than_a_twentieth_make_all_steps() -> None:
    peers = Peer(0.1), Peer(0.104)
    run(*peers)
    assert [peer.made for peer in peers] == [[LENGTH] * 12] * 2


@pytest.mark.parametrize("length", [1, 2, 3])
def test_fractions_of_steps_are_carried_over_to_later_rounds(length: int) -> None:
    peers = Peer(0.1, length=length), Peer(0.16, length=length)
    run(*peers, rounds=60)
    expected = max(1.0, length / 1.6)  # this peer makes one at least
    assert fmean(peers[1].made[10:]) == pytest.approx(expected, abs=0.1)


def test_one_busy_round_makes_nobody_slow() -> None:
    peer, other = Peer(0.1), Peer(0.1)
    run(peer, other, rounds=4)
    peer.step_s = 0.5
    run(peer, other, rounds=1)
    peer.step_s = 0.1
    run(peer, other, rounds=4)
    assert peer.made == [LENGTH] * 9


def test_the_first_step_of_a_membership_is_not_measured() -> None:
    peer = Peer(5.0, length=1)
    peer.train()
    assert peer.speed.planned_s == 0.0
    peer.step_s = 0.1
    peer.train()
    assert peer.speed.planned_s == pytest.approx(0.1)


@pytest.mark.parametrize("lie", [1e-9, float("nan"), float("inf"), -1.0, 0.0])
def test_nobody_makes_less_than_a_sixteenth_because_of_what_others_say(lie: float) -> None:
    peer = Peer(0.1, length=64)
    for _ in range(4):
        peer.train()
        peer.speed.heard((peer.speed.planned_s, lie))
    assert peer.made[1:] == [4 if lie == 1e-9 else 64] * 3
