# SPDX-License-Identifier: Apache-2.0
"""A peer whom the run has let in, with a valid key, tries whatever it can say: nobody else notices.

What a member can do to its own round is in test_run_liars.py, what strangers can do in test_run_hostile.py.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from isthmus.collective.core.types import Epoch, Incarnation, OuterStep, PeerId, PeerRef, RoundKey
from isthmus.collective.errors import CollectiveError
from isthmus.collective.transport import Channel, FrameType, Purpose, Security, connect
from isthmus.collective.transport.wire import Header, pack
from isthmus.elastic.core.messages import (
    Heartbeat,
    Held,
    Join,
    LeaseRequest,
    Leave,
    Met,
    Refused,
    RoundFailed,
    Synced,
    Unmet,
    Vote,
)
from isthmus.elastic.shell.notary import PeerSigner
from isthmus.elastic.state.wire import ChunkRequest, CommitRequest, ManifestRequest, PrivateRequest, StockRequest
from isthmus.elastic.wire import encode
from isthmus.trainer.contact.admission import hello_maker
from isthmus.trainer.run.founding import recall_membership
from tests.multiprocess.lies.in_words import forged
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, Run, running
from tests.multiprocess.test_run_keys import TIMEOUT_S, _address_of, _identity_in

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

DIGEST = b"d" * 32
FAR = OuterStep(10**6)
PATIENCE_S = 0.3
"""So long an answer is awaited, or an end."""


@dataclass(slots=True)
class Foe:
    """A peer that was let in and has ended; somebody else has its key now."""

    me: PeerRef
    security: Security
    run_id: str
    digest: bytes
    coordinator: str
    peers: tuple[str, ...]
    others: tuple[PeerRef, ...]

    @property
    def ours(self) -> Join:
        """What an honest peer would say first."""
        return Join(address="127.0.0.1:9", manifest_digest=self.digest)

    async def dials(self, purpose: Purpose, address: str = "", who: PeerRef | None = None) -> Channel:
        hello = hello_maker(who or self.me, self.run_id)(purpose, 0, 1)
        return await connect(address or self.coordinator, hello, timeout_s=TIMEOUT_S, security=self.security)

    async def says(self, *words: msgspec.Struct | bytes, joins: bool = True) -> None:
        """These, as control messages, to the coordinator; after a Join like any other's."""
        channel = await self.dials(Purpose.CONTROL)
        try:
            for word in (self.ours, *words) if joins else words:
                payload = word if isinstance(word, bytes) else encode(word)
                await channel.send(FrameType.CONTROL, payload, timeout_s=TIMEOUT_S)
            await asyncio.sleep(PATIENCE_S)
        finally:
            channel.close()

    async def sends(self, purpose: Purpose, frames: Iterable[tuple[FrameType, bytes]]) -> None:
        """These frames, to every peer."""
        for address in self.peers:
            with contextlib.suppress(CollectiveError):
                channel = await self.dials(purpose, address)
                try:
                    for kind, payload in frames:
                        await channel.send(kind, payload, timeout_s=TIMEOUT_S)
                    await asyncio.sleep(PATIENCE_S)
                finally:
                    channel.close()


def vote(step: int = 3, *, weight: float = 1.0, weights: tuple[float, ...] = ()) -> Vote:
    key = RoundKey(Epoch(3), OuterStep(step), 0)
    return Vote(key=key, digest=DIGEST, weight=weight, num_tokens=1, consumed=(), weights=weights)


def failed(suspects: tuple[PeerId, ...], told_by: PeerId | None = None) -> RoundFailed:
    return RoundFailed(
        key=RoundKey(Epoch(3), OuterStep(3), 0), suspects=suspects, cause="they are bad", told_by=told_by
    )


def beat(number: int = 0, epoch: int = 3) -> Heartbeat:
    return Heartbeat(epoch=Epoch(epoch), outer_step=FAR, progress=number, blocked=False, ready=True, inner_steps=number)


async def _brings_a_certificate(foe: Foe) -> None:
    signer = PeerSigner(foe.security.key, foe.run_id, lambda: foe.security.authorities)
    await foe.says(msgspec.structs.replace(foe.ours, certificate=forged(foe.me, signer.sign)), joins=False)


async def _opens_many(foe: Foe) -> None:
    channels: list[Channel] = []
    try:
        while len(channels) < 40:
            channels.append(await foe.dials(Purpose.CONTROL))
        await asyncio.sleep(PATIENCE_S)
    finally:
        for channel in channels:
            channel.close()


async def _is_another(foe: Foe, who: PeerRef) -> None:
    channel = await foe.dials(Purpose.CONTROL, who=who)
    channel.close()
    raise AssertionError("it was let in as another peer")


async def _is_an_older_start(foe: Foe) -> None:
    channel = await foe.dials(Purpose.CONTROL, who=PeerRef(foe.me.peer_id, Incarnation(1)))
    await channel.send(FrameType.CONTROL, encode(foe.ours), timeout_s=TIMEOUT_S)
    await asyncio.sleep(PATIENCE_S)
    channel.close()


def _asks(*requests: msgspec.Struct) -> Callable[[Foe], Awaitable[None]]:
    frames = [(FrameType.STATE_REQUEST, encode(request)) for request in requests]
    return lambda foe: foe.sends(Purpose.STATE, frames)


NOISE = random.Random(5)
ATTEMPTS: dict[str, Callable[[Foe], Awaitable[None]]] = {
    "another manifest": lambda foe: foe.says(Join(address="", manifest_digest=DIGEST), joins=False),
    "a state of the future": lambda foe: foe.says(msgspec.structs.replace(foe.ours, held=Held(FAR, DIGEST))),
    "a certificate of its own making": _brings_a_certificate,
    "an epoch of the future": lambda foe: foe.says(msgspec.structs.replace(foe.ours, epoch=Epoch(2**31))),
    "an address that is none": lambda foe: foe.says(msgspec.structs.replace(foe.ours, address="\n" * 256)),
    "the address of a member": lambda foe: foe.says(msgspec.structs.replace(foe.ours, address=foe.peers[-1])),
    "goes, and was never there": lambda foe: foe.says(Leave(), joins=False),
    "goes at once": lambda foe: foe.says(Leave(now=True)),
    "goes with a state that nobody has": lambda foe: foe.says(Leave(held=Held(FAR, DIGEST), address="127.0.0.1:9")),
    "votes": lambda foe: foe.says(vote()),
    "votes with all the weight there is": lambda foe: foe.says(vote(weight=1e15, weights=(1e15,) * 1024)),
    "votes for a round of the future": lambda foe: foe.says(vote(int(FAR))),
    "votes before it has joined": lambda foe: foe.says(vote(), joins=False),
    "accuses everybody": lambda foe: foe.says(failed(tuple(ref.peer_id for ref in foe.others))),
    "accuses in the name of another": lambda foe: foe.says(failed((foe.me.peer_id,), foe.others[0].peer_id)),
    "wants all samples": lambda foe: foe.says(LeaseRequest(epoch=Epoch(3), serial=1, num_samples=2**31)),
    "wants samples without end": lambda foe: foe.says(
        *(LeaseRequest(epoch=Epoch(n), serial=n, num_samples=1000) for n in range(300))
    ),
    "has met everybody": lambda foe: foe.says(Met(peers=foe.others)),
    "has met two thousand": lambda foe: foe.says(
        Met(peers=tuple(PeerRef(PeerId(f"{n:016x}"), Incarnation(n)) for n in range(2000)))
    ),
    "reaches nobody": lambda foe: foe.says(Met(unmet=tuple(Unmet(ref, "bad\n" * 40) for ref in foe.others))),
    "holds a state of the future": lambda foe: foe.says(Synced(held=Held(FAR, DIGEST))),
    "a heartbeat from the future": lambda foe: foe.says(beat(epoch=2**31)),
    "ten thousand heartbeats": lambda foe: foe.says(*(beat(number) for number in range(10_000))),
    "noise": lambda foe: foe.says(*(NOISE.randbytes(500) for _ in range(20))),
    "a word of the coordinator": lambda foe: foe.says(Refused(code=9, reason="go home")),
    "lists without end": lambda foe: foe.says(b"\x91" * 100_000),
    "the name of the founder": lambda foe: _is_another(foe, foe.others[0]),
    "a newer start of a member": lambda foe: _is_another(foe, PeerRef(foe.others[-1].peer_id, Incarnation(2**52))),
    "an older start of itself": _is_an_older_start,
    "forty connections": _opens_many,
    "a chunk that the state does not have": _asks(ManifestRequest(), ChunkRequest(10**9)),
    "commits that never were": _asks(CommitRequest(FAR), StockRequest(FAR), ChunkRequest(1)),
    "what is private": _asks(PrivateRequest(), ChunkRequest(0)),
    "an exchange that it is not part of": lambda foe: foe.sends(
        Purpose.BULK,
        [(kind, NOISE.randbytes(200)) for kind in (FrameType.OPEN, FrameType.PART, FrameType.ABORT)],
    ),
}


def _foe(run: Run, hostile: Process, others: list[Process]) -> Foe:
    me, security, run_id = _identity_in(hostile.directory)
    kept = recall_membership(hostile.directory)
    assert kept is not None
    numbers = [int((peer.directory / "incarnation").read_text()) for peer in others]
    refs = [PeerRef(PeerId(peer.peer_id), Incarnation(n)) for peer, n in zip(others, numbers, strict=True)]
    addresses = tuple(map(_address_of, others))
    return Foe(me.ref, security, run_id, kept.terms.digest(), addresses[0], addresses, tuple(refs))


def _foe_beside_two(run: Run) -> tuple[Foe, list[Process]]:
    """Somebody with the key of a member, which has ended, and two peers that go on without it."""
    others = [run.found("--peers", "2", "--min-peers", "2", "--outer-steps", str(OPEN_END), *NEVER_LATE)]
    run.wait_for_ticket()
    others.append(run.join())
    hostile = run.join()
    run.until_step(3, *others, hostile)
    hostile.kill()
    foe = _foe(run, hostile, others)
    run.until_step(others[0].step + 3, *others)
    return foe, others


def test_a_hostile_member_tries_all_it_can_say_and_nobody_else_notices(tmp_path: Path) -> None:
    assert len(ATTEMPTS) >= 30
    with running(tmp_path) as run:
        foe, others = _foe_beside_two(run)
        epoch = _epoch(others[0])
        for name, attempt in ATTEMPTS.items():
            with contextlib.suppress(CollectiveError):
                asyncio.run(asyncio.wait_for(attempt(foe), 120.0))
            assert all(peer.is_running for peer in others), f"{name}: {run.story()}"
            run.until_step(others[0].step + 2, *others)
        assert _epoch(others[0]) == epoch, "no view was changed for it"
        assert not any(peer.events("learner") for peer in others)
        evicted = run.command("evict", foe.me.peer_id, "--dir", str(others[0].directory))
        assert evicted.code == 0, evicted.err
        run.leave_all()
    founder = others[0]
    assert {event["of"] for event in founder.events("lied")} == {foe.me.peer_id}
    for peer in others:
        assert "Traceback" not in peer.console.with_suffix(".err").read_text()
    assert_same_commits(*others)


async def _floods(foe: Foe, is_over: Callable[[], bool]) -> int:
    """Heartbeats to the coordinator, as fast as TCP takes them, until then. How many went."""
    channel = await foe.dials(Purpose.CONTROL)
    await channel.send(FrameType.CONTROL, encode(foe.ours), timeout_s=TIMEOUT_S)
    body, num_sent = encode(beat()), 0
    words = (pack(Header(type=FrameType.CONTROL, payload_nbytes=len(body)), body) + body) * 300

    async def send() -> None:
        nonlocal num_sent
        while True:
            await asyncio.get_running_loop().sock_sendall(channel._sock, words)
            num_sent += 300

    async with asyncio.timeout(170.0), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send())
        while not is_over():  # noqa: ASYNC110 - of other processes, which do not tell
            await asyncio.sleep(0.05)
        sending.cancel()
    channel.close()
    return num_sent


def test_a_learner_that_floods_the_coordinator_holds_up_nobody(tmp_path: Path) -> None:
    # Found before: at 2.8 MB/s for ten seconds there was one commit, and both honest peers were dropped as silent.
    with running(tmp_path) as run:
        foe, others = _foe_beside_two(run)
        epoch, target = _epoch(others[0]), others[0].step + 60
        num_sent = asyncio.run(_floods(foe, lambda: all(peer.step >= target for peer in others)))
        assert num_sent > 4000, "more than anybody may say at once"
        assert _epoch(others[0]) == epoch, "no view was changed for it"
        assert not any(peer.events("learner") for peer in others)
        run.leave_all()
    for peer in others:
        assert "Traceback" not in peer.console.with_suffix(".err").read_text()
    assert_same_commits(*others)


def _epoch(founder: Process) -> int:
    return max(int(str(event["epoch"])) for event in founder.events("view_decided"))
