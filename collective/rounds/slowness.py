# SPDX-License-Identifier: Apache-2.0
"""Whether a round that all have come to is too slow, and because of whom.

A member that has owed us its own part for long is too slow by our own finding. If only sums are missing, we do not
know whether the member that makes them keeps them back, or waits for the part of a third member. Then we give up, say
for whom we wait, and ask the others. A member that waits for the part of a third one names that one (findings.py).
"""

import math
from collections.abc import Mapping

from isthmus.collective.core.round_times import RoundLimit, SlowLimits, is_hopeless
from isthmus.collective.core.types import Instant
from isthmus.collective.rounds.running_round import RunningRound
from isthmus.collective.transport.bundle import Bundle


class Slowness:
    """See the module.

    Args:
        round_: which.
        bundles: by rank.
        limits: when what is too slow.
        limit: how long this round may take, once all have come.
        deadline_s: of the round anyway.
    """

    def __init__(
        self,
        round_: RunningRound,
        bundles: Mapping[int, Bundle],
        limits: SlowLimits,
        *,
        limit: RoundLimit,
        deadline_s: float,
    ) -> None:
        self._round, self._bundles, self._limits = round_, bundles, limits
        self._limit, self._deadline_s = limit, deadline_s
        self.open_s = 0.0
        """How long all have been in the round, as this process saw it."""
        self._looked_at: Instant | None = None
        self._idle_s = 0.0  # since a chunk came that the round needs, or was sent
        self._passed = 0
        self._most_missing = 0
        self._owed_since: dict[int, tuple[float, int]] = {}  # by rank: open_s, and what had moved

    def observe(self, now: Instant, forgiven_s: float) -> None:
        """Count the time since the last look, but for what this process did not run."""
        if not self._round.is_open:
            return
        if self._looked_at is None:
            self._most_missing = self._round.num_missing
        else:
            seconds = max(0.0, now - self._looked_at - forgiven_s)
            self.open_s += seconds
            self._idle_s += seconds
        self._looked_at = now
        passed = self._round.bytes_sent - self._round.num_missing  # grows with both
        if passed != self._passed:
            self._passed, self._idle_s = passed, 0.0
        for rank, bundle in self._bundles.items():
            if not self._round.owes_now(rank):
                self._owed_since.pop(rank, None)
            elif rank not in self._owed_since:
                self._owed_since[rank] = self.open_s, bundle.moved()

    def culprits(self, *, share: float = 1.0) -> list[int]:
        """Ranks that are too slow by themselves, or, at a smaller share of the limits, that will be soon."""
        is_overdue = self.is_overdue(share=share)
        least_s = share * self._limits.floor_s * (0.5 if is_overdue else 1.0)
        return [
            rank
            for rank, (since_s, moved) in self._owed_since.items()
            if self.open_s - since_s > least_s
            and self._round.concerns(rank)
            and (is_overdue or self._is_hopeless(rank, since_s, moved))
        ]

    def is_overdue(self, *, share: float = 1.0) -> bool:
        """Whether the round has lasted too long, whoever is to blame.

        At a smaller share it is the limit that others may have who know nothing of our doublings.
        """
        limit_s = self._limit.own_s if share == 1.0 else self._limit.usual_s
        if limit_s < math.inf:
            return self.open_s > share * limit_s
        missing = self._round.num_missing
        comes_to_no_end = self.open_s > share * self._limits.unknown_s and is_hopeless(
            self._limits,
            moved=self._most_missing - missing,
            left=missing,
            seconds=self.open_s,
            deadline_s=self._deadline_s,
        )
        return comes_to_no_end or self._idle_s > share * self._limits.unknown_s

    def _is_hopeless(self, rank: int, since_s: float, moved_before: int) -> bool:
        return is_hopeless(
            self._limits,
            moved=self._bundles[rank].moved() - moved_before,
            left=self._round.left_nbytes(rank),
            seconds=self.open_s - since_s,
            deadline_s=self._deadline_s,
        )
