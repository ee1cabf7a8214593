# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a coordinator, and what follows for the connections of a process that hears of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.collective.core.types import Incarnation, PeerId, PeerRef
from isthmus.collective.errors import SecurityRefused
from isthmus.collective.transport import Authority, Credentials, Security
from isthmus.collective.transport.certificates import certificate_to_bytes
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.events import PutOut, UseTicket
from isthmus.elastic.core.messages import Bar, Trust
from isthmus.elastic.core.records import BarRecord
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.trainer.contact.bouncer import Bouncer
from isthmus.trainer.contact.identity import RunIdentity
from isthmus.trainer.contact.office import Office
from isthmus.trainer.contact.ticket import verify_token
from isthmus.trainer.record.status import PeerStatus
from tests.unit.elastic.machines import KEYS

NOW_S = 1_000_000.0
RUN = RunIdentity(run_id="demo-0123abcd", secret=b"s" * 32)
ME = PeerRef(PeerId("a" * 16), Incarnation(1))
STRANGER = PeerId("f" * 16)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    journal = Journal(tmp_path / "journal.sqlite", run_id=RUN.run_id)
    config = CoordinatorConfig(manifest_digest=bytes(32), sealer=KEYS.of_the_run, outer_steps=9)
    yield Office(
        me=ME,
        run=RUN,
        addresses=lambda: ("127.0.0.1:1", "127.0.0.1:2"),
        fingerprint=b"f" * 32,
        lifetime_s=60.0,
        coordinator=CoordinatorShell(config, journal),
        now_s=lambda: NOW_S,
    )
    journal.close()


def test_a_new_ticket_admits_for_as_long_and_as_many_as_was_asked_for(office: Office) -> None:
    usual = office.new_ticket()
    assert usual.addresses == office.addresses()
    assert usual.fingerprint == office.fingerprint
    assert usual.expires_at_s == NOW_S + 60
    short = office.new_ticket(is_once=True, lifetime_s=5.0)
    claims = verify_token(RUN.secret, RUN.run_id, short.token, now_s=NOW_S)
    assert (claims.expires_at_s, claims.is_once) == (NOW_S + 5, True)


async def test_the_ticket_of_a_run_stays_the_same_while_it_admits(office: Office) -> None:
    first = office.ticket()
    office.new_ticket(is_once=True)
    assert office.ticket() == first
    assert office.new_ticket(lifetime_s=5.0) == office.ticket() != first
    office.now_s = lambda: NOW_S + 5
    after_expiry = office.ticket()
    assert after_expiry.expires_at_s == NOW_S + 65
    await office.revoke(after_expiry.ticket_id, None)
    assert office.ticket().ticket_id > after_expiry.ticket_id


def test_the_ticket_of_a_run_has_the_addresses_of_now(office: Office) -> None:
    first = office.ticket()
    office.addresses = lambda: ("10.9.0.11:1",)
    assert office.ticket().addresses == office.new_ticket(is_once=True).addresses == ("10.9.0.11:1",)
    assert office.ticket().token == first.token, "it is the same one all the same"


@pytest.mark.parametrize("clock_s", [NOW_S, NOW_S - 3600], ids=["", "a clock that goes back"])
async def test_all_tickets_made_so_far_are_revoked_at_once_and_later_ones_are_not(
    office: Office, clock_s: float
) -> None:
    before = [office.ticket(), office.new_ticket(is_once=True), office.new_ticket()]
    assert await office.revoke(None, None) is None
    office.now_s = lambda: clock_s
    after = [office.ticket(), office.new_ticket(is_once=True)]
    doors = office.coordinator.doors
    assert [doors.refusal(one.ticket_id, STRANGER) for one in before] == ["the ticket was revoked"] * 3
    assert [doors.refusal(one.ticket_id, STRANGER) for one in after] == [None] * 2


async def test_tickets_that_were_made_by_a_clock_that_was_ahead_are_revoked_too(office: Office) -> None:
    office.now_s = lambda: NOW_S + 3600
    ticket = office.ticket()
    restarted = replace(office, now_s=lambda: NOW_S)
    assert await restarted.revoke(None, None) is None
    doors = restarted.coordinator.doors
    assert doors.refusal(ticket.ticket_id, STRANGER) == "the ticket was revoked"
    assert doors.refusal(restarted.ticket().ticket_id, STRANGER) is None
    assert await restarted.revoke(None, None) is None
    assert doors.refusal(restarted.ticket().ticket_id, STRANGER) is None


async def test_certificates_that_were_numbered_by_a_clock_that_was_ahead_are_void_too(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors, ordered = office.coordinator.doors, list[PutOut]()

    async def order(order: PutOut, *, timeout_s: float) -> None:
        ordered.append(order)
        doors.apply(BarRecord(bar=Bar(order.peer_id, Incarnation(1), order.certificate)))

    monkeypatch.setattr(office.coordinator, "order", order)
    newest = round((NOW_S + 3600) * 1000)  # of the peer's certificates
    for _ in range(2):
        assert await office.put_out(STRANGER, for_ever=False) is None
        assert ordered[-1].certificate >= newest, "a certificate is void up to the number of the bar"
        newest = doors.void_up_to(STRANGER) + 1  # with a ticket it gets in again


async def test_a_ticket_is_revoked_for_as_long_as_it_could_admit(office: Office) -> None:
    ticket = office.ticket()
    assert await office.revoke(ticket.ticket_id, None) is None
    (record,) = office.coordinator.doors.tickets.values()
    assert (record.ticket_id, record.used_by) == (ticket.ticket_id, None)
    assert record.expires_at_s > NOW_S + 365 * 86_400


async def test_the_peer_that_the_coordinator_lives_with_is_not_put_out(office: Office) -> None:
    assert "lives with this peer" in (await office.put_out(ME.peer_id, for_ever=True) or "")
    assert office.coordinator.doors.bars == {}


async def test_whoever_is_banned_is_listed_as_such_and_goes_with_its_ticket(office: Office) -> None:
    ticket = office.ticket()
    used = UseTicket(
        ticket_id=ticket.ticket_id,
        expires_at_s=ticket.expires_at_s,
        used_by=STRANGER,
        at_s=round(NOW_S),
        is_once=False,
    )
    assert await office.coordinator.order(used, timeout_s=5.0) is None
    assert "is in the run" in (await office.put_out(STRANGER, for_ever=False) or "")
    assert await office.put_out(STRANGER, for_ever=True) is None
    assert office.peers() == (PeerStatus(peer_id=STRANGER, state="banned"),)
    assert set(office.coordinator.doors.tickets) == {ticket.ticket_id}


# ------------------------------------------------------------------------ the bouncer


def test_connections_end_once_for_every_news_of_a_bar_and_new_authorities_are_believed() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    authority, another = Authority(b"s" * 32), Authority(b"o" * 32)
    own = Credentials(key, authority.issue(key.public_key(), 1), (authority.certificate,))
    security = Security(own)
    newcomer = another.issue(other.public_key(), 7)
    bouncer, ended = Bouncer(security), []
    bouncer.ends(ended.append)
    their_id = Security(Credentials(other, newcomer, (another.certificate,))).peer_id
    with pytest.raises(SecurityRefused, match="another run"):
        security.require_member(newcomer, their_id)

    both = tuple(certificate_to_bytes(one.certificate) for one in (authority, another))
    for barred, calls in (((), []), ((Bar(their_id, Incarnation(1), 6),), [their_id]), ((), [their_id])):
        bouncer.heard(Trust(authorities=both, barred=barred))
        bouncer.heard(Trust(authorities=both, barred=barred))
        assert ended == calls
        security.require_member(newcomer, their_id)  # its certificate is newer than the bar
    bouncer.heard(Trust(authorities=(b"noise",), barred=(Bar(their_id, Incarnation(1), 7),)))
    assert ended == [their_id, their_id]
    with pytest.raises(SecurityRefused, match="withdrawn"):
        security.require_member(newcomer, their_id)
