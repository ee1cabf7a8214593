# SPDX-License-Identifier: Apache-2.0
"""What people and programs read of the doctor's findings, and what it makes of measurements."""

import json

import jsonschema
import msgspec
import pytest

from isthmus.collective.errors import (
    CollectiveError,
    ConnectionLost,
    DeadlineExceeded,
    HandshakeRefused,
    PeerUnreachable,
    SecurityRefused,
)
from isthmus.collective.transport.security import ANOTHER_RUN
from isthmus.elastic.shell.dialler import LATER_CODE
from isthmus.trainer.contact.ticket import NEWEST_ID, Ticket, issue_token
from isthmus.trainer.doctor import network
from isthmus.trainer.doctor.messages import Attempt, Called, CalledByBoth, MemberCalled
from isthmus.trainer.doctor.path import Transfer, Trip
from isthmus.trainer.doctor.report import Check, fail, ok, render_check, report_of, warn
from isthmus.trainer.doctor.transfer import WINDOW_S, moved_of, rate_of, windows_of

NOW_S = 1_800_000_000
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["schema", "ok", "checks"],
    "properties": {
        "schema": {"const": "isthmus.doctor/1"},
        "ok": {"type": "boolean"},
        "checks": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "level", "text", "cure", "facts"],
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z_]+$"},
                    "level": {"enum": ["ok", "warn", "fail"]},
                    "text": {"type": "string", "minLength": 1},
                    "cure": {"type": ["string", "null"]},
                    "facts": {
                        "type": "object",
                        "additionalProperties": {
                            "anyOf": [
                                {"type": ["string", "number", "boolean", "null"]},
                                {"type": "array", "items": {"type": "string"}},
                            ]
                        },
                    },
                },
                "if": {"properties": {"level": {"const": "ok"}}},
                "then": {"properties": {"cure": {"type": "null"}}},
                "else": {"properties": {"cure": {"type": "string", "minLength": 1}}},
            },
        },
    },
}
MEMBER = "00112233aabbccdd"
AT_80_COLUMNS = """\
✓ ticket      admits to demo-0123abcd until 2027-01-15 08:00 UTC
✓ coordinator answers at 10.9.0.1:7000; it sees this machine as 203.0.113.7 (a
              NAT)
! clock       75.250 s behind the coordinator's (give or take 0.020 s); times in
              events and logs cannot be compared
              set the clock, with NTP for example: timedatectl set-ntp true
✓ round trip  40.2 ms (the longest 44.0 ms)
✓ down        47.6 Mbit/s over 8 connections
✗ up          short messages pass and long ones do not
              packets of full size are lost on the way: lower the MTU of this
              machine's interface (ip link set DEV mtu 1400), or let ICMP
              through the firewalls
✓ path mtu    packets of 1500 bytes
✓ loss        sent again: 0.10% down, unknown up
! called      the coordinator cannot call this machine: 203.0.113.7:4000
              (refused), 192.168.1.5:4000 (no answer)
              it is enough that this peer calls, if all others can be called;
              else open or forward a port, and say --listen '*:PORT', and
              --advertise HOST:PORT where a router forwards it
✓ member      00112233aabbccdd can be called from here, and cannot call this
              machine"""


def ticket(*addresses: str) -> Ticket:
    token = issue_token(NEWEST_ID, b"s" * 32, "demo-0123abcd", NOW_S)
    return Ticket(addresses=addresses or ("10.9.0.1:7000",), run_id="demo-0123abcd", token=token)


def transfer(bytes_per_s: float = 5.95e6, *, num_streams: int = 8, sent: int = 0, resent: int = 0) -> Transfer:
    return Transfer(bytes_per_s=bytes_per_s, num_streams=num_streams, sent_nbytes=sent, resent_nbytes=resent)


def calls(*attempts: Attempt, member: MemberCalled | None = None, num_others: int = 1) -> CalledByBoth:
    return CalledByBoth(coordinator=Called(attempts), member=member, num_others=num_others)


def by_member(*attempts: Attempt) -> MemberCalled:
    return MemberCalled(peer_id=MEMBER, address="10.9.0.2:5000", attempts=attempts)


def a_visit() -> list[Check]:
    trip = Trip(shortest_s=0.0402, longest_s=0.044, ahead_s=75.25)
    attempts = (
        Attempt("203.0.113.7:4000", "refused"),
        Attempt("192.168.1.5:4000", "no answer"),
        Attempt("127.0.0.1:4000", "not dialled: loopback is another machine's"),
    )
    answer = calls(*attempts, member=by_member(*attempts))
    return [
        network.admits(ticket()),
        network.answers("10.9.0.1:7000", "203.0.113.7", {"192.168.1.5"}),
        network.clock(trip, is_encrypted=True),
        network.round_trip(trip),
        network.rate("down", transfer(), cap=None),
        network.rate("up", transfer(0.0), cap=None),
        network.path_mtu(1500),
        network.loss(transfer(sent=9_990, resent=10), transfer()),
        network.called(answer, is_home=False),
        network.member(answer, None),
    ]


def test_each_check_is_a_line_with_its_cure_below_at_80_columns() -> None:
    lines = "\n".join(render_check(check, width=80) for check in a_visit())
    assert lines == AT_80_COLUMNS
    assert max(map(len, lines.splitlines())) <= 80


def test_in_a_pipe_a_check_is_one_line_and_its_cure_another() -> None:
    for check in a_visit():
        assert len(render_check(check, width=None).splitlines()) == (1 if check.cure is None else 2)


def test_the_json_has_its_schema_and_fails_only_with_a_failed_check() -> None:
    checks = [ok("python", "3.12", python="3.12"), warn("bbr", "not available", "load it", addresses=["a"])]
    for found, is_ok in ((checks, True), ([*checks, fail("disk", "full", "free some space")], False)):
        document = json.loads(msgspec.json.encode(report_of(found)))
        jsonschema.validate(document, SCHEMA)
        assert document["ok"] is is_ok
    jsonschema.validate(json.loads(msgspec.json.encode(report_of(a_visit()))), SCHEMA)


@pytest.mark.parametrize(
    ("addresses", "cause", "name", "text", "cure"),
    [
        (
            ("127.0.0.1:7000",),
            PeerUnreachable("127.0.0.1:7000", "refused", is_refused=True),
            "coordinator",
            "nobody answers at 127.0.0.1:7000 (refused); by this machine's clock the ticket expired 0 seconds ago",
            "the founder listens on its own machine only",
        ),
        (
            ("10.9.0.1:7000",),
            PeerUnreachable("10.9.0.1:7000", "refused", is_refused=True),
            "coordinator",
            "nobody answers at 10.9.0.1:7000 (refused)",
            "check that the founder runs",
        ),
        (
            ("10.9.0.1:7000,10.8.0.1:7000",),
            PeerUnreachable(
                "10.9.0.1:7000,10.8.0.1:7000",
                "told",
                attempts={"10.9.0.1:7000": "no answer in 6 s", "10.8.0.1:7000": "[Errno 101] Network is unreachable"},
            ),
            "coordinator",
            "nobody answers at 10.9.0.1:7000 (no answer in 6 s), 10.8.0.1:7000 (Network is unreachable)",
            "a firewall or a router may drop",
        ),
        (
            ("10.9.0.1:7000",),
            PeerUnreachable("10.9.0.1:7000", "[Errno 101] Network is unreachable"),
            "coordinator",
            "nobody answers at",
            "no network of this machine leads there",
        ),
        (
            ("10.9.0.1:7000",),
            PeerUnreachable("10.9.0.1:7000", "[Errno 113] Connect call failed ('10.9.0.1', 7000)"),
            "coordinator",
            "nobody answers at 10.9.0.1:7000 (No route to host)",
            "check that the founder runs",
        ),
        (
            ("10.9.0.1:7000",),
            SecurityRefused(ANOTHER_RUN),
            "coordinator",
            "another run answers at 10.9.0.1:7000 (certificate of another run)",
            "ask for a new ticket",
        ),
        (
            ("10.9.0.1:7000",),
            SecurityRefused("TLS: wrong version number"),
            "coordinator",
            "who answers does not speak with us: 10.9.0.1:7000 (TLS: wrong version number)",
            "run the same version",
        ),
        (("10.9.0.1:7000",), DeadlineExceeded("handshake", 6), "coordinator", "who answers says nothing", "hangs"),
        (("10.9.0.1:7000",), ConnectionLost("closed"), "coordinator", "who answers does not speak", "the same version"),
        (
            ("10.9.0.1:7000",),
            HandshakeRefused(5, "the ticket expired 2 days ago; ask for a new ticket"),
            "ticket",
            "the ticket expired 2 days ago",
            "ask for a new ticket",
        ),
        (
            ("10.9.0.1:7000",),
            HandshakeRefused(LATER_CODE, "this coordinator cannot reach its journal"),
            "coordinator",
            "this coordinator cannot reach its journal",
            "try again",
        ),
    ],
)
def test_why_nobody_answers_is_one_failed_check_with_the_cure_that_fits(
    addresses: tuple[str, ...], cause: CollectiveError, name: str, text: str, cure: str
) -> None:
    check = network.unreached(ticket(*addresses), {addresses[0]: cause}, now_s=NOW_S)
    assert (check.name, check.level) == (name, "fail")
    assert check.text.startswith(text)
    assert cure in str(check.cure)


def test_who_says_no_says_more_than_who_does_not_answer() -> None:
    causes = {
        "10.9.0.1:7000": PeerUnreachable("10.9.0.1:7000", "refused"),
        "10.9.0.2:7000": HandshakeRefused(LATER_CODE, "later"),
        "10.9.0.3:7000": HandshakeRefused(5, "the ticket was revoked"),
    }
    assert network.unreached(ticket(*causes), causes, now_s=0).text == "the ticket was revoked"


def test_a_wrong_clock_fails_only_where_nothing_is_encrypted() -> None:
    day = Trip(shortest_s=0.01, longest_s=0.01, ahead_s=-86_400)
    assert network.clock(day, is_encrypted=True).level == "warn"
    assert network.clock(day, is_encrypted=False).level == "fail"
    assert network.clock(day, is_encrypted=True).text.startswith("86400.000 s ahead of the coordinator's")
    assert network.clock(Trip(shortest_s=0.01, longest_s=0.01, ahead_s=3), is_encrypted=False).level == "ok"


def test_a_member_and_this_machine_that_cannot_call_each_other_are_worth_a_warning() -> None:
    here, there = Attempt("10.9.0.3:4000", None), Attempt("10.9.0.3:4000", "no answer")
    levels = {
        (attempt.cause, doubt): network.member(calls(member=by_member(attempt)), doubt).level
        for attempt in (here, there)
        for doubt in (None, "10.9.0.2:5000 cannot be reached: refused")
    }
    assert [pair for pair, level in levels.items() if level != "ok"] == [
        ("no answer", "10.9.0.2:5000 cannot be reached: refused")
    ]
    assert set(levels.values()) == {"ok", "warn"}
    assert network.member(calls(num_others=0), None).level == "ok"
    assert network.member(calls(num_others=2), None).level == "warn"


def test_the_coordinators_call_counts_wherever_it_got_through() -> None:
    check = network.called(calls(Attempt("10.1.0.3:4000", "no answer"), Attempt("10.9.0.3:4000", None)), is_home=False)
    assert (check.level, check.facts["reached"]) == ("ok", ["10.9.0.3:4000"])
    assert "--listen keeps" in network.called(calls(Attempt("127.0.0.1:4000", "not dialled")), is_home=True).text


def test_a_rate_is_what_all_streams_held_together() -> None:
    first, nbytes = 1000, 125_000
    one = {first + number: nbytes for number in range(16)}
    # One stream has what the other one lacks: the line is steady.
    other = {first + number: nbytes if number % 2 else 3 * nbytes for number in range(16)}
    third = {first + number: 3 * nbytes if number % 2 else nbytes for number in range(16)}
    assert rate_of([one]) == nbytes / WINDOW_S
    assert rate_of([other, third]) == 4 * nbytes / WINDOW_S
    assert rate_of([]) == 0.0


def test_windows_travel_with_their_numbers() -> None:
    windows = {7: 100, 9: 300}
    assert windows_of(moved_of(windows)) == windows
    assert windows_of(moved_of({})) == {}
