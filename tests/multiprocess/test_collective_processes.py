# SPDX-License-Identifier: Apache-2.0
"""The collective layer between real processes: exact values, and what is left when one is killed or frozen."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

PEER = Path(__file__).with_name("collective_peer.py")
NUMEL = 6_000_000
MAX_SECONDS = 30.0


class Peer:
    """A running peer process, which may send only so many bytes a second."""

    def __init__(self, number, max_upload=None):
        self.number = number
        self.peer_id = f"{number:016x}"
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), str(number), *([] if max_upload is None else [str(max_upload)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PEER.parents[2])},
        )
        self.address = ""

    def order(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, f"peer {self.number} ended with {self.process.wait()}"
        return json.loads(line)


@contextlib.contextmanager
def running(count, *, slow=None):
    """So many peers; the one with the number `slow` sends 4 MB a second at most."""
    peers = [Peer(number, max_upload=4e6 if number == slow else None) for number in range(count)]
    try:
        for peer in peers:
            peer.address = peer.answer()["address"]
        yield peers
    finally:
        for peer in peers:
            peer.process.kill()  # also ends one that is stopped
            peer.process.communicate()


def install(peers, epoch=1):
    members = [{"peer_id": peer.peer_id, "incarnation": 1, "address": peer.address} for peer in peers]
    for peer in peers:
        peer.order(install={"epoch": epoch, "outer_step": 0, "digest": "", "members": members})
    assert all(peer.answer() == {"installed": True} for peer in peers)


def reduce(peers, *, special=None, **more):
    """Post one round on all peers; `special` = (peer, extra fields of its order)."""
    order = {"epoch": 1, "outer_step": 0, "numel": NUMEL, "members": [peer.number for peer in peers]} | more
    for peer in peers:
        peer.order(**(order | special[1] if special and special[0] is peer else order))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_processes_agree_bit_for_bit_and_integers_are_exact(world_size):
    with running(world_size) as peers:
        install(peers)
        for step, (kind, codec, numel, bound) in enumerate(
            [
                ("integers", "raw", NUMEL, 0.0),
                ("integers", "raw", 2, 0.0),
                ("gaussian", "raw", NUMEL, 1e-6),
                ("gaussian", "int8", NUMEL, 1.1e-2),
            ]
        ):
            reduce(peers, outer_step=step, kind=kind, codec=codec, numel=numel)
            answers = [peer.answer() for peer in peers]
            assert len({answer["digest"] for answer in answers}) == 1
            assert all(answer["input_untouched"] for answer in answers)
            if kind == "integers" and world_size in (1, 2, 4):
                expected = [(index % 997) * (world_size + 1) / 2 for index in range(min(64, numel))]
                assert answers[0]["head"] == expected
            # Thirds are rounded once; everything else in the integer rounds is exact.
            assert answers[0]["relative_error"] <= (1e-7 if bound == 0.0 and world_size == 3 else bound)


@pytest.mark.parametrize(("victim_number", "in_place"), [(0, False), (2, True)])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_survivors_of_a_sigkill_name_the_dead_and_finish_in_the_next_view(victim_number, in_place, codec):
    with running(3) as peers:
        install(peers)
        victim = peers[victim_number]
        reduce(peers, codec=codec, in_place=in_place, special=(victim, {"signal": "SIGKILL", "signal_after": 5}))
        survivors = [peer for peer in peers if peer is not victim]
        for answer in [peer.answer() for peer in survivors]:
            assert answer["suspects"] == [victim.peer_id]
            assert answer["input_untouched"]
            assert answer["seconds"] < MAX_SECONDS
        assert victim.process.wait(60) == -signal.SIGKILL
        install(survivors, epoch=2)
        reduce(survivors, epoch=2, codec=codec, in_place=in_place)
        answers = [peer.answer() for peer in survivors]
        assert len({answer["digest"] for answer in answers}) == 1


def test_a_frozen_process_is_the_suspect_within_a_bound_and_cannot_disturb_the_next_view():
    with running(3) as peers:
        install(peers)
        victim = peers[1]
        reduce(peers, special=(victim, {"signal": "SIGSTOP", "signal_after": 3}))
        survivors = [peers[0], peers[2]]
        for answer in [peer.answer() for peer in survivors]:
            assert answer["suspects"] == [victim.peer_id]
            assert answer["seconds"] < MAX_SECONDS
        install(survivors, epoch=2)
        victim.process.send_signal(signal.SIGCONT)  # wakes up in mid-round, in a view that is over
        for step in range(3):
            reduce(survivors, epoch=2, outer_step=step, kind="integers")
            answers = [peer.answer() for peer in survivors]
            assert len({answer["digest"] for answer in answers}) == 1
            assert answers[0]["relative_error"] == 0.0
        late = victim.answer()
        assert late["suspects"] or "gave up" in late["aborted"]
