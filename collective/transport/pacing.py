# SPDX-License-Identifier: Apache-2.0
"""How fast the streams of a pair send on a long path, and how many of them do.

Flows that each look for the whole line fill its queue and lose packets, and the pair that came off worst ends the
operation; so the plan says how fast each pair must send. It says so from a survey, which may be wrong: one that was
taken while something else filled the line, such as a state that a newcomer fetches, may be a hundred times too low,
and as long as nobody sends faster the next one says the same. Paces that alone hold a peer back are therefore raised.

Nothing here touches a socket.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from isthmus.collective.transport.link import Link

P = TypeVar("P", bound=Hashable)

_FLIGHT_NBYTES = 1 << 20
"""What one stream keeps on its way. Linux lets some 2.8 MB be unacknowledged by default (tcp_wmem), and a lost packet
holds up what is sent in two round trips."""
_AT_PACE = 0.95
"""Paces are above what the links should carry: who comes this near to them is held back by nothing else."""
_WINDOWS = 3
"""In one window bytes may arrive that were sent in another."""
_PACKET_NBYTES = 1500
"""What a path may lack of its pace: where that lets a packet through in a second, most windows see none."""
RAISE = 1.5
"""By what factor a pace that alone holds a path back is raised, about once a second."""
FADING = 0.7
"""What is left of that factor in the operation that follows: it may have had the line for itself."""
_ENOUGH_NBYTES = 64 << 10
"""A window that has not collapsed: larger ones differ by what there was to send."""


class Brake:
    """Tells when paces are all that holds a peer back, and which of them to raise.

    All of its paced paths together, for several windows in a row: a single one may for a moment have what the others
    leave of the line, and who merely ends last has all of it. One that carries less than its own pace even so is held
    back by what lies behind it, such as the receiver's line.
    """

    def __init__(self) -> None:
        self._carried: Counter[Hashable] = Counter()
        self._allowed: Counter[Hashable] = Counter()
        self._num_windows = 0

    def window(self, carried: Mapping[P, float], allowed: Mapping[P, float]) -> list[P]:
        """The paths to raise the pace of, after a window in which all paced paths had more to send.

        Args:
            carried: bytes that got through, by path.
            allowed: what their paces let through in that time.
        """
        self._carried.update(carried)
        self._allowed.update(allowed)
        self._num_windows += 1
        if self._num_windows < _WINDOWS:
            return []
        lacking = len(allowed) * _PACKET_NBYTES
        is_all = self._carried.total() + lacking > _AT_PACE * self._allowed.total()
        held_back = [
            path for path in allowed if is_all and self._carried[path] + _PACKET_NBYTES > _AT_PACE * self._allowed[path]
        ]
        self.release()
        return held_back

    def release(self) -> None:
        """Something else held it back, nothing was to be sent, or the paces are new."""
        self._carried.clear()
        self._allowed.clear()
        self._num_windows = 0


def streams_needed(pace: float, round_trip_s: float) -> int:
    """How many streams carry it."""
    return 1 + int(pace * round_trip_s / _FLIGHT_NBYTES)


def is_used(link: Link, links: Iterable[Link], num_used: int) -> bool:
    """Whether it is among as many streams as are needed: the first ones whose windows have not collapsed.

    Who has lost a packet twice, or the last one, begins anew with a window of one packet; with little to send it
    grows back over a dozen round trips, during which others of the pair would carry the same at once.
    """
    window = min(link.window_nbytes(), _ENOUGH_NBYTES)
    before = 0
    for other in links:
        if other is not link:
            others = min(other.window_nbytes(), _ENOUGH_NBYTES)
            before += others > window or (others == window and other.stream < link.stream)
    return before < num_used
