"""The learner's side: from what is held to the newest committed state, without anybody waiting for it.

A learner that is a few steps behind replays the missing commits. Otherwise it fetches a snapshot from several donors
at once and then replays what was committed meanwhile. Rules:

* Every chunk is verified on arrival, in place. A donor that sends wrong bytes, breaks off or stalls is dropped, and
  only the chunks still missing are fetched from the others. Chunks that are already right, from an earlier transfer
  or because they never changed, are not fetched.
* Commits made while the transfer runs (`heard_of`) are collected beside it, before the donors' logs forget them, and
  replayed after it. A learner that started again for every commit, or chased the newest, would never arrive.
* A replayed commit counts only if the digest is the committed one.
* Memory is bounded: chunks go straight to their destination, collected commits by the size of the state.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from collective.core.types import Member, OuterStep, PeerRef
from collective.errors import CollectiveError
from elastic.core.messages import Held
from elastic.digest import Hasher, StateManifest
from elastic.donor_link import Dial, DonorLink
from elastic.errors import DonorFault, DonorRefused, NoDonor, StateDiverged, StateMismatch
from elastic.replica import CommitEntry, Replica
from elastic.state_wire import Pace
from elastic.transfer import Transfer

_log = logging.getLogger(__name__)

_MAX_SNAPSHOTS = 3
"""Snapshots fetched for one catch-up. More than one is needed only if the donors' commit logs are too short."""

_COMMIT_SLACK_NBYTES = 1 << 20
"""A commit may be this much larger than the state: headers of codecs on tiny fragments."""


class StateSync:
    """Brings a replica to the newest target. One `run` at a time.

    Args:
        replica: what is filled.
        dial: opens a STATE connection to a donor.
        hasher: hashes what the destinations already contain.
        pace: floors and windows of the transfer.
        advanced: called with the number of bytes that were verified, for progress and metrics.
    """

    def __init__(
        self,
        replica: Replica,
        dial: Dial,
        *,
        hasher: Hasher,
        pace: Pace | None = None,
        advanced: Callable[[int], None] = lambda _nbytes: None,
    ) -> None:
        self._replica = replica
        self._dial = dial
        self._hasher = hasher
        self._pace = pace or Pace()
        self._advanced = advanced
        self._target: Held | None = None
        self._donors: tuple[Member, ...] = ()
        self._dropped: dict[PeerRef, str] = {}
        self._transfer: Transfer | None = None
        self._known: dict[OuterStep, bytes] = {}
        self._collected: dict[OuterStep, CommitEntry] = {}
        self._news = asyncio.Event()
        self._commit_link: DonorLink | None = None

    def aim(self, target: Held, donors: Sequence[Member]) -> None:
        """Set where the next `run` has to get to, and from whom."""
        self._target = target
        self._donors = tuple(donors)
        self.heard_of(target)

    def heard_of(self, committed: Held) -> None:
        """The coordinator says that this state is committed. May be called at any time, also during `run`."""
        self._known[committed.outer_step] = committed.digest
        self._news.set()

    async def run(self) -> Held:
        """Get to the target and return what is held then: the target, or a newer committed state.

        Raises:
            NoDonor: nobody could serve it this time. What has arrived is kept for the next call.
            StateMismatch: the run's state is not of this peer's model.
        """
        self._dropped.clear()
        try:
            held = self._replica.held()
            if held is not None and held.outer_step > self._aim_now.outer_step:
                held = None  # a state of our own that is ahead of the run belongs to a history that was given up
            if held is not None:
                held = await self._replay(held)
            num_snapshots = 0
            # More than the target is fine from here on: donors may be ahead of the coordinator's word to us, and
            # collected commits may lead beyond it.
            while held is None or self._is_wrong(held) or held.outer_step < self._aim_now.outer_step:
                if num_snapshots == _MAX_SNAPSHOTS:
                    causes = (*self._dropped.values(), "the donors' commit logs are too short")
                    raise NoDonor(self._aim_now.outer_step, causes)
                num_snapshots += 1
                held = await self._replay(await self._fetch_snapshot())
            self._transfer = None
            self._forget_before(held)
            return held
        finally:
            self._close_commit_link()

    def _is_wrong(self, held: Held) -> bool:
        return self._known.get(held.outer_step, held.digest) != held.digest

    def _forget_before(self, held: Held) -> None:
        for known in (self._known, self._collected):
            for step in [step for step in known if step <= held.outer_step]:
                del known[step]

    @property
    def _aim_now(self) -> Held:
        if self._target is None:
            raise ValueError("aim before run")
        return self._target

    # -------------------------------------------------------------------------------- donors

    def _candidates(self) -> list[Member]:
        return [member for member in self._donors if member.ref not in self._dropped]

    def _drop(self, member: Member, error: Exception) -> None:
        _log.warning("donor_dropped peer_id=%s cause=%s", member.peer_id, error)
        self._dropped[member.ref] = f"{member.address}: {error}"

    async def _open(self, member: Member) -> DonorLink:
        return DonorLink(member, await self._dial(member), self._pace)

    # -------------------------------------------------------------------------------- commits

    async def _replay(self, held: Held) -> Held:
        """Apply commits up to the target, and what is collected beyond it. Returns what is held then."""
        while True:
            step = OuterStep(held.outer_step + 1)
            entry = self._collected.pop(step, None)
            if entry is None and step <= self._aim_now.outer_step:
                entry = await self._fetch_commit(step)
            if entry is None:
                return held
            try:
                replayed = await self._replica.replay(entry)
            except (StateDiverged, CollectiveError) as error:
                _log.warning("replay_diverged outer_step=%d cause=%s", step, error)
                return held  # it may be wrong itself: only a snapshot helps
            assert replayed == Held(entry.outer_step, entry.digest), "a replica says what it holds"
            self._advanced(entry.nbytes)
            held = replayed

    async def _fetch_commit(self, step: OuterStep) -> CommitEntry | None:
        """The commit that made `step`, from whoever still has it. A donor that lacks it stays a donor."""
        for member in self._candidates():
            try:
                link = await self._link_for_commits(member)
                entry = await link.commit(step, max_nbytes=self._max_commit_nbytes())
                if self._is_wrong(Held(entry.outer_step, entry.digest)):
                    raise StateDiverged(step, self._known[step], entry.digest)
                return entry
            except DonorRefused as error:
                _log.info("commit_not_kept peer_id=%s cause=%s", member.peer_id, error)
            except (CollectiveError, DonorFault) as error:
                self._drop(member, error)
                self._close_commit_link()
            except asyncio.CancelledError:
                self._close_commit_link()  # it is in the middle of an answer
                raise
        return None

    async def _link_for_commits(self, member: Member) -> DonorLink:
        if self._commit_link is None or self._commit_link.member != member:
            self._close_commit_link()
            self._commit_link = await self._open(member)
        return self._commit_link

    def _close_commit_link(self) -> None:
        link, self._commit_link = self._commit_link, None
        if link is not None:
            link.close()

    def _max_commit_nbytes(self) -> int:
        """A result in wire form is never larger than the fp32 state it is about."""
        if self._transfer is not None:
            return self._transfer.manifest.nbytes + _COMMIT_SLACK_NBYTES
        pinned = self._replica.pin()
        try:
            return pinned.manifest.nbytes + _COMMIT_SLACK_NBYTES
        finally:
            pinned.release()

    async def _collect_commits(self, manifest: StateManifest) -> None:
        """While a snapshot is fetched, keep the commits made after it, before the donors' logs forget them."""
        room = manifest.nbytes + _COMMIT_SLACK_NBYTES
        while True:
            self._news.clear()
            for step in range(manifest.outer_step + 1, max(self._known) + 1):
                entry = self._collected.get(OuterStep(step)) or await self._fetch_commit(OuterStep(step))
                if entry is None or sum(kept.nbytes for kept in self._collected.values()) + entry.nbytes > room:
                    return
                self._collected[entry.outer_step] = entry
            await self._news.wait()

    # -------------------------------------------------------------------------------- snapshot

    async def _fetch_snapshot(self) -> Held:
        """Fetch one whole snapshot and install it. Every turn of the loop drops a donor or ends."""
        while True:
            offers: list[tuple[DonorLink, StateManifest]] = []
            try:
                await self._gather_offers(offers)
                if not offers:
                    raise NoDonor(self._aim_now.outer_step, tuple(self._dropped.values()))
                manifest = max((offered for _, offered in offers), key=self._preference)
                transfer = await self._begin(manifest)
                links = [link for link, offered in offers if offered.digest == manifest.digest]
                for link in (link for link, offered in offers if offered.digest != manifest.digest):
                    link.close()
                await self._pull_all(links, transfer)
            finally:
                for link, _ in offers:
                    link.close()
            if transfer.is_complete:
                self._transfer = None
                return await self._replica.finish_restore(manifest)

    def _preference(self, manifest: StateManifest) -> tuple[bool, bool, int]:
        """Largest is best: what a broken transfer has begun, then the target itself, then the newest."""
        begun = self._transfer is not None and self._transfer.manifest.digest == manifest.digest
        return begun, manifest.digest == self._aim_now.digest, manifest.outer_step

    async def _gather_offers(self, offers: list[tuple[DonorLink, StateManifest]]) -> None:
        """Connect to the first few donors and ask each to pin its state. The caller closes what is in `offers`."""

        async def ask(member: Member) -> None:
            useless = None
            try:
                link = useless = await self._open(member)
                offers.append((link, await link.manifest()))
                useless = None
            except (CollectiveError, DonorFault) as error:
                self._drop(member, error)
            finally:
                if useless is not None:
                    useless.close()

        while not offers and (candidates := self._candidates()):
            async with asyncio.TaskGroup() as tasks:
                for member in candidates[: self._pace.max_donors]:
                    tasks.create_task(ask(member))

    async def _begin(self, manifest: StateManifest) -> Transfer:
        """Go on with the transfer of this manifest, or begin it with the chunks that are already right."""
        if self._transfer is None or self._transfer.manifest.digest != manifest.digest:
            self._transfer = None
            destinations = self._replica.begin_restore(manifest)
            if [buffer.nbytes for buffer in destinations] != [part.nbytes for part in manifest.tensors]:
                raise StateMismatch("a destination has another size than the manifest names")
            present = await self._hasher.hash_async(destinations, chunk_nbytes=manifest.chunk_nbytes)
            self._transfer = Transfer(manifest, destinations, present)
        _log.info(
            "snapshot_begun outer_step=%d missing_chunks=%d num_chunks=%d",
            manifest.outer_step,
            len(self._transfer.missing),
            self._transfer.num_chunks,
        )
        return self._transfer

    async def _pull_all(self, links: Sequence[DonorLink], transfer: Transfer) -> None:
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(self._collect_commits(transfer.manifest))
            pulls = [tasks.create_task(self._pull(link, transfer)) for link in links]
            await asyncio.wait(pulls)
            collecting.cancel()

    async def _pull(self, link: DonorLink, transfer: Transfer) -> None:
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
                    asked.popleft()
                    transfer.arrived()
                    self._advanced(destination.nbytes)
                elif not await transfer.more():
                    return
        except (CollectiveError, DonorFault) as error:
            self._drop(link.member, error)
        finally:
            # Closed before its chunks are given to another donor: two writers must never share a destination.
            link.close()
            transfer.give_back(asked)
