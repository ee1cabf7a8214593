"""What one seed is put through: every fault class is drawn on or off, and how hard it hits (swarm testing)."""

import random
from dataclasses import dataclass, replace

PLANS = ("butterfly", "ring", "two_level")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Shape and faults of one simulated run. Rates are per second of virtual time; 0 switches a class off."""

    # - Shape
    num_peers: int = 3
    """Peers that exist; `num_late` of them start during the run."""
    num_late: int = 0
    min_peers: int = 1
    outer_steps: int = 100_000
    num_fragments: int = 1
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
    swizzle_rate: float = 0.0
    """Some links cut one after the other, and healed in another order."""
    burst_rate: float = 0.0
    """Several faults in one instant, of all classes."""
    # - Processes
    crash_rate: float = 0.0
    silent_death: float = 0.5
    """Share of crashes that nobody is notified of (the machine died, not the process)."""
    pause_rate: float = 0.0
    hang_rate: float = 0.0
    leave_rate: float = 0.0
    leave_now: float = 0.3
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
    coordinator_pause_rate: float = 0.0
    disk_loss_rate: float = 0.0
    """The coordinator dies and its journal with it."""
    forged_certificates: float = 0.0
    """Chance that a Join brings a certificate that its sender has made up."""
    # - Bound
    max_strikes: int = 1_000_000
    """How many faults strike at most; what shrinks a failing seed (minimise.py)."""

    @classmethod
    def of_seed(cls, seed: int) -> "Options":
        """The swarm: which faults this seed has, and how many.

        They are drawn apart from what happens: the same options given by hand make the same history.
        """
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
            last_leave_rate=often(0.2, 0.3),
        )

    def with_(self, **changes: object) -> "Options":
        """The same but for these."""
        return replace(self, **changes)  # type: ignore[arg-type]
