"""Who gets in, at a real door: tickets for strangers, the mesh key for everybody else, and what each refusal costs."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from collective.core.types import Incarnation, PeerId, PeerRef
from collective.errors import HandshakeRefused
from collective.transport import (
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
from collective.wire import PROTOCOL_VERSION
from elastic.dialler import LATER_CODE
from trainer.admission import (
    PATIENCE_S,
    Gatekeeper,
    RunTerms,
    ask_terms,
    hello_maker,
    member_security,
    mesh_key,
    stranger_security,
    tls_secret,
)
from trainer.errors import ExitCode, NobodyReachable, Refused
from trainer.ticket import Ticket, TicketFault, TicketRefused, issue_token, make_ticket

NOW_S = 1_000_000.0
SECRET = b"s" * 32
RUN_ID = "demo-0123abcd"
FOUNDER = PeerRef(PeerId("a" * 16), Incarnation(5))
JOINER = PeerRef(PeerId("b" * 16), Incarnation(7))
TERMS = RunTerms(
    run_id=RUN_ID,
    manifest=b'{"format":1}',
    data_digest="d" * 64,
    mesh_key=mesh_key(SECRET, RUN_ID),
    tls_secret=tls_secret(SECRET, RUN_ID),
)
FINGERPRINT = member_security(FOUNDER, TERMS, "auto").server_fingerprint
ANOTHER_FINGERPRINT = Security(FOUNDER.peer_id, b"t" * 32).server_fingerprint


def ticket(
    *addresses: str,
    run_id: str = RUN_ID,
    secret: bytes = SECRET,
    expires_at_s: float = NOW_S + 60,
    fingerprint: bytes = FINGERPRINT,
) -> Ticket:
    return make_ticket(
        secret=secret,
        run_id=run_id,
        addresses=addresses,
        expires_at_s=round(expires_at_s),
        fingerprint=fingerprint,
    )


async def terms_for(given: Ticket, pause: "Patience") -> RunTerms:
    """What a joiner with this ticket and no wishes of its own learns."""
    security = stranger_security(given, "auto")
    return await ask_terms(given, JOINER, security=security, pause=pause, clock=pause.now_s)


def gatekeeper(*, secret: bytes | None = SECRET) -> Gatekeeper:
    return Gatekeeper(FOUNDER, TERMS, secret=secret, now_s=lambda: NOW_S)


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
        security=security or member_security(FOUNDER, TERMS, tls),
    ) as listener:
        yield listener


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
        terms = await terms_for(ticket(listener.address), pause=Patience())
        assert terms == TERMS
        channel = await connect(
            listener.address,
            hello_maker(JOINER, terms)(Purpose.CONTROL),
            timeout_s=5.0,
            security=member_security(JOINER, terms, tls),
        )
        await channel.send(FrameType.CONTROL, b"hello", timeout_s=5.0)
        assert bytes((await channel.receive(timeout_s=5.0)).payload) == b"hello"
        assert channel.hello.ref == FOUNDER
        channel.close()


async def test_the_largest_manifest_that_may_be_gets_through() -> None:
    terms = msgspec.structs.replace(TERMS, manifest=b"x" * (64 << 10))
    keeper = Gatekeeper(FOUNDER, terms, secret=SECRET, now_s=lambda: NOW_S)
    async with door(keeper) as listener:
        assert await terms_for(ticket(listener.address), pause=Patience()) == terms


async def test_coordinator_that_is_away_sends_callers_to_the_next_and_refuses_nobody_for_good() -> None:
    away = Gatekeeper(FOUNDER, TERMS, secret=SECRET, now_s=lambda: NOW_S, is_away=lambda: True)
    async with door(away) as first, door() as second:
        assert await terms_for(ticket(first.address, second.address), pause=Patience()) == TERMS
        patience = Patience()
        with pytest.raises(NobodyReachable, match="look for another one"):
            await terms_for(ticket(first.address), pause=patience)
        assert patience.num_pauses == PATIENCE_S
        with pytest.raises(HandshakeRefused) as refused:
            await connect(first.address, hello_maker(JOINER, TERMS)(Purpose.CONTROL), timeout_s=5.0)
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
    async with door(keeper, security=Security(FOUNDER.peer_id, b"t" * 32)) as listener:
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
    async with door(security=Security(FOUNDER.peer_id, b"t" * 32)) as impostor, door() as listener:
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
        open_ticket = ticket(listener.address, fingerprint=b"")
        patience = Patience()
        assert await ask_terms(open_ticket, JOINER, security=None, pause=patience, clock=patience.now_s) == TERMS


async def test_a_ticket_with_fingerprint_is_never_shown_unencrypted_whatever_the_joiner_wants() -> None:
    for tls in ("auto", "on", "off"):
        security = stranger_security(ticket("127.0.0.1:1"), tls)
        assert isinstance(security, TicketSecurity)
        assert security.wanted_for("127.0.0.1")


async def test_a_run_that_encrypts_everything_hears_no_unencrypted_stranger() -> None:
    patience = Patience()
    async with door(tls="on") as listener:
        given = ticket(listener.address)
        with pytest.raises(NobodyReachable, match=r"closed in the handshake|ECONNRESET"):
            await ask_terms(given, JOINER, security=None, pause=patience, clock=patience.now_s, patience_s=1.0)
        assert listener.counters["not encrypted"] == 1


async def test_a_peer_that_is_not_the_coordinator_admits_nobody() -> None:
    async with door(gatekeeper(secret=None)) as listener:
        with pytest.raises(Refused, match="not the coordinator"):
            await terms_for(ticket(listener.address), pause=Patience())


async def test_expiry_keeps_strangers_out_and_never_throws_a_member_out() -> None:
    keeper = Gatekeeper(FOUNDER, TERMS, secret=SECRET, now_s=lambda: NOW_S + 1e9)
    async with door(keeper) as listener:
        (await connect(listener.address, hello_maker(JOINER, TERMS)(Purpose.CONTROL), timeout_s=5.0)).close()
        with pytest.raises(Refused):
            await terms_for(ticket(listener.address), pause=Patience())


@pytest.mark.parametrize("purpose", [Purpose.CONTROL, Purpose.BULK, Purpose.STATE])
@pytest.mark.parametrize("credential", [b"", b"x" * 32, TERMS.mesh_key[:-1], issue_token(SECRET, RUN_ID, 2**40)])
def test_without_the_mesh_key_no_connection_of_the_run_is_accepted(purpose: Purpose, credential: bytes) -> None:
    hello = msgspec.structs.replace(hello_maker(JOINER, TERMS)(purpose), credential=credential)
    reply = gatekeeper().accept(hello)
    assert (reply.accepted, reply.code) == (False, ExitCode.REFUSED)


def test_the_mesh_key_is_no_ticket() -> None:
    assert not gatekeeper().accept(hello_maker(JOINER, TERMS)(Purpose.ADMISSION)).accepted


def test_keys_of_different_runs_and_secrets_differ() -> None:
    keys = {
        derive(secret, run)
        for derive in (mesh_key, tls_secret)
        for secret in (SECRET, b"t" * 32)
        for run in (RUN_ID, "demo-0123abce")
    }
    assert len(keys) == 8
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
        security=member_security(FOUNDER, TERMS, "auto"),
    ) as listener:
        with pytest.raises(Refused, match="update one side") as refused:
            await terms_for(ticket(listener.address), pause=Patience())
    assert refused.value.exit_code == 5
    older = msgspec.structs.replace(hello_maker(JOINER, TERMS)(Purpose.CONTROL), protocol_version=PROTOCOL_VERSION + 1)
    async with door() as listener:
        with pytest.raises(HandshakeRefused, match="protocol"):
            await connect(listener.address, older, timeout_s=5.0)


async def test_a_reason_cannot_carry_a_strangers_control_characters_into_a_log() -> None:
    hello = msgspec.structs.replace(
        hello_maker(JOINER, TERMS)(Purpose.CONTROL), run_id="x\n\x1b[31mfounder: all is well"
    )
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
    (said,) = [record.message for record in caplog.records if record.name == "trainer.admission"]
    assert said == f"waiting_for_coordinator nobody_answers_at='{address} (refused)' up_to_s=30"


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
        security=member_security(FOUNDER, TERMS, "auto"),
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
    for secret in (SECRET, TERMS.mesh_key, TERMS.tls_secret, wrong.token):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown


def test_the_digest_of_the_terms_sees_settings_and_text() -> None:
    others = (
        msgspec.structs.replace(TERMS, manifest=b'{"format":2}'),
        msgspec.structs.replace(TERMS, data_digest="e" * 64),
    )
    assert len({TERMS.digest(), *(other.digest() for other in others)}) == 3
    assert msgspec.structs.replace(TERMS, mesh_key=b"k" * 32).digest() == TERMS.digest()
