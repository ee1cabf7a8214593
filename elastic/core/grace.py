# SPDX-License-Identifier: Apache-2.0
"""How long a round that has its quorum waits for the others.

The grace follows what was measured: some times the lateness that is usual in this run, never less than a floor and
never more than a round's own work takes, because whoever waits loses that. Before the first round nothing is measured,
and the first inner step may compile for minutes.

Rules: lateness counts from the member that makes the quorum. Only rounds that were committed teach anything, and (but
for the first one) only if nothing interrupted them: the others last as long as the fault did. Knows no peers and
decides nothing.
"""

import math
from collections.abc import Collection

from isthmus.collective.core.types import Instant
from isthmus.elastic.core.config import CoordinatorConfig

_MEMORY = 0.9
"""What is usual fades by this factor with every round that was quicker."""

_LONGER = 1.5
"""By what factor the next grace is longer than one that was too short."""


class Grace:
    """Measures rounds, and says when the next one has waited long enough."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._lateness_s: float | None = None
        self._round_s = 0.0
        self._began: Instant | None = None
        self._is_whole = True

    def quorum_of(self, num_standing: int) -> int:
        """How many members must have handed in before the others can be late."""
        return max(1, self._config.min_peers, math.ceil(self._config.round_quorum * num_standing))

    @property
    def window_s(self) -> float:
        """How long a round waits for the others once it has its quorum."""
        config = self._config
        if self._lateness_s is None:
            return config.grace_initial_s
        usual_s = config.grace_factor * self._lateness_s
        return max(config.grace_floor_s, min(usual_s, config.grace_limit * self._round_s))

    def closes_at(self, ready_at: Collection[Instant], num_standing: int) -> Instant | None:
        """When the round goes on without whoever is not ready; None while the quorum is not there."""
        quorum = self.quorum_of(num_standing)
        if not quorum <= len(ready_at) < num_standing:
            return None
        return sorted(ready_at)[quorum - 1] + self.window_s

    def learn(self, ready_at: Collection[Instant], num_standing: int, now: Instant) -> None:
        """A round was committed whose members handed in at these instants."""
        quorum = self.quorum_of(num_standing)
        is_first = self._lateness_s is None
        if self._began is not None and (self._is_whole or is_first) and len(ready_at) >= quorum:
            times = sorted(ready_at)
            work_s = times[quorum - 1] - self._began
            if not self._is_whole:  # better than nothing, if every round is interrupted
                work_s = min(work_s, self._config.grace_initial_s / self._config.grace_limit)
            # Where nobody could be late, or somebody is excused, it is not known that nobody would have been: two
            # members of uneven pace were left behind in turn, for ever (seed 16834).
            memory = _MEMORY if quorum < len(times) == num_standing else 1.0
            self._lateness_s = max(times[-1] - times[quorum - 1], memory * (self._lateness_s or 0.0))
            self._round_s = max(work_s, _MEMORY * self._round_s)
        self._began, self._is_whole = now, True

    def was_too_short(self) -> None:
        """Somebody was left behind. How late it will be nobody knows, but it is late by more than this.

        Only who was in time would teach otherwise, and where work takes now long, now short, somebody would be left
        behind in every round for ever (scenarios/work_of_uneven_length.toml).
        """
        if self._lateness_s is not None:
            self._lateness_s = max(self._lateness_s, _LONGER * self.window_s / self._config.grace_factor)

    def interrupted(self, now: Instant) -> None:
        """While some had not handed in, a view ended or the coordinator was away. Between two rounds it is nothing."""
        self._is_whole = self._began == now
