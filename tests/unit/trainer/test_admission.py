# SPDX-License-Identifier: Apache-2.0
"""Who gets in, at a real door: tickets for strangers, keys for everybody else, and what each refusal costs."""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.collective.core.types import Incarnation
from isthmus.collective.errors import HandshakeRefused
from isthmus.collective.transport import (
    Channel,
    FrameType,
    Hello,
    HelloReply,
    Listener,
    Purpose,
    Security,
    TicketSecurity,
    connect,
)
from isthmus.collective.transport.certificates import certificate_to_bytes, key_in, peer_id_of_key
from isthmus.collective.transport.wire import PROTOCOL_VERSION
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.events import PutOut, RevokeTicket
from isthmus.elastic.core.messages import Join
from isthmus.elastic.core.records import Record
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.elastic.shell.dialler import LATER_CODE
from isthmus.elastic.wire import encode
from isthmus.trainer.contact.admission import (
    Gatekeeper,
    Request,
    RunTerms,
    authority_of,
    hello_maker,
    own_security,
)
from isthmus.trainer.contact.identity import PeerIdentity, RunIdentity
from isthmus.trainer.contact.joining import PATIENCE_S, Admission, ask_admission, stranger_hello, stranger_security
from isthmus.trainer.contact.ticket import NEWEST_ID, Ticket, TicketFault, TicketRefused, issue_token, make_ticket
from isthmus.trainer.errors import ExitCode, NobodyReachable, Refused
from tests.unit.elastic.machines import KEYS

NOW_S = 1_000_000.0
SECRET = b"s" * 32
RUN_ID = "demo-0123abcd"
RUN = RunIdentity(run_id=RUN_ID, secret=SECRET)
ANOTHER_RUN = RunIdentity(run_id=RUN_ID, secret=b"t" * 32)


def identity(seed: bytes, incarnation: int) -> PeerIdentity:
    key = Ed25519PrivateKey.from_private_bytes(seed * 32)
    peer_id = peer_id_of_key(key.public_key().public_bytes_raw())
    return PeerIdentity(peer_id=peer_id, incarnation=Incarnation(incarnation), key=key)


def terms_of(run: RunIdentity) -> RunTerms:
    return RunTerms(
        run_id=run.run_id,
        manifest=b'{"format":1}',
        data_digest="d" * 64,
        authorities=(certificate_to_bytes(authority_of(run).certificate),),
    )


def founders_security(run: RunIdentity = RUN, tls: str = "auto") -> Security:
    certificate = authority_of(run).issue(FOUNDER.key.public_key(), 1)
    return own_security(FOUNDER, certificate, terms_of(run), tls)


class Memory:
    """A journal for whom nothing has to last."""

    is_quick = True

    def append(self, record: Record) -> int:
        return 0

    def replay(self) -> list[Record]:
        return []

    def close(self) -> None:
        pass


FOUNDER, JOINER, THIRD = identity(b"1", 5), identity(b"2", 7), identity(b"3", 9)
TERMS = terms_of(RUN)
CONFIG = CoordinatorConfig(manifest_digest=TERMS.digest(), sealer=KEYS.of_the_run, outer_steps=9)
FINGERPRINT = founders_security().server_fingerprint
CONTROL = hello_maker(JOINER.ref, RUN_ID)(Purpose.CONTROL, 0, 1)


def ticket(
    *addresses: str,
    run_id: str = RUN_ID,
    secret: bytes = SECRET,
    expires_at_s: float = NOW_S + 60,
    fingerprint: bytes = FINGERPRINT,
    is_once: bool = False,
) -> Ticket:
    return make_ticket(
        ticket_id=secrets.token_bytes(8),
        secret=secret,
        run_id=run_id,
        addresses=addresses,
        expires_at_s=round(expires_at_s),
        fingerprint=fingerprint,
        is_once=is_once,
    )


async def admission_by(
    given: Ticket, pause: "Patience", *, me: PeerIdentity = JOINER, certificate: x509.Certificate | None = None
) -> Admission:
    """What a joiner with this ticket and no wishes of its own learns."""
    security = stranger_security(given, "auto")
    hello = stranger_hello(me, given.run_id, given.token, certificate)
    return await ask_admission(given.addresses, hello, security=security, pause=pause, clock=pause.now_s)


async def terms_for(given: Ticket, pause: "Patience") -> RunTerms:
    return (await admission_by(given, pause)).terms


def member_security(tls: str = "auto", me: PeerIdentity = JOINER) -> Security:
    """Of a peer that was admitted."""
    return own_security(me, authority_of(RUN).issue(me.key.public_key(), 1), TERMS, tls)


def gatekeeper(*, run: RunIdentity | None = RUN, **more: object) -> Gatekeeper:
    shell = CoordinatorShell(CONFIG, Memory())
    usual = {"terms": TERMS, "now_s": lambda: NOW_S, "security": founders_security(), "coordinator": lambda: shell}
    given = usual | more
    return Gatekeeper(FOUNDER.ref, run=run, **given)  # type: ignore[arg-type]


async def echo(channel: Channel) -> None:
    frame = await channel.receive(timeout_s=5.0)
    await channel.send(FrameType.CONTROL, bytes(frame.payload), timeout_s=5.0)


@contextlib.asynccontextmanager
async def door(
    keeper: Gatekeeper | None = None,
    *,
    tls: str = "auto",
    security: Security | None = None,
    address: str = "127.0.0.1:0",
) -> AsyncIterator[Listener]:
    keeper = keeper or gatekeeper()
    async with Listener(
        address,
        accept=keeper.accept,
        routes={Purpose.ADMISSION: keeper.admit, Purpose.CONTROL: echo},
        bulk=lambda sock, _: sock.close(),
        security=security or founders_security(tls=tls),
    ) as listener:
        yield listener


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorShell]:
    """One that nobody has joined yet."""
    journal = Journal(tmp_path / "journal.sqlite", run_id=RUN_ID)
    yield CoordinatorShell(CONFIG, journal)
    journal.close()


class Patience:
    """Counts pauses of a second instead of taking them; something may happen in one."""

    def __init__(self, happens: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.num_pauses = 0
        self._happens = happens

    async def __call__(self) -> None:
        self.num_pauses += 1
        if self._happens is not None:
            await self._happens(self.num_pauses)

    def now_s(self) -> float:
        return float(self.num_pauses)


@pytest.mark.parametrize("tls", ["auto", "on"])
async def test_a_ticket_brings_the_terms_and_the_terms_open_every_other_door(tls: str) -> None:
    async with door(tls=tls) as listener:
        admission = await admission_by(ticket(listener.address), pause=Patience())
        assert admission.terms == TERMS
        channel = await connect(
            listener.address,
            hello_maker(JOINER.ref, RUN_ID)(Purpose.CONTROL, 0, 1),
            timeout_s=5.0,
            security=own_security(JOINER, admission.certificate, admission.terms, tls),
        )
        await channel.send(FrameType.CONTROL, b"hello", timeout_s=5.0)
        assert bytes((await channel.receive(timeout_s=5.0)).payload) == b"hello"
        assert channel.hello.ref == FOUNDER.ref
        channel.close()


async def test_the_largest_manifest_that_may_be_gets_through() -> None:
    terms = msgspec.structs.replace(TERMS, manifest=b"x" * (64 << 10))
    keeper = gatekeeper(terms=terms)
    async with door(keeper) as listener:
        assert await terms_for(ticket(listener.address), pause=Patience()) == terms


async def test_coordinator_that_is_away_sends_callers_to_the_next_and_refuses_nobody_for_good(
    coordinator: CoordinatorShell,
) -> None:
    coordinator.send_away("a test")
    away = gatekeeper(coordinator=lambda: coordinator)
    async with door(away) as first, door() as second:
        assert await terms_for(ticket(first.address, second.address), pause=Patience()) == TERMS
        patience = Patience()
        with pytest.raises(NobodyReachable, match="look for another one"):
            await terms_for(ticket(first.address), pause=patience)
        assert patience.num_pauses == PATIENCE_S
        with pytest.raises(HandshakeRefused) as refused:
            await connect(first.address, CONTROL, timeout_s=5.0, security=member_security())
    assert refused.value.code == ExitCode.NOBODY_REACHABLE == LATER_CODE


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"expires_at_s": NOW_S}, "expired"),
        ({"secret": b"t" * 32}, "was not made for run"),
        ({"run_id": "another-run"}, "is for run 'another-run'"),
    ],
    ids=["expired", "forged", "of another run"],
)
async def test_a_ticket_that_does_not_admit_is_refused_once_and_not_asked_again(
    bad: dict[str, object], reason: str
) -> None:
    patience = Patience()
    async with door() as listener:
        with pytest.raises(Refused, match=reason) as refused:
            await terms_for(ticket(listener.address, **bad), pause=patience)
    assert refused.value.exit_code is ExitCode.REFUSED
    assert patience.num_pauses == 0


async def test_whoever_cannot_prove_to_be_of_the_tickets_run_does_not_get_to_see_its_token() -> None:
    patience, heard = Patience(), []

    def accept(hello: Hello) -> HelloReply:
        heard.append(hello)
        return gatekeeper().accept(hello)

    keeper = gatekeeper()
    keeper.accept = accept  # type: ignore[method-assign]
    async with door(keeper, security=founders_security(ANOTHER_RUN)) as listener:
        with pytest.raises(Refused) as refused:
            await terms_for(ticket(listener.address), pause=patience)
        assert str(refused.value) == (
            f"who answers is not the run of this ticket: {listener.address} (certificate of another run); "
            "ask for a new ticket; if that does not help, compare the machines' clocks"
        )
        assert refused.value.exit_code is ExitCode.REFUSED
        with pytest.raises(Refused, match="certificate of another run"):
            await terms_for(ticket(listener.address, fingerprint=b"\0" * 32), pause=patience)
    assert heard == []
    assert patience.num_pauses == 0


async def test_an_impostor_at_one_address_does_not_keep_a_joiner_from_the_run_at_another() -> None:
    async with door(security=founders_security(ANOTHER_RUN)) as impostor, door() as listener:
        assert await terms_for(ticket(impostor.address, listener.address), Patience()) == TERMS


async def test_a_ticket_without_fingerprint_serves_only_who_wants_no_encryption() -> None:
    bare = ticket("127.0.0.1:1", fingerprint=b"")
    for tls in ("auto", "on"):
        with pytest.raises(
            TicketRefused, match=r"no fingerprint to know the run by.*; ask for a new ticket"
        ) as refused:
            stranger_security(bare, tls)
        assert refused.value.fault is TicketFault.NO_FINGERPRINT
        assert refused.value.exit_code is ExitCode.REFUSED
    assert stranger_security(bare, "off") is None
    async with door(tls="off") as listener:
        patience, hello = Patience(), stranger_hello(JOINER, RUN_ID, ticket().token)
        addresses = [listener.address]
        admission = await ask_admission(addresses, hello, security=None, pause=patience, clock=patience.now_s)
    assert admission.terms == TERMS


async def test_a_ticket_with_fingerprint_is_never_shown_unencrypted_whatever_the_joiner_wants() -> None:
    for tls in ("auto", "on", "off"):
        security = stranger_security(ticket("127.0.0.1:1"), tls)
        assert isinstance(security, TicketSecurity)
        assert security.wanted_for("127.0.0.1")


async def test_a_run_that_encrypts_everything_hears_no_unencrypted_stranger() -> None:
    patience = Patience()
    async with door(tls="on") as listener:
        hello = stranger_hello(JOINER, RUN_ID, ticket().token)
        with pytest.raises(NobodyReachable, match=r"closed in the handshake|ECONNRESET"):
            await ask_admission(
                [listener.address], hello, security=None, pause=patience, clock=patience.now_s, patience_s=1.0
            )
        assert listener.counters["not encrypted"] == 1


async def test_a_peer_that_is_not_the_coordinator_admits_nobody() -> None:
    async with door(gatekeeper(run=None)) as listener:
        with pytest.raises(Refused, match="not the coordinator"):
            await terms_for(ticket(listener.address), pause=Patience())


async def test_expiry_keeps_strangers_out_and_never_throws_a_member_out() -> None:
    keeper = gatekeeper(now_s=lambda: NOW_S + 1e9)
    async with door() as listener:
        certificate = (await admission_by(ticket(listener.address), pause=Patience())).certificate
    async with door(keeper) as listener:
        (await connect(listener.address, CONTROL, timeout_s=5.0, security=member_security())).close()
        with pytest.raises(Refused):
            await terms_for(ticket(listener.address), pause=Patience())
        # Who has been a peer of the run comes back, whatever became of its ticket.
        again = await admission_by(ticket(listener.address), Patience(), certificate=certificate)
        assert again.certificate.serial_number > certificate.serial_number
        assert key_in(again.certificate) == key_in(certificate)


async def test_a_certificate_of_another_peer_or_run_admits_nobody() -> None:
    another_run = authority_of(ANOTHER_RUN).issue(JOINER.key.public_key(), 1)
    another_peer = authority_of(RUN).issue(THIRD.key.public_key(), 1)
    wrong_name = authority_of(RUN).issue(THIRD.key.public_key(), 1, peer_id=JOINER.peer_id)
    async with door() as listener:
        old = ticket(listener.address, expires_at_s=NOW_S - 1)
        for certificate in (another_run, another_peer, wrong_name):
            with pytest.raises(Refused, match="neither ticket nor certificate admits"):
                await admission_by(old, Patience(), certificate=certificate)


async def test_a_certificate_is_given_for_nothing_but_the_key_that_asks_and_only_under_its_own_name() -> None:
    async with door() as listener:
        given = ticket(listener.address)
        security = stranger_security(given, "auto")
        honest = stranger_hello(JOINER, RUN_ID, given.token)
        request = msgspec.msgpack.decode(honest.credential, type=Request)
        theirs = msgspec.structs.replace(request, public_key=THIRD.key.public_key().public_bytes_raw())
        forged = {
            "another name": msgspec.structs.replace(honest, peer_id=THIRD.peer_id),
            "another key": msgspec.structs.replace(honest, credential=msgspec.msgpack.encode(theirs)),
            "another start": msgspec.structs.replace(honest, incarnation=Incarnation(8)),
            "no request": msgspec.structs.replace(honest, credential=given.token),
        }
        for hello in forged.values():
            with pytest.raises(HandshakeRefused, match="not signed with the key"):
                await connect(listener.address, hello, timeout_s=5.0, security=security)
        as_third = msgspec.structs.replace(
            stranger_hello(dataclasses.replace(JOINER, peer_id=THIRD.peer_id), RUN_ID, given.token)
        )
        with pytest.raises(HandshakeRefused, match="the peer id is not that of the key"):
            await connect(listener.address, as_third, timeout_s=5.0, security=security)


async def test_whoever_is_let_in_hears_where_others_are_that_have_the_text(coordinator: CoordinatorShell) -> None:
    keeper = gatekeeper(coordinator=lambda: coordinator)
    async with Listener(
        "127.0.0.1:0",
        accept=keeper.accept,
        routes={Purpose.ADMISSION: keeper.admit, Purpose.CONTROL: coordinator.serve},
        bulk=lambda sock, _: sock.close(),
        security=founders_security(),
    ) as listener:
        given, told = ticket(listener.address), Join(address="10.9.0.1:7000", manifest_digest=TERMS.digest())
        assert (await admission_by(given, Patience())).peers == ()
        channel = await connect(listener.address, CONTROL, timeout_s=5.0, security=member_security())
        await channel.send(FrameType.CONTROL, encode(told), timeout_s=5.0)
        await channel.receive(timeout_s=5.0)  # the coordinator knows it
        assert (await admission_by(given, Patience(), me=THIRD)).peers == (told.address,)
        assert (await admission_by(given, Patience())).peers == (), "nobody is named to itself"
        channel.close()


async def test_a_ticket_for_one_peer_admits_the_first_again_and_again_and_nobody_else(
    coordinator: CoordinatorShell,
) -> None:
    async with door(gatekeeper(coordinator=lambda: coordinator)) as listener:
        once = ticket(listener.address, is_once=True)
        for _ in range(2):
            await admission_by(once, Patience())
        with pytest.raises(Refused, match="for one peer and has been used"):
            await admission_by(once, Patience(), me=THIRD)
        (record,) = coordinator.doors.tickets.values()
        assert (record.ticket_id, record.used_by) == (once.ticket_id, JOINER.peer_id)
        await admission_by(ticket(listener.address), Patience(), me=THIRD)


async def test_of_two_that_come_at_once_with_a_ticket_for_one_peer_one_is_let_in(
    coordinator: CoordinatorShell,
) -> None:
    async with door(gatekeeper(coordinator=lambda: coordinator)) as listener:
        once = ticket(listener.address, is_once=True)
        asked = (admission_by(once, Patience(), me=me) for me in (JOINER, THIRD))
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Admission", "Refused"]


async def test_a_revoked_ticket_admits_nobody_but_who_was_let_in_before(coordinator: CoordinatorShell) -> None:
    async with door(gatekeeper(coordinator=lambda: coordinator)) as listener:
        given = ticket(listener.address)
        certificate = (await admission_by(given, Patience())).certificate
        revoked = RevokeTicket(ticket_id=given.ticket_id, expires_at_s=given.expires_at_s, at_s=round(NOW_S))
        assert await coordinator.order(revoked, timeout_s=5.0) is None
        with pytest.raises(Refused, match="the ticket was revoked"):
            await admission_by(given, Patience())
        await admission_by(given, Patience(), certificate=certificate)


@pytest.mark.parametrize("for_ever", [False, True], ids=["evicted", "banned"])
async def test_whoever_was_put_out_needs_a_ticket_or_gets_in_no_more(
    coordinator: CoordinatorShell, for_ever: bool
) -> None:
    security = founders_security()
    keeper = gatekeeper(coordinator=lambda: coordinator, security=security)
    async with door(keeper, security=security) as listener:
        given = ticket(listener.address)
        certificate = (await admission_by(given, Patience())).certificate
        order = PutOut(
            peer_id=JOINER.peer_id,
            incarnation=JOINER.incarnation,
            certificate=certificate.serial_number + 5,
            for_ever=for_ever,
            at_s=round(NOW_S),
        )
        assert await coordinator.order(order, timeout_s=5.0) is None
        (bar,) = coordinator.doors.bars.values()
        security.withdraw(bar.peer_id, bar.certificate)
        expired = ticket(listener.address, expires_at_s=NOW_S - 1)
        with pytest.raises(Refused, match="was banned" if for_ever else "certificate was withdrawn"):
            await admission_by(expired, Patience(), certificate=certificate)
        if for_ever:
            with pytest.raises(Refused, match="the key of this peer was banned"):
                await admission_by(given, Patience())
            with pytest.raises(Refused, match="the ticket was revoked"):
                await admission_by(given, Patience(), me=THIRD)  # who might be the same one under another key
        else:
            newer = (await admission_by(given, Patience())).certificate
            assert newer.serial_number > bar.certificate
            own = own_security(JOINER, newer, TERMS, "auto")
            (await connect(listener.address, CONTROL, timeout_s=5.0, security=own)).close()
            await admission_by(given, Patience(), me=THIRD)
        await admission_by(ticket(listener.address), Patience(), me=THIRD)


@pytest.mark.parametrize("purpose", [Purpose.CONTROL, Purpose.BULK, Purpose.STATE])
@pytest.mark.parametrize(
    "credential",
    [b"", b"x" * 32, issue_token(NEWEST_ID, SECRET, RUN_ID, 2**40), stranger_hello(JOINER, RUN_ID, b"t").credential],
    ids=["none", "noise", "token", "request"],
)
async def test_without_a_key_of_the_run_no_connection_of_it_is_accepted(purpose: Purpose, credential: bytes) -> None:
    hello = hello_maker(JOINER.ref, RUN_ID)(purpose, 0, 1)
    async with door() as listener:
        with pytest.raises(HandshakeRefused, match="no proof of the key") as refused:
            await connect(
                listener.address, msgspec.structs.replace(hello, credential=credential), timeout_s=5.0, security=None
            )
    assert refused.value.code == ExitCode.REFUSED


@pytest.mark.parametrize("tls", ["auto", "on"])
@pytest.mark.parametrize("purpose", [Purpose.CONTROL, Purpose.BULK, Purpose.STATE])
async def test_a_member_cannot_speak_as_another_one(tls: str, purpose: Purpose) -> None:
    as_third = hello_maker(THIRD.ref, RUN_ID)(purpose, 0, 1)
    async with door(tls=tls) as listener:
        with pytest.raises(HandshakeRefused, match="certificate of another peer"):
            await connect(listener.address, as_third, timeout_s=5.0, security=member_security(tls))


def test_a_certificate_is_no_ticket() -> None:
    hello = hello_maker(JOINER.ref, RUN_ID)(Purpose.ADMISSION, 0, 1)
    assert not gatekeeper().accept(hello).accepted


def test_keys_of_different_runs_and_secrets_differ() -> None:
    runs = [RunIdentity(run_id=run, secret=secret) for secret in (SECRET, b"t" * 32) for run in (RUN_ID, "demo-1")]
    keys = {authority_of(run).public_key for run in runs}
    assert len(keys) == 4
    assert all(len(key) == 32 for key in keys)


async def test_another_protocol_version_ends_with_the_exit_code_of_a_refusal() -> None:
    def accept(hello: Hello) -> HelloReply:
        return HelloReply(accepted=False, code=76, reason="protocol version 1, here 2: update one side",
                          peer_id=FOUNDER.peer_id, incarnation=FOUNDER.incarnation)  # fmt: skip

    async with Listener(
        "127.0.0.1:0",
        accept=accept,
        routes={},
        bulk=lambda sock, _: sock.close(),
        security=founders_security(),
    ) as listener:
        with pytest.raises(Refused, match="update one side") as refused:
            await terms_for(ticket(listener.address), pause=Patience())
    assert refused.value.exit_code == 5
    older = msgspec.structs.replace(CONTROL, protocol_version=PROTOCOL_VERSION + 1)
    async with door() as listener:
        with pytest.raises(HandshakeRefused, match="protocol"):
            await connect(listener.address, older, timeout_s=5.0, security=member_security())


async def test_a_reason_cannot_carry_a_strangers_control_characters_into_a_log() -> None:
    hello = msgspec.structs.replace(CONTROL, run_id="x\n\x1b[31mfounder: all is well")
    reply = gatekeeper().accept(hello)
    assert not reply.accepted
    assert reply.reason.isprintable()


async def test_nobody_at_any_address_is_told_with_every_address_and_its_cause() -> None:
    async with door() as listener:
        gone = listener.address
    patience = Patience()
    with pytest.raises(NobodyReachable) as nobody:
        await terms_for(ticket(gone, "no-address"), pause=patience)
    assert nobody.value.exit_code is ExitCode.NOBODY_REACHABLE
    assert f"{gone} (refused)" in str(nobody.value)
    assert "no-address" in str(nobody.value)
    assert patience.num_pauses == PATIENCE_S


async def test_a_coordinator_that_comes_back_within_the_joiners_patience_is_waited_for_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with contextlib.AsyncExitStack() as stack:
        async with door() as listener:
            address = listener.address

        async def comes_back(num_pauses: int) -> None:
            if num_pauses == PATIENCE_S - 1:
                await stack.enter_async_context(door(address=address))

        assert await terms_for(ticket(address), pause=Patience(comes_back)) == TERMS
    (said,) = [record.message for record in caplog.records if record.name == "isthmus.trainer.contact.joining"]
    assert said == f"waiting_for_coordinator nobody_answers_at='{address} (refused)' up_to_s={PATIENCE_S:.0f}"


@pytest.mark.parametrize(
    ("code", "num_pauses"), [(socket.EAI_NONAME, 0), (socket.EAI_AGAIN, PATIENCE_S)], ids=["no such name", "not now"]
)
async def test_a_name_that_does_not_exist_is_not_asked_again_and_a_resolver_that_is_away_is(
    monkeypatch: pytest.MonkeyPatch, code: int, num_pauses: int
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(code, "as the resolver says")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    patience = Patience()
    with pytest.raises(NobodyReachable, match="as the resolver says"):
        await terms_for(ticket("coordinator.invalid:1"), pause=patience)
    assert patience.num_pauses == num_pauses


async def test_the_second_address_of_a_ticket_is_tried_when_the_first_is_silent() -> None:
    async with door() as listener:
        gone = listener.address
    async with door() as listener:
        assert await terms_for(ticket(gone, listener.address), pause=Patience()) == TERMS


async def test_an_answer_that_cannot_be_read_is_a_refusal() -> None:
    async def babble(channel: Channel) -> None:
        await channel.send(FrameType.CONTROL, b"\xc1 no msgpack", timeout_s=5.0)

    routes = {Purpose.ADMISSION: babble}
    async with Listener(
        "127.0.0.1:0",
        accept=gatekeeper().accept,
        routes=routes,
        bulk=lambda sock, _: sock.close(),
        security=founders_security(),
    ) as listener:
        with pytest.raises(Refused, match="cannot be read"):
            await terms_for(ticket(listener.address), pause=Patience())


async def test_no_secret_is_logged_or_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = ticket("127.0.0.1:1", secret=b"t" * 32)
    async with door() as listener:
        await terms_for(ticket(listener.address), pause=Patience())
        with pytest.raises(Refused) as refused:
            await terms_for(dataclasses.replace(wrong, addresses=(listener.address,)), Patience())
    shown = f"{caplog.text} {refused.value} {TERMS!r} {wrong!r}"
    for secret in (SECRET, wrong.token, JOINER.key.private_bytes_raw()):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown


def test_the_digest_of_the_terms_sees_settings_and_text() -> None:
    others = (
        msgspec.structs.replace(TERMS, manifest=b'{"format":2}'),
        msgspec.structs.replace(TERMS, data_digest="e" * 64),
    )
    assert len({TERMS.digest(), *(other.digest() for other in others)}) == 3
    assert msgspec.structs.replace(TERMS, authorities=(b"k",)).digest() == TERMS.digest()
