# SPDX-License-Identifier: Apache-2.0
"""What one seed is put through: every fault class is drawn on or off, and how hard it hits (swarm testing)."""

import random
from dataclasses import dataclass, fields, replace
from typing import Any

PLANS = ("butterfly", "ring", "two_hops")
"""The last is no plan of an all-reduce: trees with members between, as a gather has where links lack."""
PATIENT_S = 5.0
"""A stall timeout that is longer than this is a long one."""
LIES = ("weight", "size", "two_weights", "one_weight", "framing", "digest", "two_results")

OPS = (("mean",), ("gather",), ("pair",), ("mean", "pair"), ("gather", "pair", "mean"))

SHAPE = (
    *("num_fragments", "chunks_per_peer", "eager_chunks", "plan", "latency_s", "jitter_s", "snapshot_s"),
    *("replay_s", "has_odd_weights", "checkpoint_every"),
)
"""What is no fault."""

FOCUSES: tuple[dict[str, Any], ...] = (
    {"lines_rate": 0.12, "plan": "butterfly"},
    {"lines_rate": 0.12, "plan": "butterfly"},
    {"wrong_result": 0.15, "coordinator_crash_at_commit": 0.15, "crash_rate": 0.1},
    {"wrong_result": 0.6, "num_peers": 2, "num_late": 0},
    {"hung_absorb_rate": 0.12},
    {"hung_absorb_rate": 0.3, "num_peers": 5, "num_late": 3, "snapshot_s": (3.0, 8.0)},
    {"hang_rate": 0.2, "stall_floor_s": 20.0},
    {"hang_rate": 0.4, "stall_floor_s": 20.0, "train_s": (0.3, 0.5)},
    {
        "hang_rate": 0.3,
        "stall_floor_s": 20.0,
        "train_s": (0.3, 0.5),
        "coordinator_crash_rate": 0.15,
        "compaction": 0.03,
    },
    {"store_s": 0.8, "reset_rate": 1.5},
    {"lie": "size"},
    {"lie": "one_weight", "crash_rate": 0.1},
    {"lie": "framing", "crash_rate": 0.1},
    {"lie": "digest", "plan": "butterfly", "coordinator_crash_at_commit": 0.1},
    {"disk_loss_rate": 0.15, "forged_certificates": 0.5, "crash_rate": 0.1},
    {"power_cut_rate": 0.08, "disk_lag_s": 1.0, "checkpoint_every": 3, "coordinator_pause_rate": 0.15},
    {"one_way_rate": 0.06, "crash_rate": 0.08, "safety_s": 60.0, "train_s": (1.0, 2.5)},
    {"undialable_rate": 0.08, "one_way_rate": 0.05, "safety_s": 60.0, "train_s": (1.0, 2.5)},
    {"link_break_rate": 0.1, "num_late": 0, "safety_s": 70.0, "train_s": (1.0, 2.5)},
    {"relapse_rate": 0.1, "stall_floor_s": 20.0, "train_s": (0.3, 0.5)},
    {"control_reorders": 0.4, "control_duplicates": 0.4, "cut_rate": 0.2, "reset_rate": 1.0},
    {"control_loss": 0.15, "control_duplicates": 0.4, "cut_rate": 0.2, "reset_rate": 0.3, "crash_rate": 0.05},
    {"lie": "own_weight"},
    {"lie": "unsigned"},
    {"lie": "recants"},
    {"lie": "accuses"},
    {"train_s": (0.2, 3.0), "grace_floor_s": 0.2},
    {"disk_loss_rate": 0.1, "cut_rate": 1.0, "num_peers": 5, "train_s": (0.2, 0.4), "safety_s": 60.0},
)
"""Which kinds go together, in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Shape and faults of one simulated run. Rates are per second of virtual time; 0 switches a class off."""

    # - Shape
    num_peers: int = 3
    """Peers that exist; `num_late` of them start during the run."""
    num_late: int = 0
    min_peers: int = 1
    start_peers: int = 1
    outer_steps: int = 100_000
    num_fragments: int = 1
    steps_per_round: int = 1
    """Inner steps between two outer steps. Of a course's inner steps; the coordinator hears of parts of them."""
    first_inner_step: int = 1
    """After which the first outer step is emitted; 0: before anybody has trained."""
    delay: int = 0
    """Inner steps after which an outer step is due."""
    rounds_per_step: int = 1
    """Fragments that one outer step exchanges, the next ones in turn."""
    ops: tuple[str, ...] = ("mean",)
    """How payloads become results, by fragment: "mean", "gather", or "pair", of which nobody but the two has any."""
    hurries: bool = False
    """Who was late, or has just come, hands in what it has when it sees the others wait."""
    safety_s: float = 30.0
    chunks_per_peer: int = 1
    eager_chunks: int = 1
    plan: str = "butterfly"
    """Which trees an exchange uses: see PLANS."""
    # - Speed
    train_s: tuple[float, float] = (0.3, 1.0)
    latency_s: tuple[float, float] = (0.01, 0.05)
    jitter_s: float = 0.005
    snapshot_s: tuple[float, float] = (0.5, 2.0)
    replay_s: float = 0.1
    samples_per_round: int = 4
    warm_up_rounds: int = 0
    """Over so many rounds the learning rate of who begins without its moments rises, and with it how large its numbers
    are: from half of one part of so many to 1; 0: all numbers are 1."""
    has_odd_weights: bool = False
    """A payload's weight is a number of its method's, not that of its samples."""
    stall_floor_s: float = 3.0
    """Patience with who stands still. Where it is long, only the grace keeps a round from waiting."""
    grace_floor_s: float = 0.5
    """How long a round with its quorum waits for the late, at least."""
    checkpoint_every: int = 1
    """Committed states that survive the process: every n-th; 0 = none does."""
    # - Network
    control_loss: float = 0.0
    control_duplicates: float = 0.0
    control_reorders: float = 0.0
    bulk_duplicates: float = 0.0
    bulk_corrupt: float = 0.0
    """Chance that a bulk frame is damaged: its reader finds it out, and the link is made anew."""
    link_break_rate: float = 0.0
    reset_rate: float = 0.0
    cut_rate: float = 0.0
    slow_rate: float = 0.0
    partition_rate: float = 0.0
    """All sites in two parts: halves, a majority and a minority, or two halves with one site that both can reach."""
    lines_rate: float = 0.0
    """Lines between some of the peers are cut, one way or both; the coordinator hears all of them."""
    swizzle_rate: float = 0.0
    """Some links cut one after the other, and healed in another order."""
    burst_rate: float = 0.0
    """Several faults in one instant, of all classes."""
    # - Processes
    crash_rate: float = 0.0
    silent_death: float = 0.5
    """Share of crashes that nobody is notified of (the machine died, not the process)."""
    undialable_rate: float = 0.0
    """A peer starts (again) with an address that reaches nobody: it can dial, and be dialled by none."""
    one_way_rate: float = 0.0
    """The same for some of the others: dials succeed one way only."""
    clone_rate: float = 0.0
    """A copy of a running peer's folder is started: two live starts of one id."""
    pause_rate: float = 0.0
    hang_rate: float = 0.0
    relapse_rate: float = 0.0
    """A peer's trainer hangs whenever the peer is a member, and works when it is none."""
    hung_absorb_rate: float = 0.0
    """A peer, or all of them, take part in every exchange and never vote: their outer step hangs, or they lie."""
    leave_rate: float = 0.0
    leave_now: float = 0.3
    evict_rate: float = 0.0
    """The operator puts a peer out. Its next start has a ticket."""
    alone_leave_rate: float = 0.0
    """A peer is asked to go while it has no coordinator, for longer than it waits for an answer."""
    last_leave_rate: float = 0.0
    """All who hold the committed state leave in order while somebody fetches it."""
    wrong_manifest: bool = False
    wrong_result: float = 0.0
    """Chance that a peer computes other bits than the rest."""
    # - Clocks
    clock_drift: float = 0.0
    """Every site's clock runs at a rate within 1 ± this."""
    clock_jump_rate: float = 0.0
    # - Disks of peers
    disk_lag_s: float = 0.0
    """How long a checkpoint is being written; until then the process may not end, or it is lost."""
    torn_write: float = 0.0
    """Chance that files are found damaged after a power cut."""
    # - Coordinator
    coordinator_crash_rate: float = 0.0
    coordinator_crash_per_effect: float = 0.0
    coordinator_crash_in_persist: float = 0.0
    """Chance that it dies while a record is written: the record is on the disk or it is not, and nobody was told."""
    coordinator_crash_at_commit: float = 0.0
    """The same right after a commit is written: nobody has heard of it, and nothing has followed."""
    compaction: float = 0.0
    """Chance, after each event, that a snapshot is written, with which the next start begins. It takes no time."""
    store_s: float = 0.0
    """A record takes up to so long to be durable, and now and then much longer; 0 = at once."""
    takeover_rate: float = 0.0
    """A coordinator freezes, another one takes over its journal, and the first one wakes up."""
    coordinator_pause_rate: float = 0.0
    power_cut_rate: float = 0.0
    """All processes are gone within 50 ms; what is on the disks stays."""
    power_return_s: float = 6.0
    """After which the last of them that start by themselves have started."""
    disk_loss_rate: float = 0.0
    """The coordinator dies and its journal with it."""
    forged_certificates: float = 0.0
    """Chance that a Join brings a certificate that its sender has made up."""
    lie: str = ""
    """What one member says in every round that is not true, see LIES: more weight than its leases allow; numbers that
    are far too large; another weight to each of the others, or to one of them; that one of them has told it another
    weight; another digest than it has staged; another sum to half of the others; a false sum to all of them; numbers
    that are far too large to one of them alone, for the slice that this one adds up. In seeds
    with few faults also: another weight of its own part; that it cannot finish, before it votes; that one after the
    other has told it to give up; that one after the other cannot be reached; a vote with a signature
    that it has not made for it."""
    hoards: bool = False
    """The last peer asks for all samples whenever it asks for any."""
    # - Bound
    max_strikes: int = 1_000_000
    """How many faults strike at most; what shrinks a failing seed (minimise.py)."""

    @classmethod
    def of_seed(cls, seed: int) -> "Options":
        """The swarm: which faults this seed has, and how many.

        They are drawn apart from what happens: the same options given by hand make the same history.
        """
        return (
            cls.plain_of_seed(seed)
            ._with_false_sums(seed)
            ._with_tales(seed)
            ._with_frames(seed)
            ._with_method(seed)
            ._with_warm_up(seed)
            ._and_rare(seed)
        )

    @classmethod
    def plain_of_seed(cls, seed: int) -> "Options":
        """With the simplest method: every step waits for its commit, and what comes of it is equal for all."""
        return cls.first_of_seed(seed)._and_more(seed)._or_few(seed)

    @classmethod
    def first_of_seed(cls, seed: int) -> "Options":
        """Without the faults that came later: what the files of scenarios/ replay that name a seed alone."""
        rng = random.Random(f"options of {seed}")

        def often(rate: float, chance: float = 0.4) -> float:
            return rate * rng.uniform(0.3, 1.0) if rng.random() < chance else 0.0

        num_peers = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6))
        slowest_train_s = rng.choice((0.4, 1.0, 2.5))
        return cls(
            num_peers=num_peers,
            num_late=rng.randrange(num_peers) if rng.random() < 0.6 else 0,
            min_peers=1 if rng.random() < 0.6 else rng.randint(1, num_peers // 2 + 1),
            outer_steps=rng.randint(4, 20) if rng.random() < 0.12 else 100_000,
            num_fragments=rng.choice((1, 1, 3)),
            safety_s=rng.uniform(10.0, 30.0),
            chunks_per_peer=rng.choice((1, 1, 2)),
            eager_chunks=rng.choice((1, 2)),
            train_s=(0.2, slowest_train_s),
            latency_s=rng.choice(((0.001, 0.005), (0.01, 0.08), (0.05, 0.2))),
            jitter_s=rng.choice((0.0, 0.002, 0.05)),
            snapshot_s=rng.choice(((0.1, 0.5), (0.5, 3.0), (3.0, 8.0))),
            replay_s=rng.choice((0.02, 0.1)),
            checkpoint_every=rng.choice((0, 1, 1, 1, 1, 1, 1, 3)),
            control_loss=often(0.2),
            control_duplicates=often(0.2),
            control_reorders=often(0.3),
            bulk_duplicates=often(0.1),
            link_break_rate=often(0.3),
            reset_rate=often(0.2),
            cut_rate=often(0.15),
            slow_rate=often(0.1),
            crash_rate=often(0.25, 0.6),
            silent_death=rng.choice((0.0, 0.5, 1.0)),
            pause_rate=often(0.15),
            hang_rate=often(0.06),
            leave_rate=often(0.1),
            leave_now=rng.choice((0.0, 0.5)),
            wrong_manifest=rng.random() < 0.05,
            wrong_result=often(rng.choice((0.08, 0.5)), 0.2),
            coordinator_crash_rate=often(0.15),
            coordinator_crash_per_effect=often(0.02),
            coordinator_pause_rate=often(0.08, 0.3),
            plan=rng.choice(PLANS),
            bulk_corrupt=often(0.01, 0.3),
            partition_rate=often(0.08, 0.3),
            swizzle_rate=often(0.08, 0.3),
            burst_rate=often(0.08, 0.3),
            clock_drift=rng.choice((0.0, 0.0, 0.01, 0.1)),
            clock_jump_rate=often(0.1, 0.3),
            disk_lag_s=rng.choice((0.0, 0.0, 0.0, 0.0, 0.2, 1.0)),
            torn_write=rng.choice((0.0, 0.0, 0.0, 0.0, 0.3)),
            coordinator_crash_in_persist=often(0.03),
            stall_floor_s=rng.choice((3.0, 3.0, 3.0, 20.0)),
            disk_loss_rate=often(0.1, 0.4),
            forged_certificates=often(0.4, 0.3),
            power_cut_rate=often(0.08, 0.25),
        )._with_lie(rng.choice(LIES) if rng.random() < 0.35 else "", rng)

    def _with_lie(self, lie: str, rng: random.Random) -> "Options":
        """Who lies about results is found out by the majority of a run that is not too busy with other faults."""
        if lie not in ("digest", "two_results"):
            return self.with_(lie=lie)
        calm = {"crash_rate": self.crash_rate / 4, "leave_rate": 0.0, "wrong_result": 0.0, "disk_loss_rate": 0.0}
        num_peers = max(4, self.num_peers)
        return self.with_(lie=lie, num_peers=num_peers, num_late=rng.randrange(2), plan="butterfly", **calm)

    def _with_false_sums(self, seed: int) -> "Options":
        """Half of those who send numbers that are too large send them in sums; drawn apart, as below."""
        if self.lie != "size" or random.Random(f"false sums of {seed}").random() < 0.5:
            return self
        return self.with_(lie="false_sum", plan="butterfly")

    def _with_tales(self, seed: int) -> "Options":
        """Half of those who say that they cannot finish say that another member has told them so; drawn apart."""
        if self.lie != "recants" or random.Random(f"tales of {seed}").random() < 0.5:
            return self
        return self.with_(lie="tells")

    def _with_frames(self, seed: int) -> "Options":
        """A part of those who send numbers that are too large send them to one other member alone; drawn apart."""
        if self.lie not in ("size", "false_sum") or random.Random(f"frames of {seed}").random() < 0.6:
            return self
        return self.with_(lie="framed", plan="butterfly", num_peers=max(3, self.num_peers))

    def _and_more(self, seed: int) -> "Options":
        """Those faults, drawn apart: a seed that draws none of them keeps its history."""
        rng = random.Random(f"more options of {seed}")

        def often(rate: float, chance: float) -> float:
            return rate * rng.uniform(0.3, 1.0) if rng.random() < chance else 0.0

        store_s = rng.choice((0.02, 0.8, 0.8)) * rng.uniform(0.8, 1.2) if rng.random() < 0.4 else 0.0
        return self.with_(
            # What comes while the store is at work shows whether the machine's time stands still.
            reset_rate=max(self.reset_rate, 0.5 if store_s else 0.0),
            hung_absorb_rate=often(0.3, 0.25),
            undialable_rate=often(0.3, 0.3),
            one_way_rate=often(0.15, 0.2),
            clone_rate=often(0.1, 0.2),
            store_s=store_s,
            has_odd_weights=rng.random() < 0.3,
            takeover_rate=often(0.12, 0.25),
            evict_rate=often(0.08, 0.3),
            last_leave_rate=often(0.2, 0.3),
            lines_rate=often(0.2, 0.25),
            coordinator_crash_at_commit=often(0.2, 0.25),
            compaction=often(0.05, 0.6),
        )

    def _or_few(self, seed: int) -> "Options":
        """Every other seed has few kinds of faults and many peers.

        What needs a large view, or quiet before it strikes, is met there.
        """
        if seed % 2:
            return self
        rng = random.Random(f"focus of {seed}")
        num_peers = rng.randint(3, 6)
        shape = {field.name: getattr(self, field.name) for field in fields(self) if field.name in SHAPE}
        quiet = Options(**shape, num_peers=num_peers, num_late=rng.randrange(3), silent_death=self.silent_death)
        pace = {"safety_s": rng.uniform(25.0, 40.0), "train_s": (0.3, 1.0)}
        return quiet.with_(**(pace | FOCUSES[seed // 2 % len(FOCUSES)]))

    def _with_method(self, seed: int) -> "Options":
        """Which outer steps there are, drawn apart; every third seed keeps the simplest, and its history."""
        rng = random.Random(f"method of {seed}")
        if seed % 3 == 0 or rng.random() < 0.2:
            return self
        steps = rng.choice((1, 1, 2, 4))
        delay = rng.choice((0, rng.randint(0, steps), steps, rng.randint(steps, 3 * steps)))
        ops = rng.choice(OPS)
        if self.lie in ("two_results", "false_sum", "framed"):
            ops = ("mean",)  # nobody adds up anything in the others
        first_inner_step = rng.choice((0, steps, steps, rng.randint(1, 2 * steps)))
        num_rounds = rng.randint(1, self.num_fragments)
        if (delay // steps + 1) * num_rounds > self.num_fragments:
            # A fragment comes again before it lands: then all do, and it is due by then (OuterPlan).
            num_rounds, delay = self.num_fragments, min(delay, steps)
        return self.with_(
            steps_per_round=steps,
            delay=delay,
            first_inner_step=first_inner_step,
            rounds_per_step=num_rounds,
            ops=ops,
            hurries=rng.random() < 0.5,
        )

    def _and_rare(self, seed: int) -> "Options":
        """What few seeds have, drawn apart: all others keep their histories."""
        rng = random.Random(f"rare options of {seed}")
        made = self.with_(alone_leave_rate=0.1 if rng.random() < 0.08 else 0.0)
        made = made.with_(hoards=random.Random(f"hoards of {seed}").random() < 0.06)
        rng = random.Random(f"more rare options of {seed}")
        if self.power_cut_rate and rng.random() < 0.5:  # a minority is back long before the others, without the newest
            rare = {"power_cut_rate": 0.03, "checkpoint_every": 3, "crash_rate": self.crash_rate / 4}
            made = made.with_(power_return_s=60.0, safety_s=max(60.0, self.safety_s), **rare)
        # Of a liar and the one that it blames one is out by turns, for longer each time: then no commit may ever begin.
        # Even seeds have few kinds of faults (`_or_few`), and keep to them.
        has_many = seed % 2 == 1 and not self.lie and rng.random() < 0.5
        return made.with_(start_peers=min(self.num_peers, rng.randint(2, 6))) if has_many else made

    def with_(self, **changes: object) -> "Options":
        """The same but for these."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def _with_warm_up(self, seed: int) -> "Options":
        """In a third of all seeds members' numbers differ though all are honest; drawn apart."""
        rng = random.Random(f"warm-up of {seed}")
        return self.with_(warm_up_rounds=rng.choice((10, 20, 40))) if rng.random() < 0.35 else self
