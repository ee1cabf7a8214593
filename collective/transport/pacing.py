"""How fast the streams of a pair send on a long path, and how many of them do.

Flows that each look for the whole line fill its queue and lose packets, and the pair that came off worst ends the
operation; so the plan says how fast each pair must send. It says so from a survey, which may be wrong: one that was
taken while something else filled the line, such as a state that a newcomer fetches, may be a hundred times too low,
and as long as nobody sends faster the next one says the same. Paces that alone hold a peer back are therefore raised.

Nothing here touches a socket.
"""

from collections.abc import Iterable

from collective.transport.link import Link

_FLIGHT_NBYTES = 3 << 19
"""What one stream keeps on its way: Linux allows 2 MiB by default (half of tcp_wmem), some of it for what was lost."""
_AT_PACE = 0.95
"""Paces are above what the links should carry: who comes this near to them is held back by nothing else."""
_WINDOWS = 3
"""In one window bytes may arrive that were sent in another."""
RAISE = 1.5
_FADING = 0.7
_ENOUGH_NBYTES = 64 << 10
"""A window that has not collapsed: larger ones differ by what there was to send."""


def next_pace(planned: float | None, now: float | None) -> float | None:
    """The pace of an operation, bytes/s; None is none.

    What an earlier one has found beyond its plan fades: it may have had the line for itself.
    """
    return planned if planned is None or now is None else max(planned, _FADING * now)


class Brake:
    """Tells when paces are all that holds a peer back.

    All of its paced paths together, for several windows in a row: a single one may for a moment have what the others
    leave of the line, and who merely ends last has all of it.
    """

    def __init__(self) -> None:
        self._carried = self._allowed = 0.0
        self._num_windows = 0

    def window(self, carried: float, allowed: float) -> bool:
        """Whether the paces should be raised, after a window in which all paced paths had more to send.

        Args:
            carried: bytes that got through on them.
            allowed: what their paces let through in that time.
        """
        self._carried += carried
        self._allowed += allowed
        self._num_windows += 1
        if self._num_windows < _WINDOWS:
            return False
        is_all = self._carried > _AT_PACE * self._allowed
        self.release()
        return is_all

    def release(self) -> None:
        """Something else held it back, or nothing was to be sent."""
        self._carried = self._allowed = 0.0
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
