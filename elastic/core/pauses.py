# SPDX-License-Identifier: Apache-2.0
"""How long a peer that the others have waited for in vain stays out of the views.

Every wait in vain in a row doubles its pause, which is counted in commits: who is late once may be a member again at
the next commit boundary, then at the second one, the fourth, the eighth. Work of its own in a commit ends that. So
whoever is late again and again costs the others a share of their time that falls to nothing, whatever it says of
itself, and whether it comes back as an excused peer or as a learner. A wait that may last as long as many rounds, as
for a vote that does not come, is followed by a pause nine times as long as it was: with the doubling alone a peer that
never voted took nearly all of the others' time for minutes. A new start of the peer begins anew, since that is how an
operator mends it. Pure; knows neither why somebody was late nor who is a member.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.collective.core.types import Instant, OuterStep, PeerId, PeerRef

LONGEST = 1024
"""Commits."""
_SHARE = 0.1
"""Of the others' time that waits for one peer may take."""


@dataclass(frozen=True, slots=True)
class _Pause:
    ref: PeerRef
    num_commits: int
    until_step: int
    until: Instant


class Pauses:
    """Who may not be a member yet.

    Args:
        max_peers: how many are remembered; then the one that was late first is forgotten.
    """

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._pauses: dict[PeerId, _Pause] = {}

    def missed(self, ref: PeerRef, outer_step: OuterStep, now: Instant, *, waited_s: float = 0.0) -> float:
        """The others waited for it in vain, for a round that starts from this committed step.

        Args:
            waited_s: for how long, where that may be many rounds; 0: about a round at most.

        Returns:
            After how many seconds, at the least, it may be a member again.
        """
        before = self._pauses.pop(ref.peer_id, None)
        again = before is not None and before.ref == ref
        num_commits = min(LONGEST, 2 * before.num_commits) if before is not None and again else 1
        seconds = waited_s * (1.0 - _SHARE) / _SHARE
        self._pauses[ref.peer_id] = _Pause(ref, num_commits, outer_step + num_commits, now + seconds)
        if len(self._pauses) > self._max_peers:
            del self._pauses[next(iter(self._pauses))]
        return seconds

    def contributed(self, refs: Iterable[PeerRef]) -> None:
        """A commit holds work of these."""
        for ref in refs:
            self._pauses.pop(ref.peer_id, None)

    def is_over(self, ref: PeerRef, outer_step: OuterStep, now: Instant) -> bool:
        """Whether it may be a member now, of a view that starts from this committed step."""
        pause = self._pauses.get(ref.peer_id)
        return pause is None or pause.ref != ref or (outer_step >= pause.until_step and now >= pause.until)
