# SPDX-License-Identifier: Apache-2.0
"""The learner's side: from what is held to the newest committed state, without anybody waiting for it.

Two ways lead there: replaying the commits that are missing, or fetching the chunks that differ from a snapshot, from
several donors at once. Rules:

* Fewer bytes win. Donors say how large their commits are and which digests their chunks have; what the held state, a
  broken transfer or an overruled result already has right is not fetched. A single missing commit is replayed unasked.
* Every chunk is verified on arrival, in place. A donor that sends wrong bytes, breaks off or stalls is dropped, and
  only the chunks still missing are fetched from the others.
* Commits made while the transfer runs (`heard_of`) are collected beside it, before the donors' logs forget them, and
  replayed after it. A learner that started again for every commit, or chased the newest, would never arrive.
* A replayed commit counts only if the digest is the committed one.
* A catch-up ends with a state that the coordinator has named: the target, or a newer one. A donor may have heard of a
  commit before us, so its word is awaited for a moment; who offers what is not named by then is dropped. Found before:
  one liar offered step 2^40, and whoever took that ignored every later target.
* Whoever was overruled learns where it was wrong: `inquiry.py`.
* Memory is bounded: chunks go straight to their destination, collected commits by the size of the state.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence

from isthmus.collective.core.types import Member, OuterStep
from isthmus.collective.errors import CollectiveError
from isthmus.elastic.core.messages import Held
from isthmus.elastic.errors import DonorFault, NoDonor, StateDiverged, StateMismatch, StateUnknown
from isthmus.elastic.learner.commit_source import CommitSource
from isthmus.elastic.learner.donor_link import DonorLink
from isthmus.elastic.learner.donors import Dial, Donors, Offer
from isthmus.elastic.learner.inquiry import Inquiry
from isthmus.elastic.learner.transfer import Transfer
from isthmus.elastic.observation import Observe, ignore
from isthmus.elastic.state.digest import Hasher, StateManifest
from isthmus.elastic.state.parity import contents_of, missing_nbytes, salvage
from isthmus.elastic.state.replica import Replica
from isthmus.elastic.state.wire import Pace

_log = logging.getLogger(__name__)

_MAX_APPROACHES = 4
"""Snapshots and replays for one catch-up. More than two are needed only if the donors' commit logs are too short."""

_COMMIT_SLACK_NBYTES = 1 << 20
"""A commit may be this much larger than the state: headers of codecs on tiny fragments."""


class StateSync:
    """Brings a replica to the newest target. One `run` at a time.

    Args:
        replica: what is filled.
        dial: opens a STATE connection to a donor.
        hasher: hashes what is here already.
        pace: floors and windows of the transfer.
        advanced: called with the number of bytes that were verified, for progress and metrics.
        observe: told where this peer was wrong, if it was overruled.
    """

    def __init__(
        self,
        replica: Replica,
        dial: Dial,
        *,
        hasher: Hasher,
        pace: Pace | None = None,
        advanced: Callable[[int], None] = lambda _nbytes: None,
        observe: Observe = ignore,
    ) -> None:
        self._replica = replica
        self._hasher = hasher
        self._pace = pace or Pace()
        self._advanced = advanced
        self._donors = Donors(dial, self._pace)
        self._commits = CommitSource(self._donors)
        self._inquiry = Inquiry(replica, hasher, observe)
        self._target: Held | None = None
        self._transfer: Transfer | None = None
        self._may_replay = True
        self._has_diverged = False
        """The last replay has."""
        self._doubts_older = False
        """A snapshot of this catch-up has led to no committed state."""

    def aim(self, target: Held, donors: Sequence[Member]) -> None:
        """Set where the next `run` has to get to, and from whom."""
        self._target = target
        self._donors.name(donors)
        self.heard_of(target)

    def heard_of(self, committed: Held) -> None:
        """The coordinator says that this state is committed. May be called at any time, also during `run`."""
        self._commits.heard_of(committed)

    def went_back(self) -> None:
        """The run did: nothing that was heard of counts any more, but where a catch-up under way has to get to."""
        self._commits.forget()
        if self._target is not None:
            self._commits.heard_of(self._target)

    def overruled(self, committed: Held, voted: bytes) -> None:
        """The others agreed on `committed` in the very round in which this peer had voted for another digest."""
        self._inquiry.begin(committed, voted)

    async def run(self) -> Held:
        """Get to the target and return what is held then: the target, or a newer committed state.

        Raises:
            NoDonor: nobody could serve it this time. What has arrived is kept for the next call.
            StateMismatch: the run's state is not of this peer's model.
        """
        self._donors.forgive()
        try:
            self._may_replay = await self._inquiry.memory_is_sound()
            held = self._replica.held()
            if held is not None and held.outer_step > self._aim_now.outer_step:
                held = None  # a state of our own that is ahead of the run belongs to a history that was given up
            if held is not None and held.outer_step + 1 == self._aim_now.outer_step and not self._inquiry.is_open:
                held = await self._replay(held)
            num_approaches, self._doubts_older = 0, False
            # More than the target is fine from here on: donors may be ahead of it, and collected commits may lead
            # beyond it. But the coordinator must have named it.
            while held is None or held.outer_step < self._aim_now.outer_step or not self._commits.is_named(held):
                if num_approaches == _MAX_APPROACHES:
                    causes = (*self._donors.causes, "the donors' commit logs are too short")
                    raise NoDonor(self._aim_now.outer_step, causes)
                num_approaches += 1
                held = await self._approach(held)
            self._transfer = None
            self._inquiry.end()
            self._commits.forget_before(held)
            return held
        finally:
            self._commits.close()

    @property
    def _aim_now(self) -> Held:
        if self._target is None:
            raise ValueError("aim before run")
        return self._target

    # -------------------------------------------------------------------------------- which way

    async def _approach(self, held: Held | None) -> Held:
        """Replay, or fetch a snapshot and replay what came after it. Returns what is held then."""
        misfits: list[StateMismatch] = []
        while True:
            offers: list[Offer] = []
            try:
                await self._donors.gather(offers, None if held is None else OuterStep(held.outer_step + 1))
                if not offers:
                    if misfits and len(misfits) == len(self._donors.causes):
                        raise misfits[0]  # all say the same
                    raise NoDonor(self._aim_now.outer_step, self._donors.causes)
                offer = await self._choose(offers)
                if offer is None:
                    continue
                self._inquiry.compare(offer.manifest)
                source = self._cheapest_replay(held, offers, offer.manifest)
                if source is not None:
                    offers.remove(source)
                    self._commits.use(source.link)
                    manifest = None
                else:
                    manifest = await self._pull_if_it_fits(offers, offer, misfits)
            finally:
                for unused in offers:
                    unused.link.close()
            if source is not None:
                assert held is not None, "a replay begins somewhere"
                return await self._replay(held)
            if manifest is not None:
                held = await self._replay(await self._replica.finish_restore(manifest))
                self._doubts_older |= self._has_diverged
                return held

    async def _choose(self, offers: list[Offer]) -> Offer | None:
        """The best of those that lead to a committed state, once the coordinator has named one. The others are closed;
        if there is none, their donors are dropped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pace.word_s):
                while not any(map(self._leads_there, offers)) and any(map(self._may_be_named, offers)):
                    await self._commits.next_word()
        leading = list(filter(self._leads_there, offers))
        for offer in offers:
            if offer in leading:
                continue
            if not leading or not self._may_be_named(offer):
                manifest = offer.manifest
                self._donors.drop(offer.link.member, StateUnknown(manifest.outer_step, manifest.digest))
            offer.link.close()
        offers[:] = leading
        return max(leading, key=self._preference, default=None)

    def _leads_there(self, offer: Offer) -> bool:
        """Whether its state is committed, or older than the target: what is replayed onto that must be committed."""
        state = Held(offer.manifest.outer_step, offer.manifest.digest)
        is_older = state.outer_step < self._aim_now.outer_step and not self._doubts_older
        return self._commits.is_named(state) or (is_older and self._may_be_named(offer))

    def _may_be_named(self, offer: Offer) -> bool:
        """Whether the coordinator has named no other state of this step."""
        return not self._commits.is_wrong(Held(offer.manifest.outer_step, offer.manifest.digest))

    def _cheapest_replay(self, held: Held | None, offers: Sequence[Offer], manifest: StateManifest) -> Offer | None:
        """Whose commits to replay, or None if fetching what differs moves fewer bytes (or there is no other way)."""
        if held is None or not self._may_replay or self._commits.is_wrong(held):
            return None
        num_missing = self._aim_now.outer_step - held.outer_step
        if num_missing <= 0:
            return None  # a state that nobody has named: it leads nowhere
        complete = [offer for offer in offers if len(offer.commits_nbytes) >= num_missing]
        if not complete:
            return None
        source = min(complete, key=lambda offer: sum(offer.commits_nbytes[:num_missing]))
        replay_nbytes = sum(source.commits_nbytes[:num_missing])
        fetch_nbytes = self._missing_nbytes(manifest)
        _log.info(
            "catch_up_costs outer_step=%d commits=%d replay_bytes=%d fetch_bytes=%d",
            self._aim_now.outer_step,
            num_missing,
            replay_nbytes,
            fetch_nbytes,
        )
        is_back = manifest.outer_step <= held.outer_step
        return source if replay_nbytes < fetch_nbytes or is_back else None

    def _missing_nbytes(self, manifest: StateManifest) -> int:
        """Bytes of the snapshot that are nowhere in this peer's memory."""
        pinned = self._replica.pin()
        try:
            return missing_nbytes(manifest, contents_of(pinned.manifest, manifest), self._destined(manifest))
        finally:
            pinned.release()

    def _destined(self, manifest: StateManifest) -> Sequence[bytes | None]:
        """What the memory contains that the next restore gets, as far as known."""
        leftover = self._replica.leftover()
        if leftover is None and self._transfer is not None:
            return self._transfer.contents(manifest)
        return contents_of(leftover, manifest)

    def _preference(self, offer: Offer) -> tuple[bool, bool, int]:
        """Largest is best: what a broken transfer has begun, then the target itself, then the newest."""
        manifest = offer.manifest
        begun = self._transfer is not None and self._transfer.manifest.digest == manifest.digest
        return begun, manifest.digest == self._aim_now.digest, manifest.outer_step

    # -------------------------------------------------------------------------------- replaying

    async def _replay(self, held: Held) -> Held:
        """Apply commits up to the target, and what is collected beyond it. Returns what is held then."""
        self._transfer = None  # a replay may take its memory
        self._has_diverged = False
        while True:
            step = OuterStep(held.outer_step + 1)
            entry = self._commits.take_collected(step)
            if entry is None and step <= self._aim_now.outer_step:
                entry = await self._commits.fetch(step, max_nbytes=self._state_nbytes() + _COMMIT_SLACK_NBYTES)
                self._may_replay = entry is not None
            if entry is None:
                return held
            try:
                replayed = await self._replica.replay(entry)
            except (StateDiverged, CollectiveError) as error:
                _log.warning("replay_diverged outer_step=%d cause=%s", step, error)
                self._has_diverged = True
                self._may_replay = False  # what is held may be wrong itself: only a snapshot helps
                return held
            assert replayed == Held(entry.outer_step, entry.digest), "a replica says what it holds"
            self._advanced(entry.nbytes)
            self._inquiry.arrived()
            held = replayed

    def _state_nbytes(self) -> int:
        """A result in wire form is never larger than the fp32 state it is about."""
        pinned = self._replica.pin()
        try:
            return pinned.manifest.nbytes
        finally:
            pinned.release()

    # -------------------------------------------------------------------------------- fetching

    async def _pull_if_it_fits(
        self, offers: list[Offer], offer: Offer, misfits: list[StateMismatch]
    ) -> StateManifest | None:
        """As `_pull`; a state of another model counts only if it is the run's.

        That is one that the coordinator has named. Of any other there is only the donor's word, so that is dropped.
        """
        try:
            return await self._pull(offers, offer.manifest)
        except StateMismatch as error:
            if self._commits.is_named(Held(offer.manifest.outer_step, offer.manifest.digest)):
                raise
            misfits.append(error)
            self._donors.drop(offer.link.member, error)
            return None

    async def _pull(self, offers: list[Offer], manifest: StateManifest) -> StateManifest | None:
        """Fetch what is missing of this snapshot from all who offer it. None if they failed before it was whole."""
        transfer = await self._begin(manifest)
        links = []
        for offer in offers:
            if offer.manifest.digest == manifest.digest:
                links.append(offer.link)
            else:
                offer.link.close()
        room_nbytes = manifest.nbytes + _COMMIT_SLACK_NBYTES
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(self._commits.collect(manifest.outer_step, room_nbytes=room_nbytes))
            await asyncio.wait([tasks.create_task(self._pull_from(link, transfer)) for link in links])
            collecting.cancel()
        if not transfer.is_complete:
            return None
        self._transfer = None
        self._inquiry.repaired(manifest, transfer)
        self._may_replay = True
        return manifest

    async def _begin(self, manifest: StateManifest) -> Transfer:
        """Go on with the transfer of this manifest, or begin it with the chunks that are already right."""
        leftover = self._replica.leftover()
        destinations = self._replica.begin_restore(manifest)
        if [buffer.nbytes for buffer in destinations] != [part.nbytes for part in manifest.tensors]:
            raise StateMismatch("a destination has another size than the manifest names")
        begun = self._transfer
        if begun is not None and begun.destinations is not destinations:
            begun = self._transfer = None  # its memory was needed for something else
        if begun is None or begun.manifest.digest != manifest.digest:
            contents = contents_of(leftover, manifest) if begun is None else begun.contents(manifest)
            self._transfer = None
            self._inquiry.keep_evidence(manifest, destinations, leftover)
            present = await self._salvage(manifest, destinations, contents)
            begun = self._transfer = Transfer(manifest, destinations, present)
        _log.info(
            "snapshot_begun outer_step=%d missing_chunks=%d num_chunks=%d",
            manifest.outer_step,
            len(begun.missing),
            begun.num_chunks,
        )
        return begun

    async def _salvage(
        self, manifest: StateManifest, destinations: Sequence[memoryview], contents: Sequence[bytes | None]
    ) -> frozenset[int]:
        live = None if self._replica.held() is None else self._replica.pin()
        try:
            found = await salvage(manifest, destinations, contents=contents, live=live, hasher=self._hasher)
        finally:
            if live is not None:
                live.release()
        if found.damaged:
            _log.error(
                "memory_damaged chunks=%d first_chunk=%d; the held state is not what was committed, and nobody wrote "
                "to it: test this machine's memory",
                len(found.damaged),
                found.damaged[0],
            )
        return found.present

    async def _pull_from(self, link: DonorLink, transfer: Transfer) -> None:
        """Fetch missing chunks from one donor until none is missing or the donor fails."""
        asked: deque[int] = deque()
        try:
            while True:
                while len(asked) < self._pace.window and transfer.missing:
                    asked.append(transfer.missing.popleft())
                    await link.ask_chunk(asked[-1])
                if asked:
                    destination, digest = transfer.place(asked[0])
                    await link.take_chunk(asked[0], destination, digest)
                    transfer.arrived(asked.popleft())
                    self._advanced(destination.nbytes)
                elif not await transfer.more():
                    return
        except (CollectiveError, DonorFault) as error:
            self._donors.drop(link.member, error)
        finally:
            # Closed before its chunks are given to another donor: two writers must never share a destination.
            link.close()
            transfer.give_back(asked)
