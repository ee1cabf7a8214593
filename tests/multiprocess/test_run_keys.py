# SPDX-License-Identifier: Apache-2.0
"""Every peer its own key: nobody speaks as another, who is put out is gone at once, tickets end when told to."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from isthmus.collective.core.types import Incarnation, PeerRef
from isthmus.collective.errors import CollectiveError, DeadlineExceeded, HandshakeRefused
from isthmus.collective.transport import Channel, Credentials, Mode, Purpose, Security, connect
from isthmus.collective.transport.certificates import certificate_from_bytes
from isthmus.trainer.contact.admission import hello_maker
from isthmus.trainer.contact.identity import PeerFolder, PeerIdentity
from isthmus.trainer.contact.ticket import read_ticket
from isthmus.trainer.run.founding import recall_membership
from tests.multiprocess.processes import LEFT, Outcome, Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, Run, at_home, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

REFUSED = 5
TIMEOUT_S = 10.0
SOON_S = 20.0
"""A tenth of a second on an idle machine. What is not cut a donor lets stand for two minutes."""
UNCUT_S = 100.0
PURPOSES = (Purpose.CONTROL, Purpose.BULK, Purpose.STATE)


def _sentence(outcome: Outcome) -> str:
    """The one sentence of a refusal."""
    assert outcome.code == REFUSED, outcome.err
    assert not outcome.out or " ended here with 5\n" in outcome.out  # who has trained is told how it went
    (sentence,) = outcome.sentences
    return sentence


def _end_of(process: Process) -> Outcome:
    process.is_judged = True
    return process.outcome()


def _address_of(process: Process) -> str:
    return at_home(process.events("started")[-1]["address"])


def _identity_in(folder: Path) -> tuple[PeerIdentity, Security, str]:
    """The key and the certificate of a peer that has ended, and its run."""
    kept = recall_membership(folder)
    assert kept is not None
    with PeerFolder(folder) as opened:
        me, certificate = opened.start_identity(), opened.load_certificate()
    assert certificate is not None
    authorities = tuple(map(certificate_from_bytes, kept.terms.authorities))
    tls = Mode(json.loads(kept.terms.manifest)["net"]["tls"])
    return me, Security(Credentials(me.key, certificate, authorities), mode=tls), kept.terms.run_id


def _dials_as(who: PeerRef, security: Security | None, run_id: str, address: str, purpose: Purpose) -> str | None:
    """Why a dialler with these credentials is not let in as this peer; None if it is."""

    async def dial() -> str | None:
        for _ in range(6):
            hello = hello_maker(who, run_id)(purpose, 0, 1)
            try:
                (await connect(address, hello, timeout_s=TIMEOUT_S, security=security)).close()
            except HandshakeRefused as refused:
                return refused.reason
            except CollectiveError:
                continue  # it has no processor now
            return None
        raise AssertionError(f"nobody answers at {address}")

    return asyncio.run(dial())


@pytest.mark.parametrize("tls", ["auto", "on"])
def test_a_member_with_its_key_and_certificate_speaks_as_itself_and_as_nobody_else(tmp_path: Path, tls: str) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END), "--tls", tls, *NEVER_LATE)
        run.wait_for_ticket()
        victim, hostile = run.join(), run.join()
        run.until_step(3, founder, victim, hostile)
        hostile.kill()
        me, security, run_id = _identity_in(hostile.directory)
        for target in (founder, victim):
            address = _address_of(target)
            for other in (founder, victim):
                # A newer start than the real one: it would take its place.
                as_other = PeerRef(other.peer_id, Incarnation(me.incarnation + 10**6))  # type: ignore[arg-type]
                for purpose in PURPOSES:
                    refusal = _dials_as(as_other, security, run_id, address, purpose)
                    assert refusal == "the connection is not safe: certificate of another peer", (target.name, purpose)
                    if tls == "auto":
                        refusal = _dials_as(as_other, None, run_id, address, purpose)
                        assert refusal == "the connection is not safe: no proof of the key"
            # Its own name opens what it may open, so it was for the name that it was refused.
            assert _dials_as(me.ref, security, run_id, address, Purpose.BULK) is None
        step = founder.step
        run.until_step(step + 3, founder, victim)
        assert len(founder.events("join")) == len(victim.events("join")) == 1
        run.leave_all()
    assert_same_commits(founder, victim, hostile)


async def _until_cut(channels: list[Channel]) -> float:
    """Seconds until the other side has ended all of these."""
    began = time.monotonic()

    async def until_cut(channel: Channel) -> None:
        while True:
            try:
                await channel.receive(timeout_s=TIMEOUT_S)
            except DeadlineExceeded:
                continue  # it is still open
            except CollectiveError:
                return

    async with asyncio.timeout(UNCUT_S), asyncio.TaskGroup() as tasks:
        for channel in channels:
            tasks.create_task(until_cut(channel))
    return time.monotonic() - began


@pytest.mark.parametrize("tls", ["auto", "on"])
def test_an_evicted_peer_is_told_and_gone_soon_and_comes_back_with_a_ticket(tmp_path: Path, tls: str) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END), "--tls", tls)
        run.wait_for_ticket()
        others = [founder, run.join()]
        victim = run.join()
        run.until_step(3, *others, victim)
        listed = run.told("peers", "--dir", str(founder.directory))
        assert {line.split()[0]: line.split()[1] for line in listed.splitlines()} == {
            peer.peer_id: "member" for peer in (*others, victim)
        }
        evicted = run.command("evict", victim.peer_id, "--dir", str(founder.directory))
        assert evicted.code == 0, evicted.err
        sentence = _sentence(_end_of(victim))
        assert "evicted by the operator of the run; it may join again with a ticket" in sentence
        run.until("bars", lambda: all("put_out peer_id=" in _log(peer) for peer in others))

        # Its key and certificate open nothing any more, and bring it back to nothing.
        me, security, run_id = _identity_in(victim.directory)
        for peer in others:
            for purpose in PURPOSES:
                refusal = _dials_as(me.ref, security, run_id, _address_of(peer), purpose)
                assert refusal == "the connection is not safe: certificate was withdrawn"
        back = run.start("join", "--node.threads", "1", folder=victim.directory)
        assert "certificate was withdrawn" in _sentence(_end_of(back))

        step = founder.step
        again = run.join(folder=victim.directory)
        run.until_step(step + 5, *others, again)
        run.leave_all()
    assert victim.peer_id == again.peer_id
    assert_same_commits(*others, again)


def test_a_hostile_member_that_stays_connected_is_cut_off_soon_after_its_eviction(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found("--peers", "2", "--outer-steps", str(OPEN_END))
        run.wait_for_ticket()
        others = [founder, run.join()]
        hostile = run.join()
        run.until_step(3, *others, hostile)
        hostile.kill()
        me, security, run_id = _identity_in(hostile.directory)

        async def stays() -> float:
            channels = []
            for peer in others:
                purposes = PURPOSES if peer is founder else (Purpose.BULK, Purpose.STATE)
                for purpose in purposes:
                    hello = hello_maker(me.ref, run_id)(purpose, 0, 1)
                    channels.append(await connect(_address_of(peer), hello, timeout_s=TIMEOUT_S, security=security))
            async with asyncio.TaskGroup() as tasks:
                cut = tasks.create_task(_until_cut(channels))
                arguments = ("evict", hostile.peer_id, "--dir", str(founder.directory))
                began = time.monotonic()
                evicted = await asyncio.to_thread(run.command, *arguments)  # takes seconds on a busy machine
                answered_s = time.monotonic() - began
            assert evicted.code == 0, evicted.err
            return cut.result() - answered_s

        cut_s = asyncio.run(stays())
        print(f"cut off {cut_s:.2f} s after the answer to `isthmus evict`")
        assert cut_s < SOON_S
        step = founder.step
        run.until_step(step + 3, *others)
        run.leave_all()
    assert_same_commits(*others)


def test_after_a_ban_ticket_and_key_are_refused_by_all_also_when_the_coordinator_has_started_again(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as run:
        flags = ["--members.start_peers", "2", "--members.min_peers", "1", "--run.outer_steps", str(OPEN_END)]
        coordinator = run.coordinator(*flags)
        run.wait_for_ticket()
        others = [run.join(), run.join()]
        victim = run.join()
        run.until_step(3, *others, victim)
        banned = run.command("ban", victim.peer_id, "--dir", str(coordinator.directory))
        assert banned.code == 0, banned.err
        assert "the key of this peer was banned from the run by its operator" in _sentence(_end_of(victim))
        run.until("bars", lambda: all("put_out peer_id=" in _log(peer) for peer in (*others, coordinator)))
        me, security, run_id = _identity_in(victim.directory)

        def is_refused_by_all() -> None:
            for peer in (*others, coordinator):
                refusal = _dials_as(me.ref, security, run_id, _address_of(peer), Purpose.STATE)
                assert refusal is not None
                assert "certificate was withdrawn" in refusal
            assert "was banned" in _sentence(_end_of(run.join(folder=victim.directory)))
            listed = run.command("peers", "--dir", str(coordinator.directory)).out
            assert f"{victim.peer_id}  banned" in listed

        is_refused_by_all()
        assert "the ticket was revoked" in _sentence(_end_of(run.join()))  # another key costs nothing
        coordinator.kill()
        coordinator = run.coordinator(*flags, folder=coordinator.directory)
        run.wait_for_ticket()
        step = max(peer.step for peer in others)
        run.until_step(step + 3, *others)
        late = run.join()  # it hears of the ban although it was not there
        run.until("a bar", lambda: "put_out peer_id=" in _log(late))
        others.append(late)
        is_refused_by_all()
        unban = run.command("evict", "0" * 16, "--dir", str(coordinator.directory))
        assert "no peer 0000000000000000 is in the run" in _sentence(unban)
        _leave(run, others, coordinator)
    assert_same_commits(*others)


def test_a_ticket_for_one_peer_admits_one_and_a_revoked_one_nobody(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--peers", "1", "--min-peers", "1", "--outer-steps", str(OPEN_END)]
        founder = run.found(*flags)
        run.wait_for_ticket()
        folder = ("--dir", str(founder.directory))
        general = run.ticket.read_text()

        once = run.command("ticket", "--once", *folder).out
        assert read_ticket(once).run_id == read_ticket(general).run_id
        run.ticket.write_text(once)
        first = run.join()
        run.until("membership", lambda: bool(first.events("join")))
        assert "the ticket was for one peer and has been used" in _sentence(_end_of(run.join()))

        founder.kill()
        before = len(founder.events("join"))
        founder = run.found(*flags, folder=founder.directory)
        run.wait_for_ticket()
        newest = run.ticket.read_text()
        run.ticket.write_text(once)
        assert "has been used" in _sentence(_end_of(run.join()))
        run.until("membership of the founder again", lambda: len(founder.events("join")) > before)
        run.until_step(first.step + 2, founder, first)
        first.kill()
        begun = len(first.events("join"))
        again = run.join(folder=first.directory)  # whose ticket it is may use it again
        run.until("membership", lambda: len(again.events("join")) > begun)

        for named in (general.strip(), read_ticket(newest).ticket_id.hex()):
            assert run.command("ticket", "--revoke", named, *folder).code == 0
        for text in (general, newest):
            run.ticket.write_text(text)
            assert "the ticket was revoked" in _sentence(_end_of(run.join()))
        run.until_step(again.step + 2, founder, again)
        again.kill()
        begun_again = len(again.events("join"))
        # Who was let in before needs no ticket.
        back = run.start("join", "--node.threads", "1", folder=first.directory)
        run.until("membership", lambda: len(back.events("join")) > begun_again)
        refused = run.command("ticket", "--dir", str(back.directory))
        assert "the coordinator of the run does not live in this folder" in _sentence(refused)
        run.leave_all()
    assert_same_commits(founder, back)


def test_revoking_all_tickets_ends_the_ones_before_and_no_membership(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ["--peers", "1", "--min-peers", "1", "--outer-steps", str(OPEN_END), *NEVER_LATE]
        founder = run.found(*flags)
        run.wait_for_ticket()
        folder = ("--dir", str(founder.directory))
        first = read_ticket(run.ticket.read_text())
        assert read_ticket(run.command("ticket", *folder).out) == first
        renewed = run.command("ticket", "--renew", "--lifetime", "30d", *folder).out
        assert read_ticket(renewed).expires_at_s > first.expires_at_s
        assert run.command("ticket", *folder).out == renewed
        member = run.join()  # with the first one, which admits as well
        run.until("membership", lambda: bool(member.events("join")))

        new = run.command("ticket", "--revoke-all", *folder)
        assert (new.code, new.err) == (0, "")
        old = [run.ticket.read_text(), renewed]

        def admits_new_and_refuses_old() -> None:
            for text in old:
                run.ticket.write_text(text)
                assert "the ticket was revoked; ask for a new ticket" in _sentence(_end_of(run.join()))
            run.ticket.write_text(new.out)
            newcomer = run.join()
            run.until("membership", lambda: bool(newcomer.events("join")))
            newcomer.kill()

        admits_new_and_refuses_old()
        founder.kill()
        founder = run.found(*flags, folder=founder.directory)
        run.wait_for_ticket()
        admits_new_and_refuses_old()
        run.until_step(member.step + 3, founder, member)
        assert len(member.events("join")) == 1 + len(member.events("learner")), "it was put out by nobody"
        run.leave_all()
    assert_same_commits(founder, member)


def _leave(run: Run, peers: list[Process], coordinator: Process) -> None:
    for peer in peers:
        assert run.command("leave", "--dir", str(peer.directory)).code == 0
    assert run.until_ended(*peers) == [LEFT] * len(peers)
    assert run.command("leave", "--dir", str(coordinator.directory)).code == 0
    assert run.until_ended(coordinator) == [LEFT]


def _log(process: Process) -> str:
    return process.console.with_suffix(".err").read_text()
