# SPDX-License-Identifier: Apache-2.0
"""What a caller of the mean may rely on, whatever happens to links and members. Values: test_operations.py."""

import asyncio
import contextlib
import gc
import math
import weakref

import msgspec
import pytest
import torch

from isthmus.collective import (
    NonFiniteInput,
    OperationAborted,
    PlanMismatch,
    RoundRefused,
    decode_result,
)
from isthmus.collective.codec import codec_named
from isthmus.collective.rounds.outbox import Outbox
from isthmus.collective.rounds.plan import Terms
from isthmus.collective.transport.hello import introduce
from isthmus.collective.transport.sockets import SocketOptions, dial
from isthmus.collective.transport.wire import Frame, FrameType, Header, pack

NUMEL = 700_001


def parts(count, numel=NUMEL):
    generator = torch.Generator().manual_seed(count * 1000 + numel)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


async def mean_of_all(sites, tensors, **more):
    outs = [torch.full_like(tensor, math.nan) for tensor in tensors]
    stats = await asyncio.gather(
        *(site.mean(tensor, out=out, **more) for site, tensor, out in zip(sites, tensors, outs, strict=True))
    )
    return outs, stats


def bits(tensor):
    return tensor.view(torch.int32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("numel", [0, 1, 3, 256, 1025, NUMEL])
async def test_integers_average_exactly_and_all_hold_the_same_bits(sites_running, world_size, numel):
    tensors = [torch.arange(numel).remainder(1000).float() * 8 * (rank + 1) for rank in range(world_size)]
    expected = sum(tensors) / world_size
    async with sites_running(world_size) as sites:
        outs, stats = await mean_of_all(sites, tensors)
    assert all(torch.equal(out, expected) for out in outs)
    assert all(stat.weight_sum == world_size and len(stat.members) == world_size for stat in stats)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("num_streams", [1, 3])
async def test_bits_are_equal_on_all_members_and_inputs_stay_as_they_were(sites_running, codec, num_streams):
    tensors = parts(3)
    before = [tensor.clone() for tensor in tensors]
    async with sites_running(3, num_streams=num_streams, chunk_nbytes=64 << 10) as sites:
        outs, _ = await mean_of_all(sites, tensors, codec=codec)
    assert all(torch.equal(bits(out), bits(outs[0])) for out in outs)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(tensors, before, strict=True))
    error = (outs[0] - sum(tensors) / 3).norm() / (sum(tensors) / 3).norm()
    assert error <= (1e-6 if codec == "raw" else 1.1e-2)


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_in_place_gives_the_same_bits_as_out_of_place(sites_running, codec):
    tensors = parts(2)
    async with sites_running(2) as sites:
        outs, _ = await mean_of_all(sites, tensors, codec=codec)
        await asyncio.gather(*(site.mean(x, step=1, codec=codec) for site, x in zip(sites, tensors, strict=True)))
    assert all(torch.equal(bits(tensor), bits(outs[0])) for tensor in tensors)


async def test_weights_count_and_no_weight_at_all_gives_zeros(sites_running):
    tensors = [torch.full((1000,), float(rank)) for rank in range(3)]
    async with sites_running(3) as sites:
        outs = [torch.empty(1000) for _ in sites]
        await asyncio.gather(*(sites[i].mean(tensors[i], out=outs[i], weight=[1.0, 0.0, 3.0][i]) for i in range(3)))
        assert all(torch.equal(out, torch.full((1000,), 1.5)) for out in outs)
        outs, stats = await mean_of_all(sites, tensors, weight=0.0, step=1)
    assert all(not out.any() for out in outs)
    assert stats[0].weight_sum == 0.0


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk:4096"])
@pytest.mark.parametrize("weights", [(1.0, 3.0), (0.125, 0.25), (5e8, 1e9), (1e-30, 1e-30), (1e19, 1e19)])
async def test_a_mean_in_a_codec_is_right_whatever_the_weights_sum_to(sites_running, codec, weights):
    numbers = (1.0, 4.0)  # of which every codec here keeps what it is given
    async with sites_running(2) as sites:
        outs = [torch.empty(5000) for _ in sites]
        posted = [
            site.mean(torch.full((5000,), number), out=out, weight=weight, codec=codec)
            for site, number, out, weight in zip(sites, numbers, outs, weights, strict=True)
        ]
        await asyncio.gather(*posted)
    mean = sum(number * weight for number, weight in zip(numbers, weights, strict=True)) / sum(weights)
    assert all(torch.allclose(out, torch.full((5000,), mean), rtol=1e-2) for out in outs)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
async def test_what_is_recorded_replays_to_the_same_bits(sites_running, codec, world_size):
    tensors = parts(world_size)
    records = [[] for _ in tensors]
    outs = [torch.empty(NUMEL) for _ in tensors]
    async with sites_running(world_size) as sites:
        await asyncio.gather(
            *(
                sites[i].mean(
                    tensors[i],
                    out=outs[i],
                    codec=codec,
                    record=lambda start, numel, wire, kept=records[i]: kept.append((start, numel, bytes(wire))),
                )
                for i in range(world_size)
            )
        )
    assert all(sorted(kept) == sorted(records[0]) for kept in records)
    replayed = torch.full((NUMEL,), math.nan)
    for start, numel, wire in records[0]:
        decode_result(codec, start, numel, wire, replayed)
    assert torch.equal(bits(replayed), bits(outs[0]))


async def test_several_rounds_run_at_once(sites_running):
    async with sites_running(3, chunk_nbytes=64 << 10) as sites:
        results = await asyncio.gather(*(mean_of_all(sites, parts(3, 50_000 + n), step=n) for n in range(4)))
    for number, (outs, _) in enumerate(results):
        torch.testing.assert_close(outs[0], sum(parts(3, 50_000 + number)) / 3)


async def test_a_member_that_posts_late_finds_what_came_early(sites_running, until):
    tensors = parts(2)
    outs = [torch.empty(NUMEL), torch.empty(NUMEL)]
    async with sites_running(2) as sites, asyncio.TaskGroup() as tasks:
        tasks.create_task(sites[0].mean(tensors[0], out=outs[0]))
        await until(lambda: sites[1].communicator.bytes_received)
        await sites[1].mean(tensors[1], out=outs[1])
    assert torch.equal(outs[0], outs[1])


async def test_a_round_of_the_next_view_waits_until_that_view_is_installed_here(sites_running, view_of, until):
    tensors = parts(2)
    outs = [torch.empty(NUMEL), torch.empty(NUMEL)]
    async with sites_running(2) as sites, asyncio.TaskGroup() as tasks:
        await sites[0].communicator.install(view_of(sites, epoch=2))
        tasks.create_task(sites[0].mean(tensors[0], out=outs[0], epoch=2))
        await until(lambda: sites[1].communicator.bytes_received)
        await sites[1].communicator.install(view_of(sites, epoch=2))
        await sites[1].mean(tensors[1], out=outs[1], epoch=2)
    assert torch.equal(outs[0], outs[1])


async def test_other_terms_are_a_named_error_on_all_members_at_once(sites_running):
    async with sites_running(3) as sites:
        results = await asyncio.gather(
            sites[0].mean(torch.ones(1000)),
            sites[1].mean(torch.ones(1000)),
            sites[2].mean(torch.ones(1001)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [PlanMismatch] * 3
        assert (results[0].field, results[0].ours, results[0].theirs) == ("numel", 1000, 1001)
        assert results[0].peer_id == sites[2].me.peer_id
        codecs = await asyncio.gather(
            sites[0].mean(torch.ones(1000), step=1, codec="raw"),
            sites[1].mean(torch.ones(1000), step=1, codec="int8"),
            sites[2].mean(torch.ones(1000), step=1, codec="raw"),
            return_exceptions=True,
        )
        assert [result.field for result in codecs] == ["codec"] * 3
        outs, _ = await mean_of_all(sites, parts(3), step=2)  # nothing is broken by that
        assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
async def test_numbers_that_are_not_finite_are_their_owners_error_and_name_it_to_the_others(
    sites_running, outcomes, bad, codec, world_size
):
    async with sites_running(world_size) as sites:
        for step, index in enumerate([0, 1234, NUMEL // 2 + 1, NUMEL - 1]):  # in the slice of everybody once
            tensors = [torch.ones(NUMEL) for _ in range(world_size)]
            tensors[0][index : index + 3] = bad
            before = tensors[0].clone()
            works = (site.mean(x, step=step, codec=codec) for site, x in zip(sites, tensors, strict=True))
            ours, *theirs = await outcomes(works)
            assert isinstance(ours, NonFiniteInput)
            assert ours.first_index == index
            assert all(isinstance(it, OperationAborted) and it.suspects == (sites[0].peer_id,) for it in theirs)
            assert torch.equal(bits(tensors[0]), bits(before))


@pytest.mark.parametrize("others_weight", [0.0, 1.0])
@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_no_weight_does_not_hide_numbers_that_are_not_finite(sites_running, outcomes, codec, others_weight):
    async with sites_running(3) as sites:
        bad = torch.full((1000,), math.nan)
        works = [site.mean(torch.ones(1000), codec=codec, weight=others_weight) for site in sites[1:]]
        ours, *theirs = await outcomes([sites[0].mean(bad, codec=codec, weight=0.0), *works])
    assert isinstance(ours, NonFiniteInput)
    assert all(isinstance(other, OperationAborted) and other.suspects == (sites[0].peer_id,) for other in theirs)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("world_size", [2, 3])
async def test_a_sum_that_overflows_aborts_without_a_suspect(sites_running, codec, world_size):
    async with sites_running(world_size) as sites:
        results = await asyncio.gather(
            *(site.mean(torch.full((1000,), 3e38), codec=codec) for site in sites), return_exceptions=True
        )
    assert all(isinstance(result, OperationAborted) and result.suspects == () for result in results)


async def test_keys_are_used_once_and_only_in_their_view(sites_running):
    async with sites_running(2) as sites:
        await mean_of_all(sites, parts(2))
        with pytest.raises(RoundRefused, match="used before"):
            await sites[0].mean(torch.ones(5))
        with pytest.raises(RoundRefused, match="installed view is 1"):
            await sites[0].mean(torch.ones(5), epoch=2)


@pytest.mark.parametrize(
    ("tensor", "out"),
    [
        (torch.ones(4, dtype=torch.float64), torch.ones(4)),
        (torch.ones(2, 2).t(), torch.ones(4)),
        (torch.ones(8)[::2], torch.ones(4)),
        (torch.ones(4), torch.ones(5)),
    ],
)
async def test_tensors_that_are_not_as_described_are_refused(sites_running, tensor, out):
    async with sites_running(1) as sites:
        with pytest.raises(ValueError, match=r"tensor|out"):
            await sites[0].mean(tensor, out=out)


async def test_overlapping_memory_and_impossible_weights_are_refused(sites_running):
    memory = torch.ones(10)
    async with sites_running(1) as sites:
        with pytest.raises(ValueError, match="overlap"):
            await sites[0].mean(memory[:8], out=memory[2:])
        for weight in (-1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match="weight"):
                await sites[0].mean(memory, weight=weight)
        with pytest.raises(ValueError, match="no codec"):
            await sites[0].mean(memory, codec="zip")


async def test_a_newer_view_ends_running_rounds_and_the_same_input_goes_through_it(
    sites_running, outcome, view_of, until
):
    tensors = parts(2)
    before = tensors[0].clone()
    async with sites_running(2) as sites:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(outcome(sites[0].mean(tensors[0], out=torch.empty(NUMEL))))
            await until(lambda: sites[1].communicator.bytes_received)
            for site in sites:
                await site.communicator.install(view_of(sites, epoch=2))
        assert isinstance(running.result(), OperationAborted)
        assert running.result().suspects == ()
        assert torch.equal(bits(tensors[0]), bits(before))
        outs, _ = await mean_of_all(sites, tensors, epoch=2)
    torch.testing.assert_close(outs[0], sum(tensors) / 2)


async def test_a_cancelled_caller_tells_the_others(sites_running, outcome, until):
    async with sites_running(3) as sites:
        gone = asyncio.ensure_future(sites[0].mean(torch.ones(NUMEL)))
        others = [asyncio.ensure_future(outcome(site.mean(torch.ones(NUMEL)))) for site in sites[1:2]]
        await until(lambda: sites[2].communicator.bytes_received)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        outcomes = [await other for other in others]
    assert all(isinstance(outcome, OperationAborted) and "gave up" in outcome.cause for outcome in outcomes)


async def test_a_member_that_has_not_posted_is_no_suspect_until_the_deadline(sites_running, outcome):
    async with sites_running(2) as sites:
        outcome = await outcome(sites[0].mean(torch.ones(NUMEL), deadline_s=1.0))
    assert isinstance(outcome, OperationAborted)
    assert "not finished in 1 s" in outcome.cause


async def test_a_member_that_hangs_up_and_is_gone_is_the_suspect(sites_running, outcome, until):
    async with sites_running(3) as sites:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(outcome(site.mean(torch.ones(NUMEL)))) for site in sites[1:]]
            await until(lambda: sites[0].communicator.bytes_received)
            await sites[0].close()
        for task in running:
            assert isinstance(task.result(), OperationAborted)
            assert task.result().suspects == (sites[0].me.peer_id,)


async def test_a_link_that_breaks_in_mid_round_is_made_anew_and_the_round_goes_on(sites_running, until):
    tensors = parts(2, 4_000_000)
    outs = [torch.empty(4_000_000) for _ in tensors]
    async with sites_running(2, chunk_nbytes=64 << 10) as sites, asyncio.TaskGroup() as tasks:
        for site, tensor, out in zip(sites, tensors, outs, strict=True):
            tasks.create_task(site.mean(tensor, out=out))
        for nbytes in (2 << 20, 5 << 20, 9 << 20):
            await until(lambda nbytes=nbytes: sites[0].communicator.bytes_received >= nbytes)
            for bundle in sites[0].communicator._mesh.bundles.values():
                for link in tuple(bundle._links.values()):
                    link.close()
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    torch.testing.assert_close(outs[0], sum(tensors) / 2)


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_corrupt_chunks_are_found_and_sent_again(sites_running, monkeypatch, codec):
    whole, to_corrupt = Outbox.pieces_of, {(FrameType.PART, 0), (FrameType.RESULT, 1)}

    def corrupt_once(self, frame_type, chunk, scratch):
        header, payload = whole(self, frame_type, chunk, scratch)
        if (frame_type, self.rank) in to_corrupt:
            to_corrupt.remove((frame_type, self.rank))
            payload = memoryview(bytearray(payload))
            payload[len(payload) // 2] ^= 0x40
        return header, payload

    monkeypatch.setattr(Outbox, "pieces_of", corrupt_once)
    tensors = parts(3)
    async with sites_running(3, chunk_nbytes=64 << 10) as sites:
        outs, _ = await mean_of_all(sites, tensors, codec=codec)
        dropped = [site.communicator.dropped.get("checksum does not fit", 0) for site in sites]
    assert not to_corrupt
    assert sum(dropped) == 2
    assert all(torch.equal(bits(out), bits(outs[0])) for out in outs)
    error = (outs[0] - sum(tensors) / 3).norm() / (sum(tensors) / 3).norm()
    assert error <= (1e-6 if codec == "raw" else 1.1e-2)


async def test_a_peer_whose_chunks_never_fit_is_given_up(sites_running, outcome, monkeypatch):
    whole = Outbox.pieces_of

    def corrupt(self, frame_type, chunk, scratch):
        header, payload = whole(self, frame_type, chunk, scratch)
        return (header[:-1] + bytes([header[-1] ^ 1]) if self.rank == 0 else header), payload

    monkeypatch.setattr(Outbox, "pieces_of", corrupt)
    async with sites_running(2) as sites:
        outcomes = await asyncio.gather(*(outcome(site.mean(torch.ones(NUMEL))) for site in sites))
    assert outcomes[1].suspects == (sites[0].me.peer_id,)


async def test_an_error_in_the_callers_record_reaches_the_caller_and_ends_the_round_for_all(sites_running, outcome):
    def fail(_start, _numel, _wire):
        raise KeyError("disk full")

    tensor = torch.ones(2 * NUMEL)  # too long for a swap, in which the other may have all it needs by then
    async with sites_running(2) as sites, asyncio.TaskGroup() as tasks:
        other = tasks.create_task(outcome(sites[1].mean(tensor)))
        with pytest.raises(KeyError, match="disk full"):
            await sites[0].mean(tensor, record=fail)
    assert isinstance(other.result(), OperationAborted)


# ------------------------------------------------------------------------------------ a peer that misbehaves


@contextlib.asynccontextmanager
async def impostor(site, bulk_hello, number=0):
    """A raw, handshaken bulk connection to `site`, as peer `number` of the view."""
    me = type(site.me)(f"{number:016x}", 1)
    sock = await dial(site.listener.address, SocketOptions(), timeout_s=5)
    await introduce(sock, bulk_hello(me), timeout_s=5)
    try:
        yield sock
    finally:
        sock.close()


async def closed_by_other_side(sock):
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(sock, 1 << 16):
                pass
    return True


def frame(frame_type, payload=b"", **fields):
    return pack(Header(type=frame_type, payload_nbytes=len(payload), **fields), payload) + payload


async def read_opening(sock):
    """The OPEN that `sock` brings first: (fields for frames of the same round, its payload)."""
    loop = asyncio.get_running_loop()
    read = b""
    while len(read) < 48 or len(read) < 48 + int.from_bytes(read[4:8], "big"):
        received = await loop.sock_recv(sock, 4096)
        assert received, "the other side hung up"
        read += received
    fields = {
        "epoch": int.from_bytes(read[8:12], "big"),
        "outer_step": int.from_bytes(read[12:16], "big"),
        "plan_hash": int.from_bytes(read[36:40], "big"),
        "weight": 1.0,
    }
    return fields, read[48 : 48 + int.from_bytes(read[4:8], "big")]


def early(frame_type, count, payload=b"1234"):
    return b"".join(frame(frame_type, payload, epoch=2, chunk=chunk) for chunk in range(count))


BAD_FRAMES = {
    "random bytes": (bytes(range(255, -1, -1)), "wrong magic"),
    "control on bulk": (frame(FrameType.CONTROL, b"{}"), "frame type not allowed here"),
    "four GiB": (
        pack(Header(type=FrameType.PART, payload_nbytes=2**32 - 1)),
        "payload too long",
    ),
    "a sign with a payload": (frame(FrameType.SIGN, b"1"), "payload too long"),
    "flipped byte": (frame(FrameType.OPEN, b"abcd", epoch=1)[:-1] + b"X", "checksum does not fit"),
    "parts far ahead": (early(FrameType.PART, 600), "too far ahead"),
    "results far ahead": (early(FrameType.RESULT, 600), "too far ahead"),
    "much memory ahead": (early(FrameType.RESULT, 20, bytes(1 << 20)), "too far ahead"),
}


@pytest.mark.parametrize(("data", "reason"), BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
async def test_a_peer_that_sends_nonsense_loses_its_link_and_nobody_else_does(sites_running, bulk_hello, data, reason):
    async with sites_running(3) as sites:
        async with impostor(sites[2], bulk_hello, number=0) as sock:  # replaces the link of peer 0
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(sock, data)
            assert await closed_by_other_side(sock)
        assert sites[2].communicator.dropped[reason] == 1
        outs, _ = await mean_of_all(sites, parts(3))  # peer 0 dials again
    assert torch.equal(outs[0], outs[2])


SLICE_NBYTES = [3072, 2048, 2880]
"""Of 2000 fp32 among 3 members: 3, 2 and the rest of 8 blocks."""
BAD_CHUNKS = [
    (FrameType.PART, b"1234", {"chunk": 10**6}, "no such chunk"),
    (FrameType.PART, b"1234", {"chunk": 2}, "chunk has another length than planned"),
    (FrameType.RESULT, b"1234", {"chunk": 0}, "chunk has another length than planned"),
    (FrameType.PART, bytes(SLICE_NBYTES[1]), {"chunk": 1}, "part that is not for us to add"),
    (FrameType.RESULT, bytes(SLICE_NBYTES[1]), {"chunk": 1}, "result of a chunk that its sender does not give us"),
    (FrameType.OPEN, b"1234", {}, "malformed Terms"),
    (FrameType.ABORT, b"1234", {}, "malformed AbortNotice"),
    (FrameType.PART, b"1234", {"rank": 1}, "rank is not the sender's"),
    (FrameType.PART, b"1234", {"rank": 99}, "rank is not the sender's"),
]


@pytest.mark.parametrize(("frame_type", "payload", "fields", "reason"), BAD_CHUNKS)
async def test_chunks_that_the_plan_does_not_know_break_the_link(
    sites_running, bulk_hello, outcome, frame_type, payload, fields, reason
):
    async with sites_running(3) as sites, impostor(sites[2], bulk_hello) as sock:
        running = asyncio.ensure_future(outcome(sites[2].mean(torch.ones(2000))))
        known, _ = await read_opening(sock)
        await asyncio.get_running_loop().sock_sendall(sock, frame(frame_type, payload, **(known | fields)))
        assert await closed_by_other_side(sock)
        assert sites[2].communicator.dropped[reason] >= 1
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_a_chunk_that_is_not_finite_names_its_sender(sites_running, bulk_hello, outcome, codec):
    numel = 512 if codec == "raw" else 256  # between two, raw parts are swapped whole and coded ones halved
    poison = b"\xff" * codec_named(codec).wire_nbytes(numel)
    kind = (FrameType.RESULT, 0) if codec == "raw" else (FrameType.PART, 1)
    async with sites_running(2) as sites, impostor(sites[1], bulk_hello) as sock:
        running = asyncio.ensure_future(outcome(sites[1].mean(torch.ones(512), codec=codec)))
        fields, opening = await read_opening(sock)
        msgspec.msgpack.decode(opening, type=Terms)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, frame(FrameType.OPEN, opening, **fields))
        await loop.sock_sendall(sock, frame(kind[0], poison, chunk=kind[1], **fields))
        ended = await running
    assert isinstance(ended, OperationAborted)
    assert ended.suspects == (sites[0].peer_id,)
    assert "not finite" in ended.cause


async def test_a_member_that_opens_and_then_stands_still_is_the_suspect(sites_running, bulk_hello, outcome):
    async with sites_running(2) as sites, impostor(sites[1], bulk_hello) as sock:
        running = asyncio.ensure_future(outcome(sites[1].mean(torch.ones(512))))
        fields, opening = await read_opening(sock)
        await asyncio.get_running_loop().sock_sendall(sock, frame(FrameType.OPEN, opening, **fields))
        ended = await running
    assert isinstance(ended, OperationAborted)
    assert ended.suspects == (sites[0].peer_id,)
    assert "no byte moved" in ended.cause


async def keep_signing(sock, running):
    while not running.done():
        await asyncio.get_running_loop().sock_sendall(sock, frame(FrameType.SIGN))
        await asyncio.wait([running], timeout=0.4)


async def test_signs_of_life_do_not_excuse_a_member_that_owes_what_depends_on_nobody(
    sites_running, bulk_hello, outcome
):
    async with sites_running(3) as sites, impostor(sites[2], bulk_hello) as sock:
        running = asyncio.ensure_future(outcome(sites[2].mean(torch.ones(2000), deadline_s=5.0)))
        fields, opening = await read_opening(sock)
        await asyncio.get_running_loop().sock_sendall(sock, frame(FrameType.OPEN, opening, **fields))
        await keep_signing(sock, running)
    assert "no byte moved" in running.result().cause
    assert running.result().suspects == (sites[0].peer_id,)


@pytest.mark.parametrize("signs", [False, True])
async def test_a_member_that_waits_for_a_third_one_is_judged_by_its_signs_of_life(
    sites_running, bulk_hello, outcome, signs
):
    """Peer 1 has not posted. The impostor has given all that it can alone; what it owes now depends on peer 1."""
    async with sites_running(3) as sites, impostor(sites[2], bulk_hello) as sock:
        running = asyncio.ensure_future(outcome(sites[2].mean(torch.ones(2000), deadline_s=4.0)))
        fields, opening = await read_opening(sock)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, frame(FrameType.OPEN, opening, **fields))
        await loop.sock_sendall(sock, frame(FrameType.PART, bytes(SLICE_NBYTES[2]), chunk=2, **fields))
        if signs:
            await keep_signing(sock, running)
        ended = await running
    assert isinstance(ended, OperationAborted)
    if signs:
        assert "not finished in 4 s" in ended.cause
    else:
        assert ended.suspects == (sites[0].peer_id,)
        assert "no byte moved" in ended.cause


async def test_members_that_wait_for_a_late_one_do_not_suspect_each_other(sites_running, outcomes):
    """Longer than the floor: only their signs of life, nothing of the round, goes to and fro."""
    async with sites_running(3) as sites:
        ended = await outcomes(site.mean(torch.ones(2000), deadline_s=4.0) for site in sites[1:])
    assert all(isinstance(error, OperationAborted) and "not finished in 4 s" in error.cause for error in ended)


async def test_a_connection_in_the_other_direction_than_the_one_there_is_is_closed_and_counted(
    sites_running, bulk_hello
):
    async with sites_running(2) as sites, impostor(sites[0], bulk_hello, number=1) as sock:
        assert await closed_by_other_side(sock)
        assert sites[0].communicator.dropped == {"connected in the other direction": 1}


async def test_of_short_chunks_as_many_bytes_go_ahead_as_of_long_ones_and_are_kept_for_who_posts_late(
    sites_running, until
):
    tensors = [torch.rand(3 << 20), torch.rand(3 << 20)]  # 12 MiB: 6 MiB for each
    async with sites_running(2) as sites:
        for site in sites:
            site.communicator._workplace.chunk_nbytes = 256 << 10  # as after a survey of a long path
        early, late = sites
        held = late.communicator._engine._stashes
        outs = [[torch.empty_like(tensor) for _ in range(5)] for tensor in tensors]
        waiting = [
            asyncio.ensure_future(early.mean(tensors[0], step=step, out=out)) for step, out in enumerate(outs[0])
        ]
        await until(lambda: sum(stash._nbytes for stash in held.values()) >= 4 * (4 << 20))
        assert sum(len(stash._frames) for stash in held.values()) == 5 + 4 * 16, "an OPEN each, and four rounds' credit"
        await asyncio.gather(*waiting, *(late.mean(tensors[1], step=step, out=out) for step, out in enumerate(outs[1])))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*outs, strict=True))
        assert torch.allclose(outs[0][4], (tensors[0] + tensors[1]) / 2)
        assert not late.communicator.dropped


async def test_what_rounds_were_lent_that_another_member_gave_up_is_not_lent_again_in_their_view(
    sites_running, outcomes, view_of
):
    """The one who gave up tells the third; what we sent it ahead stays there, and it must not become too much."""
    tensor = torch.zeros(NUMEL)
    async with sites_running(3) as sites:
        ahead, quitter, late = sites
        engine = ahead.communicator._engine
        for step in range(4):
            assert engine.credit(1 << 20) > 0
            waiting = ahead.mean(tensor, step=step, out=torch.empty_like(tensor))
            giving_up = quitter.mean(tensor, step=step, out=torch.empty_like(tensor), deadline_s=0.01)
            assert all(isinstance(error, OperationAborted) for error in await outcomes([waiting, giving_up]))
        assert engine.credit(1 << 20) == 0
        outs, _ = await mean_of_all(sites, [tensor, tensor + 3, tensor + 6], step=4)
        assert all(torch.equal(out, tensor + 3) for out in outs)
        assert not late.communicator.dropped.get("too far ahead")
        await asyncio.gather(*(site.communicator.install(view_of(sites, epoch=2)) for site in sites))
        assert engine.credit(1 << 20) > 0


@pytest.mark.parametrize(("epoch", "is_anew"), [(2, False), (3, True)])
async def test_who_missed_a_view_dials_anew_what_the_others_may_have_dropped(sites_running, view_of, epoch, is_anew):
    """A cut line lets a dead connection look alive for seconds after it was healed; the others wait for the dialler."""
    tensors = parts(2)
    async with sites_running(2) as sites:
        dialler = min(sites, key=lambda site: site.peer_id).communicator
        (before,) = dialler._mesh.bundles.values()
        for site in sites:
            await site.communicator.install(view_of(sites, epoch=epoch))
        (after,) = dialler._mesh.bundles.values()
        assert (after is not before) == before.closed == is_anew
        outs, _ = await mean_of_all(sites, tensors, epoch=epoch)
    assert torch.equal(outs[0], outs[1])


async def test_what_an_aborted_round_held_is_free_without_the_collector(sites_running, view_of, until):
    """Under churn rounds abort all the time; what waits for the collector adds up."""
    async with sites_running(2) as sites:
        out = torch.empty(NUMEL)
        held = weakref.ref(out)
        posted = asyncio.ensure_future(sites[0].mean(torch.ones(NUMEL), out=out))
        await until(lambda: sites[1].communicator.bytes_received)
        gc.collect()
        gc.disable()
        try:
            await sites[0].communicator.install(view_of(sites, epoch=2))
            await asyncio.wait([posted])
            assert isinstance(posted.exception(), OperationAborted)
            del posted, out
            assert held() is None
        finally:
            gc.enable()


async def test_who_opens_a_round_in_a_view_that_the_others_have_left_is_told_at_once(sites_running, view_of, outcome):
    """A peer that was frozen posts in the only view it knows; without an answer it waits for its deadline."""
    async with sites_running(2) as sites:
        behind, ahead = sites
        await ahead.communicator.install(view_of(sites, epoch=2))
        async with asyncio.timeout(5.0):
            ended = await outcome(behind.mean(torch.ones(2000), deadline_s=60.0))
        assert isinstance(ended, OperationAborted)
        assert "it has left that view" in ended.cause
        assert ended.suspects == ()


async def test_a_peer_that_asks_without_listening_is_owed_a_bounded_number_of_answers(sites_running, view_of):
    async with sites_running(2) as sites:
        asker, asked = sites
        await asked.communicator.install(view_of(sites, epoch=2))
        (bundle,) = asked.communicator._mesh.bundles.values()
        bundle.wake = lambda: None  # nothing leaves: the other one's window is full
        for step in range(1000):
            opening = Frame(Header(type=FrameType.OPEN, payload_nbytes=0, epoch=1, outer_step=step), memoryview(b""))
            asked.communicator._engine.on_frame(bundle, opening)
        assert len(bundle.notices) <= 256
        assert asked.communicator.dropped["of an older view"] == 1000
        assert asker.communicator.dropped == {}


def _vanish(site, other):
    """The links of this dialler are gone, and no end of them ever arrives at the other: the line was cut."""
    lost = site.communicator._mesh.bundles.pop(other.me)
    for link in lost._links.values():
        asyncio.get_running_loop().remove_reader(link._sock.fileno())
    return lost


async def test_what_was_lost_with_a_stream_that_is_not_made_anew_is_sent_again(sites_running, view_of, until):
    """A dialler that has lost its links unheard begins anew with fewer; what goes into the old ones goes nowhere."""
    async with sites_running(2, num_streams=3) as sites:
        dialler, acceptor = sites
        lost = _vanish(dialler, acceptor)
        dialler.communicator._mesh._num_streams = 1
        await asyncio.gather(*(site.communicator.install(view_of(sites, epoch=2)) for site in sites))
        bundle = acceptor.communicator._mesh.bundles[dialler.me]
        await until(lambda: 0 in bundle._links)
        assert list(bundle._links) == [0]
        async with asyncio.timeout(10):
            await asyncio.gather(*(site.mean(torch.ones(1000), out=torch.empty(1000), epoch=2) for site in sites))
        lost.close()


@pytest.mark.parametrize("first", [0, 2])
async def test_what_a_round_sent_into_streams_that_nobody_holds_is_sent_again(sites_running, view_of, until, first):
    """As before, but the round is opened before the dialler begins anew, into a stream that it then has or has not."""
    async with sites_running(2, num_streams=3) as sites:
        dialler, acceptor = sites
        bundle = acceptor.communicator._mesh.bundles[dialler.me]
        lost = _vanish(dialler, acceptor)
        dialler.communicator._mesh._num_streams = 1
        await acceptor.communicator.install(view_of(sites, epoch=2))
        bundle._links = {first: bundle._links.pop(first)} | bundle._links  # who sends first
        waiting = asyncio.ensure_future(acceptor.mean(torch.ones(1000), out=torch.empty(1000), epoch=2))
        await until(lambda: bundle._links[first].bytes_sent and not bundle.is_waiting)
        await dialler.communicator.install(view_of(sites, epoch=2))
        async with asyncio.timeout(10):
            await asyncio.gather(waiting, dialler.mean(torch.ones(1000), out=torch.empty(1000), epoch=2))
        lost.close()


async def test_an_opening_that_comes_after_the_end_is_answered_only_if_something_may_be_lost(sites_running, until):
    """With several streams an opening may be overtaken by the chunks that follow it, or their answers."""
    async with sites_running(2, num_streams=2) as sites:
        await asyncio.gather(*(site.mean(torch.ones(2000), out=torch.empty(2000)) for site in sites))
        engine = sites[0].communicator._engine
        (bundle,) = sites[0].communicator._mesh.bundles.values()
        bundle.wake = lambda: None  # what it would say stays where it can be seen
        opening = Frame(Header(type=FrameType.OPEN, payload_nbytes=0, epoch=1, outer_step=0, rank=1), memoryview(b""))
        engine.on_frame(bundle, opening)
        assert not bundle.notices
        bundle._links[1].close()
        await until(lambda: bundle.has_lost)
        engine.on_frame(bundle, opening)
        (answer,) = bundle.notices
        assert b"the round has ended there" in bytes(answer.pieces(None)[1])
