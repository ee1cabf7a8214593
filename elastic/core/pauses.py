# SPDX-License-Identifier: Apache-2.0
"""How long a peer that the others have waited for in vain stays out of the views.

Every wait in vain in a row doubles its pause, which is counted in commits: who is late once may be a member again at
the next commit boundary, then at the second one, the fourth, the eighth. Work of its own in a commit ends that. So
whoever is late again and again costs the others a share of their time that falls to nothing, whatever it says of
itself, and whether it comes back as an excused peer or as a learner. Where one wait lasts as long as many rounds, as
for a vote that does not come, the first pause is so long already that the wait was a tenth of it. A new start of the peer begins anew, since that
is how an operator mends it. Pure; knows neither why somebody was late nor who is a member.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from collective.core.types import OuterStep, PeerId, PeerRef

LONGEST = 1024
"""Commits, by doubling."""
_ROUNDS_FOR_ONE = 9
"""So many rounds go on without it for each that the others could have made while they waited."""


@dataclass(frozen=True, slots=True)
class _Pause:
    ref: PeerRef
    num_commits: int
    until: int


class Pauses:
    """Who may not be a member yet.

    Args:
        max_peers: how many are remembered; then the one that was late first is forgotten.
    """

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._pauses: dict[PeerId, _Pause] = {}

    def missed(self, ref: PeerRef, outer_step: OuterStep, *, num_rounds: float = 0.0) -> None:
        """The others waited for it in vain, from this committed step on, for as long as so many rounds take."""
        before = self._pauses.pop(ref.peer_id, None)
        again = before is not None and before.ref == ref
        num_commits = min(LONGEST, 2 * before.num_commits) if before is not None and again else 1
        num_commits = max(num_commits, math.ceil(_ROUNDS_FOR_ONE * num_rounds))
        self._pauses[ref.peer_id] = _Pause(ref, num_commits, outer_step + num_commits)
        if len(self._pauses) > self._max_peers:
            del self._pauses[next(iter(self._pauses))]

    def contributed(self, refs: Iterable[PeerRef]) -> None:
        """A commit holds work of these."""
        for ref in refs:
            self._pauses.pop(ref.peer_id, None)

    def is_over(self, ref: PeerRef, outer_step: OuterStep) -> bool:
        """Whether it may be a member of the view that starts from this committed step."""
        pause = self._pauses.get(ref.peer_id)
        return pause is None or pause.ref != ref or outer_step >= pause.until
