# SPDX-License-Identifier: Apache-2.0
"""What an audit says: findings, and one verdict a check.

Rules: a finding names the invariant of ARCHITECTURE.md that does not hold, the journal slot where that shows, and says
it in one sentence; who is to blame is for people. However wrong a history is, no more is kept of it than `MAX_KEPT`.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

Invariant = Literal["I1", "I2", "I3", "I5", "I7", "I8", "I9"]
"""Those that what is written down can prove; I4 and I6 are about time and about what was never written."""

MAX_KEPT = 100
"""Findings of one check that are kept; the rest is counted."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that must not be. `slot` is the journal record where it shows, None if no record does."""

    invariant: Invariant
    slot: int | None
    sentence: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one check came to.

    `num_looked_at` counts what it looked at, in `unit`: a check that saw nothing has proved nothing. `num_findings`
    may be more than there are `findings`.
    """

    check: str
    invariants: tuple[Invariant, ...]
    num_looked_at: int
    unit: str
    num_findings: int
    findings: tuple[Finding, ...]

    def shifted(self, num_slots: int) -> "Verdict":
        """The same where the first record that was looked at stands in this slot, and not in slot 0."""
        moved = (
            item if item.slot is None else msgspec.structs.replace(item, slot=item.slot + num_slots)
            for item in self.findings
        )
        return msgspec.structs.replace(self, findings=tuple(moved))

    @property
    def holds(self) -> bool:
        """Whether it found nothing wrong."""
        return self.num_findings == 0


def judge(
    check: str, invariants: tuple[Invariant, ...], findings: Iterable[Finding], *, num_looked_at: int, unit: str
) -> Verdict:
    """The verdict over all these findings. They may be many: they are counted, and the first ones kept."""
    kept: list[Finding] = []
    num_findings = 0
    for finding in findings:
        num_findings += 1
        if len(kept) < MAX_KEPT:
            kept.append(finding)
    return Verdict(
        check=check,
        invariants=invariants,
        num_looked_at=num_looked_at,
        unit=unit,
        num_findings=num_findings,
        findings=tuple(kept),
    )


def short(digest: bytes) -> str:
    """A digest for people."""
    return digest.hex()[:12]
