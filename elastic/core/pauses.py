# SPDX-License-Identifier: Apache-2.0
"""How long a peer that the others have waited for in vain stays out of the views.

Every wait in vain in a row doubles its pause, which is counted in commits: who is late once may be a member again at
the next commit boundary, then at the second one, the fourth, the eighth. Work of its own in a commit ends that. So
whoever is late again and again costs the others a share of their time that falls to nothing, whatever it says of
itself, and whether it comes back as an excused peer or as a learner. A wait that may last as long as many rounds, as
for a vote that does not come, is followed by a pause nine times as long as it was: with the doubling alone a peer that
never voted took nearly all of the others' time for minutes. A new start of the peer begins anew, since that is how an
operator mends it. Pure; knows neither why somebody was late nor who is a member.

Who was put out because a round could not be finished with it may be an honest victim: of a cut line, or of who accuses
it. The first time it may come back at the next boundary. From the second time on its pause doubles, and lasts nine
times as long as the time that was lost with it, the first time included. Work in a commit does not end that, or one
who fails every other round would never pause. Every 64 commits with its work take one time back, but not before nine
times the lost time is over: in a run of seven rounds a second a wait of 40 s would be forgiven after nine seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from isthmus.collective.core.types import Instant, OuterStep, PeerId, PeerRef

LONGEST = 1024
"""Commits."""
FORGIVEN = 64
"""So many commits with its work make up for one time."""
_SHARE = 0.1
"""Of the others' time that waits for one peer may take."""
_TIMES = (1.0 - _SHARE) / _SHARE


@dataclass(frozen=True, slots=True)
class _Pause:
    ref: PeerRef
    num_commits: int
    until_step: int
    until: Instant


@dataclass(frozen=True, slots=True)
class _Blame:
    ref: PeerRef
    times: int
    owed_s: float
    """What it has cost the others, and no pause has made up for."""
    until_step: int
    until: Instant
    forgiven_from: Instant
    num_commits: int = 0
    """With its work, since then."""

    def times_left(self, now: Instant) -> int:
        """How often it was blamed and is not forgiven."""
        return max(0, self.times - self.num_commits // FORGIVEN) if now >= self.forgiven_from else self.times


class Pauses:
    """Who may not be a member yet.

    Args:
        max_peers: how many are remembered; then the one that was late first is forgotten.
    """

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._pauses: dict[PeerId, _Pause] = {}
        self._blamed: dict[PeerId, _Blame] = {}

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
        seconds = _TIMES * waited_s
        self._pauses[ref.peer_id] = _Pause(ref, num_commits, outer_step + num_commits, now + seconds)
        self._forget()
        return seconds

    def blamed(self, ref: PeerRef, outer_step: OuterStep, now: Instant, *, waited_s: float = 0.0) -> None:
        """It goes, since a round from this committed step could not be finished with it.

        Args:
            waited_s: how much longer the tries took than a round does.
        """
        before = self._blamed.pop(ref.peer_id, None)
        times, owed_s = 1, waited_s
        if before is not None and before.ref == ref and (left := before.times_left(now)):
            times, owed_s = left + 1, before.owed_s + waited_s
        num_commits = min(LONGEST, 1 << min(times - 1, LONGEST.bit_length()))
        self._blamed[ref.peer_id] = _Blame(
            ref,
            times,
            owed_s=owed_s if times == 1 else 0.0,
            until_step=outer_step + num_commits,
            until=now if times == 1 else now + _TIMES * owed_s,
            forgiven_from=now + _TIMES * waited_s,
        )
        self._forget()

    def _forget(self) -> None:
        for known in (self._pauses, self._blamed):
            if len(known) > self._max_peers:
                del known[next(iter(known))]

    def contributed(self, refs: Iterable[PeerRef]) -> None:
        """A commit holds work of these."""
        for ref in refs:
            self._pauses.pop(ref.peer_id, None)
            if (blame := self._blamed.get(ref.peer_id)) is not None:
                num_commits = blame.num_commits + 1
                self._blamed[ref.peer_id] = replace(blame, until_step=0, until=0.0, num_commits=num_commits)

    def is_over(self, ref: PeerRef, outer_step: OuterStep, now: Instant) -> bool:
        """Whether it may be a member now, of a view that starts from this committed step."""
        pause, blame = self._pauses.get(ref.peer_id), self._blamed.get(ref.peer_id)
        if blame is not None and blame.ref == ref and (outer_step < blame.until_step or now < blame.until):
            return False
        return pause is None or pause.ref != ref or (outer_step >= pause.until_step and now >= pause.until)
