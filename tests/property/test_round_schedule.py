# SPDX-License-Identifier: Apache-2.0
"""Any plan, any order, any duplicates, any broken link: every result holds each member exactly once (invariant I2)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.collective.core import slices as trees
from isthmus.collective.core.round_machine import RoundMachine
from isthmus.collective.core.round_words import (
    Accumulate,
    FinishChunk,
    Finished,
    InstallResult,
    LinkRenewed,
    PartArrived,
    PeerOpened,
    ResultArrived,
    SendOpen,
    SendPart,
    SendResult,
)
from isthmus.collective.core.slices import NOBODY, SlicePlan
from isthmus.collective.core.types import Epoch, OuterStep, RoundKey

KEY = RoundKey(Epoch(1), OuterStep(0), 0)
EVENT_BUDGET = 30_000


class World:
    """Machines with a bag of messages between them; a chunk's value is the list of its contributors."""

    def __init__(self, slices, eager_chunks):
        self.slices = slices
        self.machines = [
            RoundMachine(key=KEY, rank=rank, slices=slices, eager_chunks=eager_chunks)
            for rank in range(slices.world_size)
        ]
        self.started = [False] * slices.world_size
        self.sums = [{} for _ in self.machines]
        self.values = [{} for _ in self.machines]
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
                    self.bag.append((to, PeerOpened(rank), None))
                case SendPart(to=to, chunk=chunk):
                    part = self.sums[rank].get(chunk, [rank])
                    self.bag.append((to, PartArrived(rank, chunk), part))
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


def any_tree(draw, root, world_size):
    """Everybody is the child of somebody who is in the tree already."""
    order = [root, *draw(st.permutations([rank for rank in range(world_size) if rank != root]))]
    parents = {rank: order[draw(st.integers(0, place - 1))] for place, rank in enumerate(order) if place}
    return tuple(parents.get(rank, NOBODY) for rank in range(world_size))


def any_route(draw, root, world_size):
    up, down = (any_tree(draw, root, world_size) for _ in range(2))
    return trees.Route(root=root, up=up, down=down)


def routes_of(draw, world_size):
    order = draw(st.permutations(range(world_size)))
    plans = {
        "butterfly": trees.butterfly(world_size),
        "ring": trees.ring(order),
        "any": tuple(any_route(draw, root, world_size) for root in range(world_size)),
        "gather": trees.gather(world_size),
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


def expected_values(plan):
    """What every member must hold in the end: all contributors of every chunk."""
    values = {}
    for slice_, route in enumerate(plan.routes):
        contributors = [other for other in range(plan.world_size) if route.up[other] != NOBODY or other == route.root]
        values.update(dict.fromkeys(plan.chunks_of(slice_), contributors))
    return values


@settings(max_examples=60, deadline=None)
@given(plan=plans(), eager_chunks=st.integers(1, 3), chaos=st.randoms(use_true_random=False))
def test_every_schedule_of_every_plan_ends_with_each_member_counted_once(plan, eager_chunks, chaos):
    world = World(plan, eager_chunks)
    world.run(chaos)
    assert world.num_finished == [1] * plan.world_size
    assert world.values == [expected_values(plan)] * plan.world_size
