# SPDX-License-Identifier: Apache-2.0
"""Who is put out of a run stays out, and who was let in by a ticket has used it: in the machine and in its journal."""

from typing import Any

import pytest

from isthmus.collective.core.types import Epoch, Incarnation, PeerId
from isthmus.elastic.core.doorkeeper import BANNED, EVICTED
from isthmus.elastic.core.doors import FOR_EVER, MAX_BARS
from isthmus.elastic.core.events import (
    Answered,
    Disconnect,
    Ordered,
    Persist,
    PutOut,
    RevokeTicket,
    SendToPeer,
    UseTicket,
)
from isthmus.elastic.core.messages import Bar, Heartbeat, Join, NewView, Refused, Trust, Welcome
from isthmus.elastic.core.records import BarRecord, TicketRecord, ViewRecord
from tests.unit.elastic.machines import MANIFEST, CoordinatorDriver, MemberDriver, held, ref, view

MAX_TICKETS = 40
"""For these tests; every ticket is a record."""
NUMBER = 1_000
NOW_S = 1_000_000
TICKET, ANOTHER = b"ticket 1", b"ticket 2"


def put_out(
    driver: CoordinatorDriver, number: int, *, for_ever: bool = False, connected: int | None = None
) -> str | None:
    order = PutOut(
        peer_id=ref(number).peer_id,
        incarnation=None if connected is None else Incarnation(connected),
        certificate=NUMBER,
        for_ever=for_ever,
        at_s=NOW_S,
    )
    return answer(driver, order)


def use(driver: CoordinatorDriver, number: int, ticket: bytes = TICKET, **more: Any) -> str | None:
    given = {"expires_at_s": NOW_S + 60, "at_s": NOW_S, "is_once": True} | more
    return answer(driver, UseTicket(ticket_id=ticket, used_by=ref(number).peer_id, **given))


def revoke(driver: CoordinatorDriver, ticket: bytes = TICKET, **more: Any) -> str | None:
    given = {"expires_at_s": NOW_S + 60, "at_s": NOW_S} | more
    return answer(driver, RevokeTicket(ticket_id=ticket, **given))


def answer(driver: CoordinatorDriver, order: PutOut | UseTicket | RevokeTicket) -> str | None:
    """What became of it. The answer is the last word: what it tells of is in the journal by then."""
    *before, answered = driver.feed(Ordered(serial=7, order=order))
    assert isinstance(answered, Answered)
    assert answered.serial == 7
    assert not any(isinstance(effect, Answered) for effect in before)
    return answered.refusal


def test_an_evicted_member_is_told_and_disconnected_and_the_others_go_on_without_it() -> None:
    driver = CoordinatorDriver().with_members(1, 2, 3)
    assert put_out(driver, 2) is None
    assert driver.member_numbers() == [1, 3]
    assert driver.told(2, Refused) == Refused(code=5, reason=EVICTED)
    bar = Bar(ref(2).peer_id, Incarnation(1), NUMBER)
    for number in (1, 3):
        assert driver.told(number, NewView).view == driver.machine.state.view
        assert driver.told(number, Trust).barred == (bar,)
    kinds = [type(effect) for effect in driver.effects]
    first_word = next(place for place, kind in enumerate(kinds) if kind is SendToPeer)
    (written,) = (
        place
        for place, effect in enumerate(driver.effects)
        if isinstance(effect, Persist) and isinstance(effect.record, BarRecord)
    )
    assert written < first_word, "nobody hears of what is not written"
    told = max(
        place for place, effect in enumerate(driver.effects) if isinstance(effect, SendToPeer) and effect.to == ref(2)
    )
    assert told < kinds.index(Disconnect), "it is told before its connection ends"
    assert Disconnect(peer_id=ref(2).peer_id, up_to=Incarnation(1)) in driver.effects


@pytest.mark.parametrize("restart", [False, True])
def test_whatever_an_evicted_start_says_it_stays_out_and_its_next_start_may_come(restart: bool) -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    put_out(driver, 2)
    driver = driver.recovered() if restart else driver
    for message in (
        Join(address="host2:1", manifest_digest=MANIFEST, epoch=driver.machine.state.epoch),
        Heartbeat(epoch=Epoch(1), outer_step=driver.machine.state.outer_step, progress=1, blocked=False),
    ):
        driver.says(2, message)
        assert driver.all_told(2) == [Refused(code=5, reason=EVICTED)]
        assert Disconnect(peer_id=ref(2).peer_id, up_to=Incarnation(1)) in driver.effects
    driver.join(2, incarnation=2)
    assert driver.told(2, Welcome, incarnation=2)


def died_right_after_the_bar() -> CoordinatorDriver:
    """A coordinator that has started again: the one before had barred the second of three members, and done no more."""
    driver = CoordinatorDriver().with_members(1, 2, 3)
    put_out(driver, 2)
    bar = next(place for place, record in enumerate(driver.journal) if isinstance(record, BarRecord))
    del driver.journal[bar + 1 :]
    return driver.recovered()


def test_a_coordinator_that_died_right_after_it_had_written_the_bar_goes_on_without_the_peer() -> None:
    driver = died_right_after_the_bar()
    driver.says(1, Heartbeat(epoch=Epoch(2), outer_step=driver.machine.state.outer_step, progress=1, blocked=False))
    assert driver.member_numbers() == [1, 3]
    assert driver.told(2, Refused).reason == EVICTED


def test_no_view_names_a_barred_member_also_if_the_coordinator_died_right_after_the_bar() -> None:
    driver = died_right_after_the_bar()
    known = len(driver.journal)
    driver.join(3, incarnation=2)  # its earlier start leaves the view
    told = [record.view for record in driver.journal[known:] if isinstance(record, ViewRecord)]
    assert told
    assert all(member.ref != ref(2) for view in told for member in view.members)


def test_a_banned_peer_stays_out_in_every_start_and_needs_not_have_been_there() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    for number in (2, 9):
        assert put_out(driver, number, for_ever=True) is None
    driver = driver.recovered()
    for number in (2, 9):
        for incarnation in (1, 2, 10**12):
            driver.join(number, incarnation=incarnation)
            assert driver.all_told(number, incarnation) == [Refused(code=5, reason=BANNED)]
        assert driver.machine.state.doors.is_banned(ref(number).peer_id)


def test_a_ban_is_not_weakened_by_an_eviction_and_is_written_once() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    for for_ever in (True, True, False):
        assert put_out(driver, 2, for_ever=for_ever, connected=5) is None
    assert len(driver.records(BarRecord)) == 1
    assert driver.machine.state.doors.bars[ref(2).peer_id].certificate == FOR_EVER


def test_whoever_was_never_there_cannot_be_evicted_and_nothing_is_written() -> None:
    driver = CoordinatorDriver().with_members(1)
    assert put_out(driver, 9) == f"no peer {ref(9).peer_id} is in the run"
    assert driver.records(BarRecord) == []


def test_a_start_that_is_connected_and_has_said_nothing_is_put_out_too() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    assert put_out(driver, 2, connected=4) is None
    assert Disconnect(peer_id=ref(2).peer_id, up_to=Incarnation(4)) in driver.effects
    driver.join(2, incarnation=4)
    assert driver.all_told(2, 4) == [Refused(code=5, reason=EVICTED)]
    assert put_out(driver, 9, connected=1) is None, "it need not have said anything"


def test_a_peer_that_has_left_can_be_evicted_so_that_it_needs_a_ticket_again() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    driver.join(2, held(1), incarnation=3, epoch=int(driver.machine.state.epoch))
    assert driver.member_numbers() == [1]
    driver = driver.recovered()
    assert put_out(driver, 2) is None
    assert driver.machine.state.doors.void_up_to(ref(2).peer_id) == NUMBER


def test_a_learner_and_a_late_member_are_put_out_like_a_member() -> None:
    driver = CoordinatorDriver(grace_floor_s=1.0).with_veterans(1, 2, 3)
    driver.join(4)
    put_out(driver, 4)
    assert driver.told(4, Refused).reason == EVICTED
    assert driver.member_numbers() == [1, 2, 3]


def test_everybody_who_joins_hears_whom_not_to_believe_also_after_a_restart() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    put_out(driver, 2, for_ever=True)
    driver = driver.recovered()
    driver.join(1, driver.machine.state.committed, epoch=int(driver.machine.state.epoch))
    (bar,) = driver.told(1, Trust).barred
    assert bar.peer_id == ref(2).peer_id
    driver.join(5)
    assert driver.told(5, Trust).barred == (bar,)


def test_a_run_with_one_authority_and_nobody_put_out_says_nothing_of_it() -> None:
    driver = CoordinatorDriver(authorities=(b"one",))
    driver.join(1)
    assert not any(isinstance(message, Trust) for message in driver.all_told(1))
    driver = CoordinatorDriver(authorities=(b"one", b"another"))
    driver.join(1)
    assert driver.told(1, Trust).authorities == (b"one", b"another")


def test_no_more_peers_are_barred_than_fit_into_a_message() -> None:
    driver = CoordinatorDriver().with_members(1, 2)
    for number in range(10, 10 + MAX_BARS):
        assert put_out(driver, number, for_ever=True) is None
    assert "no more can be" in (put_out(driver, 2) or "")
    assert put_out(driver, 10, for_ever=True) is None


def test_a_member_takes_word_of_trust_without_moving() -> None:
    member = MemberDriver(held(3)).active_in(view(1, 3, 1, 2))
    assert member.hears(Trust(authorities=(b"a",), barred=())) == []


# ------------------------------------------------------------------------ tickets


@pytest.mark.parametrize("restart", [False, True])
def test_a_ticket_for_one_peer_is_its_peers_and_nobody_elses(restart: bool) -> None:
    driver = CoordinatorDriver()
    assert use(driver, 1) is None
    driver = driver.recovered() if restart else driver
    assert use(driver, 1) is None
    assert "has been used" in (use(driver, 2) or "")
    assert use(driver, 2, ANOTHER) is None
    assert len(driver.records(TicketRecord)) == 2


@pytest.mark.parametrize("restart", [False, True])
def test_a_revoked_ticket_is_nobodys_not_even_of_who_has_used_it(restart: bool) -> None:
    driver = CoordinatorDriver()
    assert use(driver, 1) is None
    assert revoke(driver) is None
    assert revoke(driver) is None
    driver = driver.recovered() if restart else driver
    for number in (1, 2):
        assert use(driver, number) == "the ticket was revoked"
    assert len(driver.records(TicketRecord)) == 2


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_with_a_ticket_go_all_that_were_made_before_it(
    restart: bool, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.elastic.core.doorkeeper.MAX_TICKETS", MAX_TICKETS)
    driver = CoordinatorDriver()
    assert use(driver, 1, b"ticket 0") is None
    for number in range(MAX_TICKETS if full else 1):
        revoke(driver, number.to_bytes(8))
    assert (revoke(driver, TICKET) is None) is not full
    for _ in range(2):
        assert revoke(driver, TICKET, and_earlier=True) is None
    driver = driver.recovered() if restart else driver
    for ticket in (b"\0" * 8, b"ticket 0", TICKET):
        assert use(driver, 1, ticket) == "the ticket was revoked", "also for who has used it"
    assert use(driver, 1, ANOTHER) is None
    assert set(driver.machine.state.doors.tickets) == {TICKET, ANOTHER}
    assert len([record for record in driver.records(TicketRecord) if record.and_earlier]) == 1


@pytest.mark.parametrize("restart", [False, True])
def test_with_a_banned_peer_goes_the_ticket_by_which_it_came(restart: bool) -> None:
    driver = CoordinatorDriver()
    for number in (1, 2, 1):
        assert use(driver, number, is_once=False) is None
    assert len(driver.records(TicketRecord)) == 2, "the same once more is no news"
    driver = driver.recovered() if restart else driver
    put_out(driver, 1, connected=1)
    assert use(driver, 3, is_once=False) is None, "who is evicted may come again"
    put_out(driver, 1, for_ever=True)
    assert use(driver, 4, is_once=False) == "the ticket was revoked"
    assert use(driver, 4, ANOTHER, is_once=False) is None


def test_a_ban_does_not_revoke_what_has_expired() -> None:
    driver = CoordinatorDriver()
    use(driver, 1, is_once=False, expires_at_s=NOW_S)
    put_out(driver, 1, for_ever=True)
    assert driver.machine.state.doors.tickets == {}


def test_by_which_ticket_a_peer_came_is_known_of_the_newest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.elastic.core.doors.MAX_ADMITTED", 3)
    driver = CoordinatorDriver()
    for number in (1, 2, 3, 4):
        use(driver, number, is_once=False)
    assert list(driver.machine.state.doors.admitted) == [ref(number).peer_id for number in (2, 3, 4)]


def test_what_has_expired_is_forgotten_and_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.elastic.core.doorkeeper.MAX_TICKETS", MAX_TICKETS)
    driver = CoordinatorDriver()
    for number in range(MAX_TICKETS):
        assert revoke(driver, number.to_bytes(8, "big")) is None
    assert "are remembered already" in (revoke(driver, TICKET) or "")
    assert revoke(driver, TICKET, at_s=NOW_S + 60, expires_at_s=NOW_S + 120) is None, "those have expired by then"
    driver = CoordinatorDriver()
    revoke(driver, ANOTHER, expires_at_s=NOW_S + 1)
    revoke(driver, TICKET, at_s=NOW_S + 1)
    assert set(driver.machine.state.doors.tickets) == {TICKET}


def test_tickets_and_bars_before_the_run_begins_change_nothing_of_its_beginning() -> None:
    driver = CoordinatorDriver()
    use(driver, 1)
    put_out(driver, 9, for_ever=True)
    driver = driver.recovered()
    driver.join(1)
    assert driver.told(1, Welcome).found
    driver.with_members(2, 3)
    assert driver.records(ViewRecord)
    assert PeerId(ref(9).peer_id) in driver.machine.state.doors.bars
