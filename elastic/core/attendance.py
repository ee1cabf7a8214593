# SPDX-License-Identifier: Apache-2.0
"""What members and the excused say, noted where it belongs: in their sessions, in the open round, in the leases.

Void words do not come here (peer_fence.py). What follows is decided by whoever settles.
"""

import math
from typing import assert_never

from isthmus.collective.core.types import OuterStep, PeerRef
from isthmus.elastic.core.certificate import ballot
from isthmus.elastic.core.config import CoordinatorConfig
from isthmus.elastic.core.leases import MAX_INDEX, MAX_ROUNDS_OWNED, SPARE_ROUNDS
from isthmus.elastic.core.messages import Heartbeat, Join, LeaseGrant, LeaseRequest, RoundFailed, Synced, Vote
from isthmus.elastic.core.news import News
from isthmus.elastic.core.open_round import OpenRound
from isthmus.elastic.core.records import LeaseRecord
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn
from isthmus.elastic.core.views import Views


class Attendance:
    """Notes facts, and answers requests for samples."""

    def __init__(self, config: CoordinatorConfig, turn: Turn, news: News, views: Views, open_round: OpenRound) -> None:
        self._config, self._state, self._turn = config, turn.state, turn
        self._news, self._views, self._round = news, views, open_round

    def holds(self, session: Session, message: Join | Synced) -> None:
        """It comes back, or missed its admission: what it holds is known from itself alone after a restart (seed 4273).

        One that is late follows the commits, and need not be a learner for that.
        """
        step = message.held.outer_step if message.held is not None else OuterStep(0)
        if isinstance(message, Join):
            # Found before: a member's was passed over, and newcomers were told where it had been.
            session.address = message.address
        if not self._state.is_excused(session.ref):
            session.shows(step, self._state.outer_step, self._turn.now)
            self._news.tell(session)
            return
        if message.held is not None and step <= self._state.outer_step:
            session.synced = message.held
        if isinstance(message, Join):
            self._news.tell(session)

    def beats(self, session: Session, beat: Heartbeat) -> None:
        """How far it is. Of whatever it has not heard it is told again."""
        now, step = self._turn.now, self._state.outer_step
        session.beat(beat, now)
        session.works(beat, self._config.round_inner_steps)
        session.is_aware |= beat.epoch >= self._state.admitted.get(session.ref, math.inf)
        knows_view = beat.epoch >= self._state.epoch
        if knows_view:
            if beat.ready and beat.outer_step == step:
                session.hands_in(now)
            session.shows(beat.outer_step, step, now)
        if knows_view and (beat.outer_step >= step or not beat.blocked):
            session.behind_since = None  # or it is on its way to the view's state
        elif now >= session.told_at + self._config.resend_interval_s:
            self._news.tell(session)

    def judges(self, session: Session, message: Vote | RoundFailed) -> None:
        """A member says how the round in progress ended for it."""
        peer_id, now = session.ref.peer_id, self._turn.now
        session.behind_since = None
        session.shows(message.key.outer_step, self._state.outer_step, now)
        session.hands_in(now)
        session.is_aware = True
        match message:
            case Vote() if not self._is_signed(session.ref, message):
                self._turn.counters["forged_vote"] += 1
                self._views.strike({session.ref: "has not signed what it votes for"})
            case Vote():
                if not self._round.vote(peer_id, message, now):
                    self._turn.counters["vote_after_failure"] += 1
            case RoundFailed():
                self._round.report(peer_id, message, now)
            case _:
                assert_never(message)

    def _is_signed(self, ref: PeerRef, vote: Vote) -> bool:
        """Without its signature a vote would make no certificate that anybody believes."""
        assert self._state.committed is not None, "members vote from a committed state"
        if self._round.votes.get(ref.peer_id) == vote:
            return True  # said again, and looked at before
        words = ballot(vote.key, self._state.committed.digest, vote.digest, ref, vote.weight)
        return self._config.sealer.is_signed_by(ref.peer_id, words, vote.signature)

    def wants_data(self, session: Session, request: LeaseRequest) -> None:
        """Grant it samples, and the same ones to the same request.

        Who owns as many as it may gets an answer later: it asks again until it has one, and commits make room.
        """
        ref, leases = session.ref, self._state.leases
        if request.serial > leases.newest_serial(ref):
            ranges = leases.plan(min(request.num_samples, self._room_of(session)))
            if not ranges:
                self._turn.counters["leased_enough"] += 1
                return
            self._turn.persist(LeaseRecord(ref=ref, serial=request.serial, ranges=ranges))
        self._turn.send(ref, LeaseGrant(serial=request.serial, ranges=leases.newest_grant(ref)))

    def _room_of(self, session: Session) -> int:
        """How many samples more it may own."""
        per_round, num_owned = self._config.samples_per_round, self._state.leases.num_unreported(session.ref)
        if per_round is None:
            return MAX_INDEX
        if session.num_owned_before is None:
            session.num_owned_before = num_owned
        most = max(MAX_ROUNDS_OWNED * per_round, session.num_owned_before) + SPARE_ROUNDS * per_round
        return max(0, most - num_owned)
