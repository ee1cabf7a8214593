# SPDX-License-Identifier: Apache-2.0
"""What the coordinator writes down and says when a run goes back: it can be read back, proved, and audited."""

from collections.abc import Callable

import msgspec

from isthmus.collective.core.types import Epoch
from isthmus.elastic.audit import audit
from isthmus.elastic.core.messages import Heartbeat, IndexRange, Join, LeaseRequest, Rebuilt
from isthmus.elastic.core.records import Record, RollbackRecord
from tests.unit.elastic.machines import KEYS, MANIFEST, CoordinatorDriver, MemberDriver, held, ref

BACK_S = 8
"""Longer than all members of the newest commit are given to say what they hold."""


def told_to_go_back() -> CoordinatorDriver:
    """1, 2 and 3 lost power; what their disks hold is the state before the newest."""
    driver = CoordinatorDriver().with_veterans(1, 2, 3)
    driver.says(1, LeaseRequest(epoch=driver.machine.state.epoch, serial=0, num_samples=8))
    for number in (1, 2, 3):
        consumed = (IndexRange(0, 4),) if number == 1 else ()
        driver.vote(number, None, *consumed)
    newest = driver.machine.state.outer_step
    for number in (1, 2, 3):
        driver.join(number, held(newest - 1), incarnation=2)
    live_until(driver, lambda: bool(driver.records(RollbackRecord)))
    return driver


def live_until(driver: CoordinatorDriver, what: Callable[[], bool]) -> None:
    """Time passes, and the peers' newer starts say once a second that they live."""
    for _ in range(BACK_S):
        driver.wait(1.0)
        if what():
            return
        for number in (1, 2, 3):
            state = driver.machine.state
            life = Heartbeat(epoch=state.epoch, outer_step=state.outer_step, progress=0, blocked=True)
            driver.says(ref(number, 2), life)
    raise AssertionError("nothing has come of it")


def test_the_record_and_what_peers_are_told_are_under_the_seal_and_can_be_read_back() -> None:
    driver = told_to_go_back()
    (record,) = driver.records(RollbackRecord)
    assert record.certificate is not None
    assert record.certificate.check(KEYS)
    assert driver.told(1, Rebuilt, incarnation=2).certificate == record.certificate
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record) == record
    again = driver.recovered()
    assert again.machine.state.committed == driver.machine.state.committed == record.certificate.made


def test_a_peer_believes_it() -> None:
    driver = told_to_go_back()
    rebuilt = driver.told(1, Rebuilt, incarnation=2)
    assert rebuilt.certificate is not None
    peer = MemberDriver(rebuilt.certificate.made)
    peer.hears(rebuilt)
    assert peer.kept() == [rebuilt.certificate]
    assert peer.machine.counters["forged_certificate"] == 0


def test_a_run_that_its_coordinator_took_back_goes_on_and_its_audit_holds() -> None:
    driver = told_to_go_back()
    (record,) = driver.records(RollbackRecord)
    for number in (1, 2, 3):
        join = Join(
            epoch=Epoch(record.epoch),
            address=f"host{number}:1",
            manifest_digest=MANIFEST,
            held=driver.machine.state.committed,
            certificate=record.certificate,
        )
        driver.says(ref(number, 2), join)
    live_until(driver, lambda: driver.member_numbers() == [1, 2, 3])
    proved = audit(driver.journal)
    assert proved.holds, [finding for verdict in proved.verdicts for finding in verdict.findings]
    (lost,) = proved.account.given_up
    assert (lost.from_step - lost.to_step, lost.num_samples) == (1, 4)
    assert proved.samples.num_leased == proved.samples.next_index == 0
