# SPDX-License-Identifier: Apache-2.0
"""Any plan, any order, any duplicates, any broken link: every result holds each member exactly once (invariant I2)."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.collective.core import slices as trees
from isthmus.collective.core.round import RoundMachine
from isthmus.collective.core.round_words import (
    Accumulate,
    ContributionArrived,
    FinishChunk,
    Finished,
    InstallResult,
    LinkRenewed,
    PeerOpened,
    ResultArrived,
    SendContribution,
    SendOpen,
    SendResult,
)
from isthmus.collective.core.slices import NOBODY, SlicePlan
from isthmus.collective.core.types import Epoch, OuterStep, RoundKey

KEY = RoundKey(Epoch(1), OuterStep(0), 0)
EVENT_BUDGET = 30_000


class World:
    """Machines with a bag of messages between them; a chunk's value is the list of its contributors."""

    def __init__(self, slices, eager_chunks, held=None, values=None):
        self.slices = slices
        held = held or [0] * slices.world_size
        self.machines = [
            RoundMachine(key=KEY, rank=rank, slices=slices, eager_chunks=eager_chunks, held=held[rank])
            for rank in range(slices.world_size)
        ]
        self.started = [False] * slices.world_size
        self.sums = [{} for _ in self.machines]
        self.values = values or [{} for _ in self.machines]
        self.num_finished = [0] * slices.world_size
        self.num_results_sent = 0
        self.bag = []

    def start(self, rank):
        self.started[rank] = True
        self.carry_out(rank, self.machines[rank].start(), None)

    def deliver(self, to, event, value):
        self.carry_out(to, self.machines[to].handle(event), value)
        self.machines[to].check_invariants()

    def carry_out(self, rank, effects, arrived):
        for effect in effects:
            match effect:
                case SendOpen(to=to):
                    self.bag.append((to, PeerOpened(rank, self.machines[rank].held), None))
                case SendContribution(to=to, chunk=chunk):
                    part = self.sums[rank].get(chunk, [rank])
                    self.bag.append((to, ContributionArrived(rank, chunk), part))
                case Accumulate(chunk=chunk):
                    self.sums[rank].setdefault(chunk, [rank]).extend(arrived)
                case FinishChunk(chunk=chunk):
                    self.values[rank][chunk] = sorted(self.sums[rank].get(chunk, [rank]))
                case SendResult(to=to, chunk=chunk):
                    self.num_results_sent += 1
                    self.bag.append((to, ResultArrived(rank, chunk), self.values[rank][chunk]))
                case InstallResult(chunk=chunk):
                    self.values[rank][chunk] = arrived
                case Finished():
                    self.num_finished[rank] += 1

    def run(self, chaos, faults_left=20, stop_after=EVENT_BUDGET):
        to_start = list(range(self.slices.world_size))
        for _ in range(stop_after):
            ready = [index for index, (to, _, _) in enumerate(self.bag) if self.started[to]]
            if to_start and (not ready or chaos.random() < 0.2):
                self.start(to_start.pop(chaos.randrange(len(to_start))))
                continue
            if not ready:
                return
            to, event, value = self.bag.pop(chaos.choice(ready))
            if faults_left and chaos.random() < 0.1:
                faults_left -= 1
                if chaos.random() < 0.5:
                    self.bag.append((to, event, value))
                else:  # lost with its link; the link is made anew on both sides
                    sender = event.rank
                    self.carry_out(sender, self.machines[sender].handle(LinkRenewed(to)), None)
                    self.carry_out(to, self.machines[to].handle(LinkRenewed(sender)), None)
                    continue
            self.deliver(to, event, value)


def routes_of(draw, world_size):
    order = draw(st.permutations(range(world_size)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, world_size - 1)), max_size=2)) | {0, world_size})
    regions = [order[first:last] for first, last in pairwise(cuts) if order[first:last]]
    plans = {
        "butterfly": trees.butterfly(world_size),
        "ring": trees.ring(order),
        "two_level": trees.two_level(regions),
        "gather": trees.gather(world_size),
        "scatter": trees.scatter(world_size),
        "broadcast": trees.broadcast(order[0], world_size),
    }
    return plans[draw(st.sampled_from(sorted(plans)))]


@st.composite
def plans(draw):
    routes = routes_of(draw, draw(st.integers(1, 6)))
    bounds = [0]
    for num_chunks in draw(st.lists(st.integers(0, 4), min_size=len(routes), max_size=len(routes))):
        bounds.append(bounds[-1] + num_chunks)
    return SlicePlan(bounds=tuple(bounds), routes=routes)


def expected_values(plan, rank):
    """What a member must hold in the end: all contributors of every chunk that it takes part in."""
    values = {}
    for slice_, route in enumerate(plan.routes):
        contributors = [other for other in range(plan.world_size) if route.up[other] != NOBODY or other == route.root]
        if rank == route.root or route.down[rank] != NOBODY:
            values.update(dict.fromkeys(plan.chunks_of(slice_), contributors))
    return values


@settings(max_examples=150, deadline=None)
@given(plan=plans(), eager_chunks=st.integers(1, 3), chaos=st.randoms(use_true_random=False))
def test_every_schedule_of_every_plan_ends_with_each_member_counted_once(plan, eager_chunks, chaos):
    world = World(plan, eager_chunks)
    world.run(chaos)
    assert world.num_finished == [1] * plan.world_size
    for rank, values in enumerate(world.values):
        assert values == expected_values(plan, rank)


@settings(max_examples=100, deadline=None)
@given(
    num_chunks=st.lists(st.integers(0, 4), min_size=2, max_size=5),
    chaos=st.randoms(use_true_random=False),
    stop_after=st.integers(0, 200),
    faults=st.integers(0, 5),
    forgetful=st.integers(-1, 4),
)
def test_a_round_that_is_tried_again_keeps_what_it_has_and_sends_it_once(
    num_chunks, chaos, stop_after, faults, forgetful
):
    bounds = [0]
    for number in num_chunks:
        bounds.append(bounds[-1] + number)
    plan = SlicePlan(bounds=tuple(bounds), routes=trees.butterfly(len(num_chunks)))
    first = World(plan, 2)
    first.run(chaos, stop_after=stop_after)
    held = [machine.done_mask() for machine in first.machines]
    if 0 <= forgetful < len(held):
        held[forgetful] = 0
    second = World(plan, 2, held, [dict(values) for values in first.values])
    second.run(chaos, faults_left=faults)
    assert second.num_finished == [1] * plan.world_size
    for values in second.values:
        assert values == {chunk: list(range(plan.world_size)) for chunk in range(plan.num_chunks)}
    if not faults:
        already = 0
        for root in range(plan.world_size):
            for rank in set(range(plan.world_size)) - {root}:
                already += (held[rank] & held[root] & slice_mask(plan, root)).bit_count()
        assert second.num_results_sent == plan.num_chunks * (plan.world_size - 1) - already


def slice_mask(plan, root):
    return sum(1 << chunk for chunk in plan.chunks_of(root))
