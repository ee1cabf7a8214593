# SPDX-License-Identifier: Apache-2.0
"""The doctor at a real door: what it learns with a ticket, what that costs, and what nobody can make of it."""

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.collective.core.types import Incarnation, Member
from isthmus.collective.errors import HandshakeRefused
from isthmus.collective.transport import Channel, Listener, Purpose, Security, SocketOptions, connect
from isthmus.collective.transport.certificates import certificate_to_bytes, peer_id_of_key
from isthmus.collective.transport.interfaces import gather_candidates
from isthmus.collective.transport.link import Caps
from isthmus.collective.transport.sockets import bind
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.records import Record
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.trainer.contact.admission import Gatekeeper, RunTerms, authority_of, hello_maker, own_security
from isthmus.trainer.contact.identity import PeerIdentity, RunIdentity
from isthmus.trainer.contact.joining import PATIENCE_S, ask_admission, stranger_hello, stranger_security
from isthmus.trainer.contact.ticket import NEWEST_ID, Ticket, make_ticket
from isthmus.trainer.doctor.callback import CallBack, answering
from isthmus.trainer.doctor.messages import REPLIES, Attempt, Busy, Call, Called, hear, say
from isthmus.trainer.doctor.path import Path, TurnRefused, Unreached, reach
from isthmus.trainer.doctor.service import DoctorService, Surroundings
from isthmus.trainer.errors import leaves
from tests.unit.elastic.machines import KEYS

NOW_S = 1_000_000.0
RUN = RunIdentity(run_id="demo-0123abcd", secret=b"s" * 32)
AUTHORITY = authority_of(RUN)
TERMS = RunTerms(
    run_id=RUN.run_id,
    manifest=b'{"format":1}',
    data_digest="d" * 64,
    authorities=(certificate_to_bytes(AUTHORITY.certificate),),
)
CONFIG = CoordinatorConfig(manifest_digest=TERMS.digest(), sealer=KEYS.of_the_run, outer_steps=9)
NONCE = b"n" * 16


def identity(seed: bytes) -> PeerIdentity:
    key = Ed25519PrivateKey.from_private_bytes(seed * 32)
    return PeerIdentity(
        peer_id=peer_id_of_key(key.public_key().public_bytes_raw()), incarnation=Incarnation(1), key=key
    )


FOUNDER, MEMBER = identity(b"1"), identity(b"2")


def security_of(me: PeerIdentity) -> Security:
    return own_security(me, AUTHORITY.issue(me.key.public_key(), 1), TERMS, "auto")


class Memory:
    """A journal for whom nothing has to last."""

    is_quick = True

    def append(self, record: Record) -> int:
        return 0

    def replay(self) -> list[Record]:
        return []

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Door:
    listener: Listener
    shell: CoordinatorShell

    def ticket(self, *, lifetime_s: float = 60, is_once: bool = False, secret: bytes = RUN.secret) -> Ticket:
        return make_ticket(
            ticket_id=NEWEST_ID,
            secret=secret,
            run_id=RUN.run_id,
            addresses=[self.listener.address],
            expires_at_s=round(NOW_S + lifetime_s),
            fingerprint=security_of(FOUNDER).server_fingerprint,
            is_once=is_once,
        )

    @contextlib.asynccontextmanager
    async def path(self, ticket: Ticket | None = None) -> AsyncIterator[Path]:
        given = ticket or self.ticket()
        async with reach(given, stranger_security(given, "auto"), Caps()) as path:
            yield path


@contextlib.asynccontextmanager
async def door(
    *, caps: Caps | None = None, members: Sequence[Member] = (), call_back: CallBack | None = None
) -> AsyncIterator[Door]:
    shell, caps = CoordinatorShell(CONFIG, Memory()), caps or Caps()
    keeper = Gatekeeper(
        FOUNDER.ref,
        TERMS,
        security=security_of(FOUNDER),
        run=RUN,
        now_s=lambda: NOW_S,
        coordinator=lambda: shell,
    )

    async def dial(member: Member) -> Channel:
        hello = hello_maker(FOUNDER.ref, RUN.run_id)(Purpose.DIAL_BACK, 0, 1)
        return await connect(member.address, hello, timeout_s=5, security=security_of(FOUNDER), expect=member.peer_id)

    async def quiet() -> None:
        pass

    service = DoctorService(
        Surroundings(
            me=FOUNDER.peer_id,
            terms=TERMS,
            version="0.1.0",
            now_s=lambda: time.time_ns() / 1e9 + 100,
            members=lambda: tuple(members),
            dial=dial,
            quiet=quiet,
            upload=caps.upload,
            download=caps.download,
        ),
        call_back or CallBack(),
    )
    async with Listener(
        "127.0.0.1:0",
        accept=keeper.accept,
        routes={Purpose.ADMISSION: keeper.admit, Purpose.DOCTOR: service.serve},
        bulk=lambda sock, _: sock.close(),
        security=security_of(FOUNDER),
    ) as listener:
        yield Door(listener, shell)


@contextlib.asynccontextmanager
async def a_member() -> AsyncIterator[Member]:
    """Its port, which serves peers only."""
    security = security_of(MEMBER)
    keeper = Gatekeeper(MEMBER.ref, TERMS, security=security, run=None, now_s=lambda: NOW_S)
    async with Listener(
        "127.0.0.1:0",
        accept=keeper.accept,
        routes={Purpose.DIAL_BACK: CallBack().serve},
        bulk=lambda sock, _: sock.close(),
        security=security,
    ) as listener:
        yield Member(MEMBER.peer_id, MEMBER.incarnation, listener.address)


def bound() -> socket.socket:
    sock = bind("127.0.0.1:0", SocketOptions())
    sock.listen()
    return sock


def address_of(sock: socket.socket) -> str:
    return f"127.0.0.1:{sock.getsockname()[1]}"


# ------------------------------------------------------------------------------------------------ with a ticket


async def test_who_has_a_ticket_learns_what_a_joiner_would_and_what_time_it_is() -> None:
    async with door() as here, here.path() as path:
        facts, trip = await path.facts(), await path.trip()
    assert (facts.manifest, facts.data_digest, facts.seen_from) == (TERMS.manifest, TERMS.data_digest, "127.0.0.1")
    assert trip.ahead_s == pytest.approx(100, abs=trip.shortest_s + 0.01)
    assert 0 < trip.shortest_s <= trip.longest_s


async def test_the_doctor_does_not_use_up_a_ticket_that_is_for_one_peer() -> None:
    async with door() as here:
        running = asyncio.ensure_future(here.shell.run())
        given = here.ticket(is_once=True)
        for _ in range(2):
            async with here.path(given) as path:
                await path.facts()
        hello = stranger_hello(MEMBER, given.run_id, given.token)
        await ask_admission(
            given.addresses,
            hello,
            security=stranger_security(given, "auto"),
            pause=lambda: asyncio.sleep(0.01),
            clock=time.monotonic,
            patience_s=PATIENCE_S,
        )
        with pytest.raises(Unreached) as refused:
            async with here.path(given):
                pass
        running.cancel()
        await asyncio.wait([running])
    (cause,) = refused.value.causes.values()
    assert isinstance(cause, HandshakeRefused)


@pytest.mark.parametrize("wrong", [{"lifetime_s": -3600}, {"secret": b"x" * 32}], ids=["expired", "forged"])
async def test_a_ticket_that_admits_nobody_opens_nothing_to_the_doctor_either(wrong: dict[str, object]) -> None:
    async with door() as here:
        with pytest.raises(Unreached) as refused:
            async with here.path(here.ticket(**wrong)):  # type: ignore[arg-type]
                pass
    (cause,) = refused.value.causes.values()
    assert isinstance(cause, HandshakeRefused)
    assert "ticket" in cause.reason


# --------------------------------------------------------------------------------------------------- transfers


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_rates_are_those_of_the_coordinators_caps(num_streams: int) -> None:
    caps = Caps(upload=1e6, download=0.5e6)
    down = up = 0.0
    for _ in range(4):  # a busy machine makes both ends wait, and nothing makes them faster
        async with door(caps=caps) as here, here.path() as path:
            down = max(down, (await path.download(num_streams)).bytes_per_s)
            up = max(up, (await path.upload(num_streams)).bytes_per_s)
        if down > 0.85e6 and up > 0.425e6:
            break
    assert down == pytest.approx(1e6, rel=0.15)
    assert up == pytest.approx(0.5e6, rel=0.15)


async def test_a_gentle_transfer_stays_below_what_it_is_told() -> None:
    async with door() as here, here.path() as path:
        down = await path.download(1, most_bytes_per_s=0.4e6)
        up = await path.upload(1, most_bytes_per_s=0.3e6)
    assert 0 < down.bytes_per_s < 1.15 * 0.4e6
    assert 0 < up.bytes_per_s < 1.15 * 0.3e6
    assert min(up.sent_nbytes, down.sent_nbytes) > 0


async def test_one_asker_measures_at_a_time_and_the_next_one_waits() -> None:
    async with door(caps=Caps(upload=1e6)) as here, here.path() as one, here.path() as other:
        began_s = time.monotonic()
        first, second = await asyncio.gather(one.download(1), other.download(1))
    assert time.monotonic() - began_s > 3.9
    for down in (first, second):  # each had the cap to itself for most of its time, on a busy machine too
        assert 0.6e6 < down.bytes_per_s < 1.15e6


async def test_too_many_transfers_are_told_to_come_later() -> None:
    async with door(caps=Caps(upload=1e6)) as here:
        refused = 0
        for _ in range(6):  # eight streams each, more than wait for their turn
            async with contextlib.AsyncExitStack() as stack:
                paths = [await stack.enter_async_context(here.path()) for _ in range(4)]
                results = await asyncio.gather(*(path.download(8) for path in paths), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            refused += len(errors)
            assert all(isinstance(leaf, TurnRefused) for error in errors for leaf in leaves(error))
            if refused:
                break
        assert 0 < refused < 24


# -------------------------------------------------------------------------------------------------- dialling back


async def test_the_coordinator_and_a_member_call_the_listener_that_says_the_nonce() -> None:
    async with a_member() as member, door(members=[member]) as here, here.path() as path:
        sock = bound()
        address = address_of(sock)
        async with answering(sock) as nonce:
            answer = await path.called_at([address], nonce)
        assert answer.coordinator.attempts == (Attempt(address, None),)
        assert answer.member is not None
        assert (answer.member.peer_id, answer.member.attempts) == (MEMBER.peer_id, (Attempt(address, None),))
        assert await path.doubt_member(member.address, MEMBER.peer_id) is None
        assert "certificate of another peer" in str(await path.doubt_member(here.listener.address, MEMBER.peer_id))


async def test_a_member_that_cannot_be_asked_is_passed_over() -> None:
    with bound() as closed:
        nowhere = address_of(closed)
    gone = Member(identity(b"3").peer_id, Incarnation(1), nowhere)
    async with (
        a_member() as member,
        door(members=[gone, member]) as here,
        here.path() as path,
        answering(bound()) as nonce,
    ):
        answer = await path.called_at([nowhere], nonce)
    assert answer.num_others == 2
    assert answer.member is not None
    assert answer.member.peer_id == MEMBER.peer_id


async def test_a_stranger_cannot_make_a_member_dial() -> None:
    async with a_member() as member, door() as here:
        hello = hello_maker(identity(b"4").ref, RUN.run_id)(Purpose.DIAL_BACK, 0, 1)
        ticket = here.ticket()
        with pytest.raises(HandshakeRefused, match="not safe"):
            await connect(member.address, hello, timeout_s=5, security=stranger_security(ticket, "auto"))


async def test_only_who_says_the_nonce_is_our_listener_and_nothing_is_said_to_anybody_else() -> None:
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail ESMTP\r\n")
        heard.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = address_of(server.sockets[0])
        called = await CallBack().call([address], NONCE, asker="127.0.0.1")
        assert await asyncio.wait_for(heard, 5) == b""
    assert called == Called((Attempt(address, "somebody else answers there"),))


SHORT_CALL_S = 0.4


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.trainer.doctor.callback.CALL_S", SHORT_CALL_S)


async def test_of_a_third_machine_nobody_learns_whether_a_port_is_open_or_closed(short_calls: None) -> None:
    host = gather_candidates("0.0.0.0", 1)[0].rpartition(":")[0]
    if host.startswith("127."):
        pytest.skip("this machine has loopback only")
    with socket.create_server((host, 0)) as open_one, socket.create_server((host, 0)) as closing:
        opened, closed = (f"{host}:{sock.getsockname()[1]}" for sock in (open_one, closing))
        closing.close()
        answers, took_s = [], []
        for address in (opened, closed):
            began_s = time.monotonic()
            answers.append(await CallBack().call([address], NONCE, asker="198.51.100.9"))
            took_s.append(time.monotonic() - began_s)
        own = await CallBack().call([closed], NONCE, asker=host)
    assert [answer.attempts[0].cause for answer in answers if answer is not None] == ["no answer", "no answer"]
    assert min(took_s) >= SHORT_CALL_S - 0.01
    assert own is not None
    assert own.attempts[0].cause == "refused"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:22",
        "[::1]:22",
        "169.254.169.254:80",
        "[fe80::1]:80",
        "224.0.0.1:80",
        "0.0.0.0:80",
        "name.org:80",
        "x",
    ],
)
async def test_some_addresses_are_dialled_for_nobody_from_outside(address: str) -> None:
    called = await CallBack().call([address], NONCE, asker="198.51.100.9")
    assert called is not None
    assert str(called.attempts[0].cause).startswith("not ")


async def test_dials_have_a_budget_whoever_asks() -> None:
    with bound() as closed:
        address = address_of(closed)
    call_back = CallBack()
    answers = [await call_back.call([address] * 8, NONCE, asker="127.0.0.1") for _ in range(4)]
    assert [answer is None for answer in answers] == [False, False, False, True]


async def test_a_member_says_no_more_than_whether_our_listener_answers(short_calls: None) -> None:
    """A peer of the run that is no coordinator could ask as well."""
    host = gather_candidates("0.0.0.0", 1)[0].rpartition(":")[0]
    if host.startswith("127."):
        pytest.skip("this machine has loopback only")
    async with a_member() as member:
        hello = hello_maker(FOUNDER.ref, RUN.run_id)(Purpose.DIAL_BACK, 0, 1)
        channel = await connect(member.address, hello, timeout_s=5, security=security_of(FOUNDER))
        with contextlib.closing(channel):
            await say(channel, Call((f"{host}:9",), NONCE), timeout_s=5)
            answer = await hear(channel, REPLIES, timeout_s=10)
    assert not isinstance(answer, Busy)
    assert answer == Called((Attempt(f"{host}:9", "no answer"),))
