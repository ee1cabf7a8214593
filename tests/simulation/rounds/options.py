# SPDX-License-Identifier: Apache-2.0
"""What one seed of the round simulator is put through: shape, plans, credit, faults (swarm testing).

Times are shorter than in life, in proportion: a silence counts after 1 s, a cut breaks its connections after 1.5 to 3.
"""

import random
from dataclasses import dataclass, replace

from isthmus.collective.core.apart import NO_PAIR, Apart
from isthmus.collective.core.cost import Volume
from isthmus.collective.core.link_table import LinkTable
from isthmus.collective.core.planner import choose
from isthmus.collective.core.slices import Route, SlicePlan, ring, star

LOOK_S = 0.25
BROKEN_LOOK_S = 0.1
SIGN_EVERY_S = 0.25
SILENCE_S = 1.0
REDIAL_S = 0.3
FIRST_CONTACT_S = 2.0
INSTALL_GRACE_S = 1.0
ROUND_S = 12.0
DIAL_TIMEOUT_S = 1.0
KEEPALIVE_S = (1.5, 3.0)
"""A cut, or a host that vanished, breaks a connection after so long, on either side by itself."""
PLANS = ("butterfly", "ring")
NOTHING = Volume(nbytes_up_raw=0.0, nbytes_up=0.0, nbytes_down=0.0, chunk_nbytes=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """Shape and faults of one run. Rates are per second of virtual time; 0 switches a class off."""

    # - Shape
    num_peers: int = 3
    num_operations: int = 1
    """In flight at once; a step is committed when all of them have ended at all members."""
    plans: tuple[str, ...] = ("butterfly",)
    """The plan of each operation."""
    max_chunks_per_slice: int = 2
    eager_chunks: int = 2
    max_rounds_ahead: int = 2
    num_streams: int = 1
    window: int = 4
    """Frames that the kernels take of one stream before somebody reads them."""
    shuffles: bool = False
    """Every view has its members in another order."""
    num_hidden: int = 0
    """So many peers have no link with each other, as if behind NATs: always fewer than there are peers."""
    # - Speed
    latency_s: tuple[float, float] = (0.01, 0.03)
    jitter_s: float = 0.005
    frame_s: float = 0.001
    compute_s: tuple[float, float] = (0.0, 0.2)
    """Between the start of a step and the post of each operation: late members open late."""
    # - Length
    safety_s: float = 8.0
    max_commits: int = 6
    # - Faults
    corrupt: float = 0.0
    """Chance of a frame."""
    break_rate: float = 0.0
    cut_rate: float = 0.0
    pause_rate: float = 0.0
    jam_rate: float = 0.0
    """Peers that send signs of life and short words, and no chunk."""
    crash_rate: float = 0.0
    crash_per_effect: float = 0.0
    silent_death: float = 0.5
    view_rate: float = 0.0
    """Views that come for no reason."""
    cancel_rate: float = 0.0
    """Callers that give an operation up."""
    distrust: float = 0.5
    """Chance that the server drops a suspect that it can reach itself."""

    @classmethod
    def draw(cls, rng: random.Random) -> "RoundOptions":
        """The swarm: which faults this seed has, and how many."""

        def often(rate: float, chance: float = 0.4) -> float:
            return rate * rng.uniform(0.3, 1.0) if rng.random() < chance else 0.0

        num_peers = rng.choice((2, 2, 3, 3, 4, 4, 5, 6))
        num_operations = rng.choice((1, 1, 2, 3, 4))
        one_plan = (rng.choice(PLANS),) * num_operations
        drawn = cls(
            num_peers=num_peers,
            num_operations=num_operations,
            plans=one_plan if rng.random() < 0.5 else tuple(rng.choice(PLANS) for _ in range(num_operations)),
            max_chunks_per_slice=rng.choice((1, 2, 3) if num_peers < 5 else (1, 1, 2)),
            eager_chunks=rng.choice((1, 1, 2, 4)),
            max_rounds_ahead=rng.choice((1, 2, 4)),
            num_streams=rng.choice((1, 1, 2, 3)),
            window=rng.choice((1, 2, 8)),
            shuffles=rng.random() < 0.2,
            latency_s=rng.choice(((0.001, 0.005), (0.01, 0.05), (0.05, 0.15))),
            jitter_s=rng.choice((0.0, 0.002, 0.05)),
            frame_s=rng.choice((0.0, 0.002, 0.01)),
            compute_s=rng.choice(((0.0, 0.01), (0.0, 0.2), (0.0, 1.0), (0.0, 2.5))),
            safety_s=rng.uniform(3.0, 8.0),
            corrupt=often(0.01),
            break_rate=often(1.5, 0.5),
            cut_rate=often(0.4),
            pause_rate=often(0.4),
            crash_rate=often(0.3),
            crash_per_effect=often(0.002, 0.3),
            silent_death=rng.choice((0.0, 0.5, 1.0)),
            view_rate=often(rng.choice((0.4, 2.0))),
            cancel_rate=often(0.3, 0.25),
            distrust=rng.choice((0.0, 0.3, 1.0)),
            num_hidden=rng.randint(2, num_peers - 1) if num_peers > 2 and rng.random() < 0.3 else 0,
            jam_rate=often(0.4, 0.3),
        )
        # Where all goes through one member, a frame for each round trip is too slow for any deadline (seed 1028).
        return drawn.with_(window=8) if drawn.num_hidden > 3 else drawn

    def with_(self, **changes: object) -> "RoundOptions":
        """The same but for these."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def draw_plan(self, name: str, world_size: int, rng: random.Random, apart: Apart = NO_PAIR) -> SlicePlan:
        """The trees and the cut of one operation. Slices may be empty."""
        order = list(range(world_size))
        rng.shuffle(order)
        routes: tuple[Route, ...]
        if name == "butterfly":
            table = LinkTable.unknown(world_size).without(apart)
            routes = choose(table, NOTHING, only=name).routes
        elif apart:  # every member is a root, and what goes to or from one without a link is handed on
            stars = [star(root, world_size, apart) for root in range(world_size)]
            routes = tuple(Route(root=root, up=tree, down=tree) for root, tree in enumerate(stars))
        else:
            routes = ring(order)
        bounds = [0]
        for _ in routes:
            bounds.append(bounds[-1] + rng.randint(0 if len(bounds) > 1 else 1, self.max_chunks_per_slice))
        return SlicePlan(bounds=tuple(bounds), routes=routes)
