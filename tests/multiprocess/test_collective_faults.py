# SPDX-License-Identifier: Apache-2.0
"""Real peers that are killed, frozen and cut off in the middle of an operation: every value right, nobody hung.

The peers, the faults and the checks are those of `scripts/bench faults` and `scripts/bench churn`.
"""

import asyncio
import os
import random
import shutil
import sys
import time

import pytest
import torch

from isthmus.collective import RoundKey
from scripts.chaoslab.process import is_alive
from scripts.faults.attempts import Attempt, Site
from scripts.faults.churn import churn
from scripts.faults.reviving import Reviver
from scripts.faults.values import fill, is_mean
from scripts.faults.views import open_server
from scripts.faults.words import Mode, Report

pytestmark = pytest.mark.multiprocess

NBYTES = 8 << 20
DEADLINE_S = 60.0
MAX_REVIVAL_S = 30.0
"""A frozen peer takes 4 to 7 s on an idle machine. `scripts/bench faults` has the sharp limits."""
NO_NAMESPACES = not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("nsenter")


def assert_flawless(tally):
    assert tally.notes == []
    assert (tally.wrong, tally.hung, tally.silent) == (0, 0, 0)
    assert tally.operations > 0


async def revive(kind, modes, world_size=3):
    """One fault in each mode, all in the same processes: loading torch takes longer than everything else here."""
    seed = random.randrange(2**32)
    async with open_server(nbytes=NBYTES, deadline_s=DEADLINE_S, namespaces=kind == "blackhole") as server:
        for mode in modes:
            print(f"{kind} {mode} seed {seed}")  # shown if the test fails
            reviver = Reviver(server, mode, world_size, random.Random(f"{seed} {mode}"))
            await reviver.warm_up()
            revival = await reviver.revive(kind)
            assert_flawless(server.tally)
            assert len(server.living()) == world_size
            assert 0 < revival.seconds < MAX_REVIVAL_S


@pytest.mark.parametrize("world_size", [3, 4])
async def test_survivors_of_a_kill_at_any_moment_have_right_values_in_every_mode(world_size):
    await revive("kill", list(Mode), world_size)


async def test_a_frozen_peer_is_left_out_and_does_not_disturb_when_it_thaws():
    await revive("freeze", [Mode.SEVERAL])


@pytest.mark.netns
@pytest.mark.skipif(NO_NAMESPACES, reason="network namespaces need root, iproute2 and nsenter")
async def test_a_peer_whose_cable_is_cut_is_left_out_and_comes_back_when_it_is_healed():
    await revive("blackhole", [Mode.IN_PLACE])


async def test_peers_that_come_and_go_for_fifteen_seconds_leave_no_gap_and_no_wrong_value():
    async with open_server(nbytes=1 << 20, deadline_s=DEADLINE_S) as server:
        story = await churn(server, 15.0, random.Random(), max_peers=5, practice_s=0.0)
        assert_flawless(server.tally)
        assert story.kills > 0
        assert story.starts > 0
        assert len(story.world_sizes) > 1
        assert story.longest_gap_s < 20.0
        assert story.after.descriptors == story.before.descriptors


# ------------------------------------------------------------------------------------ the judge itself


def mean_of(numbers, step, fragment=0, numel=300_000):
    total = torch.zeros(numel)
    part = torch.empty(numel)
    for number in numbers:
        fill(part, number=number, step=step, fragment=fragment)
        total += part
    return total / len(numbers)


@pytest.mark.parametrize("numbers", [(0,), (0, 1, 2), (3, 5, 6), (*range(8),)])
def test_the_mean_of_any_peers_is_exact_and_no_other_peers_step_or_fragment_is_taken_for_it(numbers):
    mean = mean_of(numbers, step=3)
    assert is_mean(mean, numbers, step=3, fragment=0)
    assert not is_mean(mean, numbers, step=4, fragment=0)
    assert not is_mean(mean, numbers, step=3, fragment=1)
    assert not is_mean(mean, {*numbers} ^ {7}, step=3, fragment=0)
    mean[-1] += 1
    assert not is_mean(mean, numbers, step=3, fragment=0)


def test_a_part_that_was_added_twice_or_left_out_is_no_mean():
    part = torch.empty(300_000)
    fill(part, number=1, step=3, fragment=0)
    for error in (part / 3, -part / 3):
        assert not is_mean(mean_of((0, 1, 2), step=3) + error, (0, 1, 2), step=3, fragment=0)


def site(number):
    return Site(number, 1, 0, "", None)


def report(outcome, *suspects):
    return Report(key=RoundKey(1, 1, 0), outcome=outcome, at=0.0, posted_at=0.0, suspects=suspects)


def attempt(sites, *reports):
    return Attempt(
        1, sites, frozenset({0}), 0.0, {(site, 0): report for site, report in zip(sites, reports, strict=False)}
    )


def test_a_peer_that_suspects_all_others_is_not_believed_and_the_one_most_suspect_leaves():
    sites = [site(number) for number in range(3)]
    lonely = attempt(sites, report("aborted", 1, 2))
    assert lonely.suspected() == set()
    assert not lonely.is_decided(trusts_ends=False)
    outvoted = attempt(sites, report("aborted", 1, 2), report("aborted", 0), report("aborted", 0))
    assert outvoted.suspected() == {sites[0]}
    assert outvoted.is_decided(trusts_ends=False)


def test_the_end_of_a_process_decides_only_where_it_was_felt_or_ends_are_trusted():
    sites = [site(number) for number in range(3)]
    sites[2].is_alive = False
    assert not attempt(sites, report("finished")).is_decided(trusts_ends=False)
    assert attempt(sites, report("finished")).is_decided(trusts_ends=True)
    assert attempt(sites, report("aborted", 2)).is_decided(trusts_ends=False)
    assert attempt(sites, report("finished"), report("finished")).is_decided(trusts_ends=False)


def test_the_last_one_is_a_laggard_and_those_whom_a_lone_one_has_outrun_are_not():
    """A peer may have finished and be cut off with what the others lack on its way: it is they who find that out."""
    sites = [site(number) for number in range(3)]
    assert attempt(sites, report("finished")).laggards() == []
    assert attempt(sites, report("finished"), report("finished")).laggards() == sites[2:]
    assert attempt(sites, report("finished"), report("aborted", 2)).laggards() == []


def living(pids):
    return [pid for pid in pids if is_alive(pid)]


async def test_a_server_takes_its_peers_with_it_also_a_frozen_one():
    async with open_server(nbytes=1 << 20) as server:
        pids = [(await server.launch(number)).pid for number in range(2)]
        server.freeze(server.sites[1])
        assert living(pids) == pids
    deadline = time.monotonic() + 5
    while living(pids):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
