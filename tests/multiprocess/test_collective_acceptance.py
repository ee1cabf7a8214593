# SPDX-License-Identifier: Apache-2.0
"""What every collective operation promises, between real processes: exact values, named errors, survivors.

The same promises in one process, and many more of them, are those of tests/unit/collective/test_operations.py.
"""

import hashlib
import itertools
import signal

import numpy as np
import pytest
import torch

from tests.multiprocess.test_collective_processes import MAX_SECONDS, install, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

FLOATS = ["float32", "float64", "bfloat16", "float16"]
INTEGERS = ["int8", "uint8", "int16", "int32", "int64"]
NUMELS = [0, 2, 1001, 60_000]
LARGE = 6_000_000


def digest(values, dtype):
    """Of int64 or float64 values as this dtype; only bfloat16 needs torch."""
    if dtype == "bfloat16":
        whole = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.int16).numpy()
    else:
        whole = values.astype(dtype)
    return hashlib.sha256(whole.tobytes()).hexdigest()


def part(numel, rank, dtype):
    index = np.arange(numel, dtype=np.int64)
    values = (index * 7 + rank * 5 + index // 13 * rank) % 13 - 3
    return values % 256 if dtype == "uint8" else values


def reduced(op, numel, world_size, dtype):
    parts = np.stack([part(numel, rank, dtype) for rank in range(world_size)])
    return {
        "sum": parts.sum(0),
        "mean": parts.sum(0) / world_size,
        "min": parts.min(0),
        "max": parts.max(0),
    }[op]


def batch_of(peers):
    """(orders, digests expected of every rank): every kind, dtype, op and size."""
    world_size = len(peers)
    orders, expected = [], []

    def add(digests, **order):
        orders.append(order | {"outer_step": len(orders) // 64, "fragment": len(orders) % 64})
        expected.append(digests)

    for dtype, op, numel in itertools.product(FLOATS + INTEGERS, ["sum", "mean", "min", "max"], NUMELS):
        if op == "mean" and dtype in INTEGERS:
            continue
        whole = reduced(op, numel, world_size, dtype)
        same = [digest(whole, dtype)] * world_size
        add(same, kind="all_reduce", op=op, dtype=dtype, numel=numel, in_place=len(orders) % 2 == 0)
    for dtype in ["float32", "int8"]:
        for sizes in ([7] * world_size, [20_000 * rank for rank in range(world_size)]):
            whole = np.concatenate([part(max(sizes), rank, dtype)[:size] for rank, size in enumerate(sizes)])
            add([digest(whole, dtype)] * world_size, kind="all_gather", sizes=sizes, dtype=dtype, numel=max(sizes))
        for rank, peer in enumerate(peers):
            given = digest(part(30_001, rank, dtype), dtype)
            add([given] * world_size, kind="broadcast", root=peer.peer_id, dtype=dtype, numel=30_001)
    add([digest(np.zeros(0), "float32")] * world_size, kind="barrier")
    return orders, expected


def run(peers, batch, *, special=None, epoch=1):
    """Post one batch on all; `special` = (peer, extra fields of its order). Answers of the others."""
    for peer in peers:
        peer.order(batch=batch, epoch=epoch, **(special[1] if special and special[0] is peer else {}))
    return [peer.answer() for peer in peers if not (special and special[0] is peer)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_that_post_everything_at_once_in_other_orders_get_exact_values(world_size):
    with running(world_size) as peers:
        install(peers)
        orders, expected = batch_of(peers)
        assert len(orders) > 2 * 64
        for first in range(0, len(orders), 64):
            answers = run(peers, orders[first : first + 64])
            for rank, answer in enumerate(answers):
                wanted = [digests[rank] for digests in expected[first : first + 64]]
                wrong = [
                    (rank, order)
                    for order, got, want in zip(orders[first:], answer["outcomes"], wanted, strict=False)
                    if got != want
                ]
                assert not wrong


def test_pairs_of_processes_exchange_under_one_key():
    with running(4) as peers:
        install(peers)
        partner_of = [3, 2, 1, 0]
        order = {"kind": "exchange", "outer_step": 0, "fragment": 0, "numel": 50_001, "dtype": "int32"}
        order["partner"] = [peers[other].peer_id for other in partner_of]
        answers = run(peers, [order])
        assert [answer["outcomes"] for answer in answers] == [
            [digest(part(50_001, other, "int32"), "int32")] for other in partner_of
        ]


def test_a_process_that_posts_other_terms_is_named_on_all_at_once():
    changes = [
        ({"numel": 1001}, "numel"),
        ({"dtype": "int32"}, "dtype"),
        ({"op": "max"}, "op"),
        ({"codec": "int8"}, "codec"),
    ]
    with running(3) as peers:
        install(peers)
        for step, (change, field) in enumerate(changes):
            order = {"kind": "all_reduce", "outer_step": step, "fragment": 0}
            order |= {"numel": 1000, "dtype": "float32", "op": "sum"}
            for peer in peers:
                peer.order(batch=[order | (change if peer is peers[1] else {})], epoch=1)
            answers = [peer.answer() for peer in peers]
            outcomes = [answer["outcomes"][0] for answer in answers]
            assert [outcome["error"] for outcome in outcomes] == ["PlanMismatch"] * 3
            assert [outcome["field"] for outcome in outcomes] == [field] * 3
            assert outcomes[0]["peer_id"] == outcomes[2]["peer_id"] == peers[1].peer_id
            assert all(answer["seconds"] < MAX_SECONDS for answer in answers)


@pytest.mark.parametrize("kind", ["all_gather", "broadcast"])
def test_survivors_of_a_sigkill_in_any_operation_name_the_dead_and_go_on_in_the_next_view(kind):
    with running(3, slow=1) as peers:
        install(peers)
        victim, survivors = peers[1], [peers[0], peers[2]]
        order = {"kind": kind, "outer_step": 0, "fragment": 0, "numel": LARGE, "dtype": "float32", "op": "sum"}
        order |= {"sizes": [LARGE] * 3, "root": victim.peer_id}
        # The victim is slow, so that it dies with most of what it owes unsent. The root of a broadcast receives only
        # what opens the round.
        nbytes = 200 if kind == "broadcast" else 2 << 20
        answers = run(peers, [order], special=(victim, {"kill_at_nbytes": nbytes}))
        for answer in answers:
            assert answer["outcomes"] == [{"error": "OperationAborted", "suspects": [victim.peer_id]}]
            assert answer["seconds"] < MAX_SECONDS
        assert victim.process.wait(60) == -signal.SIGKILL
        install(survivors, epoch=2)
        order |= {"sizes": [LARGE] * 2, "root": survivors[1].peer_id}
        answers = run(survivors, [order], epoch=2)
        # Peer numbers, not ranks, choose the values.
        parts = [part(LARGE, number, "float32") for number in (0, 2)]
        expected = {
            "all_gather": [np.concatenate(parts)] * 2,
            "broadcast": [parts[1]] * 2,
        }[kind]
        assert [answer["outcomes"][0] for answer in answers] == [digest(values, "float32") for values in expected]
