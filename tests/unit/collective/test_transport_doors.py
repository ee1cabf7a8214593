# SPDX-License-Identifier: Apache-2.0
"""The door of a peer: who gets in, what becomes of those who do not, and what a channel promises."""

import asyncio
import contextlib
import socket

import msgspec
import pytest

from isthmus.collective.core.types import Incarnation, PeerId
from isthmus.collective.errors import (
    AddressInUse,
    ConnectionLost,
    DeadlineExceeded,
    HandshakeRefused,
    PeerUnreachable,
    RemoteProtocolError,
)
from isthmus.collective.transport import Channel, FrameType, Hello, HelloReply, Listener, Purpose, connect
from isthmus.collective.transport.accept_limit import NO_PLACE_FOR_ADDRESS
from isthmus.collective.transport.hello import MAX_CREDENTIAL_NBYTES
from isthmus.collective.transport.wire import PROTOCOL_VERSION, Header, pack

SERVER, CLIENT = PeerId("5" * 16), PeerId("c" * 16)


def hello(purpose=Purpose.CONTROL, version=PROTOCOL_VERSION):
    return Hello(protocol_version=version, run_id="run", purpose=purpose, peer_id=CLIENT, incarnation=Incarnation(7))


def reply(accepted=True, code=0, reason=""):
    return HelloReply(accepted=accepted, code=code, reason=reason, peer_id=SERVER, incarnation=Incarnation(3))


async def echo(channel: Channel):
    while True:
        frame = await channel.receive(timeout_s=5)
        await channel.send(frame.type, frame.payload, chunk=frame.chunk, timeout_s=5)


def listener(answer=None, **more):
    return Listener(
        "127.0.0.1:0",
        accept=lambda _: answer or reply(),
        routes={Purpose.CONTROL: echo, Purpose.STATE: echo},
        bulk=lambda sock, _: sock.close(),
        **more,
    )


async def talk_raw(address, data):
    """Send bytes as a stranger and wait until the other side closes."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def send_many(channel, count, timeout_s):
    for _ in range(count):
        await channel.send(FrameType.STATE_CHUNK, bytes(4 << 20), timeout_s=timeout_s)


async def works(address):
    with contextlib.closing(await connect(address, hello(), timeout_s=5)) as channel:
        await channel.send(FrameType.CONTROL, b"still there?", timeout_s=5)
        return bytes((await channel.receive(timeout_s=5)).payload) == b"still there?"


async def test_a_frame_goes_there_and_back_and_both_sides_know_each_other():
    async with listener() as door:
        with contextlib.closing(await connect(door.address, hello(), timeout_s=5)) as channel:
            assert (channel.hello.peer_id, channel.hello.incarnation) == (SERVER, 3)
            await channel.send(FrameType.CONTROL, b"x" * 200_000, chunk=9, timeout_s=5)
            frame = await channel.receive(timeout_s=5)
            assert (frame.type, bytes(frame.payload), frame.chunk) == (FrameType.CONTROL, b"x" * 200_000, 9)


async def test_state_chunks_land_in_the_memory_that_was_named():
    async with listener() as door:
        with contextlib.closing(await connect(door.address, hello(Purpose.STATE), timeout_s=5)) as channel:
            payload = bytes(range(256)) * 8192
            await channel.send(FrameType.STATE_CHUNK, payload, chunk=4, timeout_s=5)
            place = bytearray(len(payload))
            named = []

            def into(frame_type, chunk, nbytes):
                named.append((frame_type, chunk, nbytes))
                return memoryview(place)

            await channel.receive(timeout_s=5, into=into)
            assert place == payload
            assert named == [(FrameType.STATE_CHUNK, 4, len(payload))]


async def test_a_chunk_of_another_length_than_its_place_breaks_the_channel():
    async with listener() as door:
        with contextlib.closing(await connect(door.address, hello(Purpose.STATE), timeout_s=5)) as channel:
            await channel.send(FrameType.STATE_CHUNK, b"12345", timeout_s=5)
            with pytest.raises(RemoteProtocolError, match="another length"):
                await channel.receive(timeout_s=5, into=lambda *_: memoryview(bytearray(4)))
            assert channel.closed


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(range(256)) * 4, "wrong magic"),
        (b"GET / HTTP/1.1\r\nHost: somewhere.example\r\nAccept: */*\r\n\r\n", "wrong magic"),
        (b"\0" * 48, "wrong magic"),
        (pack(Header(type=FrameType.CONTROL, payload_nbytes=2), b"hi") + b"hi", "frame type not allowed here"),
        (pack(Header(type=FrameType.HELLO, payload_nbytes=4097)), "payload too long"),
        (pack(Header(type=FrameType.HELLO, payload_nbytes=3), b"abc") + b"abX", "checksum does not fit"),
        (pack(Header(type=FrameType.HELLO, payload_nbytes=3), b"abc") + b"abc", "malformed Hello"),
        (pack(Header(type=FrameType.HELLO)), "malformed Hello"),
    ],
    ids=["random", "http", "zeros", "data first", "too long", "checksum", "no msgpack", "empty"],
)
async def test_whoever_sends_no_hello_is_closed_and_told_of_and_others_go_on(data, reason, caplog):
    async with listener() as door:
        with contextlib.closing(await connect(door.address, hello(), timeout_s=5)) as friend:
            await talk_raw(door.address, data)
            assert door.counters == {reason: 1}
            await friend.send(FrameType.CONTROL, b"me too", timeout_s=5)
            assert bytes((await friend.receive(timeout_s=5)).payload) == b"me too"
        assert await works(door.address)
        await talk_raw(door.address, data)
        assert door.counters == {reason: 2}
    lines = [record.getMessage() for record in caplog.records if "connection_ended" in record.getMessage()]
    assert lines == [f"connection_ended host='127.0.0.1' reason={reason!r} so_far=1"]


MALFORMED = {
    "unknown field": {"admin": True},
    "negative incarnation": {"incarnation": -1},
    "huge incarnation": {"incarnation": 2**63},
    "no peer id": {"peer_id": "../../etc/passwd"},
    "long credential": {"credential": b"x" * (MAX_CREDENTIAL_NBYTES + 1)},
    "unknown purpose": {"purpose": "root"},
    "stream out of range": {"stream": 64},
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_hello_with_a_bad_field_is_refused(change):
    payload = msgspec.msgpack.encode(msgspec.to_builtins(hello(), builtin_types=(bytes,)) | change)
    async with listener() as door:
        await talk_raw(door.address, pack(Header(type=FrameType.HELLO, payload_nbytes=len(payload)), payload) + payload)
        assert door.counters == {"malformed Hello": 1}


async def test_deep_nesting_and_bad_text_are_malformed_too():
    async with listener() as door:
        for payload in (b"\x91" * 4000, b"\x81\xa3\xff\xfe\xfd\x01"):
            header = pack(Header(type=FrameType.HELLO, payload_nbytes=len(payload)), payload)
            await talk_raw(door.address, header + payload)
        assert door.counters == {"malformed Hello": 2}


async def test_silence_is_closed_after_its_deadline():
    async with listener(hello_timeout_s=0.05) as door:
        await talk_raw(door.address, b"")
        assert door.counters == {"no hello in time": 1}
        assert await works(door.address)


async def test_a_peer_that_hangs_up_in_mid_hello_is_counted():
    async with listener() as door:
        host, port = door.address.split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"IS")
        assert await works(door.address)
        assert door.counters == {"closed before hello": 1}


async def test_too_many_strangers_are_turned_away_and_come_back_later():
    async with listener(max_unknown=4, hello_timeout_s=0.3) as door:
        await asyncio.gather(*(talk_raw(door.address, b"") for _ in range(5)))
        assert door.counters == {NO_PLACE_FOR_ADDRESS: 3, "no hello in time": 2}
        assert await works(door.address)


async def shake_hands_from(source, address):
    """Seconds that a hello from this address of this machine takes to be accepted."""
    loop = asyncio.get_running_loop()
    started, payload = loop.time(), msgspec.msgpack.encode(hello())
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    writer.write(pack(Header(type=FrameType.HELLO, payload_nbytes=len(payload)), payload) + payload)
    answered = await reader.read(1)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert answered, "it was turned away"
    return loop.time() - started


async def test_a_flood_from_one_address_leaves_places_for_another():
    async with listener() as door, contextlib.AsyncExitStack() as flood:
        host, port = door.address.split(":")
        for _ in range(200):  # far more than there are places, and each says nothing until its deadline
            _, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.1", 0))
            flood.callback(writer.close)
        assert await shake_hands_from("127.0.0.2", door.address) < 1
        assert door.counters == {NO_PLACE_FOR_ADDRESS: 200 - 64}


async def test_a_refusal_carries_code_and_reason():
    async with listener(reply(False, 77, "another run")) as door:
        with pytest.raises(HandshakeRefused, match="another run") as refused:
            await connect(door.address, hello(), timeout_s=5)
        assert refused.value.code == 77


async def test_another_protocol_version_is_refused_with_a_reason():
    async with listener() as door:
        with pytest.raises(HandshakeRefused, match="update one side") as refused:
            await connect(door.address, hello(version=PROTOCOL_VERSION + 1), timeout_s=5)
        assert refused.value.code == 5


async def test_nobody_there_is_peer_unreachable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(PeerUnreachable) as unreachable:
            await connect(address, hello(), timeout_s=5)
    assert (unreachable.value.address, unreachable.value.cause) == (address, "refused")


async def test_a_port_that_is_taken_is_address_in_use():
    async with listener() as door:
        other = Listener(door.address, accept=lambda _: reply(), routes={}, bulk=lambda sock, _: sock.close())
        with pytest.raises(AddressInUse, match=door.address):
            await other.start()


async def test_a_receive_without_frames_ends_at_its_deadline_and_can_be_repeated():
    async with listener() as door:
        with contextlib.closing(await connect(door.address, hello(), timeout_s=5)) as channel:
            with pytest.raises(DeadlineExceeded):
                await channel.receive(timeout_s=0.01)
            await channel.send(FrameType.CONTROL, b"now", timeout_s=5)
            assert bytes((await channel.receive(timeout_s=5)).payload) == b"now"


async def test_a_send_that_nobody_reads_ends_at_its_deadline_and_closes():
    stopped = asyncio.Event()

    async def never_read(_: Channel):
        await stopped.wait()

    door = Listener(
        "127.0.0.1:0", accept=lambda _: reply(), routes={Purpose.STATE: never_read}, bulk=lambda sock, _: sock.close()
    )
    async with door:
        channel = await connect(door.address, hello(Purpose.STATE), timeout_s=5)
        with pytest.raises(DeadlineExceeded):
            await send_many(channel, 64, timeout_s=0.2)
        assert channel.closed
        with pytest.raises(ConnectionLost):
            await channel.send(FrameType.STATE_CHUNK, b"", timeout_s=0.2)
        stopped.set()


async def test_closing_wakes_whoever_waits_on_either_side():
    async with listener() as door:
        channel = await connect(door.address, hello(), timeout_s=5)
        waiting = asyncio.ensure_future(channel.receive(timeout_s=5))
        await asyncio.sleep(0)
        channel.close()
        with pytest.raises(ConnectionLost):
            await waiting


async def test_a_handler_that_fails_does_not_take_the_listener_with_it():
    async def fail(_: Channel):
        raise KeyError("bug")

    door = Listener(
        "127.0.0.1:0",
        accept=lambda _: reply(),
        routes={Purpose.CONTROL: fail, Purpose.STATE: echo},
        bulk=lambda sock, _: sock.close(),
    )
    async with door:
        channel = await connect(door.address, hello(), timeout_s=5)
        with pytest.raises(ConnectionLost):
            await channel.receive(timeout_s=5)
        with contextlib.closing(await connect(door.address, hello(Purpose.STATE), timeout_s=5)) as channel:
            await channel.send(FrameType.STATE_REQUEST, b"?", timeout_s=5)
            assert bytes((await channel.receive(timeout_s=5)).payload) == b"?"
        assert door.counters == {"handler failed": 1}


async def test_address_that_is_only_taken_refuses_callers_until_the_door_opens():
    door = listener()
    door.bind()
    with pytest.raises(PeerUnreachable) as refused:
        await connect(door.address, hello(), timeout_s=5)
    assert refused.value.cause == "refused"
    address = door.address
    await door.start()
    assert door.address == address
    channel = await connect(address, hello(), timeout_s=5)
    channel.close()
    await door.close()


async def test_door_that_never_opened_lets_its_address_go():
    door = listener()
    door.bind()
    await door.close()
    async with Listener(
        door.address, accept=lambda _: reply(), routes={}, bulk=lambda sock, _: sock.close()
    ) as another:
        assert another.address == door.address


async def test_of_two_that_took_an_address_the_second_to_open_is_told():
    first = listener()
    first.bind()
    second = Listener(first.address, accept=lambda _: reply(), routes={}, bulk=lambda sock, _: sock.close())
    second.bind()  # the system allows it as long as nobody listens
    await first.start()
    with pytest.raises(AddressInUse):
        await second.start()
    await second.close()
    await first.close()


async def test_caller_that_comes_in_the_moment_of_closing_is_no_error():
    raised = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(context))
    door = listener()
    await door.start()
    assert await works(door.address)
    host, port = door.address.split(":")
    with socket.create_connection((host, int(port))) as sock:  # the loop hears of it in the turn in which it closes
        await asyncio.ensure_future(door.close())
        assert raised == []
        sock.settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""


@pytest.mark.timeout(20)
async def test_an_address_that_the_system_has_taken_away_does_not_stop_all_else():
    # Found before: accept failed at once, again and again, and nothing else in the process got a turn.
    async with listener() as door:
        door._sock.shutdown(socket.SHUT_RDWR)  # as `ss -K` does
        await asyncio.sleep(0.05)
        assert door.counters["broken before accept"] == 1


async def test_one_peer_cannot_take_all_descriptors_whatever_starts_it_names():
    # Found before: a valid hello costs nothing, so a member could hold as many connections as there are descriptors.
    async with listener() as door, contextlib.AsyncExitStack() as stack:

        async def call(number, purpose=Purpose.CONTROL):
            start = msgspec.structs.replace(hello(purpose), incarnation=Incarnation(number))
            return stack.enter_context(contextlib.closing(await connect(door.address, start, timeout_s=5)))

        first = [await call(number) for number in range(80)]
        with pytest.raises(ConnectionLost):
            await first[-1].receive(timeout_s=5)
        assert door.counters == {"too many connections of one peer": 16}
        for held in (first[0], await call(0, Purpose.STATE)):
            await held.send(FrameType.CONTROL if held is first[0] else FrameType.STATE_CHUNK, b"there?", timeout_s=5)
            assert bytes((await held.receive(timeout_s=5)).payload) == b"there?"
        first[0].close()
        await asyncio.sleep(0.1)
        assert await works(door.address)


async def test_connections_of_who_is_put_out_end_but_where_it_is_told_why():
    async with listener() as door:
        control = await connect(door.address, hello(Purpose.CONTROL), timeout_s=5)
        state = await connect(door.address, hello(Purpose.STATE), timeout_s=5)
        for channel, kind in ((control, FrameType.CONTROL), (state, FrameType.STATE_CHUNK)):
            await channel.send(kind, b"there?", timeout_s=5)
            await channel.receive(timeout_s=5)
        door.put_out(SERVER)
        door.put_out(CLIENT)
        with pytest.raises(ConnectionLost):
            await state.receive(timeout_s=5)
        await control.send(FrameType.CONTROL, b"still?", timeout_s=5)
        assert bytes((await control.receive(timeout_s=5)).payload) == b"still?"
        control.close()
