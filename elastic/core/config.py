# SPDX-License-Identifier: Apache-2.0
"""How patient and how demanding the two elastic machines are.

Every number that decides about life and death of a peer stands here with its reason. Seconds are seconds of the
caller's monotonic clock.
"""

import enum
from dataclasses import dataclass, field

from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.notary import Sealer

REBUILD_SALTS = 1 << 20


class RebuildRule(enum.Enum):
    """When a coordinator whose journal is lost may go on from what the peers can prove."""

    MAJORITY = "more than half of the newest certificate's members bring one"
    INSIST = "whoever comes: the operator says that nobody else will"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Rules of one run, as the coordinator applies them."""

    manifest_digest: bytes
    """Digest of the run manifest. A peer that was started with another one is refused."""
    sealer: Sealer = field(repr=False)
    """Seals certificates and checks votes."""
    authorities: tuple[bytes, ...] = ()
    """Certificates of those whose word on who is who counts, for peers to believe. Of no matter here."""
    outer_steps: int
    """The commit that makes this outer step is the final one."""
    min_peers: int = 1
    """Nothing is committed by fewer members than this."""
    start_peers: int = 1
    """The first commit waits for so many members."""
    max_peers: int = 1024
    """Sessions at once; a view must fit into one control message."""
    first_free: tuple[IndexRange, ...] = ()
    """Sample indices below `first_index` that a resumed checkpoint left untrained."""
    first_index: int = 0
    """First sample index that is still free when the run starts, more than 0 when it resumes a checkpoint."""
    heartbeat_timeout_s: float = 5.0
    """Silence after which a peer counts as dead, whatever its connection looks like. Also the time a member may stay
    behind although it is told again and again: it speaks but cannot hear."""
    suspect_silence_s: float = 2.5
    """Silence after which a peer that others suspect counts as dead: two heartbeats and their delay."""
    reconnect_grace_s: float = 0.5
    """How long a peer whose control connection broke may take to come back before its place is given up."""
    recover_grace_s: float = 10.0
    """The same after a restart of the coordinator itself: all members have to dial again."""
    report_window_s: float = 0.2
    """After the first report of a failed round: how long the reports of the others are awaited, so that blame rests
    on more than one voice."""
    stall_floor_s: float = 8.0
    """A member that stands still for less than this is never dropped for it."""
    stall_factor: float = 4.0
    """A member stalls when it stands still for this many times its own slowest measured interval."""
    stall_initial_s: float = 300.0
    """The stall timeout while nothing is measured yet: the first inner step may compile for minutes."""
    vote_limit: float = 10.0
    """While the progress of a member that has not voted still grows, its vote is awaited so many times longer at most:
    a tenth of the others' speed still arrives, and bytes that never come to an end do not keep a round for ever."""
    round_inner_steps: int = 1
    """Inner steps of a round. Who is excused comes back when it has done as many, or has handed in: with less it would
    most likely be late once more, and every time that costs the others a whole grace."""
    round_quorum: float = 0.5
    """A round is closed without the late ones when this share of its members has handed in, and the grace is over."""
    grace_floor_s: float = 2.0
    """How long a round with its quorum waits for the others at least."""
    grace_factor: float = 3.0
    """It waits for this many times the lateness that is usual, but see `grace_limit`."""
    grace_limit: float = 1.5
    """Nor longer than for so many times the work of a round: to wait is to lose the work of those who wait."""
    grace_initial_s: float = 300.0
    """The grace while nothing is measured: as `stall_initial_s`."""
    admission_lag_s: float = 2.0
    """A learner may be admitted that is behind by the commits of so many seconds (always by one)."""
    lateness_s: float = 1.0
    """If the coordinator itself is woken this much after its deadline it was paused, and judges nobody by that time."""
    resend_interval_s: float = 0.5
    """A member that is behind is told the view again at most this often."""
    meet_interval_s: float = 2.0
    """A peer is asked at most this often to make links that are missing."""
    meet_timeout_s: float = 20.0
    """A newcomer that has no link with a member by then is sent home: three dials of five seconds, and their pauses."""
    recover_s: float = 30.0
    """If nobody holds the committed state, half of the members of the newest commit wait so long for it before the run
    goes back to what they hold."""
    orphan_timeout_s: float = 600.0
    """Fewer wait so long. If nobody holds anything that was committed, they are sent home then."""
    handover_timeout_s: float = 60.0
    """A leaver that alone holds the committed state waits no longer than this for peers that get no further in fetching
    it: several times what a transfer allows a donor to be silent."""
    rebuild_grace_s: float = 5.0
    """With a lost journal: how long the other members of the newest certificate are awaited when enough are there. All
    who live have dialled again by then (2 s is the longest pause) and said their Join twice. Afterwards, how long those
    who came are awaited once more, so that they begin together."""
    rebuild_salt: int = 0
    """Random, below `REBUILD_SALTS`, and another one at every start: two journals of one run that were rebuilt without
    knowledge of each other must not count the same epochs, or there would be two rounds of one name."""
    weight_per_sample: float | None = None
    """The most that one sample adds to a payload's weight; no limit: members may weigh as they like."""
    samples_per_round: int | None = None
    """As many samples a peer trains on, at most, until it has to wait for a commit: nobody is leased many times more.
    None: no limit."""
    norm_guard: float = 10.0
    """A payload whose numbers are so many times larger than the others' is left out; infinite: none is."""
    max_split_votes: int = 3
    """Votes without a majority, in a row, before the run is halted for its integrity."""

    def __post_init__(self) -> None:
        if len(self.manifest_digest) != 32:
            raise ValueError("manifest_digest must have 32 bytes")
        if not 1 <= self.min_peers <= self.max_peers <= 1024:
            raise ValueError("1 <= min_peers <= max_peers <= 1024 must hold")
        if min(self.outer_steps, self.max_split_votes, self.round_inner_steps) < 1 or self.first_index < 0:
            raise ValueError(
                "outer_steps, max_split_votes and round_inner_steps must be at least 1, first_index at least 0"
            )
        times = [self.heartbeat_timeout_s, self.suspect_silence_s, self.reconnect_grace_s, self.recover_grace_s]
        times += [self.report_window_s, self.stall_floor_s, self.stall_factor, self.stall_initial_s]
        times += [self.admission_lag_s, self.lateness_s, self.resend_interval_s, self.orphan_timeout_s]
        times += [self.recover_s, self.meet_interval_s, self.meet_timeout_s]
        times += [self.grace_floor_s, self.grace_factor, self.grace_limit, self.grace_initial_s, self.vote_limit]
        if not 0.0 < self.round_quorum <= 1.0:
            raise ValueError("round_quorum must be more than 0 and at most 1")
        if not self.norm_guard > 1.0 or (self.weight_per_sample is not None and not self.weight_per_sample > 0.0):
            raise ValueError("norm_guard must be more than 1, and weight_per_sample more than 0")
        if self.samples_per_round is not None and self.samples_per_round < 1:
            raise ValueError("samples_per_round must be at least 1")
        times += [self.rebuild_grace_s, self.handover_timeout_s]
        if not 0 <= self.rebuild_salt < REBUILD_SALTS:
            raise ValueError("rebuild_salt must be below REBUILD_SALTS")
        if min(times) <= 0:
            raise ValueError("times must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """How often one peer speaks, and how long it waits for a coordinator that does not answer."""

    heartbeat_interval_s: float = 1.0
    """A fifth of the coordinator's `heartbeat_timeout_s`: four may be lost."""
    resend_interval_s: float = 1.0
    """What is not answered is said again this often. Never on receipt: with duplication that is a message storm."""
    catch_up_retry_s: float = 0.5
    """Pause after a failed catch-up; by then the coordinator has named other donors."""
    coordinator_timeout_s: float = 600.0
    """A peer without a connection to the coordinator for this long gives up (exit code 4)."""
    farewell_timeout_s: float = 10.0
    """A peer that wants to go waits no longer than this for the coordinator's Goodbye."""

    def __post_init__(self) -> None:
        times = (self.heartbeat_interval_s, self.resend_interval_s, self.catch_up_retry_s)
        if min(*times, self.coordinator_timeout_s, self.farewell_timeout_s) <= 0:
            raise ValueError("times must be positive")
