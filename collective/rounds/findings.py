# SPDX-License-Identifier: Apache-2.0
"""What a member says of the others when a round ends without a result: its own findings, or whom it has them from.

Rules: members begin to wait at nearly the same time, and the first that gives up ends the round for all. So what a
member has nearly found itself by then (`doubted`, `is_overdue_soon`) is its own finding; all else is hearsay.
"""

from collections.abc import Sequence

from isthmus.collective.core.round_machine import RoundMachine
from isthmus.collective.core.types import Member, PeerId
from isthmus.collective.errors import OperationAborted
from isthmus.collective.rounds.notices import AbortNotice


class Findings:
    """See the module. What it holds is kept by supervision.py.

    Args:
        members: of the round, by rank.
        machine: knows who is waited for.
    """

    def __init__(self, members: Sequence[Member], machine: RoundMachine) -> None:
        self._members, self._machine = members, machine
        self.doubted: frozenset[int] = frozenset()
        """Ranks that we would soon give up because of, whatever others say."""
        self.is_overdue_soon = False
        """Whether we would soon give up because it takes too long, whoever it waits for."""

    def suspects(self, ranks: Sequence[int], cause: str) -> OperationAborted:
        """Give up because of these members."""
        return OperationAborted(self._machine.key, cause, self._names(ranks))

    def overdue(self, cause: str) -> OperationAborted:
        """It takes too long, but no member owes us its own part: those that we wait for may wait for others.

        `told_by` is the first of them, so it is to blame unless it reports itself for whom it waits.
        """
        waiting = self._names(self._machine.waiting_for())
        return OperationAborted(self._machine.key, cause, told_by=waiting[0] if waiting else None)

    def heard(self, notice: AbortNotice, sender: int) -> OperationAborted:
        """Another member has given the round up."""
        told_by = self._members[sender].peer_id
        cause = f"peer {told_by} gave up: {notice.cause}"
        if notice.is_overdue:
            return self._overdue_heard(cause, told_by)
        ours = [peer for peer in notice.suspects if peer in self._names(sorted(self.doubted))]
        if ours:
            return OperationAborted(self._machine.key, cause, ours)
        return OperationAborted(self._machine.key, cause, notice.suspects, told_by=told_by)

    def _overdue_heard(self, cause: str, told_by: PeerId) -> OperationAborted:
        """Another member gave up because the round takes too long. We name only members that we doubt ourselves.

        If the round is nearly overdue here, too, `told_by` is the first member that we wait for, else the sender: a
        false notice that comes early has nobody else blamed.
        """
        if self.doubted:
            return self.suspects(sorted(self.doubted), cause)
        waiting = self._machine.waiting_for() if self.is_overdue_soon else ()
        return OperationAborted(self._machine.key, cause, told_by=self._names(waiting)[0] if waiting else told_by)

    def _names(self, ranks: Sequence[int]) -> list[PeerId]:
        return [self._members[rank].peer_id for rank in ranks]
