# SPDX-License-Identifier: Apache-2.0
"""Recorded commits, as a learner gets them: known by the coordinator's word, fetched from whoever still keeps them.

Rules: a commit of another digest than the coordinator named is a lie, and its donor is dropped; one that lacks a commit
stays a donor. What is collected beside a snapshot is bounded by the caller's room.
"""

import asyncio
import logging

from isthmus.collective.core.types import Member, OuterStep
from isthmus.collective.errors import CollectiveError
from isthmus.elastic.core.messages import Held
from isthmus.elastic.errors import DonorFault, DonorRefused, StateDiverged
from isthmus.elastic.learner.donor_link import DonorLink
from isthmus.elastic.learner.donors import Donors
from isthmus.elastic.state.replica import CommitEntry

_log = logging.getLogger(__name__)

_MAX_KNOWN = 4096
"""Commits that were heard of, the newest. Who follows a run hears of them for days."""


class CommitSource:
    """One connection at a time to a donor that has commits; `close` when the catch-up ends."""

    def __init__(self, donors: Donors) -> None:
        self._donors = donors
        self._link: DonorLink | None = None
        self._known: dict[OuterStep, bytes] = {}
        self._collected: dict[OuterStep, CommitEntry] = {}
        self._news = asyncio.Event()

    def heard_of(self, committed: Held) -> None:
        """The coordinator says that this state is committed."""
        self._known[committed.outer_step] = committed.digest
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._news.set()

    def forget(self) -> None:
        """The run went back: what was named may be void."""
        self._known.clear()
        self._collected.clear()

    async def next_word(self) -> None:
        """Until the coordinator says something more."""
        self._news.clear()
        await self._news.wait()

    def is_wrong(self, held: Held) -> bool:
        """Whether the coordinator has named another digest for this step."""
        return self._known.get(held.outer_step, held.digest) != held.digest

    def is_named(self, held: Held) -> bool:
        """Whether the coordinator has named just this state."""
        return self._known.get(held.outer_step) == held.digest

    def forget_before(self, held: Held) -> None:
        """What led here is not needed any more."""
        for known in (self._known, self._collected):
            for step in [step for step in known if step <= held.outer_step]:
                del known[step]

    def take_collected(self, step: OuterStep) -> CommitEntry | None:
        """The commit that made `step`, if it was collected."""
        return self._collected.pop(step, None)

    def use(self, link: DonorLink) -> None:
        """Ask over this connection first; it is ours to close."""
        self.close()
        self._link = link

    async def fetch(self, step: OuterStep, *, max_nbytes: int) -> CommitEntry | None:
        """The commit that made `step`, from whoever still has it."""
        candidates = self._donors.candidates
        if self._link is not None:  # whom we are connected to comes first
            candidates.sort(key=lambda member: self._link is None or member != self._link.member)
        for member in candidates:
            try:
                link = await self._link_to(member)
                entry = await link.commit(step, max_nbytes=max_nbytes)
                if self.is_wrong(Held(entry.outer_step, entry.digest)):
                    raise StateDiverged(step, self._known[step], entry.digest)
                return entry
            except DonorRefused as error:
                _log.info("commit_not_kept peer_id=%s cause=%s", member.peer_id, error)
            except (CollectiveError, DonorFault) as error:
                self._donors.drop(member, error)
                self.close()
            except asyncio.CancelledError:
                self.close()  # it is in the middle of an answer
                raise
        return None

    async def collect(self, after: OuterStep, *, room_nbytes: int) -> None:
        """While a snapshot is fetched, keep the commits made after it, before the donors' logs forget them."""
        while True:
            self._news.clear()
            for number in range(after + 1, max(self._known, default=after) + 1):
                step = OuterStep(number)
                entry = self._collected.get(step) or await self.fetch(step, max_nbytes=room_nbytes)
                if entry is None or self._collected_nbytes() + entry.nbytes > room_nbytes:
                    return
                self._collected[step] = entry
            await self._news.wait()

    def close(self) -> None:
        """Close the connection, if there is one."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _collected_nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._collected.values())

    async def _link_to(self, member: Member) -> DonorLink:
        if self._link is None or self._link.member != member:
            self.close()
            self._link = await self._donors.open(member)
        return self._link
