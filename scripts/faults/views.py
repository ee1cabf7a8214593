# SPDX-License-Identifier: Apache-2.0
"""The view server: says who is a member, has every step repeated until it counts, and keeps the tally.

A step is one operation, or several at once, of all members. Whether it counts is decided here, as the layer above the
collective one would: an operation counts when every member that stays has finished it in the same view. What one
member finished and another aborted is repeated, and whoever has finished it makes its input anew.

A peer leaves when its process is gone, when most of the others that live suspect it, when it is mute, or when it does
not report what all others have finished. The next view is made as soon as a member says that an operation was aborted
and somebody is to leave, or somebody is mute; with `trusts_ends`, the end of a member's process is reason enough, as
for a coordinator that holds a connection to everybody.

Rules: decides by what peers report, never by what the benchmark has done to them. Every wait has a deadline. Wrong:
a value that is not the mean of the members named, or bits that two members do not share, or an error that no fault
explains, or the end of a process that nobody killed. Hung: reported later than a second after its deadline. Silent:
never reported.
"""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from isthmus.collective import Epoch, Incarnation, Member, OuterStep, RoundKey, View
from isthmus.collective.api.standalone import peer_id_of
from scripts.faults.attempts import Attempt, Fault, Outcome, Site, Tally
from scripts.faults.keeper import WORD_S, FaultBenchError, Keeper
from scripts.faults.words import Check, FromPeer, Mode, Post, Prepare, Ready, Report, Struck, Verdict

_GRACE_S = 1.0
_LAG_S = 2.0
"""When all others have finished, the last one's report is waited for so long: a layer above waits for votes alike."""
_MAX_ATTEMPTS = 50


class ViewServer(Keeper):
    """See the module. Made by `open_server`.

    Attributes:
        tally: what was counted so far.
        trusts_ends: see the module.
    """

    def __init__(self, folder: Path, *, nbytes: int, deadline_s: float, num_streams: int) -> None:
        super().__init__(folder, nbytes=nbytes, deadline_s=deadline_s, num_streams=num_streams)
        self.tally = Tally()
        self.trusts_ends = False
        self._epoch = 0
        self._step = 0
        self._attempt: Attempt | None = None
        self._fault: Fault | None = None
        self._ready: set[Site] = set()
        self._unchecked: set[tuple[Site, RoundKey]] = set()
        self._bits: dict[RoundKey, set[str]] = {}

    # -------------------------------------------------------------------------------- steps

    async def step(self, mode: Mode, fault: Fault | None = None) -> Outcome:
        """Run one step among the living, again and again until it counts; have every result checked.

        Args:
            mode: how it is posted.
            fault: what happens in the first attempt.

        Raises:
            FaultBenchError: nobody is left, or it never counts.
        """
        self._step += 1
        await self._prepare(mode)
        todo, attempts, finished_at = frozenset(mode.fragments), list[Attempt](), 0.0
        while todo:
            if len(attempts) == _MAX_ATTEMPTS or not self.living():
                raise FaultBenchError(f"step {self._step} does not count after {len(attempts)} attempts")
            attempt = self._post(mode, todo, None if attempts else fault, is_repeat=bool(attempts))
            attempts.append(attempt)
            await self._until_decided(attempt)
            stay = [site for site in attempt.sites if site.stays]
            ended = {f for f in todo if stay and all(attempt.has_finished(site, f) for site in stay)}
            finished_at = max([finished_at, *(attempt.reports[site, f].at for site in stay for f in ended)])
            todo -= ended
        sites = [site for site in attempts[-1].sites if site.stays]
        await self._check()
        return Outcome(sites=sites, finished_at=finished_at, attempts=attempts)

    async def settle(self, site: Site) -> None:
        """Wait until a peer has reported all that it owes; what does not come is counted."""
        if not await self.until(lambda: not site.owed or not site.is_alive, self.deadline_s + 2 * _GRACE_S):
            for key in site.owed:
                self.tally.note("silent", f"{site} never reported {key}")
            site.owed.clear()

    async def readmit(self, site: Site) -> None:
        """Make it a member again if it was put out.

        What it has finished is judged before: some of it may have come after it was last asked, and its next input
        takes the place of that.
        """
        if site.is_member or not site.is_alive:
            return
        await self.settle(site)
        site.tell(Check())
        if not await self.until(lambda: not site.is_alive or all(s is not site for s, _ in self._unchecked), WORD_S):
            raise FaultBenchError("a peer that comes back does not check its results")
        site.is_member = True

    async def _prepare(self, mode: Mode) -> None:
        sites, step = self.living(), self._step
        self._ready.clear()
        for site in sites:
            site.tell(Prepare(step=step, mode=mode))
        if not await self.until(lambda: all(site in self._ready or not site.is_alive for site in sites), WORD_S):
            raise FaultBenchError(f"step {step}: a peer does not make its input")

    def _post(self, mode: Mode, todo: frozenset[int], fault: Fault | None, *, is_repeat: bool) -> Attempt:
        sites = self.living()
        if is_repeat or self._attempt is None or sites != self._attempt.sites:
            self._epoch += 1  # a key is used once, so what is repeated needs another view
        epoch = Epoch(self._epoch)
        members = tuple(Member(peer_id_of(site.number), Incarnation(site.incarnation), site.address) for site in sites)
        view = View(epoch, OuterStep(0), b"", members)
        attempt = self._attempt = Attempt(epoch, sites, todo, time.monotonic())
        self._fault = fault
        for site in sites:
            by_itself = fault.by_itself if fault is not None and fault.site is site else None
            site.may_die = site.may_die or by_itself is not None
            for fragment in todo:
                site.owed[RoundKey(epoch, OuterStep(self._step), fragment)] = attempt.posted_at
            fragments = tuple(sorted(todo))
            site.tell(Post(view=view, step=self._step, mode=mode, fragments=fragments, fault=by_itself))
        if fault is not None and fault.by_itself is None:
            asyncio.get_running_loop().call_later(fault.delay_s, fault.strike)
        return attempt

    async def _until_decided(self, attempt: Attempt) -> None:
        """Wait for the decision; name those that leave."""
        is_decided = partial(attempt.is_decided, trusts_ends=self.trusts_ends)
        limit_s = self.deadline_s + 2 * _GRACE_S
        await self.until(lambda: is_decided() or bool(attempt.laggards()), limit_s)
        if not await self.until(is_decided, _LAG_S):
            for site in attempt.laggards() or [site for site in attempt.sites if site.owed]:
                site.is_member = False
        for site in attempt.sites:
            if site.is_mute or site in attempt.suspected():
                site.is_member = False

    async def _check(self) -> None:
        """Wait for the report of everything that the members were posted; have every result judged.

        The others do not wait for one that was put out: it reports what it owes before it is a member again.
        """
        for site in [site for site in self.sites.values() if site.is_alive and not site.is_frozen]:
            if site.is_member:
                await self.settle(site)
            site.tell(Check())
        if not await self.until(lambda: not any(s.stays and not s.is_frozen for s, _ in self._unchecked), WORD_S):
            raise FaultBenchError("a peer does not check its results")
        self._unchecked = {(site, key) for site, key in self._unchecked if site.is_alive and not site.is_member}
        self._bits.clear()

    # -------------------------------------------------------------------------------- what peers say

    def on_word(self, site: Site, word: FromPeer) -> None:
        """A peer said something."""
        match word:
            case Report():
                self._on_report(site, word)
            case Verdict():
                self._on_verdict(site, word)
            case Struck(at=at):
                if self._fault is not None and self._fault.site is site:
                    self._fault.at = at
                    site.is_frozen = True
            case Ready(step=step):
                if step == self._step:
                    self._ready.add(site)
            case _:
                raise FaultBenchError(f"{site} says {word}")

    def on_end(self, site: Site) -> None:
        """A peer is gone."""
        site.owed.clear()
        if not site.may_die:
            self.tally.note("wrong", f"{site} ended though nobody killed it")

    def _on_report(self, site: Site, report: Report) -> None:
        since = site.owed.pop(report.key, None)
        if since is None:
            self.tally.note("wrong", f"{site} reports {report.key}, which is not expected of it")
            return
        self.tally.operations += 1
        took_s = time.monotonic() - since
        if took_s > self.deadline_s + _GRACE_S:
            self.tally.note("hung", f"{site} took {took_s:.1f} s for {report.key}: {report.cause}")
        if report.outcome == "failed":
            self.tally.note("wrong", f"{site} at {report.key}: {report.cause}")
        if report.outcome == "finished":
            self._unchecked.add((site, report.key))
        attempt = self._attempt
        if attempt is not None and (report.key.epoch, report.key.outer_step) == (attempt.epoch, self._step):
            attempt.reports[site, report.key.fragment] = report

    def _on_verdict(self, site: Site, verdict: Verdict) -> None:
        self._unchecked.discard((site, verdict.key))
        digests = self._bits.setdefault(verdict.key, set())
        digests.add(verdict.bits)
        if not verdict.is_right:
            self.tally.note("wrong", f"{site} has another value at {verdict.key} than the mean of its members")
        elif len(digests) > 1:
            self.tally.note("wrong", f"{site} has other bits at {verdict.key}")


@contextlib.asynccontextmanager
async def open_server(
    *, nbytes: int, deadline_s: float = 20.0, num_streams: int = 1, namespaces: bool = False
) -> AsyncIterator[ViewServer]:
    """A server with a nursery and no peers yet. All its processes end with the context, or with this process.

    Args:
        nbytes: of each step's tensor.
        deadline_s: of each operation.
        num_streams: connections of each pair.
        namespaces: a network namespace for each peer, so that it can be cut off; needs root and iproute2.
    """
    folder = Path(tempfile.mkdtemp(prefix="isthmus-faults-"))
    server = ViewServer(folder, nbytes=nbytes, deadline_s=deadline_s, num_streams=num_streams)
    try:
        await server.open(namespaces=namespaces)
        yield server
    finally:
        await server.close()
        shutil.rmtree(folder)
