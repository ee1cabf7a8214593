# SPDX-License-Identifier: Apache-2.0
"""How a peer goes: on request at a commit boundary or at once, or with the run's last commit.

It says Leave until the coordinator says Goodbye. Rules: a commit boundary is awaited without limit while one is to be
expected, and nothing else is; a Leave that asks for more replaces one that asked for less, never the reverse. Who is
told to stay, because nobody else holds the state, waits for as long as it would wait for a coordinator (handover.py).
"""

from collections.abc import Callable
from typing import Literal

from isthmus.collective.core.types import Instant
from isthmus.elastic.core.events import Finish, LeaveRequested
from isthmus.elastic.core.exit_codes import DONE, LEFT
from isthmus.elastic.core.messages import Leave

LeavesAfter = Literal["commit", "handover", "answer"]


class Farewell:
    """Whether this peer is leaving, and by when it does without an answer.

    Args:
        timeout_s: for the answer, where no commit boundary is to be expected.
        boundary_ahead: whether one is: as a connected member of a view.
    """

    def __init__(self, timeout_s: float, boundary_ahead: Callable[[], bool]) -> None:
        self.word: Leave | None = None
        """What is said until it is answered."""
        self.by: Instant | None = None
        self.is_keeper = False
        """Nobody else holds the state: this peer stays to serve it."""
        self.is_final = False
        """The run's last state is committed."""
        self._timeout_s = timeout_s
        self._boundary_ahead = boundary_ahead

    def request(self, event: LeaveRequested, now: Instant) -> bool:
        """Somebody wants this peer to go. Returns whether there is anything new to say."""
        if self.word is not None and (self.word.now or not event.now):
            return False
        self._say(Leave(now=event.now), now)
        return True

    def bid(self, now: Instant) -> bool:
        """The run is complete. It is not worth more than a short wait that everybody knows we go."""
        if self.is_final:
            return False
        self.is_final = True
        self._say(Leave(now=True), now)
        return True

    def _say(self, word: Leave, now: Instant) -> None:
        """The time that another word was given is void: who stays for the others waits long (seed 8627)."""
        self.word, self.is_keeper, self.by = word, False, None
        self.limit(now)

    def limit(self, now: Instant) -> None:
        """Where this peer stands may have changed: if no boundary is ahead any more, the time runs."""
        if self.word is None or self.by is not None:
            return
        if self.word.now or not self._boundary_ahead():
            self.by = now + self._timeout_s

    def stay(self, until: Instant) -> None:
        """The coordinator answers that this peer is needed; unless it says so again, until then."""
        if self.word is not None and not self.word.now:
            self.is_keeper, self.by = True, until

    @property
    def waits_for(self) -> LeavesAfter | None:
        """What keeps this peer: a `commit`, a `handover` or an `answer`. None: it does not want to go."""
        if self.word is None:
            return None
        if self.is_keeper and not self.word.now:
            return "handover"
        return "commit" if self.by is None else "answer"

    def await_boundary(self) -> None:
        """There is one ahead again."""
        if self.word is not None and not self.word.now:
            self.is_keeper, self.by = False, None

    def is_overdue(self, now: Instant) -> bool:
        """Whether to go without an answer."""
        return self.by is not None and now >= self.by

    def end(self, reason: str) -> Finish:
        """It goes now; the reason is told unless the run is complete."""
        if self.is_final:
            return Finish(code=DONE, reason="the run is complete")
        return Finish(code=LEFT, reason=reason)
