# SPDX-License-Identifier: Apache-2.0
"""Whether a round that all have come to is too slow, and because of whom.

Who owes what depends on nobody else is too slow by our own finding. Where all such things are here and sums are
missing, it is not known whether the member that owes them keeps them back or waits for a third one. Then this member
gives up, says for whom it waits, and asks the others: whoever waits for a third one's own part says so by its own
finding (findings.py).
"""

import math
from collections.abc import Mapping

from isthmus.collective.core.round_times import SlowLimits, is_hopeless
from isthmus.collective.core.types import Instant
from isthmus.collective.rounds.running_round import RunningRound
from isthmus.collective.transport.bundle import Bundle


class Slowness:
    """See the module.

    Args:
        round_: which.
        bundles: by rank.
        limits: when what is too slow.
        limit_s: how long this round may take, once all have come; infinite: such rounds are not known.
        deadline_s: of the round anyway.
    """

    def __init__(
        self,
        round_: RunningRound,
        bundles: Mapping[int, Bundle],
        limits: SlowLimits,
        *,
        limit_s: float,
        deadline_s: float,
    ) -> None:
        self._round, self._bundles, self._limits = round_, bundles, limits
        self._limit_s, self._deadline_s = limit_s, deadline_s
        self.open_s = 0.0
        """How long the round has been under way, as this process saw it."""
        self._posted_s = 0.0
        self._idle_s = 0.0  # since something came that the round needs
        self._num_missing = round_.num_missing
        self._looked_at: Instant | None = None
        self._moved_before: dict[int, int] | None = None

    def observe(self, now: Instant, forgiven_s: float) -> None:
        """Count the time since the last look, but for what this process did not run."""
        seconds = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at - forgiven_s)
        self._looked_at = now
        self._posted_s += seconds
        if not self._round.machine.is_under_way:
            return
        if self._moved_before is None:
            self._moved_before = {rank: bundle.moved() for rank, bundle in self._bundles.items()}
            return
        self.open_s += seconds
        self._idle_s += seconds
        if self._round.num_missing < self._num_missing:
            self._num_missing, self._idle_s = self._round.num_missing, 0.0

    def culprits(self, *, share: float = 1.0) -> list[int]:
        """Ranks that have come and are too slow by themselves, or will be soon, at this share of the limits."""
        owing = [rank for rank in self._round.owing() if self._round.machine.has_opened(rank)]
        if self.is_overdue(share=share):
            return owing
        if self.open_s <= share * self._limits.floor_s:
            return []
        return [rank for rank in owing if self._is_hopeless(rank)]

    def absent(self) -> list[int]:
        """Ranks that have not come although the round has been under way for too long."""
        waiting = self._round.machine.waiting_for() if self.is_overdue() else ()
        return [rank for rank in waiting if not self._round.machine.has_opened(rank)]

    def is_overdue(self, *, share: float = 1.0) -> bool:
        """Whether the round has lasted too long, whoever is to blame."""
        if self._limit_s < math.inf:
            return self.open_s > share * self._limit_s
        return self._idle_s > share * self._limits.unknown_s

    def is_awaited(self, *, share: float) -> bool:
        """Whether somebody who has not come yet would have kept this peer waiting for too long, had it come to others.

        By itself it may still be computing; see `Findings.heard`.
        """
        limit_s = self._limit_s if self._limit_s < math.inf else self._limits.unknown_s
        return not self._round.machine.is_under_way and self._posted_s > share * limit_s

    def _is_hopeless(self, rank: int) -> bool:
        assert self._moved_before is not None, "the round is under way"
        return is_hopeless(
            self._limits,
            moved=self._bundles[rank].moved() - self._moved_before[rank],
            left=self._round.left_nbytes(rank),
            seconds=self.open_s,
            deadline_s=self._deadline_s,
        )
