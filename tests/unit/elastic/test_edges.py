# SPDX-License-Identifier: Apache-2.0
"""Who makes a view together where some pairs have no link."""

from collections.abc import Iterable

import msgspec
import pytest

from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, PeerRef, View
from isthmus.elastic.core.edges import Edges
from isthmus.elastic.core.sessions import Session

NOBODY: dict[PeerId, OuterStep] = {}


def session(number: int, *, holds_state: bool = True) -> Session:
    ref = PeerRef(PeerId(f"{number:016x}"), Incarnation(1))
    made = Session(ref=ref, address="", last_heard=0.0, progressed_at=0.0, told_at=0.0)
    made.holds_state = holds_state
    return made


def meet(*pairs: tuple[Session, Session]) -> None:
    for one, other in pairs:
        one.met.add(other.ref)
        other.met.add(one.ref)


def view(sessions: Iterable[Session], apart: tuple[tuple[int, int], ...] = ()) -> View:
    members = tuple(Member(item.ref.peer_id, item.ref.incarnation, "") for item in sessions)
    return View(Epoch(1), OuterStep(0), b"", members, apart)


def test_members_of_a_view_have_links_but_for_the_pairs_that_it_names() -> None:
    a, b, c = (session(number) for number in range(3))
    edges = Edges(view((a, b, c), apart=((1, 2),)))
    assert edges.between(a, b)
    assert not edges.between(b, c)
    assert edges.hubs_among([a, b, c]) == [a]
    assert edges.pairs_apart([c, a, b]) == ((0, 2),)


def test_a_link_needs_both_ends_to_say_so() -> None:
    a, b = session(0), session(1)
    a.met.add(b.ref)
    assert not Edges(view(())).between(a, b)
    meet((a, b))
    assert Edges(view(())).between(a, b)


def test_a_pair_that_has_met_since_is_apart_no_more() -> None:
    a, b, c = (session(number) for number in range(3))
    meet((b, c))
    assert Edges(view((a, b, c), apart=((1, 2),))).pairs_apart([a, b, c]) == ()


def test_without_a_hub_the_largest_group_around_one_goes_on() -> None:
    a, b, c, d = (session(number) for number in range(4))
    meet((a, b), (b, c), (c, d))
    assert Edges(view(())).with_a_hub([a, b, c, d], NOBODY) == [a, b, c]


def test_of_groups_of_one_size_the_one_goes_on_whose_work_was_committed_first() -> None:
    a, b = session(0), session(1)
    proven = {a.ref.peer_id: OuterStep(7), b.ref.peer_id: OuterStep(3)}
    assert Edges(view(())).with_a_hub([a, b], proven) == [b]


def test_a_group_that_holds_the_state_goes_before_a_larger_one_that_does_not() -> None:
    a, b, c = session(0, holds_state=False), session(1, holds_state=False), session(2)
    meet((a, b))
    assert Edges(view(())).with_a_hub([a, b, c], NOBODY) == [c]


@pytest.mark.parametrize("apart", [((1, 0),), ((0, 3),), ((0, 0),), ((0, 1), (1, 2))])
def test_a_view_names_pairs_of_its_ranks_and_leaves_a_hub(apart: tuple[tuple[int, int], ...]) -> None:
    members = [session(number) for number in range(3)]
    with pytest.raises(ValueError, match=r"ranks of the view|links with all"):
        view(members, apart)
    packed = msgspec.msgpack.encode(view(members, ((1, 2),)))
    assert msgspec.msgpack.decode(packed, type=View) == view(members, ((1, 2),))
