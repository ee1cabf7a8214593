"""I4: nobody keeps a round waiting for ever: not the late, once its quorum has handed in, nor who does not vote.

The late are awaited for as long as the grace may last, the voteless for some times what an exchange takes. Looked at only when everything is healed: before, somebody who is not late may be cut off.
"""

import math
from collections.abc import Collection

from collective.core.types import PeerRef, View
from elastic.core.messages import Vote
from tests.simulation.options import Options
from tests.simulation.world import World, demand

LIMIT_S = 12.0
"""More than the longest grace (1.5 rounds of at most four seconds) and all that happens around it."""

VOTE_FACTOR, USUAL_EXCHANGE_S, GROWS_S = 4.0, 4.0, 4.0
"""How many times longer than the others' votes those of the rest may take, and how long what they receive counts."""


class Patience:
    """Books of who has handed in since the last commit."""

    def __init__(self, world: World, options: Options) -> None:
        self._world = world
        self._min_peers = options.min_peers
        self._vote_limit_s = max(options.stall_floor_s, VOTE_FACTOR * USUAL_EXCHANGE_S) + GROWS_S
        self._members: set[PeerRef] = set()
        self._num_standing = 0
        self._ready: set[PeerRef] = set()
        self._complete_since: float | None = None
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
        if self._majority_since is None and 2 * len(self._voted) > len(self._members):
            self._majority_since = self._world.now

    def made(self, ref: PeerRef) -> None:
        """A payload is made."""
        self._ready.add(ref)
        self._look()

    def view_decided(self, view: View, excused: Collection[PeerRef]) -> None:
        """Whoever was awaited is awaited no more, or the round was aborted."""
        self._judge()
        self._epoch = view.epoch
        self._members = {member.ref for member in view.members}
        self._num_standing = len(self._members) + len(excused)
        self._ready &= self._members | set(excused)  # who was put out hands in anew, also if it is back at once
        self._begin()
        self._look()

    def rebuilt(self) -> None:
        """Nobody is a member any more, and what was handed in is void."""
        self._members, self._num_standing = set(), 0
        self._ready.clear()
        self._begin()

    def committed(self) -> None:
        """The next round begins."""
        self._judge()
        self._ready.clear()
        self._begin()

    def _begin(self) -> None:
        """A round, or another attempt at one: nobody waits yet."""
        self._voted.clear()
        self._complete_since = self._majority_since = None

    def _look(self) -> None:
        if self._ready >= self._members:
            self._judge_the_late()
            self._complete_since = None  # nobody is late any more
            return
        quorum = max(self._min_peers, math.ceil(0.5 * self._num_standing))
        if self._complete_since is None and len(self._ready & self._members) >= quorum:
            self._complete_since = self._world.now

    def _judge(self) -> None:
        self._judge_the_late()
        if self._is_healed and self._majority_since is not None:
            waited_s = self._world.now - self._majority_since
            demand(waited_s <= self._vote_limit_s, "I4", "a majority waited {:.1f} s for votes", waited_s)

    def _judge_the_late(self) -> None:
        if self._is_healed and self._complete_since is not None:
            waited_s = self._world.now - self._complete_since
            demand(waited_s <= LIMIT_S, "I4", "a round with its quorum waited {:.1f} s for the late", waited_s)
