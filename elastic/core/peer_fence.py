# SPDX-License-Identifier: Apache-2.0
"""Which words of peers count: the coordinator's fence, in front of everything that takes them in.

A word is of a start of its sender, of an epoch, of a round. Whatever is of an older one than the run's is void, and is
answered here with what its sender has not heard; whoever takes words in need not ask again. A heartbeat of an older
epoch is not void: it says how far its sender is. Nor is a `Leave`, nor a `Met`: who wants to go may go, and links are
of no epoch.

What a peer says while the journal is lost goes by the rules of rebuild.py.
"""

import enum
from typing import assert_never

from isthmus.collective.core.types import PeerRef
from isthmus.elastic.core.holders import Holders
from isthmus.elastic.core.messages import (
    Evicted,
    Heartbeat,
    Join,
    LeaseRequest,
    Leave,
    Met,
    PeerMessage,
    RoundFailed,
    Synced,
    Vote,
)
from isthmus.elastic.core.news import News
from isthmus.elastic.core.sessions import Session
from isthmus.elastic.core.turn import Turn


class Void(enum.Enum):
    """Why a word counts for nothing, and as what that is counted, if it is."""

    LOST_JOURNAL = "of_the_lost_journal"  # the run was rebuilt since, which its sender may not have heard
    UNAWARE = "unaware"  # its sender believes that it is a member
    RUN_OVER = "run_over"  # there is nothing left to wait for, which its sender may not have heard
    OLDER_START = "older_incarnation"  # a newer start of its sender is known
    STRANGER = "stranger"  # its sender is no member and no learner
    BELATED = "belated_word"  # a learner has said it before it heard that the run was rebuilt
    AHEAD = "ahead_of_the_journal"  # of a commit that this journal does not hold: another coordinator leads
    NO_MEMBER = "learner_spoke_as_member"
    OLD_ROUND = "old_round"  # the attempt is over
    OLD_REQUEST = "old_lease_request"  # of before the last admission, or another one has followed it


class PeerFence:
    """Judges words, and answers those that are void."""

    def __init__(self, turn: Turn, news: News, holders: Holders) -> None:
        self._state, self._turn, self._news, self._holders = turn.state, turn, news, holders

    def why_void(self, sender: PeerRef, message: PeerMessage, session: Session | None) -> Void | None:
        """None if the word counts.

        Args:
            session: of whichever start of the sender that is here.
        """
        if session is not None and sender.incarnation < session.ref.incarnation:
            return Void.OLDER_START
        if isinstance(message, Leave):
            return None
        if session is None or session.ref != sender:
            return self._why_void_of_stranger(sender, message)
        is_excused, since = self._state.is_excused(sender), self._state.standing_since(sender)
        match message:
            case Met():
                return None
            case Vote() | RoundFailed() | LeaseRequest() if since is None:
                return Void.NO_MEMBER
            case LeaseRequest():
                is_old = since is not None and message.epoch < since
                return Void.OLD_REQUEST if is_old or self._is_answered(sender, message) else None
            case Join() | Heartbeat() | Synced() if since is not None and not is_excused:
                return None
            case _ if self._state.final and (is_excused or since is None):
                return Void.RUN_OVER  # the word of it was lost, and no other will follow (seed 39444)
            case Vote() | RoundFailed():
                is_current = (message.key.epoch, message.key.outer_step) == (self._state.epoch, self._state.outer_step)
                return None if is_current and not is_excused else Void.OLD_ROUND
            case _:
                return None if is_excused else self._why_void_of_learner(message)

    def _why_void_of_stranger(self, sender: PeerRef, message: PeerMessage) -> Void | None:
        departure = self._state.departed.get(sender.peer_id)
        if not isinstance(message, Join):
            return Void.LOST_JOURNAL if self._is_of_the_lost_journal(message) else Void.STRANGER
        if departure is not None and sender.incarnation < departure.incarnation:
            return Void.OLDER_START
        if self._is_of_the_lost_journal(message):
            return Void.LOST_JOURNAL
        if departure is not None and sender.incarnation == departure.incarnation and message.epoch < departure.epoch:
            return Void.UNAWARE
        return None

    def _is_of_the_lost_journal(self, message: PeerMessage) -> bool:
        """Whether the sender may not have heard yet that the run was rebuilt, or went back."""
        rebuilt = self._state.rebuilt
        if rebuilt is None:
            return False
        match message:
            case Vote() | RoundFailed():
                return message.key.epoch < rebuilt.epoch
            case Join() | Heartbeat() | LeaseRequest():
                return message.epoch < rebuilt.epoch
            case _:
                return True  # it names no epoch; if its sender has heard, its heartbeats say so

    def _why_void_of_learner(self, message: PeerMessage) -> Void | None:
        """A learner has a session, so it has joined afresh.

        An older word, taken for what it holds now, would send it home for holding what the run gave up
        (scenarios/belated_word_of_the_lost_journal.toml). Without a rebuild another coordinator leads: the member that
        it named has gone on, and to send that home would be for good (seed 90107).
        """
        if not isinstance(message, Synced):
            return Void.BELATED if self._is_of_the_lost_journal(message) else None
        if message.held.outer_step <= self._state.outer_step:
            return None
        if self._state.rebuilt is not None:
            return Void.BELATED
        return Void.AHEAD if self._state.committed is not None else None

    def _is_answered(self, sender: PeerRef, request: LeaseRequest) -> bool:
        return request.serial < self._state.leases.newest_serial(sender)

    def answer(self, void: Void, sender: PeerRef, message: PeerMessage, session: Session | None) -> None:
        """Tell the sender of a void word what it has not heard; without an answer it would wait for ever."""
        news = self._news
        if void not in (Void.LOST_JOURNAL, Void.UNAWARE, Void.RUN_OVER):
            self._turn.counters[void.value] += 1
        match void:
            case Void.OLDER_START:
                news.tell_replaced(sender)
            case Void.LOST_JOURNAL:
                self._note(sender, message)
                news.tell_rebuilt(sender)
            case Void.UNAWARE:
                # With a payload and leases that are somebody else's by now. If it were taken as a learner and the
                # Welcome got lost, it would be admitted without ever knowing.
                news.turn_away(sender, "dropped while it was away")
            case Void.STRANGER:
                news.turn_away(sender, "no member and no learner")
            case Void.RUN_OVER:
                news.tell_commit(sender)
            case Void.NO_MEMBER:
                self._turn.send(sender, Evicted(epoch=self._state.epoch, reason="a learner, no member"))
            case Void.OLD_ROUND:
                # A late vote asks what became of the round: the last commit or the newest view says so.
                assert session is not None, "only who has a session votes"
                news.tell(session)
            case Void.BELATED | Void.AHEAD | Void.OLD_REQUEST:
                pass
            case _:
                assert_never(void)

    def _note(self, sender: PeerRef, message: PeerMessage) -> None:
        """What a peer that does not know of the rebuild has brought.

        It may have a payload and leases that the lost journal gave it, the newest commit staged, or a state whose
        commit nobody else has heard of.
        """
        if not isinstance(message, Join):
            self._turn.counters["stranger"] += 1
            return
        certificate = self._state.certificate
        if message.held is not None and message.held == self._state.committed:
            self._holders.note(sender)  # it is asked to say so again, and nothing is given up meanwhile
        if message.certificate is not None and certificate is not None:
            self._turn.counters["newer_certificate_given_up"] += message.certificate.order > certificate.order
