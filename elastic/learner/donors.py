# SPDX-License-Identifier: Apache-2.0
"""The members that may serve a learner: whom to ask next, and who has done it badly.

Rules: a donor that lied, broke off or stalled is dropped for this catch-up and forgiven in the next one, because what
looked like its fault may have been the network's. Every drop keeps its cause; of a donor one is logged a minute.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from isthmus.collective.core.types import Member, OuterStep, PeerRef
from isthmus.collective.errors import CollectiveError
from isthmus.collective.transport import Channel
from isthmus.elastic.errors import DonorFault
from isthmus.elastic.learner.donor_link import DonorLink
from isthmus.elastic.state.digest import StateManifest
from isthmus.elastic.state.wire import Pace

_log = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
_LEAST_S, _TIMES, _MOST_S = 0.05, 2.0, 1.0
"""How much longer than the first donor the others may take: so many times as long, and between these bounds."""

Dial = Callable[[Member], Awaitable[Channel]]
"""Opens a STATE connection to a peer, within its own deadline."""


class Offer(NamedTuple):
    """A donor that is ready: the state it has pinned, and the sizes of its commits after the one held here."""

    link: DonorLink
    manifest: StateManifest
    commits_nbytes: tuple[int, ...]


class Donors:
    """Members in the order in which they are asked.

    Args:
        dial: opens a connection.
        pace: floors and windows of the transfer.
    """

    def __init__(self, dial: Dial, pace: Pace) -> None:
        self._dial = dial
        self._pace = pace
        self._members: tuple[Member, ...] = ()
        self._dropped: dict[PeerRef, str] = {}
        self._logged_at: dict[PeerRef, float] = {}

    def name(self, members: Sequence[Member]) -> None:
        """These can serve from now on."""
        self._members = tuple(members)
        known = {member.ref for member in members}
        self._logged_at = {ref: at for ref, at in self._logged_at.items() if ref in known}

    def forgive(self) -> None:
        """Another catch-up begins: whoever was dropped in the last one may try again."""
        self._dropped.clear()

    def drop(self, member: Member, error: Exception) -> None:
        """It has done it badly."""
        now = asyncio.get_running_loop().time()
        if now >= self._logged_at.get(member.ref, -math.inf) + _LOG_EVERY_S:
            self._logged_at[member.ref] = now
            _log.warning("donor_dropped peer_id=%s cause=%s", member.peer_id, error)
        self._dropped[member.ref] = f"{member.address}: {error}"

    @property
    def candidates(self) -> list[Member]:
        """Who may be asked, the likeliest first."""
        return [member for member in self._members if member.ref not in self._dropped]

    @property
    def causes(self) -> tuple[str, ...]:
        """Why the others were dropped."""
        return tuple(self._dropped.values())

    async def open(self, member: Member) -> DonorLink:
        """Connect to one. Raises CollectiveError."""
        return DonorLink(member, await self._dial(member), self._pace)

    async def gather(self, offers: list[Offer], after: OuterStep | None) -> None:
        """Connect to the first few and ask each to pin its state. The caller closes what is in `offers`, whatever
        happens; none is there only if nobody is left. Once one is there, the others have a little more time: one that
        cannot be dialled would take seconds, in which the run goes on and the state that is offered grows old.

        Args:
            offers: what is offered is added here.
            after: ask for the sizes of the commits from this one on; None for none.
        """

        async def ask(member: Member) -> None:
            useless = None
            try:
                link = useless = await self.open(member)
                manifest, commits_nbytes = await link.offer(after)
                offers.append(Offer(link, manifest, commits_nbytes))
                useless = None
            except (CollectiveError, DonorFault) as error:
                self.drop(member, error)
            finally:
                if useless is not None:
                    useless.close()

        loop = asyncio.get_running_loop()
        while not offers and (candidates := self.candidates):
            began_at = loop.time()
            async with asyncio.TaskGroup() as tasks:
                asked = {tasks.create_task(ask(member)) for member in candidates[: self._pace.max_donors]}
                while asked and not offers:
                    _, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                if asked:
                    more_s = min(_MOST_S, _LEAST_S + _TIMES * (loop.time() - began_at))
                    _, asked = await asyncio.wait(asked, timeout=more_s)
                for late in asked:
                    late.cancel()
