# SPDX-License-Identifier: Apache-2.0
"""What chaos does in which order: drawn from a seed, every kind once before any comes again."""

from scripts.chaoslab.evidence import KINDS
from scripts.chaoslab.faults import Faults
from scripts.chaoslab.plan import Plan, Turn


def turns(seed: int, num_bags: int = 3) -> list[Turn]:
    plan, found = Plan(KINDS, seed=seed, tell=lambda line: None), list[Turn]()
    for _ in range(num_bags * len(KINDS)):
        plan.fill()
        turn = plan.take(lambda kind: True)
        assert turn is not None
        found.append(turn)
    return found


def test_the_same_seed_makes_the_same_turns_and_another_one_others() -> None:
    assert turns(1) == turns(1)
    assert [turn.kind for turn in turns(1)] != [turn.kind for turn in turns(2)]
    assert len({turn.seed for turn in turns(1)}) == len(turns(1)), "each has numbers of its own"


def test_every_kind_comes_once_before_any_comes_again() -> None:
    kinds = [turn.kind for turn in turns(5)]
    for start in range(0, len(kinds), len(KINDS)):
        assert sorted(kinds[start : start + len(KINDS)]) == sorted(KINDS)


def test_what_cannot_be_done_now_stays_in_the_bag_until_it_can_or_is_given_up() -> None:
    plan = Plan(("kill", "power"), seed=3, tell=lambda line: None)
    plan.fill()
    turn = plan.take(lambda kind: kind != "power")
    assert turn is not None
    assert turn.kind == "kill"
    assert plan.take(lambda kind: kind != "power") is None
    plan.fill()
    assert plan.bag == ["power"], "no new bag is filled as long as something is in the old one"
    assert plan.give_up() == ["power"]
    assert plan.bag == []


def test_every_kind_that_can_be_asked_for_can_be_done() -> None:
    assert set(Faults(world=None).kinds()) == set(KINDS)  # type: ignore[arg-type]
