# SPDX-License-Identifier: Apache-2.0
"""I4: nobody keeps a round waiting for ever: not the late, once its quorum has handed in, nor who does not vote; and
those who stand still keep the others waiting only once.

The late are awaited for as long as the grace may last, the voteless for some times what an exchange takes. Looked at
only when everything is healed: before, somebody who is not late may be cut off. That nobody is a member again who has
done no work since it was excused is looked at always.
"""

import math
from collections.abc import Callable, Collection

from isthmus.collective.core.types import PeerRef, View
from isthmus.elastic.core.messages import Vote
from isthmus.elastic.core.records import CommitRecord
from tests.simulation.options import Options
from tests.simulation.symbols import name
from tests.simulation.world import World, demand

LIMIT_S = 12.0
"""More than the longest grace (1.5 rounds of at most four seconds) and all that happens around it."""

GRACE_LIMIT = 1.5
"""Where most members hung in one round, none the less to its end, that is how long a round takes (seed 374)."""

VOTE_FACTOR, GROWS_S = 4.0, 4.0
"""How many times longer than the longest exchange a vote may take, and how long what its sender receives counts."""


class Patience:
    """Books of who has handed in since the last commit, and of what the excused have done.

    Args:
        world: for the time.
        options: of the seed.
        quorum: so many members a commit needs now.
        work_of: how many inner steps this start of a peer has done; None if it is gone.
        round_work: as many are a round.
    """

    def __init__(
        self,
        world: World,
        options: Options,
        *,
        quorum: Callable[[], int],
        work_of: Callable[[PeerRef], int | None],
        round_work: int,
    ) -> None:
        self._world = world
        self._work_of = work_of
        self._round_work = round_work
        self._idle: dict[PeerRef, int] = {}  # excused, and has handed nothing in since; its work until then
        self._quorum = quorum
        self._stall_floor_s = options.stall_floor_s
        self._exchange_began = 0.0
        self._longest_exchange_s = 0.0
        self._members: set[PeerRef] = set()
        self._num_standing = 0
        self._ready: set[PeerRef] = set()
        self._proven: set[PeerRef] = set()  # standing, and a commit holds work of it: without one no round goes on
        self._complete_since: float | None = None
        self._began: float | None = None  # this round; None if a view has cut it short
        self._longest_round_s = 0.0
        self._epoch = 0
        self._voted: set[PeerRef] = set()
        self._majority_since: float | None = None
        self._is_healed = False

    def healed(self) -> None:
        """From now on nobody is held up by a fault."""
        self._is_healed = True
        if self._complete_since is not None:
            self._complete_since = self._world.now
        if self._majority_since is not None:
            self._majority_since = self._world.now

    def voted(self, ref: PeerRef, vote: Vote) -> None:
        """A vote has arrived."""
        if vote.key.epoch != self._epoch or ref not in self._members:
            return
        self._voted.add(ref)
        if self._voted >= self._members:
            self._judge_the_voteless()
            self._majority_since = None  # nobody's vote is missing
        elif self._majority_since is None and 2 * len(self._voted) > len(self._members):
            self._majority_since = self._world.now
            self._exchanged()

    def made(self, ref: PeerRef) -> None:
        """A payload is made."""
        self._ready.add(ref)
        if ref in self._members:  # whoever is excused keeps no exchange waiting (seed 591)
            self._exchange_began = self._world.now
        self._idle.pop(ref, None)
        self._look()

    def view_decided(self, view: View, excused: Collection[PeerRef]) -> None:
        """Whoever was awaited is awaited no more, or the round was aborted."""
        self._judge()
        self._exchange_began = self._world.now
        if self._began != self._world.now and not self._ready >= self._members:
            self._began = None  # after all had handed in it says how long a round's work takes (seed 23422)
        self._epoch = view.epoch
        members = {member.ref for member in view.members}
        for ref, before in self._idle.items():
            work = self._work_of(ref)
            if ref in members and work is not None:
                done = work - before
                demand(done >= self._round_work, "I4", f"{name(ref)} is awaited again after {done} steps")
        late = self._members.intersection(excused)
        few = bool(late) and 2 * len(members) < self._num_standing
        demand(not few, "quorum", f"{len(members)} of {self._num_standing} go on without {len(late)} that are late")
        self._idle = {ref: done for ref, done in self._idle.items() if ref in excused}
        for ref in self._members.intersection(excused) - self._ready:  # the word of a payload may be on its way
            self._idle[ref] = self._work_of(ref) or 0
        self._members = members
        self._num_standing = len(self._members) + len(excused)
        self._proven &= self._members | set(excused)
        self._ready &= self._members | set(excused)  # who was put out hands in anew, also if it is back at once
        self._begin()
        self._look()

    def rebuilt(self) -> None:
        """Nobody is a member any more, and what was handed in is void."""
        self._members, self._num_standing = set(), 0
        self._idle.clear()
        self._ready.clear()
        self._proven.clear()
        self._begin()

    def committed(self, record: CommitRecord) -> None:
        """The next round begins."""
        self._exchanged()
        self._judge()
        if self._began is not None:
            self._longest_round_s = max(self._longest_round_s, self._world.now - self._began)
        self._began = self._world.now
        self._proven |= {item.ref for item in record.contributions}
        self._ready.clear()
        self._begin()

    def _exchanged(self) -> None:
        self._longest_exchange_s = max(self._longest_exchange_s, self._world.now - self._exchange_began)

    def _begin(self) -> None:
        """A round, or another attempt at one: nobody waits yet."""
        self._voted.clear()
        self._complete_since = self._majority_since = None

    def _look(self) -> None:
        if self._ready >= self._members:
            self._judge_the_late()
            self._complete_since = None  # nobody is late any more
            return
        quorum = max(self._quorum(), math.ceil(0.5 * self._num_standing))
        ready, proven = self._ready & self._members, self._proven & self._members
        is_complete = len(ready) >= quorum and (not proven or bool(proven & ready))
        if self._complete_since is None and is_complete:
            self._complete_since = self._world.now

    def _judge(self) -> None:
        self._judge_the_late()
        self._judge_the_voteless()

    def _judge_the_voteless(self) -> None:
        if self._is_healed and self._majority_since is not None:
            waited_s = self._world.now - self._majority_since
            limit_s = max(self._stall_floor_s, VOTE_FACTOR * self._longest_exchange_s) + GROWS_S
            demand(waited_s <= limit_s, "I4", "a majority waited {:.1f} s for votes", waited_s)

    def _judge_the_late(self) -> None:
        if self._is_healed and self._complete_since is not None:
            waited_s = self._world.now - self._complete_since
            limit_s = max(LIMIT_S, GRACE_LIMIT * self._longest_round_s + GROWS_S)
            demand(waited_s <= limit_s, "I4", "a round with its quorum waited {:.1f} s for the late", waited_s)
