# SPDX-License-Identifier: Apache-2.0
"""Addresses with several candidates: in which order they are dialled, which one counts, what is told of the rest."""

import asyncio
import contextlib
import ipaddress
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isthmus.collective import Member
from isthmus.collective.api import communicator
from isthmus.collective.core.address import (
    MAX_CANDIDATES,
    MAX_LENGTH,
    candidates_of,
    is_wildcard,
    join_address,
    join_candidates,
    split_address,
)
from isthmus.collective.errors import CollectiveError, ConnectionLost, HandshakeRefused, PeerUnreachable
from isthmus.collective.transport import Channel, Hello, HelloReply, Listener, Purpose, connect, dialling, interfaces
from isthmus.collective.transport.interfaces import gather_candidates, plain_host, sort_candidates
from isthmus.collective.transport.racing import race
from isthmus.collective.transport.wire import PROTOCOL_VERSION

OWN = tuple(map(ipaddress.ip_interface, ("10.9.0.1/24", "fd00:9::1/64")))
NOBODY = "127.0.0.1:1"


def _hello(purpose: Purpose = Purpose.CONTROL) -> Hello:
    return Hello(protocol_version=PROTOCOL_VERSION, run_id="run", purpose=purpose, peer_id="a" * 16, incarnation=1)


def _listener(
    letter: str, *, address: str = "127.0.0.1:0", accepted: bool = True, hosts: list[str] | None = None
) -> Listener:
    """A peer's door; `hosts` takes where its callers come from."""
    reply = HelloReply(
        accepted=accepted,
        code=0 if accepted else 5,
        reason="" if accepted else "no",
        peer_id=letter * 16,
        incarnation=1,
    )

    async def serve(channel: Channel) -> None:
        if hosts is not None:
            hosts.append(channel.host)

    return Listener(address, accept=lambda _: reply, routes={Purpose.CONTROL: serve}, bulk=lambda sock, _: sock.close())


# ------------------------------------------------------------------------------------------ the text


@pytest.mark.parametrize("address", ["10.9.0.1:7000", "[fd00::1]:7", "node-1.example.org:65535", "*:0"])
def test_an_address_is_taken_apart_and_put_together_again(address: str) -> None:
    assert join_address(*split_address(address)) == address


@pytest.mark.parametrize("address", ["10.9.0.1", ":7", "a:b", "a:70000", ""])
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)


def test_candidates_are_joined_each_once_and_never_too_many_or_too_long() -> None:
    several = ["a:1", "b:2", "a:1", "[::1]:3"]
    assert candidates_of(join_candidates(several)) == ("a:1", "b:2", "[::1]:3")
    assert len(candidates_of(join_candidates(f"h:{port}" for port in range(50)))) == MAX_CANDIDATES
    assert len(join_candidates(f"{'x' * 200}{number}:7000" for number in range(8))) <= MAX_LENGTH


@pytest.mark.parametrize(("host", "expected"), [("*", True), ("0.0.0.0", True), ("::", True), ("127.0.0.1", False)])
def test_a_host_that_means_every_interface_is_told(host: str, expected: bool) -> None:
    assert is_wildcard(host) is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::1"), ("fd00::1", "fd00::1"), ("name", "name")],
)
def test_a_sockets_host_is_made_plain(host: str, expected: str) -> None:
    assert plain_host(host) == expected


# ------------------------------------------------------------------------------------------ the order


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        (["192.0.2.1:1", "10.9.0.2:1", "127.0.0.1:1"], ["10.9.0.2:1", "192.0.2.1:1"]),
        (["192.0.2.1:1", "10.9.0.1:1", "127.0.0.1:1"], ["127.0.0.1:1", "10.9.0.1:1", "192.0.2.1:1"]),
        (["peer.example:1", "[fd00:9::2]:1"], ["[fd00:9::2]:1", "peer.example:1"]),
        (["127.0.0.1:1"], ["127.0.0.1:1"]),
        (["localhost:1", "10.9.0.2:1"], ["10.9.0.2:1"]),
        (["192.0.2.1:1", "198.51.100.1:1"], ["192.0.2.1:1", "198.51.100.1:1"]),
    ],
    ids=["another machine", "this machine", "a name last", "loopback alone", "its loopback", "as they come"],
)
def test_this_machine_comes_first_then_its_networks_and_another_machines_loopback_never(
    candidates: list[str], expected: list[str]
) -> None:
    assert sort_candidates(candidates, OWN) == expected


def test_a_machine_names_loopback_last_and_its_way_out_first() -> None:
    candidates = gather_candidates("*", 7)
    assert candidates[-1] == "127.0.0.1:7"
    assert all(split_address(item)[1] == 7 for item in candidates)
    assert not any(ipaddress.ip_address(split_address(item)[0]).is_link_local for item in candidates)
    assert all(":" not in split_address(item)[0] for item in gather_candidates("0.0.0.0", 7))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return
        assert candidates[0] == f"{probe.getsockname()[0]}:7"


def test_temporary_addresses_come_last_and_a_lasting_one_of_the_way_out_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a machine's addresses at most five are told: the one that is still there next week was not among them."""
    table = tmp_path / "if_inet6"
    table.write_text(
        "20010db8000500000000000000000005 03 40 00 80       d0\n"
        "20010db800050000b7023d797fa669e9 03 40 00 01       d0\n"
        "20010db80005000011112222333344ff 03 40 00 21       d0\n"
    )
    temporary = ["2001:db8:5:0:b702:3d79:7fa6:69e9", "2001:db8:5:0:1111:2222:3333:44ff"]
    own = [
        f"{temporary[1]}/64",
        f"{temporary[0]}/64",
        "172.17.0.1/16",
        "10.9.0.7/24",
        "10.9.0.1/24",
        "2001:db8:5::5/64",
    ]
    monkeypatch.setattr(interfaces, "own_interfaces", lambda: tuple(map(ipaddress.ip_interface, own)))
    ways_out = list(map(ipaddress.ip_address, ("10.9.0.1", temporary[0])))
    monkeypatch.setattr(interfaces, "_ways_out", lambda: ways_out)
    monkeypatch.setattr(interfaces, "_IPV6_ADDRESSES", table)
    found = [split_address(item)[0] for item in gather_candidates("*", 7)]
    assert found == ["10.9.0.1", "10.9.0.7", "2001:db8:5::5", "172.17.0.1", *temporary, "127.0.0.1"]
    table.unlink()
    assert split_address(gather_candidates("*", 7)[2])[0] == temporary[0], "where the system does not say"


# ------------------------------------------------------------------------------------------ the race


async def test_the_first_that_gets_there_counts_and_what_comes_later_is_let_go() -> None:
    arrived, let_go = asyncio.Event(), list[str]()

    async def attempt(way: str) -> str:
        if way == "fails":
            raise ConnectionLost("at once")
        if way == "slow":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                arrived.set()
                return "late"
        return way.upper()

    causes: dict[str, CollectiveError] = {}
    ways = ["slow", "fails", "quick", "never"]
    won = await race(ways, attempt, head_start_s=0.01, let_go=let_go.append, causes=causes)
    assert won == ("quick", "QUICK")
    assert list(causes) == ["fails"]
    await arrived.wait()
    await asyncio.sleep(0)
    assert let_go == ["late"]


async def test_of_ways_that_all_lead_nowhere_each_has_its_cause() -> None:
    async def attempt(way: str) -> str:
        raise ConnectionLost(way)

    causes: dict[str, CollectiveError] = {}
    assert await race(["a", "b"], attempt, head_start_s=60, let_go=lambda _: None, causes=causes) is None
    assert {way: str(error) for way, error in causes.items()} == {
        "a": "connection lost: a",
        "b": "connection lost: b",
    }


async def test_the_candidate_where_the_expected_peer_is_counts_though_another_one_answers_first() -> None:
    async with _listener("b") as stranger, _listener("c") as wanted:
        address = join_candidates([NOBODY, stranger.address, wanted.address])
        channel = await connect(address, _hello(), timeout_s=5, expect="c" * 16)
        assert channel.hello.peer_id == "c" * 16
        channel.close()


async def test_a_name_stands_for_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = asyncio.get_running_loop().getaddrinfo

    async def two_of_them(host: str, port: int, **more: int) -> list[object]:
        hosts = ("127.0.0.1", "::1") if host == "peer.example" else (host,)
        return [entry for one in hosts for entry in await resolve(one, port, **more)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_of_them)
    async with _listener("b", address="[::1]:0") as door:
        port = split_address(door.address)[1]
        channel = await connect(f"peer.example:{port}", _hello(), timeout_s=5)
        channel.close()


async def test_who_is_not_reached_is_told_with_every_candidate_and_its_error() -> None:
    async with _listener("b") as stranger:
        address = join_candidates([NOBODY, stranger.address])
        with pytest.raises(PeerUnreachable) as unreachable:
            await connect(address, _hello(), timeout_s=5, expect="c" * 16)
    assert unreachable.value.attempts == {NOBODY: "refused", stranger.address: "another peer answers there"}
    assert (
        str(unreachable.value) == f"nobody answers: {NOBODY} (refused), {stranger.address} (another peer answers there)"
    )
    assert not unreachable.value.is_refused


@contextlib.contextmanager
def _no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_a_descriptor_left_nobody_is_reached_and_that_is_all() -> None:
    address = join_candidates([NOBODY, "127.0.0.1:2"])
    with _no_descriptor_left(), pytest.raises(PeerUnreachable) as unreachable:
        await connect(address, _hello(), timeout_s=5)
    assert all("Too many open files" in cause for cause in unreachable.value.attempts.values())
    assert not unreachable.value.is_refused


def test_candidates_are_dialled_as_they_come_where_ones_own_addresses_are_not_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dialling._warn_of_no_order.cache_clear()
    with _no_descriptor_left():
        for _ in range(2):
            assert dialling._in_order(["192.0.2.1:1", "127.0.0.1:1", "10.9.0.2:1"]) == ["192.0.2.1:1", "10.9.0.2:1"]
    (warning,) = caplog.records
    assert warning.getMessage().startswith("own_addresses_unknown cause=")


async def test_a_no_says_more_than_silence() -> None:
    async with _listener("b", accepted=False) as door:
        with pytest.raises(HandshakeRefused, match="no"):
            await connect(join_candidates([NOBODY, door.address]), _hello(), timeout_s=5)


async def test_a_listener_on_every_interface_is_reached_over_both_versions_and_sees_plain_hosts() -> None:
    seen: list[str] = []

    async with _listener("b", address="*:0", hosts=seen) as door:
        host, port = split_address(door.address)
        assert host == "*"
        for address in (f"127.0.0.1:{port}", f"[::1]:{port}"):
            channel = await connect(address, _hello(), timeout_s=5)
            channel.close()
        async with asyncio.timeout(5):
            while len(seen) < 2:  # noqa: ASYNC110 - what sockets do has no event
                await asyncio.sleep(0)
    assert sorted(seen) == ["127.0.0.1", "::1"]


# ------------------------------------------------------------------------------------------ the direction


@pytest.mark.parametrize(("calls", "is_called"), [(1, 2), (2, 1)], ids=["the smaller id calls", "the larger id calls"])
async def test_a_peer_that_cannot_be_called_calls(new_site, calls: int, is_called: int) -> None:
    hidden, open_ = await new_site(calls), await new_site(is_called)
    nowhere = Member(hidden.me.peer_id, hidden.me.incarnation, NOBODY)
    met = await asyncio.gather(hidden.communicator.meet(open_.member), open_.communicator.meet(nowhere))
    assert met == [None, None]

    sites = sorted((hidden, open_), key=lambda site: site.peer_id)
    view = communicator.View(1, 0, b"", tuple(nowhere if site is hidden else site.member for site in sites))
    await asyncio.gather(*(site.communicator.install(view) for site in sites))
    outs = [torch.empty(100) for _ in sites]
    await asyncio.gather(*(site.mean(torch.ones(100), out=out) for site, out in zip(sites, outs, strict=True)))
    assert all(torch.equal(out, torch.ones(100)) for out in outs)


async def test_the_direction_that_was_found_is_remembered_when_a_link_is_made_anew(new_site) -> None:
    open_, hidden = await new_site(1), await new_site(2)
    nowhere = Member(hidden.me.peer_id, hidden.me.incarnation, NOBODY)
    assert await asyncio.gather(hidden.communicator.meet(open_.member), open_.communicator.meet(nowhere)) == [
        None,
        None,
    ]
    for site, other in ((hidden, open_.member), (open_, nowhere)):
        site.communicator._mesh.drop(other.ref)
    began_s = asyncio.get_running_loop().time()
    assert await asyncio.gather(hidden.communicator.meet(open_.member), open_.communicator.meet(nowhere)) == [
        None,
        None,
    ]
    assert asyncio.get_running_loop().time() - began_s < 1.4, "nobody waits for a call that never comes"
