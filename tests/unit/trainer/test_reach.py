# SPDX-License-Identifier: Apache-2.0
"""What a peer tells of where it may be reached."""

import errno
import ipaddress

import pytest

from isthmus.collective.core.address import candidates_of, split_address
from isthmus.trainer.contact import reach
from isthmus.trainer.contact.reach import Reach, reachable_at


def test_a_peer_that_listens_at_one_address_tells_that_or_what_its_operator_says() -> None:
    assert reachable_at("10.0.0.1:7000", seen_from="203.0.113.9") == "10.0.0.1:7000"
    assert reachable_at("127.0.0.1:7000", advertise="peer.example:7001") == "peer.example:7001"


def test_a_peer_that_listens_everywhere_tells_what_it_was_told_first_and_loopback_last() -> None:
    candidates = candidates_of(reachable_at("*:7000", advertise="peer.example:7001", seen_from="203.0.113.9"))
    assert candidates[0] == "peer.example:7001"
    assert candidates[-2:] == ("203.0.113.9:7000", "127.0.0.1:7000")
    assert all(not ipaddress.ip_address(split_address(item)[0]).is_loopback for item in candidates[1:-1])


@pytest.mark.parametrize("seen_from", ["127.0.0.1", "::1", "a.name", "10.0.0.1,10.0.0.2", ""])
def test_what_the_coordinator_saw_counts_if_it_is_another_machines_address(seen_from: str) -> None:
    assert reachable_at("0.0.0.0:7000", seen_from=seen_from) == reachable_at("0.0.0.0:7000")


def test_an_ipv6_address_that_was_seen_is_written_in_brackets() -> None:
    assert "[2001:db8::9]:7000" in candidates_of(reachable_at("*:7000", seen_from="2001:db8::9"))


def test_where_a_process_is_reached_follows_its_machine_and_what_coordinators_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ["10.0.0.1"]
    monkeypatch.setattr(
        reach, "gather_candidates", lambda _host, port: [f"{host}:{port}" for host in (*own, "127.0.0.1")]
    )
    here = Reach("*:7000", advertise=None, seen_from="203.0.113.9")
    assert here.first == here.now() == "10.0.0.1:7000,203.0.113.9:7000,127.0.0.1:7000"
    assert here.now("203.0.113.10") == "10.0.0.1:7000,203.0.113.10:7000,127.0.0.1:7000"
    own[:] = ["10.0.0.2"]
    assert here.now("127.0.0.1") == here.now("") == here.now() == "10.0.0.2:7000,203.0.113.10:7000,127.0.0.1:7000"
    assert here.first.startswith("10.0.0.1:7000")


def test_an_address_stays_while_the_system_does_not_say_which_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_host: str, _port: int) -> list[str]:
        raise OSError(errno.EMFILE, "too many open files")

    here = Reach("*:7000", advertise=None, seen_from=None)
    monkeypatch.setattr(reach, "gather_candidates", refuse)
    assert here.now() == here.first
