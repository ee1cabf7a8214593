# SPDX-License-Identifier: Apache-2.0
"""Nobody owns much more than it can train on before its next commit: what a vote weighs rests on its leases."""

import msgspec
import pytest

from isthmus.elastic.core.leases import MAX_INDEX, MAX_PIECES, MAX_ROUNDS_OWNED, SPARE_ROUNDS, LeaseLedger, count
from isthmus.elastic.core.messages import (
    CoordinatorMessage,
    Heartbeat,
    IndexRange,
    LeaseGrant,
    LeaseRequest,
    Synced,
    Vote,
)
from isthmus.elastic.core.records import LeaseRecord, Record
from tests.unit.elastic.liars.members import Members, members
from tests.unit.elastic.machines import CoordinatorDriver, held, key, ref

ROUND = 10
MOST = (MAX_ROUNDS_OWNED + SPARE_ROUNDS) * ROUND
ALL = 2**31


@pytest.fixture
def driver() -> Members:
    return members(1, 2, 3, weight_per_sample=1.0, samples_per_round=ROUND)


def asks(driver: CoordinatorDriver, number: int, num_samples: int, serial: int) -> tuple[IndexRange, ...] | None:
    """What it is granted; None: it gets no answer for now."""
    request = LeaseRequest(epoch=driver.machine.state.epoch, serial=serial, num_samples=num_samples)
    driver.says(number, request)
    grants = [item for item in driver.all_told(number) if isinstance(item, LeaseGrant)]
    return grants[-1].ranges if grants else None


def commits(driver: Members, **consumed: tuple[IndexRange, ...]) -> None:
    for number in driver.member_numbers():
        used = consumed.get(f"by_{number}", ())
        driver.votes(number, weight=float(count(used)), seen=_weights(driver, consumed), consumed=used)


def _weights(driver: Members, consumed: dict[str, tuple[IndexRange, ...]]) -> dict[int, float]:
    return {number: float(count(consumed.get(f"by_{number}", ()))) for number in driver.member_numbers()}


def test_a_member_that_asks_for_all_samples_gets_a_few_rounds_work_and_then_no_answer(driver: Members) -> None:
    granted = asks(driver, 3, ALL, serial=0)
    assert granted is not None
    assert count(granted) == MOST
    for serial in range(1, 50):
        assert asks(driver, 3, ALL, serial=serial) is None
    assert driver.machine.state.leases.next_index == MOST
    assert len(driver.records(LeaseRecord)) == 1, "what is not granted costs the journal nothing"
    assert asks(driver, 1, 2 * ROUND, serial=0) == (IndexRange(MOST, MOST + 2 * ROUND),), (
        "the others get what they want"
    )


def test_what_a_commit_holds_makes_room_for_as_much(driver: Members) -> None:
    asks(driver, 3, ALL, serial=0)
    step = driver.step
    commits(driver, by_3=(IndexRange(0, ROUND),))
    assert driver.step == step + 1
    granted = asks(driver, 3, ALL, serial=1)
    assert granted is not None
    assert count(granted) == ROUND


def test_who_commits_and_reports_nothing_gets_nothing_more(driver: Members) -> None:
    asks(driver, 3, ALL, serial=0)
    for serial in range(1, 20):
        commits(driver)
        assert asks(driver, 3, ALL, serial=serial) is None
    again = driver.recovered()
    granted = asks(again, 3, ALL, serial=20)
    assert granted is not None
    assert count(granted) == SPARE_ROUNDS * ROUND, "a restarted coordinator knows what it owns, and not since when"
    assert asks(again, 3, ALL, serial=21) is None


def test_the_answer_to_a_request_that_had_to_wait_comes_when_it_is_repeated(driver: Members) -> None:
    asks(driver, 3, ALL, serial=0)
    assert asks(driver, 3, ROUND, serial=1) is None
    commits(driver, by_3=(IndexRange(0, ROUND),))
    granted = asks(driver, 3, ROUND, serial=1)
    assert granted == (IndexRange(MOST, MOST + ROUND),)
    assert asks(driver, 3, ROUND, serial=1) == granted


def test_no_index_is_given_that_journal_and_messages_cannot_say(driver: Members) -> None:
    driver.machine.state.leases.next_index = MAX_INDEX - 5
    granted = asks(driver, 3, ROUND, serial=0)
    assert granted == (IndexRange(MAX_INDEX - 5, MAX_INDEX),)
    record, grant = driver.records(LeaseRecord)[-1], driver.told(3, LeaseGrant)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record) == record
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grant), type=CoordinatorMessage) == grant
    assert asks(driver, 1, ROUND, serial=0) is None
    assert driver.machine.state.leases.next_index == MAX_INDEX


# ------------------------------------------------------------------------ who is late


def test_who_is_late_again_and_again_gets_a_rounds_work_to_show_and_another_one_to_hand_in() -> None:
    """Else it would starve with what it has trained on, and could never hand it in (seed 654 of the simulator)."""
    driver = members(1, 2, 3, samples_per_round=ROUND, round_inner_steps=1, grace_initial_s=1.0)
    serial = -1
    for times in range(1, 6):
        for _ in range(20):
            serial += 1
            if asks(driver, 3, ALL, serial=serial) is None:
                break
        before = count(driver.machine.state.leases.owned_by(ref(3)))
        _is_late(driver, 3)
        serial += 1
        asks(driver, 3, ALL, serial=serial)
        shown = count(driver.machine.state.leases.owned_by(ref(3)))
        assert shown - before >= ROUND, "to show that it works"
        _comes_back(driver, 3, steps=times)
        serial += 1
        asks(driver, 3, ALL, serial=serial)
        assert count(driver.machine.state.leases.owned_by(ref(3))) - shown >= ROUND, "to hand in"


def _beats(driver: Members, number: int, *, steps: int = 0, ready: bool) -> None:
    state = driver.machine.state
    beat = Heartbeat(
        epoch=state.epoch,
        outer_step=state.outer_step,
        progress=steps,
        blocked=ready,
        ready=ready,
        inner_steps=steps,
    )
    driver.says(number, beat)


def _is_late(driver: Members, number: int) -> None:
    while not driver.machine.state.is_excused(ref(number)):
        driver.now += 0.5
        for other in driver.member_numbers():
            _beats(driver, other, ready=other != number)


def _comes_back(driver: Members, number: int, *, steps: int) -> None:
    while driver.machine.state.is_excused(ref(number)):
        driver.now += 0.1
        committed = driver.machine.state.committed
        assert committed is not None
        driver.says(number, Synced(held=committed))
        _beats(driver, number, steps=100 * steps, ready=False)
        _beats(driver, number, steps=100 * steps + 1, ready=False)
        commits(driver)


# ------------------------------------------------------------------------ what was reported


def test_what_was_reported_and_left_out_of_a_commit_is_no_stock_and_weighs_nothing_again() -> None:
    step = 2 * (MAX_PIECES - 1)
    ledger = LeaseLedger(step, [IndexRange(i, i + 1) for i in range(0, step, 2)])
    ledger.grant(ref(1), 0, (IndexRange(step, step + 100),))
    claim = ledger.clip(ref(1), [IndexRange(step + 10, step + 20)])
    assert ledger.bounded([claim]) == [()], "there is no room for another piece"
    assert ledger.num_unreported(ref(1)) == 90, "who is honest does not name it again, and needs as much more"
    assert ledger.clip(ref(1), claim) == ()
    ledger.release(ref(1), ledger.owned_by(ref(1)))
    ledger.grant(ref(1), 1, (IndexRange(step, step + 100),))
    assert ledger.num_unreported(ref(1)) == 100, "whoever gets it next may train on it"


# ------------------------------------------------------------------------ how far work widens the guard


def _sends(driver: Members, weight: float, size: float) -> None:
    """Member 3 claims this weight, and sends numbers so many times as large as the others, who weigh 1."""
    weights = {1: 1.0, 2: 1.0, 3: weight}
    current = driver.machine.state.view
    for number in (1, 2, 3):
        vote = Vote(
            key=key(current.epoch, current.outer_step),
            digest=held(current.outer_step + 1).digest,
            weight=weights[number],
            num_tokens=1,
            consumed=(),
            weights=tuple(weights.values()),
            sizes=(1.0, 1.0, size),
        )
        driver.says(number, vote)


@pytest.mark.parametrize(("weight", "size"), [(20.0, 20.0), (20.0, 100.0), (1.0, 9.0), (1000.0, 150.0)])
def test_who_has_done_more_may_send_more(weight: float, size: float) -> None:
    driver = members(1, 2, 3)
    step = driver.step
    driver.votes(1)
    driver.votes(2)
    driver.votes(3)
    _sends(driver, weight, size)
    assert driver.step == step + 2


@pytest.mark.parametrize("weight", [20.0, 1e3, 33_554_432.0])
def test_no_weight_that_is_claimed_widens_the_guard_without_bound(weight: float) -> None:
    driver = members(1, 2, 3)
    for number in (1, 2, 3):
        driver.votes(number)
    _sends(driver, weight, size=200.0)
    assert driver.member_numbers() == [1, 2]
    assert driver.is_struck(3)
