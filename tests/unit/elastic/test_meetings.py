# SPDX-License-Identifier: Apache-2.0
"""Links before membership: who has not met the members does not become one, and they never notice."""

from isthmus.elastic.core.events import (
    CoordinatorSaid,
    LinkMade,
    MakeLinks,
    PeerConnectionLost,
    SendToCoordinator,
    SendToPeer,
)
from isthmus.elastic.core.messages import Evicted, Heartbeat, Leave, Meet, Met, Refused, Synced, Unmet, Welcome
from tests.unit.elastic.machines import CoordinatorDriver, MemberDriver, held, member, ref, view

TIMEOUT_S = 20.0


def joins(driver: CoordinatorDriver, number: int) -> None:
    """A learner that holds the newest state, and that nobody has a link with yet."""
    driver.unreachable.add(ref(number))
    driver.join(number, driver.machine.state.committed, epoch=driver.machine.state.epoch)


def beat(driver: CoordinatorDriver, number: int) -> None:
    state = driver.machine.state
    driver.says(number, Heartbeat(epoch=state.epoch, outer_step=state.outer_step, progress=1, blocked=False))


def commit(driver: CoordinatorDriver) -> None:
    step = driver.machine.state.outer_step
    for number in driver.member_numbers():
        driver.vote(number)
    assert driver.machine.state.outer_step == step + 1


def synced(driver: CoordinatorDriver, number: int) -> None:
    committed = driver.machine.state.committed
    assert committed is not None
    driver.says(number, Synced(held=committed))


def meet(driver: CoordinatorDriver, one: int, other: int) -> None:
    driver.says(one, Met(peers=(ref(other),)))


def test_a_joiner_and_the_members_are_told_of_each_other_at_once() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    joins(driver, 3)
    assert {peer.ref for peer in driver.told(3, Meet).peers} == {ref(1), ref(2)}
    for number in (1, 2):
        assert driver.told(number, Meet).peers == (member(3),)


def test_who_has_met_only_some_of_the_members_is_no_member() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    joins(driver, 3)
    for one, other in ((3, 1), (1, 3), (3, 2)):
        meet(driver, one, other)
    synced(driver, 3)
    commit(driver)
    assert driver.member_numbers() == [1, 2], "2 has not said that it has a link with 3"
    meet(driver, 2, 3)
    synced(driver, 3)
    commit(driver)
    assert driver.member_numbers() == [1, 2, 3]


def test_one_word_is_not_enough_whoever_says_it() -> None:
    driver = CoordinatorDriver().with_veterans(1)
    joins(driver, 2)
    meet(driver, 2, 1)
    synced(driver, 2)
    commit(driver)
    assert driver.member_numbers() == [1]


def test_joiners_that_have_not_met_each_other_come_in_one_after_the_other() -> None:
    driver = CoordinatorDriver().with_veterans(1)
    for number in (2, 3):
        joins(driver, number)
        meet(driver, number, 1)
        meet(driver, 1, number)
    for number in (2, 3):
        synced(driver, number)
    commit(driver)
    assert driver.member_numbers() == [1, 2]


def test_a_joiner_that_cannot_be_reached_hears_who_tried_which_address_with_which_error() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    views = driver.machine.state.epoch
    joins(driver, 3)
    driver.says(1, Met(unmet=(Unmet(ref(3), "refused"),)))
    driver.says(3, Met(peers=(ref(1), ref(2))))
    refused = None
    for _ in range(int(TIMEOUT_S) + 2):
        driver.wait(1.0)
        refused = refused or next((said for said in driver.all_told(3) if isinstance(said, Refused)), None)
        for number in (1, 2, 3):
            beat(driver, number)
    assert refused is not None
    assert refused.code == 4
    for part in (ref(1).peer_id, "host3:1", "refused", "--advertise"):
        assert part in refused.reason
    assert driver.machine.state.epoch == views, "the members have not noticed"


def test_a_peer_whose_work_was_committed_waits_for_its_line() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2, 3)
    driver.unreachable.add(ref(3, 2))
    driver.join(3, held(0), epoch=driver.machine.state.epoch, incarnation=2)
    for _ in range(5 * int(TIMEOUT_S)):
        driver.wait(1.0)
        assert not any(isinstance(said, Refused) for said in driver.all_told(3, 2))
        for number in (1, 2):
            beat(driver, number)
        state = driver.machine.state
        driver.says(ref(3, 2), Heartbeat(epoch=state.epoch, outer_step=state.outer_step, progress=1, blocked=False))


def test_a_member_that_is_silent_itself_sends_nobody_home() -> None:
    driver = CoordinatorDriver(heartbeat_timeout_s=300.0, stall_initial_s=1000.0).with_veterans(1)
    joins(driver, 2)
    for _ in range(3 * int(TIMEOUT_S)):
        driver.wait(1.0)
        assert not any(isinstance(said, Refused) for said in driver.all_told(2))
        beat(driver, 2)


def test_those_who_have_not_met_are_asked_again_with_their_heartbeats() -> None:
    driver = CoordinatorDriver().with_veterans(1)
    joins(driver, 2)
    driver.wait(0.5)
    beat(driver, 2)
    assert not any(isinstance(said, Meet) for said in driver.all_told(2)), "it was asked a moment ago"
    driver.wait(2.0)
    beat(driver, 2)
    assert driver.told(2, Meet).peers == (member(1),)


def test_who_has_a_link_that_the_other_side_does_not_see_is_asked_again() -> None:
    """It had dialled while the other side still dropped the links of its former member."""
    driver = CoordinatorDriver().with_veterans(1)
    joins(driver, 2)
    meet(driver, 2, 1)
    driver.wait(2.5)
    beat(driver, 2)
    assert driver.told(2, Meet).peers == (member(1),)
    meet(driver, 1, 2)
    driver.wait(2.5)
    beat(driver, 2)
    assert not any(isinstance(said, Meet) for said in driver.all_told(2))


def test_who_comes_back_after_it_was_put_out_meets_the_others_anew() -> None:
    driver = CoordinatorDriver(heartbeat_timeout_s=5.0).with_veterans(1, 2, 3)
    for _ in range(8):
        driver.wait(1.0)
        for number in (1, 2):
            beat(driver, number)
    assert driver.member_numbers() == [1, 2]
    joins(driver, 3)
    synced(driver, 3)
    commit(driver)
    assert driver.member_numbers() == [1, 2], "its links went with its membership"


# ------------------------------------------------------------------------------------------------------------ a peer


def test_a_peer_makes_the_links_and_says_what_became_of_them() -> None:
    driver = MemberDriver(held(0)).active_in(view(1, 0, 1, 2))
    driver.feed(CoordinatorSaid(message=Meet(peers=(member(1), member(3), member(4)))))
    assert driver.effects == [MakeLinks(peers=(member(3), member(4)))], "it needs no link with itself"
    driver.feed(LinkMade(ref=ref(3)))
    assert driver.effects == [SendToCoordinator(message=Met(peers=(ref(3),)))]
    driver.feed(LinkMade(ref=ref(4), cause="refused"))
    assert driver.effects == [SendToCoordinator(message=Met(unmet=(Unmet(ref(4), "refused"),)))]


def test_links_are_made_while_a_round_is_under_way() -> None:
    driver = MemberDriver(held(0)).active_in(view(1, 0, 1, 2)).hands_in()
    driver.hears(Meet(peers=(member(3),)))
    assert MakeLinks(peers=(member(3),)) in driver.effects
    assert driver.machine.view == view(1, 0, 1, 2)


def test_a_learner_makes_links_before_it_holds_anything() -> None:
    driver = MemberDriver()
    driver.hears(Welcome(epoch=view(1, 0).epoch, target=held(0), donors=()))
    driver.hears(Meet(peers=(member(2),)))
    assert MakeLinks(peers=(member(2),)) in driver.effects


def comes_back(driver: CoordinatorDriver, number: int, *unreached: int) -> None:
    """A new start of it, with the newest state, and with links to all members but these, for as long as it takes."""
    again = ref(number, 2)
    driver.unreachable.add(again)
    driver.join(number, driver.machine.state.committed, epoch=driver.machine.state.epoch, incarnation=2)
    for other in set(driver.member_numbers()) - set(unreached):
        driver.says(again, Met(peers=(ref(other),)))
        driver.says(other, Met(peers=(again,)))


def stands(driver: CoordinatorDriver, number: int, seconds: float) -> list[SendToPeer]:
    """Time passes, in which this second start and the members say that they live. What everybody is told."""
    told: list[SendToPeer] = []
    for _ in range(int(seconds)):
        driver.wait(1.0)
        told += [effect for effect in driver.effects if isinstance(effect, SendToPeer)]
        state = driver.machine.state
        for other in driver.member_numbers():
            beat(driver, other)
        word = Heartbeat(epoch=state.epoch, outer_step=state.outer_step, progress=1, blocked=False)
        driver.says(ref(number, 2), word)
    return told


def is_away(driver: CoordinatorDriver, number: int) -> None:
    driver.says(number, Leave(now=True))
    assert number not in driver.member_numbers()


def test_a_newcomer_makes_way_for_a_veteran_that_it_has_no_link_with_and_is_told_why() -> None:
    driver = CoordinatorDriver().with_veterans(2)
    driver.join(3, driver.machine.state.committed)
    commit(driver)
    beat(driver, 3)  # it has the state of the view now
    is_away(driver, 2)
    assert driver.member_numbers() == [3]
    comes_back(driver, 2, 3)
    stands(driver, 2, TIMEOUT_S - 3)
    assert driver.member_numbers() == [3]
    told = [item.message for item in stands(driver, 2, 6) if item.to == ref(3)]
    refused = next(message for message in told if isinstance(message, Refused))
    assert refused.code == 4
    assert f"you with {ref(2).peer_id}" in refused.reason
    assert driver.member_numbers() == [2]


def test_who_came_later_makes_way_also_after_its_first_commit_but_is_not_sent_home() -> None:
    driver = CoordinatorDriver().with_veterans(2)
    driver.join(3, driver.machine.state.committed)
    commit(driver)
    commit(driver)
    is_away(driver, 2)
    comes_back(driver, 2, 3)
    told = [item.message for item in stands(driver, 2, TIMEOUT_S + 3) if item.to == ref(3)]
    assert driver.member_numbers() == [2]
    assert not any(isinstance(message, Refused) for message in told)


def test_a_veteran_comes_back_beside_a_newcomer_that_it_has_no_link_with_if_a_member_has_links_with_both() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    is_away(driver, 2)
    driver.join(3, driver.machine.state.committed)
    commit(driver)
    comes_back(driver, 2, 3)
    stands(driver, 2, TIMEOUT_S + 3)
    commit(driver)
    assert driver.member_numbers() == [1, 3, 2]
    assert driver.machine.state.view.apart == ((1, 2),)


def test_of_two_that_hold_the_state_and_have_not_met_the_one_with_a_commit_comes_in() -> None:
    driver = CoordinatorDriver().with_veterans(1)
    driver.feed(PeerConnectionLost(sender=ref(1)))
    driver.wait(5.0)
    joins(driver, 2)
    assert driver.member_numbers() == []
    state = driver.machine.state.committed
    assert state is not None
    driver.join(1, state, epoch=driver.machine.state.epoch, incarnation=2)
    for _ in range(30):
        assert driver.member_numbers() == [], "they may still meet"
        driver.now += 1.0
        for learner in (ref(2), ref(1, 2)):
            driver.says(learner, Synced(held=state))
    driver.wait(1.0)
    assert driver.member_numbers() == [1]


def test_who_was_committed_first_makes_no_way() -> None:
    driver = CoordinatorDriver().with_veterans(1)
    driver.join(2, driver.machine.state.committed)
    driver.join(3, driver.machine.state.committed)
    commit(driver)
    commit(driver)
    is_away(driver, 2)
    assert driver.member_numbers() == [1, 3]
    comes_back(driver, 2, 1)
    stands(driver, 2, TIMEOUT_S + 3)
    assert driver.member_numbers() == [1, 3]


def test_a_veteran_waits_where_several_with_commits_have_no_link_with_it() -> None:
    driver = CoordinatorDriver().with_veterans(1, 2)
    is_away(driver, 2)
    for number in (3, 4):
        driver.join(number, driver.machine.state.committed)
    commit(driver)
    commit(driver)
    assert driver.member_numbers() == [1, 3, 4]
    comes_back(driver, 2, 3, 4)
    stands(driver, 2, TIMEOUT_S + 10)
    assert driver.member_numbers() == [1, 3, 4]


# -------------------------------------------------------------------------------------- a pair that cannot have a link


def tried_in_vain(driver: CoordinatorDriver, one: int, other: int) -> None:
    driver.says(one, Met(unmet=(Unmet(ref(other), "refused"),)))


def with_a_pair_apart() -> CoordinatorDriver:
    """1 has links with all; 2 and 3 have none with each other."""
    driver = CoordinatorDriver().with_veterans(1, 2)
    joins(driver, 3)
    for one, other in ((3, 1), (1, 3)):
        meet(driver, one, other)
    for one, other in ((3, 2), (2, 3)):
        tried_in_vain(driver, one, other)
    synced(driver, 3)
    commit(driver)
    assert driver.member_numbers() == [1, 2, 3]
    return driver


def test_two_that_have_both_tried_in_vain_are_in_one_view_which_names_them() -> None:
    assert with_a_pair_apart().machine.state.view.apart == ((1, 2),)


def test_a_pair_that_meets_later_is_apart_no_more_in_the_next_view() -> None:
    driver = with_a_pair_apart()
    meet(driver, 2, 3)
    meet(driver, 3, 2)
    assert driver.machine.state.view.apart == ((1, 2),)
    driver.says(1, Leave(now=True))
    assert driver.member_numbers() == [2, 3]
    assert driver.machine.state.view.apart == ()


def test_without_the_member_between_them_the_one_whose_work_was_committed_first_goes_on() -> None:
    driver = with_a_pair_apart()
    driver.says(1, Leave(now=True))
    assert driver.member_numbers() == [2]
    assert "no link" in driver.told(3, Evicted).reason


def test_members_without_a_link_are_asked_to_try_again_after_a_minute() -> None:
    driver = with_a_pair_apart()
    commit(driver)
    driver.now += 61.0
    for number in (1, 3, 2):
        beat(driver, number)
    assert driver.told(2, Meet).peers == (member(3),)
