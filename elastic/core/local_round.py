# SPDX-License-Identifier: Apache-2.0
"""The round in progress at one peer: its payload, the attempt to exchange it, and how that ended.

Rules: the payload is kept until its outcome is known. An attempt belongs to one view (its key names the epoch); when
the view goes, the attempt and everything staged by it go too, and the same payload is tried in the next view. What is
staged becomes state only under the very digest that was voted for. Who is put out while something is staged lays that
aside: it may be the only copy of a commit that was made while nothing could be heard.
"""

from collections.abc import Callable, Sequence

from isthmus.collective.core.types import OuterStep, PeerRef, RoundKey, View
from isthmus.elastic.core.certificate import ballot
from isthmus.elastic.core.events import (
    AbortExchange,
    ExchangeDone,
    ExchangeFailed,
    MemberEffect,
    RoundReady,
    StartExchange,
)
from isthmus.elastic.core.messages import Held, RoundFailed, Vote


class LocalRound:
    """At most one payload and at most one attempt to exchange it.

    Args:
        sign: this peer's signature of these bytes.
    """

    def __init__(self, me: PeerRef, sign: Callable[[bytes], bytes]) -> None:
        self._me = me
        self.sign = sign
        self._base = b""  # digest of the state that the round starts from
        self.signature = b""  # of the ballot for what is staged
        self.payload: RoundReady | None = None
        self.key: RoundKey | None = None
        """Of the exchange in the current view, running or ended."""
        self.staged: bytes | None = None
        """Digest of the state that would be, once the exchange is done."""
        self._seen: ExchangeDone | None = None  # with what was seen of the others' parts
        self.failure: RoundFailed | None = None
        self.laid_aside: tuple[RoundKey, Held] | None = None
        """The round whose result was staged when the membership ended, and the state that this would be."""

    @property
    def staged_key(self) -> RoundKey | None:
        """Of the round whose result is, or will be, staged here."""
        return self.key if self.laid_aside is None else self.laid_aside[0]

    def start(self, view: View, weights: tuple[float, ...] = ()) -> Sequence[MemberEffect]:
        """Exchange the payload in this view, if there is one and that is not under way already."""
        if self.payload is None or self.key is not None:
            return ()
        self.key = RoundKey(view.epoch, self.payload.outer_step, self.payload.fragment)
        self._base = view.digest
        return [StartExchange(view=view, key=self.key, weight=self.payload.weight, weights=weights)]

    def abort(self) -> Sequence[MemberEffect]:
        """The view is gone: the attempt is void, the payload stays."""
        key, self.key, self.staged, self.failure = self.key, None, None, None
        return () if key is None else [AbortExchange(key=key)]

    def forget(self) -> Sequence[MemberEffect]:
        """The payload will never be committed."""
        self.payload = None
        return self.abort()

    def lay_aside(self) -> None:
        """The payload is void, but what is staged of it stays until another state is named."""
        if self.key is not None and self.staged is not None:
            self.laid_aside = self.key, _state_after(self.key, self.staged)
            self.payload = self.key = self.staged = None

    def drop_aside(self) -> Sequence[MemberEffect]:
        """Another state is named, or the next round begins: nobody needs what was laid aside."""
        aside, self.laid_aside = self.laid_aside, None
        return () if aside is None else [AbortExchange(key=aside[0])]

    def ended(self, event: ExchangeDone | ExchangeFailed) -> bool:
        """Note how the exchange ended. False if the event is of an attempt that is void."""
        if event.key != self.key or self.staged is not None or self.failure is not None:
            return False
        match event:
            case ExchangeDone():
                self.staged, self._seen = event.digest, event
                weight = 0.0 if self.payload is None else self.payload.weight
                self.signature = self.sign(ballot(event.key, self._base, event.digest, self._me, weight))
            case ExchangeFailed():
                self.failure = RoundFailed(
                    key=event.key,
                    suspects=event.suspects,
                    cause=event.cause[:512],
                    told_by=event.told_by,
                    differs=event.differs,
                )
        return True

    def report(self) -> Vote | RoundFailed | None:
        """What the coordinator has to hear about the attempt until it answers."""
        payload, key, seen = self.payload, self.key, self._seen
        if self.staged is None or payload is None or key is None or seen is None:
            return self.failure
        return Vote(
            key=key,
            digest=self.staged,
            weight=payload.weight,
            num_tokens=payload.num_tokens,
            consumed=payload.consumed,
            weights=seen.weights,
            sizes=seen.sizes,
            sums=seen.sums,
            results=seen.results,
            signature=self.signature,
        )

    def take_staged(self, made: Held) -> RoundKey | None:
        """If exactly this state is staged, it is committed now: the round is over. Its key, or None."""
        key = self.key
        if self.laid_aside is not None:
            key, state = self.laid_aside
        elif key is not None and self.staged is not None:
            state = _state_after(key, self.staged)
        else:
            return None
        if state != made:
            return None
        self.payload = self.key = self.staged = self.laid_aside = None
        return key

    def check_invariants(self) -> None:
        """An outcome belongs to an attempt, an attempt to a payload, and there is one outcome."""
        assert self.key is None or self.payload is not None, "an attempt without a payload"
        assert self.key is not None or (self.staged is None and self.failure is None), "an outcome without an attempt"
        assert self.staged is None or self.failure is None, "failed after it was done"
        assert self.laid_aside is None or self.payload is None, "two rounds are staged in one place"


def _state_after(key: RoundKey, digest: bytes) -> Held:
    return Held(OuterStep(key.outer_step + 1), digest)
