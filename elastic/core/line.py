# SPDX-License-Identifier: Apache-2.0
"""A member's line to the coordinator: whether it is there, and what is said on it when.

Rules: what waits for an answer is said again on one timer, and never because something arrived. But who becomes a
member asks for its samples at once. A heartbeat is said always, but by strangers.
"""

from isthmus.collective.core.types import Instant
from isthmus.elastic.core.config import MemberConfig
from isthmus.elastic.core.coordinator_fence import CoordinatorFence
from isthmus.elastic.core.events import SendToCoordinator
from isthmus.elastic.core.farewell import Farewell
from isthmus.elastic.core.messages import Join, Leave, PeerMessage, Synced
from isthmus.elastic.core.place import Phase, Place


class Line:
    """See the module. What it says is appended to the effects of the peer's place.

    Args:
        address: where others reach this peer.
        manifest_digest: of the run, as this peer knows it.
    """

    def __init__(
        self, config: MemberConfig, address: str, manifest_digest: bytes, place: Place, fence: CoordinatorFence
    ) -> None:
        self._config, self._address, self._manifest_digest = config, address, manifest_digest
        self._place, self._fence = place, fence
        self.farewell = Farewell(config.farewell_timeout_s, lambda: place.view is not None and self._is_up)
        self.is_asked = False
        """By a coordinator without a journal, what this peer holds."""
        self._now: Instant = 0.0
        self._is_up = False
        self._gone_since: Instant | None = None
        self._heartbeat_at: Instant = 0.0
        self._resend_at: Instant = 0.0

    # -------------------------------------------------------------------------------- connection and time

    def begin(self, now: Instant) -> None:
        """The next event."""
        self._now = now
        if not self._is_up and self._gone_since is None:
            self._gone_since = now

    def up(self) -> None:
        """There is a connection (again)."""
        self._is_up, self._gone_since = True, None
        self._heartbeat_at = self._now + self._config.heartbeat_interval_s
        if self.farewell.word is None:
            if self._place.phase is not Phase.JOINING:
                self.say(self._join())  # "I am still here"
        elif self._place.view is not None:
            self.farewell.await_boundary()
        self.say_outstanding()

    def down(self) -> None:
        """The connection is gone."""
        self._is_up, self._gone_since = False, self._now
        self.farewell.limit(self._now)

    @property
    def is_given_up(self) -> bool:
        """Whether it was gone for too long."""
        return self._gone_since is not None and self._now >= self._gone_since + self._config.coordinator_timeout_s

    def tick(self) -> None:
        """Say what is due."""
        if not self._is_up:
            return
        if self._now >= self._heartbeat_at:
            self._heartbeat_at = self._now + self._config.heartbeat_interval_s
            if self._place.phase is not Phase.JOINING:  # a stranger's heartbeat would only be answered by Evicted
                self.beat()
        if self._now >= self._resend_at:
            self.say_outstanding()

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        if not self._is_up:
            return [] if self._gone_since is None else [self._gone_since + self._config.coordinator_timeout_s]
        return [self._heartbeat_at, self._resend_at] if self._outstanding() else [self._heartbeat_at]

    # -------------------------------------------------------------------------------- words

    def say(self, message: PeerMessage) -> None:
        """Once, if there is a connection."""
        if self._is_up:
            self._place.effects.append(SendToCoordinator(message=message))

    def beat(self) -> None:
        """How far this peer is."""
        self.say(self._place.heartbeat(self._fence.epoch))

    def say_outstanding(self) -> None:
        """All that waits for an answer; again later."""
        self._resend_at = self._now + self._config.resend_interval_s
        for message in self._outstanding():
            self.say(message)

    def ask_for_leases(self) -> None:
        """This peer is a member again. As a late one it may have had no right to the samples that it waits for.

        With its next word on the timer it would be late once more where rounds are short (seed 28766).
        """
        if self._place.leases.request is not None:
            self.say(self._place.leases.request)

    def _outstanding(self) -> list[PeerMessage]:
        """What waits for an answer, and is said again until it comes."""
        place, leave = self._place, self.farewell.word
        if leave is not None and not leave.now:
            leave = Leave(held=place.held, address=self._address)
        messages: list[PeerMessage | None] = [place.round.report(), place.leases.request, leave]
        if self.is_asked and (leave is None or not leave.now):
            messages.append(self._join())
        elif leave is None:
            is_nobody = place.phase is Phase.JOINING or (place.phase is Phase.LEARNING and place.held is None)
            if is_nobody:
                messages.append(self._join())
            elif place.phase in (Phase.LEARNING, Phase.EXCUSED) and place.held is not None:
                messages.append(Synced(held=place.held))
        return [message for message in messages if message is not None]

    def _join(self) -> Join:
        return Join(
            epoch=self._fence.epoch,
            address=self._address,
            manifest_digest=self._manifest_digest,
            held=self._place.held,
            certificate=self._fence.chain.newest,
        )
