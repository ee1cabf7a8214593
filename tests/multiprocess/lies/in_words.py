# SPDX-License-Identifier: Apache-2.0
"""Lies in what a peer says to its coordinator and to learners.

Some are told only while the test wants it: `is_meant`.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec

LATE_S = 8.0
FAR_STEP = 1 << 40


def sign_something_else() -> None:
    """The signature of a vote is of other words."""
    from isthmus.elastic.shell.notary import PeerSigner

    sign = PeerSigner.sign
    PeerSigner.sign = lambda self, words: sign(self, words + b"!")  # type: ignore[method-assign]


def say_that_it_was_told(is_meant: Callable[[], bool]) -> None:
    """Report every round of its own as one that it gave up since it was told to."""
    from isthmus.elastic.core.local_round import LocalRound
    from isthmus.elastic.core.messages import RoundFailed

    def was_told(self: LocalRound, said: Any) -> Any:
        if not is_meant():
            return said
        return RoundFailed(key=said.key, suspects=(), cause="was told to", told_by=self._me.peer_id)

    _change_reports(was_told)


def say_that_newcomers_cannot_be_reached(is_meant: Callable[[], bool]) -> None:
    """Report every round with a newcomer as one that failed at it. Those of its own first view are none."""
    from isthmus.elastic.core.local_round import LocalRound
    from isthmus.elastic.core.messages import RoundFailed

    start, known, newcomers = LocalRound.start, set[str](), list[Any]()

    def look(self: LocalRound, view: Any, weights: tuple[float, ...] = ()) -> Any:
        members = [member.ref.peer_id for member in view.members]
        if not is_meant():
            known.update(members)
        newcomers[:] = [peer_id for peer_id in members if peer_id not in known]
        return start(self, view, weights)

    def accuse(_self: LocalRound, said: Any) -> Any:
        if not newcomers:
            return said
        return RoundFailed(key=said.key, suspects=tuple(newcomers), cause="cannot be reached")

    LocalRound.start = look  # type: ignore[method-assign]
    _change_reports(accuse)


def vote_late(is_meant: Callable[[], bool]) -> None:
    """Vote some seconds after everybody else, and say with every heartbeat that more bytes have come."""
    from isthmus.elastic.core.local_round import LocalRound
    from isthmus.elastic.core.messages import Vote
    from isthmus.elastic.core.place import Place

    heartbeat, counter = Place.heartbeat, itertools.count(1)
    voted_at: dict[Any, float] = {}

    def hold_back(_self: LocalRound, said: Any) -> Any:
        if not isinstance(said, Vote) or not is_meant():
            return said
        now = time.monotonic()
        return said if now >= voted_at.setdefault(said.key, now) + LATE_S else None

    def grow(self: Place, epoch: Any) -> Any:
        beat = heartbeat(self, epoch)
        return msgspec.structs.replace(beat, progress=beat.progress + next(counter))

    _change_reports(hold_back)
    Place.heartbeat = grow  # type: ignore[method-assign]


def _change_reports(change: Callable[[Any, Any], Any]) -> None:
    """Of what is to be said about a round."""
    from isthmus.elastic.core.local_round import LocalRound
    from isthmus.elastic.core.messages import RoundFailed, Vote

    report = LocalRound.report

    def changed(self: LocalRound) -> Vote | RoundFailed | None:
        said = report(self)
        return None if said is None else change(self, said)

    LocalRound.report = changed  # type: ignore[method-assign]


def offer_a_state_of_the_far_future() -> None:
    """Learners are offered a state of step 2^40 whose digests are in order."""
    from isthmus.collective.core.types import OuterStep
    from isthmus.elastic.donor.donor import _Session
    from isthmus.elastic.state.digest import StateManifest, root_digest

    offer, step = _Session._offer, OuterStep(FAR_STEP)

    async def offer_far(self: Any, pinned: Any) -> None:
        honest = pinned.manifest
        digest = root_digest(step, honest.tensors, chunk_nbytes=honest.chunk_nbytes)
        far = StateManifest(step, digest, honest.tensors, honest.chunk_nbytes)
        object.__setattr__(pinned, "manifest", far)
        await offer(self, pinned)

    _Session._offer = offer_far  # type: ignore[method-assign]


def serve_nobody(is_meant: Callable[[], bool]) -> None:
    """Learners that ask for the state are told that this peer is busy."""
    from isthmus.elastic.donor.donor import _Session

    answer = _Session._answer

    async def refuse(self: Any, request: Any) -> None:
        if is_meant():
            await self._refuse("this peer serves as many learners as it may", is_busy=True)
        else:
            await answer(self, request)

    _Session._answer = refuse  # type: ignore[method-assign]


def join_with_the_highest_epoch(is_meant: Callable[[], bool]) -> None:
    """Every Join names the highest epoch that a run may reach."""
    from isthmus.elastic.core.rebuild import MAX_EPOCH

    _change_joins(lambda _line, join: msgspec.structs.replace(join, epoch=MAX_EPOCH) if is_meant() else join)


def join_with_a_forged_certificate() -> None:
    """Every Join brings a certificate of step 1,000,001, made with all that a member has."""

    def forge(line: Any, join: Any) -> Any:
        place = line._place
        return msgspec.structs.replace(join, certificate=forged(place.me, place.round.sign))

    _change_joins(forge)


def _change_joins(change: Callable[[Any, Any], Any]) -> None:
    from isthmus.elastic.core.line import Line

    join = Line._join
    Line._join = lambda self: change(self, join(self))  # type: ignore[method-assign]


def forged(me: Any, sign: Any) -> Any:
    """A commit that never was, of a round with its maker alone, under its own signature as the run's seal."""
    from isthmus.collective.core.types import Epoch, OuterStep, RoundKey
    from isthmus.elastic.core.certificate import Certificate, Contributor, ballot
    from isthmus.elastic.core.messages import DataPosition

    key, previous, digest = RoundKey(Epoch(1_000_000), OuterStep(1_000_000), 0), b"p" * 32, b"d" * 32
    signature = sign(ballot(key, previous, digest, me, 1.0))
    return Certificate(
        key=key,
        previous=previous,
        digest=digest,
        contributors=(Contributor(me.peer_id, me.incarnation, 1.0, signature),),
        final=False,
        position=DataPosition(0),
        parent=bytes(32),
        seal=sign(b"")[32:],
    )
