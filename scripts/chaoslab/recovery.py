# SPDX-License-Identifier: Apache-2.0
"""How soon the others went on, fault by fault, and how soon who was hit took part again.

    kill donor joiner   from the signal to the survivors' next commit
    freeze cut hung     the same
    silent              the same
    clone               from the older start's end to the others' next commit
    leave               from the command to the others' next commit
    coordinator         from the moment when it listens again to the next commit
    power handover      from the last of the starts to the next commit of a new step
    disk                a peer's: as a kill; the coordinator's: as the coordinator
    heal, thaw          from the end of a cut or a freeze, or when hung workers go on, to the victim's next commit of a
                        step that was new by then
    replaced            from when hung workers were found to the victim's next commit of such a step

The next commit is one that the fault could have hindered: a round for which every victim had voted before does not
count. A measurement is alone if no other fault was being recovered from between its beginning and its end; what is
asked of a class is asked of those. The others are shown as "together". Who is frozen or cut off may be missed by a
later commit than the next one, until the fault is over. Once it is out of the view it does not count: it is one peer
fewer.

Rules: pure; from the evidence alone.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from scripts.chaoslab.evidence import COORDINATOR, OF_ALL, Event, Evidence, Fault, wall_s

LIMITS_S = {
    "kill": 2.0,
    "donor": 2.0,
    "joiner": 2.0,
    "leave": 2.0,
    "clone": 2.0,
    "freeze": 10.0,
    "cut": 10.0,
    "hung": 10.0,
    "silent": 25.0,
    "coordinator": 5.0,
    "power": 20.0,
    "handover": 20.0,
    "heal": 10.0,
    "replaced": 60.0,
}
"""At the 99th percentile."""
BESIDE_A_ROUND = frozenset({"kill", "donor", "joiner", "leave", "clone"})
"""To their limit a calm round is added: a survivor may have just begun one."""
TOGETHER = "together"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One measurement. `seconds` is infinite if nothing came until the end of the run."""

    what: str
    fault: Fault
    seconds: float
    is_alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All measurements of one class."""

    what: str
    count: int
    median_s: float
    p99_s: float
    max_s: float
    limit_s: float | None

    @property
    def holds(self) -> bool:
        """Whether it is as soon as asked."""
        return self.limit_s is None or self.p99_s <= self.limit_s


def calm_round_s(evidence: Evidence) -> float:
    """Median time from commit to commit before the first fault; not a number if there were too few."""
    times = sorted(wall_s(event) for event in _decided(evidence))
    calm = [at_s for at_s in times if evidence.began_s <= at_s <= evidence.calm_until_s]
    return statistics.median(later - earlier for earlier, later in pairwise(calm)) if len(calm) > 1 else math.nan


def recoveries(evidence: Evidence) -> list[Recovery]:
    """Everything that can be measured, in the order of the faults."""
    measured = [(fault, *one) for fault in evidence.faults for one in _measured(evidence, fault)]
    found = []
    for fault, what, from_s, until_s in measured:
        if math.isinf(until_s) and _is_cut_short(evidence, fault, what, from_s):
            continue  # what it would have done by itself is not known
        is_alone = not any(
            begin_s <= until_s and _hinders_until_s(evidence, other, end_s) >= from_s
            for other, _, other_from_s, end_s in measured
            # All that a coordinator's fault hinders begins with it; it is measured from its end.
            for begin_s in [other.at_s if COORDINATOR in other.victims or other.kind in OF_ALL else other_from_s]
            if other is not fault
        )
        found.append(Recovery(what=what, fault=fault, seconds=until_s - from_s, is_alone=is_alone))
    return found


def table(evidence: Evidence) -> list[Row]:
    """Rows by class: those with a limit first, then the others that occurred."""
    by_class: dict[str, list[float]] = {what: [] for what in LIMITS_S}
    for recovery in recoveries(evidence):
        by_class.setdefault(recovery.what if recovery.is_alone else TOGETHER, []).append(recovery.seconds)
    return [_row(what, sorted(seconds), limit_of(what, evidence)) for what, seconds in by_class.items() if seconds]


def limit_of(what: str, evidence: Evidence) -> float | None:
    """What is asked of a class."""
    limit_s = LIMITS_S.get(what)
    if limit_s is None or what not in BESIDE_A_ROUND:
        return limit_s
    round_s = calm_round_s(evidence)
    return limit_s + (0.0 if math.isnan(round_s) else round_s)


def _row(what: str, seconds: list[float], limit_s: float | None) -> Row:
    return Row(
        what=what,
        count=len(seconds),
        median_s=statistics.median(seconds),
        p99_s=seconds[math.ceil(0.99 * len(seconds)) - 1],
        max_s=seconds[-1],
        limit_s=limit_s,
    )


def _measured(evidence: Evidence, fault: Fault) -> Iterator[tuple[str, float, float]]:
    """(class, from, until) of what a fault has caused."""
    hits_coordinator = COORDINATOR in fault.victims or fault.kind in OF_ALL
    if not hits_coordinator:
        yield fault.kind, fault.at_s, _next_commit_s(evidence, fault)
    if fault.over_s is None:
        return
    if fault.kind in ("freeze", "cut", "hung"):
        until_s = (
            _next_new_step_s(evidence, None, fault.over_s)
            if hits_coordinator
            else max(_next_new_step_s(evidence, site, fault.over_s) for site in fault.victims)
        )
        after = "replaced" if fault.is_for_good else "heal" if fault.kind == "cut" else "thaw"
        yield after, fault.over_s, until_s
    elif hits_coordinator:
        yield fault.kind, fault.over_s, _next_new_step_s(evidence, None, fault.over_s)


def _next_commit_s(evidence: Evidence, fault: Fault) -> float:
    """When a survivor had the first commit that the fault could have hindered."""
    voted: set[tuple[int, int]] | None = None
    for site in fault.victims:
        votes = [vote for log in evidence.logs if log.site == site for vote in log.named("vote")]
        keys = {(vote["epoch"], vote["outer_step"]) for vote in votes if wall_s(vote) < fault.at_s}
        voted = keys if voted is None else voted & keys
    return min(
        (
            wall_s(event)
            for log in evidence.peer_logs()
            if log.site not in fault.victims
            for event in log.named("commit")
            if wall_s(event) > fault.at_s and (event["epoch"], event["outer_step"] - 1) not in (voted or ())
        ),
        default=math.inf,
    )


def _next_new_step_s(evidence: Evidence, site: int | None, from_s: float) -> float:
    """When this site's peer (None: any) had a commit of a step that nobody had decided before."""
    known = max((event["outer_step"] for event in _decided(evidence) if wall_s(event) <= from_s), default=0)
    return min(
        (
            wall_s(event)
            for log in evidence.peer_logs()
            if site in (None, log.site)
            for event in log.named("commit")
            if wall_s(event) > from_s and event["outer_step"] > known
        ),
        default=math.inf,
    )


def _hinders_until_s(evidence: Evidence, fault: Fault, until_s: float) -> float:
    """Its victims may have voted once more, and be missed later: until the fault is over, or a view does without them.

    One that heard nobody was so: its vote of that moment was on its way, and the others missed the next one for 5 s.
    """
    if fault.over_s is None:
        return until_s
    logs = (log for log in evidence.logs if log.site in fault.victims)
    victims = {event.get("peer") for log in logs for event in log.named("vote")}
    views = (event for log in evidence.logs for event in log.named("view_decided"))
    without_s = (wall_s(view) for view in views if wall_s(view) > fault.at_s and not victims & set(view["members"]))
    return max(until_s, min((fault.over_s, *without_s)))


def _decided(evidence: Evidence) -> Iterator[Event]:
    for log in evidence.logs:
        yield from log.named("commit_decided")


def _is_cut_short(evidence: Evidence, fault: Fault, what: str, from_s: float) -> bool:
    """Whether the victim was hit again, or the run was over, before it could be late."""
    late_s = from_s + LIMITS_S.get(what, max(LIMITS_S.values()))
    again_s = [
        other.at_s for other in evidence.faults if set(other.victims) & set(fault.victims) and other is not fault
    ]
    return any(from_s <= at_s <= late_s for at_s in (*again_s, evidence.ended_s))
