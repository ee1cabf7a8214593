# SPDX-License-Identifier: Apache-2.0
"""What the view server knows: peers, faults, what was posted in which view, how it ended, and the tally.

Rules: look-ups and decisions, no waiting. A decision follows from what peers have said and from the ends of their
processes, never from what the benchmark has done to them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from isthmus.collective import RoundKey
from scripts.faults.words import Report, SelfFault, line


@dataclass(slots=True)
class Tally:
    """What was counted."""

    operations: int = 0
    wrong: int = 0
    hung: int = 0
    silent: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, kind: str, text: str) -> None:
        """Count one that was `wrong`, `hung` or `silent`, with a sentence about it."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.notes.append(f"{kind}: {text}")


@dataclass(slots=True, eq=False)
class Site:
    """One start of a peer, as the server knows it."""

    number: int
    incarnation: int
    pid: int
    address: str
    writer: asyncio.StreamWriter
    is_alive: bool = True
    is_member: bool = True
    """Wanted in the next view."""
    may_die: bool = False
    is_frozen: bool = False
    """Nothing is expected of it."""
    is_mute: bool = False
    """It does not answer any more, though its process is there."""
    unanswered: int = 0
    ended_at: float = 0.0
    owed: dict[RoundKey, float] = field(default_factory=dict)
    """Operations that it has not reported, and since when they may be expected."""

    def __str__(self) -> str:
        return f"peer {self.number}/{self.incarnation}"

    @property
    def stays(self) -> bool:
        """Whether it belongs into the next view."""
        return self.is_alive and self.is_member

    def tell(self, word: msgspec.Struct) -> None:
        """Send a word; one to the dead is lost."""
        if self.is_alive:
            self.writer.write(line(word))


@dataclass(slots=True, kw_only=True)
class Fault:
    """What is to happen to a peer in a step: it does it to itself, or `act` is called a while after the first post."""

    site: Site
    act: Callable[[], float]
    """Does it; returns when."""
    by_itself: SelfFault | None = None
    delay_s: float = 0.0
    at: float | None = None
    """When it happened."""

    def strike(self) -> None:
        """Do it now, if it has not happened yet."""
        if self.at is None:
            self.at = self.act()


@dataclass(slots=True)
class Attempt:
    """One view's try of what is left of a step. Times are CLOCK_MONOTONIC."""

    epoch: int
    sites: list[Site]
    todo: frozenset[int]
    posted_at: float
    reports: dict[tuple[Site, int], Report] = field(default_factory=dict)

    def __str__(self) -> str:
        told = [
            f"    {site}, {fragment}: {report.outcome} after {report.at - self.posted_at:.3f} s, suspects "
            f"{list(report.suspects)}, {report.cause!r}"
            for (site, fragment), report in self.reports.items()
        ]
        return "\n".join(
            [f"view {self.epoch} of {', '.join(map(str, self.sites))}, posted at {self.posted_at:.3f}", *told]
        )

    def aborts(self) -> list[Report]:
        """Reports of what did not finish."""
        return [report for report in self.reports.values() if report.outcome != "finished"]

    def has_finished(self, site: Site, fragment: int) -> bool:
        """Whether this peer has a result."""
        report = self.reports.get((site, fragment))
        return report is not None and report.outcome == "finished"

    def is_finished_by(self, site: Site) -> bool:
        """Whether this peer has all results."""
        return all(self.has_finished(site, fragment) for fragment in self.todo)

    def suspected(self) -> set[Site]:
        """Those whom most of the others that live suspect."""
        living = [site for site in self.sites if site.is_alive]
        accusers: dict[int, set[Site]] = {}
        for (accuser, _), report in self.reports.items():
            for number in report.suspects:
                accusers.setdefault(number, set()).add(accuser)
        return {
            site
            for site in living
            if 2 * len(accusers.get(site.number, set()) - {site}) > sum(other is not site for other in living)
        }

    def is_decided(self, *, trusts_ends: bool) -> bool:
        """Whether there is nothing to wait for: all that stay have reported, or somebody leaves and that was felt."""
        if any(site.is_mute for site in self.sites):
            return True
        suspected = self.suspected()
        stay = [site for site in self.sites if site.is_alive and site not in suspected]
        if len(stay) < len(self.sites) and (trusts_ends or self.aborts()):
            return True
        return all((site, fragment) in self.reports for site in stay for fragment in self.todo)

    def laggards(self) -> list[Site]:
        """Who has not reported, if all others have finished; else nobody.

        If two have not, one that has finished may have been cut off with what they lack on its way: they find that out.
        """
        unfinished = [site for site in self.sites if site.is_alive and not self.is_finished_by(site)]
        return unfinished if len(unfinished) == 1 < len(self.sites) and not self.aborts() else []


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A step that counts."""

    sites: list[Site]
    """The members that stayed, all of which have finished all of it."""
    finished_at: float
    """When the last of them had its last result."""
    attempts: list[Attempt]
