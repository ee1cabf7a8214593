"""Any order, any duplicates, any broken link: every result holds each member exactly once (invariant I2)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from collective.core.reduce import (
    Accumulate,
    ContributionArrived,
    FinishChunk,
    Finished,
    InstallResult,
    LinkRenewed,
    MeanMachine,
    PeerOpened,
    ResultArrived,
    SendContribution,
    SendOpen,
    SendResult,
    SlicePlan,
)
from collective.core.types import Epoch, OuterStep, RoundKey
from collective.plan import plan_mean

KEY = RoundKey(Epoch(1), OuterStep(0), 0)
EVENT_BUDGET = 20_000


class World:
    """Machines with a bag of messages between them; a chunk's value is the list of its contributors."""

    def __init__(self, slices, eager_chunks):
        self.slices = slices
        self.machines = [
            MeanMachine(key=KEY, rank=rank, slices=slices, eager_chunks=eager_chunks)
            for rank in range(slices.world_size)
        ]
        self.started = [False] * slices.world_size
        self.sums = [{} for _ in self.machines]
        self.values = [{} for _ in self.machines]
        self.num_finished = [0] * slices.world_size
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
                case SendContribution(to=to, chunk=chunk):
                    self.bag.append((to, ContributionArrived(rank, chunk), None))
                case Accumulate(chunk=chunk, rank=contributor):
                    self.sums[rank].setdefault(chunk, []).append(contributor)
                case FinishChunk(chunk=chunk):
                    self.values[rank][chunk] = sorted(self.sums[rank].pop(chunk))
                case SendResult(to=to, chunk=chunk):
                    self.bag.append((to, ResultArrived(rank, chunk), self.values[rank][chunk]))
                case InstallResult(chunk=chunk):
                    self.values[rank][chunk] = arrived
                case Finished():
                    self.num_finished[rank] += 1


@settings(max_examples=150, deadline=None)
@given(
    slices=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    eager_chunks=st.integers(1, 3),
    chaos=st.randoms(use_true_random=False),
)
def test_every_schedule_ends_with_each_member_counted_once(slices, eager_chunks, chaos):
    bounds = [0]
    for num_chunks in slices:
        bounds.append(bounds[-1] + num_chunks)
    world = World(SlicePlan(bounds=tuple(bounds)), eager_chunks)
    to_start = list(range(len(slices)))
    faults_left = 20
    for _ in range(EVENT_BUDGET):
        ready = [index for index, (to, _, _) in enumerate(world.bag) if world.started[to]]
        if to_start and (not ready or chaos.random() < 0.2):
            world.start(to_start.pop(chaos.randrange(len(to_start))))
            continue
        if not ready:
            break
        to, event, value = world.bag.pop(chaos.choice(ready))
        if faults_left and chaos.random() < 0.1:
            faults_left -= 1
            if chaos.random() < 0.5:
                world.bag.append((to, event, value))
            else:  # lost with its link; the link is made anew on both sides
                sender = event.rank
                world.carry_out(sender, world.machines[sender].handle(LinkRenewed(to)), None)
                world.carry_out(to, world.machines[to].handle(LinkRenewed(sender)), None)
                continue
        world.deliver(to, event, value)
    everyone = list(range(len(slices)))
    assert world.num_finished == [1] * len(slices)
    for values in world.values:
        assert values == dict.fromkeys(range(bounds[-1]), everyone)


@given(
    numel=st.integers(0, 10**6),
    shares=st.lists(st.floats(0.01, 100), min_size=1, max_size=20),
    chunk_blocks=st.integers(1, 64),
)
def test_a_plan_covers_every_element_once_on_block_borders(numel, shares, chunk_blocks):
    plan = plan_mean(numel, shares, 256 * chunk_blocks)
    assert plan.starts[0] == 0
    assert plan.starts[-1] == numel
    assert plan.slices.num_chunks == len(plan.starts) - 1
    assert all(start % 256 == 0 for start in plan.starts[:-1])
    numels = [plan.numel_of(chunk) for chunk in range(plan.slices.num_chunks)]
    assert all(0 < numel_ <= 256 * chunk_blocks for numel_ in numels)
    owners = [plan.slices.owner_of(chunk) for chunk in range(plan.slices.num_chunks)]
    assert owners == [rank for rank in range(len(shares)) for _ in plan.slices.chunks_of(rank)]
