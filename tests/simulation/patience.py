"""I4: the late keep nobody waiting for longer than the grace may last, and those who stand still only once.

How long a round with its quorum waits is looked at only when everything is healed: before, somebody who is not late may
be cut off. That nobody is a member again who has done no work since it was excused is looked at always.
"""

import math
from collections.abc import Callable, Collection

from collective.core.types import PeerRef, View
from tests.simulation.symbols import name
from tests.simulation.world import World, demand

LIMIT_S = 12.0
"""More than the longest grace (1.5 rounds of at most four seconds) and all that happens around it."""


class Patience:
    """Books of who has handed in since the last commit, and of what the excused have done.

    Args:
        world: for the time.
        min_peers: of a commit.
        work_of: how many inner steps this start of a peer has done; None if it is gone.
        round_work: as many are a round.
    """

    def __init__(
        self, world: World, min_peers: int, *, work_of: Callable[[PeerRef], int | None], round_work: int
    ) -> None:
        self._world = world
        self._work_of = work_of
        self._round_work = round_work
        self._idle: dict[PeerRef, int] = {}  # excused, and has handed nothing in since; its work until then
        self._min_peers = min_peers
        self._members: set[PeerRef] = set()
        self._num_standing = 0
        self._ready: set[PeerRef] = set()
        self._complete_since: float | None = None
        self._is_healed = False

    def healed(self) -> None:
        """From now on nobody is held up by a fault."""
        self._is_healed = True
        if self._complete_since is not None:
            self._complete_since = self._world.now

    def made(self, ref: PeerRef) -> None:
        """A payload is made."""
        self._ready.add(ref)
        self._idle.pop(ref, None)
        self._look()

    def view_decided(self, view: View, excused: Collection[PeerRef]) -> None:
        """Whoever was awaited is awaited no more, or the round was aborted."""
        self._judge()
        members = {member.ref for member in view.members}
        for ref, before in self._idle.items():
            work = self._work_of(ref)
            if ref in members and work is not None:
                done = work - before
                demand(done >= self._round_work, "I4", f"{name(ref)} is awaited again after {done} steps")
        self._idle = {ref: done for ref, done in self._idle.items() if ref in excused}
        for ref in self._members.intersection(excused) - self._ready:  # the word of a payload may be on its way
            self._idle[ref] = self._work_of(ref) or 0
        self._members = members
        self._num_standing = len(self._members) + len(excused)
        self._ready &= self._members | set(excused)  # who was put out hands in anew, also if it is back at once
        self._complete_since = None
        self._look()

    def rebuilt(self) -> None:
        """Nobody is a member any more, and what was handed in is void."""
        self._members, self._num_standing = set(), 0
        self._idle.clear()
        self._ready.clear()
        self._complete_since = None

    def committed(self) -> None:
        """The next round begins."""
        self._judge()
        self._ready.clear()
        self._complete_since = None

    def _look(self) -> None:
        quorum = max(self._min_peers, math.ceil(0.5 * self._num_standing))
        if self._complete_since is None and len(self._ready & self._members) >= quorum:
            self._complete_since = self._world.now

    def _judge(self) -> None:
        if self._is_healed and self._complete_since is not None:
            waited_s = self._world.now - self._complete_since
            demand(waited_s <= LIMIT_S, "I4", "a round with its quorum waited {:.1f} s for the late", waited_s)
