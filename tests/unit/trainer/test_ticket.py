# SPDX-License-Identifier: Apache-2.0
"""Tickets: whatever happens to them on their way is told apart; tokens admit to one run until they expire."""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import os
import shlex
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.trainer.contact.ticket import (
    TOKEN_NBYTES,
    Ticket,
    TicketFault,
    TicketRefused,
    decode_ticket,
    encode_ticket,
    expiry_hint,
    invitation,
    issue_token,
    make_ticket,
    named_ticket,
    next_id,
    read_ticket,
    verify_token,
)
from isthmus.trainer.errors import ConfigError, ExitCode

SECRET = b"s" * 32
ID = b"ticket 1"
RUN_ID = "demo-0123abcd"
EXPIRES_AT_S = 1_900_000_000


@functools.cache
def a_ticket(number: int = 0) -> Ticket:
    return make_ticket(
        ticket_id=next_id(b"", now_s=float(number)),
        secret=SECRET,
        run_id=RUN_ID,
        addresses=["10.0.0.1:7000", "[::1]:7000", "peer.example:7000"],
        expires_at_s=EXPIRES_AT_S,
        fingerprint=b"f" * 32,
    )


def fault_of(text: str) -> TicketFault:
    with pytest.raises(TicketRefused) as caught:
        decode_ticket(text)
    assert caught.value.exit_code == ExitCode.REFUSED
    assert "\n" not in str(caught.value)
    return caught.value.fault


def test_ticket_survives_the_way() -> None:
    ticket = a_ticket()
    text = encode_ticket(ticket)
    assert set(text) <= set(string.ascii_lowercase + string.digits)
    assert decode_ticket(text) == ticket
    assert ticket.expires_at_s == EXPIRES_AT_S


def test_ticket_of_a_run_without_encryption_has_no_fingerprint() -> None:
    bare = dataclasses.replace(a_ticket(), fingerprint=b"")
    assert decode_ticket(encode_ticket(bare)) == bare


def test_ticket_of_a_standby_has_the_secret_and_never_shows_it() -> None:
    ticket = dataclasses.replace(a_ticket(), secret=SECRET)
    assert decode_ticket(encode_ticket(ticket)) == ticket
    assert decode_ticket(encode_ticket(a_ticket())).secret == b""
    assert SECRET.decode() not in repr(ticket)


@pytest.mark.parametrize("nbytes", [1, 31, 33, 64])
def test_secret_of_another_length_is_damage(nbytes: int) -> None:
    assert fault_of(encode_ticket(dataclasses.replace(a_ticket(), secret=b"s" * nbytes))) is TicketFault.GARBLED


@pytest.mark.parametrize("nbytes", [1, 31, 33, 64])
def test_fingerprint_of_another_length_is_damage(nbytes: int) -> None:
    assert fault_of(encode_ticket(dataclasses.replace(a_ticket(), fingerprint=b"f" * nbytes))) is TicketFault.GARBLED


def test_ticket_survives_mail_programs_and_shouting() -> None:
    text = encode_ticket(a_ticket())
    wrapped = "\r\n ".join(text[i : i + 60] for i in range(0, len(text), 60))
    assert decode_ticket(f"  {wrapped}\n") == a_ticket()
    assert decode_ticket(text.upper()) == a_ticket()


@pytest.mark.parametrize("text", ["", "foo", "@", "isthmu", "http://isthmus1", "x" * 20_000, "\x00", "ünïcode"])
def test_what_was_never_a_ticket_is_told(text: str) -> None:
    assert fault_of(text) is TicketFault.NO_TICKET


def test_ticket_of_another_version_is_told() -> None:
    assert fault_of("isthmus1" + encode_ticket(a_ticket())[8:]) is TicketFault.OTHER_VERSION


def test_every_cut_is_told_as_a_missing_end() -> None:
    text = encode_ticket(a_ticket())
    faults = {fault_of(text[:length]) for length in range(len("isthmus2"), len(text) - 1)}
    assert faults == {TicketFault.TRUNCATED}


def test_every_changed_letter_is_noticed() -> None:
    text = encode_ticket(a_ticket())
    for position in range(len("isthmus2"), len(text) - 1):  # the last letter has bits that mean nothing
        changed = text[:position] + ("b" if text[position] == "a" else "a") + text[position + 1 :]
        assert fault_of(changed) in (TicketFault.GARBLED, TicketFault.TRUNCATED)


def test_letters_that_base32_does_not_have_are_damage() -> None:
    text = encode_ticket(a_ticket())
    assert fault_of(text[:20] + "1" + text[21:]) is TicketFault.GARBLED
    assert fault_of(text + "aaaa") is TicketFault.GARBLED


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x94\x90\xa1a\xc4\x00\xc4\x00",  # no address
        b"\x95\x91\xa3a:1\xa1a\xc4\x00\xc4\x31" + b"t" * 49 + b"\xc0",  # a fifth field
        b"\x94\x91\xa3a:1\xa1A\xc4\x00\xc4\x31" + b"t" * 49,  # a run id with a capital
        b"\x94\x91\xa3a:1\xa1a\xc4\x00\xc4\x30" + b"t" * 48,  # a short token
        b"\x91" * 60_000,
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_bodies_that_are_not_ours_are_damage_even_with_a_right_check(body: bytes) -> None:
    framed = len(body).to_bytes(2, "big") + body
    packed = framed + hashlib.sha256(framed).digest()[:4]
    text = "isthmus2" + base64.b32encode(packed).decode().rstrip("=").lower()
    assert fault_of(text) in (TicketFault.GARBLED, TicketFault.NO_TICKET)


@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=300) | st.text(alphabet=string.ascii_lowercase + "234567", max_size=300).map("isthmus2".__add__)
)
def test_any_text_is_a_ticket_or_is_refused(text: str) -> None:
    with contextlib.suppress(TicketRefused):
        assert decode_ticket(text).addresses


def test_a_ticket_never_shows_its_token() -> None:
    ticket = a_ticket()
    assert ticket.token.hex() not in repr(ticket)
    assert repr(ticket.token) not in repr(ticket)


# --------------------------------------------------------------------------------------------------------------- files


def test_ticket_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    path.write_text(encode_ticket(a_ticket()) + "\n")
    assert read_ticket(f"@{path}") == a_ticket()
    assert read_ticket(encode_ticket(a_ticket())) == a_ticket()


def test_missing_and_endless_ticket_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_ticket(f"@{tmp_path / 'none'}")
    endless = tmp_path / "endless"
    with endless.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TicketRefused, match="not a ticket"):
        read_ticket(f"@{endless}")


def test_ticket_comes_through_a_pipe_and_nothing_else_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.trainer.contact.ticket._PIPE_TIMEOUT_S", 0.2)
    reader, writer = os.pipe()
    os.write(writer, encode_ticket(a_ticket()).encode())
    os.close(writer)
    assert read_ticket(f"@/proc/self/fd/{reader}") == a_ticket()
    os.close(reader)

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="no ticket comes") as caught:
            read_ticket(f"@{path}")
        assert caught.value.exit_code == ExitCode.USAGE
    with pytest.raises(ConfigError, match="no ticket comes"):
        read_ticket(f"@{tmp_path}")


# -------------------------------------------------------------------------------------------------------------- tokens


def test_token_admits_until_it_expires() -> None:
    token = issue_token(ID, SECRET, RUN_ID, EXPIRES_AT_S)
    assert len(token) == TOKEN_NBYTES
    claims = verify_token(SECRET, RUN_ID, token, now_s=EXPIRES_AT_S - 0.001)
    assert (claims.expires_at_s, claims.is_once) == (EXPIRES_AT_S, False)
    with pytest.raises(TicketRefused, match="expired 2 hours ago") as caught:
        verify_token(SECRET, RUN_ID, token, now_s=EXPIRES_AT_S + 7200)
    assert caught.value.fault is TicketFault.EXPIRED
    with pytest.raises(TicketRefused):
        verify_token(SECRET, RUN_ID, token, now_s=EXPIRES_AT_S)


def test_token_of_another_run_or_secret_is_refused() -> None:
    token = issue_token(ID, SECRET, RUN_ID, EXPIRES_AT_S)
    for secret, run_id in ((b"t" * 32, RUN_ID), (SECRET, "demo-ffffffff")):
        with pytest.raises(TicketRefused) as caught:
            verify_token(secret, run_id, token, now_s=0)
        assert caught.value.fault is TicketFault.FORGED


def test_no_bit_of_a_token_can_be_changed() -> None:
    token = issue_token(ID, SECRET, RUN_ID, EXPIRES_AT_S)
    for bit in range(8 * len(token)):
        changed = bytearray(token)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TicketRefused) as caught:
            verify_token(SECRET, RUN_ID, bytes(changed), now_s=0)
        assert caught.value.fault is TicketFault.FORGED


@pytest.mark.parametrize("token", [b"", b"\0", b"\0" * 8, b"\xff" * 49, b"\0" * 4096])
def test_bytes_that_are_no_token_are_refused(token: bytes) -> None:
    with pytest.raises(TicketRefused):
        verify_token(SECRET, RUN_ID, token, now_s=0)


def test_a_later_ticket_has_a_larger_id_whatever_the_clock_says() -> None:
    ids = [b""]
    for now_s in (1e9, 1e9, 1e9 + 0.001, 0.0, 2e9):
        ids.append(next_id(ids[-1], now_s=now_s))
    assert sorted(set(ids)) == ids
    assert all(len(one) == len(ID) for one in ids[1:])
    assert next_id(b"", now_s=1e9) < ids[-1]


def test_what_invites_others_is_read_as_a_whole() -> None:
    text = invitation(a_ticket())
    assert decode_ticket(text) == decode_ticket("".join(text.split())) == a_ticket()


def test_what_invites_loops_is_typed_as_it_stands_and_read_as_a_whole() -> None:
    text = invitation(a_ticket(), ("python", "my loop.py", "--fast"))
    (line,) = (line.strip() for line in text.splitlines() if "python" in line)
    variable, *program = shlex.split(line)
    assert variable == f"ISTHMUS_COMMAND=isthmus join {encode_ticket(a_ticket())}"
    assert program == ["python", "my loop.py", "--fast"]
    assert decode_ticket(text) == a_ticket()


def test_every_ticket_has_an_id_of_its_own_by_which_people_can_name_it(tmp_path: Path) -> None:
    tickets = [a_ticket(number) for number in range(3)]
    assert len({ticket.ticket_id for ticket in tickets}) == 3
    (tmp_path / "ticket").write_text(encode_ticket(tickets[0]))
    named = (encode_ticket(tickets[0]), f"@{tmp_path / 'ticket'}", tickets[0].ticket_id.hex().upper())
    known = (tickets[0].ticket_id, EXPIRES_AT_S)
    assert [named_ticket(text) for text in named] == [known, known, (tickets[0].ticket_id, None)]
    with pytest.raises(TicketRefused):
        named_ticket("0123")


def test_a_ticket_for_one_peer_says_so_in_what_nobody_can_change() -> None:
    token = issue_token(ID, SECRET, RUN_ID, EXPIRES_AT_S, is_once=True)
    assert verify_token(SECRET, RUN_ID, token, now_s=0).is_once


def test_expiry_by_our_clock_is_only_a_hint() -> None:
    assert expiry_hint(a_ticket(), now_s=EXPIRES_AT_S - 1) is None
    assert "3 days ago" in (expiry_hint(a_ticket(), now_s=EXPIRES_AT_S + 3 * 86400) or "")
