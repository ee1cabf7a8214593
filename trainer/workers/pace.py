# SPDX-License-Identifier: Apache-2.0
"""From when on a worker hangs: by how long it has taken for the same kind of request before.

Rules: the first request of a kind has the longest limit, since a first step compiles and loads; afterwards each kind
has its own pace, so that an evaluation is not held against a step. Knows no clock.
"""

_FACTOR = 10.0
"""A batch may be slower than others, and a machine busy: several times is no hang, ten times nobody has seen."""
_MEMORY = 0.99
"""The slowest one fades by this factor with every request that was quicker."""


class WorkerPace:
    """Measures requests by kind.

    Args:
        floor_s: no limit is shorter.
        first_s: nor longer, and it is the limit of the first request of each kind.
    """

    def __init__(self, *, floor_s: float, first_s: float) -> None:
        self._floor_s = floor_s
        self._first_s = first_s
        self._slowest_s: dict[str, float] = {}

    def took(self, kind: str, seconds: float) -> None:
        """A request of this kind was answered by all."""
        self._slowest_s[kind] = max(seconds, _MEMORY * self._slowest_s.get(kind, 0.0))

    def limit_s(self, kind: str) -> float:
        """How long the next one may take."""
        slowest_s = self._slowest_s.get(kind)
        if slowest_s is None:
            return self._first_s
        return min(self._first_s, max(self._floor_s, _FACTOR * slowest_s))
