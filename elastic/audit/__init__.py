# SPDX-License-Identifier: Apache-2.0
"""What a run did, proved from its journal.

`audit` is a function from records to verdicts: no file, no clock, no network, and none of the coordinator's own
bookkeeping, which would only prove that it agrees with itself; but see snapshots.py. Where the records come from
(elastic/journal/reader.py) and what the peers' folders say besides (trainer/audit/audit.py) is not known here.

    findings.py   a finding, a verdict
    order.py      the chain of commits, the views, who is in each commit       I1 I2 I3 I8
    rollbacks.py  whether the run was allowed to go back                       I1 I2 I3 I7
    samples.py    where every sample went (moves.py: what the records did to
                  them, leases.py: who may have them, coverage.py: how far it is)   I7
    snapshots.py  whether a snapshot repeats what it stands for           I3 I7 I8
    account.py    who did what; judges nothing
    lineage.py    where the run went back, and which commits count no more
    proofs.py     what the certificates of its commits must say
    beginning.py  what a journal begins with, the run's first one, one that was rebuilt, or one without its archives
    index.py      the records by what others call them
"""

from collections.abc import Callable, Sequence

import msgspec

from isthmus.elastic.audit.account import Account, Departure, GivenUp, Share, account_for
from isthmus.elastic.audit.findings import Finding, Invariant, Verdict, judge
from isthmus.elastic.audit.index import RecordIndex
from isthmus.elastic.audit.order import audit_chain, audit_contributions, audit_views
from isthmus.elastic.audit.rollbacks import audit_rollbacks
from isthmus.elastic.audit.samples import SampleCount, audit_samples
from isthmus.elastic.audit.snapshots import audit_snapshots
from isthmus.elastic.core.records import Record

__all__ = [
    "Account",
    "Audit",
    "Departure",
    "Finding",
    "GivenUp",
    "Invariant",
    "RecordIndex",
    "SampleCount",
    "Share",
    "Verdict",
    "audit",
    "judge",
]

CHECKS: tuple[Callable[[Sequence[Record]], Verdict], ...] = (
    audit_chain,
    audit_views,
    audit_contributions,
    audit_rollbacks,
    audit_snapshots,
)
"""What is checked beside the samples. Another rule of the journal is one more function here."""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What the records prove."""

    account: Account
    samples: SampleCount
    verdicts: tuple[Verdict, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return all(verdict.holds for verdict in self.verdicts)


def audit(records: Sequence[Record], *, samples_per_data_epoch: int | None = None) -> Audit:
    """Check a run's records, oldest first; also those of a run that goes on.

    Args:
        records: from the first one on, or from a snapshot on, which is believed then; what is missing at the end was
            not yet.
        samples_per_data_epoch: how many samples one pass over the data has, at least 1; None if it is not known.
    """
    leases, samples = audit_samples(records, samples_per_data_epoch=samples_per_data_epoch)
    return Audit(
        account=account_for(records),
        samples=samples,
        verdicts=(*(check(records) for check in CHECKS), leases),
    )
