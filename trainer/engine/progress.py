# SPDX-License-Identifier: Apache-2.0
"""Where a run is, by the tokens that it has committed: what the inner learning rate follows.

    position = planned inner steps of the run · committed / (committed + expected of the outer steps to come)

What is to come is expected to bring as much for each planned inner step as the newest tenth of the run has brought. So
it does not matter who trained the tokens, nor how many inner steps a slow peer leaves out: where members stay the same,
the position is the plan's own count, and it ends with the run. Where members come, more is left of the run than before,
and the position goes back a little; where they leave, it jumps ahead.

All of it follows from commits alone. A newcomer knows the run's mean instead of its newest tenth, until it has seen as
much. Samples stand for tokens: all are as long. It must not know schedules, peers or time.
"""

from collections import deque
from typing import Final, NamedTuple

from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.leases import count
from isthmus.optim.outer_plan import OuterPlan

_WINDOW_SHARE: Final = 10
_MAX_MARKS: Final = 64


class _Mark(NamedTuple):
    """After an outer step."""

    planned: int
    """Inner steps of the plan."""
    samples: int
    """Committed by all."""


class Progress:
    """See the module.

    Args:
        plan: how many inner steps lie behind an outer step.
        total_steps: inner steps of the plan, of the whole run.
    """

    def __init__(self, plan: OuterPlan, *, total_steps: int) -> None:
        self._plan = plan
        self._total_steps = total_steps
        self._window = max(1, total_steps // _WINDOW_SHARE)
        self._newest = _Mark(0, 0)
        self._marks = deque([self._newest])  # the oldest is about a window behind the newest

    def committed(self, outer_step: int, num_samples: int) -> None:
        """This outer step is the newest one that is committed, and so many samples are, from the first on."""
        newest = _Mark(self._plan.inner_step(outer_step), num_samples)
        while len(self._marks) > 1 and self._marks[-1].planned >= newest.planned:
            self._marks.pop()  # the run went back
        self._newest = newest
        if newest.planned - self._marks[-1].planned >= self._window / _MAX_MARKS:
            self._marks.append(newest)
        while len(self._marks) > 1 and newest.planned - self._marks[1].planned >= self._window:
            self._marks.popleft()

    def certified(self, certificate: Certificate) -> None:
        """The same from the certificate of the commit."""
        position = certificate.position
        self.committed(certificate.made.outer_step, position.next_index - count(position.unconsumed))

    def position(self, inner_step: int) -> float:
        """Planned inner steps that the run is worth when a peer has come to this one of its own, global count."""
        return max(0.0, self._committed_position() + (inner_step - self._newest.planned))

    def _committed_position(self) -> float:
        """In whole numbers until the last division: where all go alike, it is the plan's count to the bit."""
        (planned, samples), oldest, total = self._newest, self._marks[0], self._total_steps
        spent, gained = planned - oldest.planned, samples - oldest.samples
        if spent <= 0 or gained <= 0 or planned >= total:
            return float(planned)
        return total * samples * spent / (samples * spent + (total - planned) * gained)
