# SPDX-License-Identifier: Apache-2.0
"""Which words of coordinators count: the member's fence, in front of everything that takes them in.

Void is what is older than the newest epoch heard of, or about the very view that holds this peer; a commit that is not
sealed, or does not continue the chain of the run as this peer knows it; and word that the run went back to such a one.
What counts is taken in here, as far as epoch and chain go.
"""

from collections import Counter

from isthmus.collective.core.types import Epoch
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.chain import Chain
from isthmus.elastic.core.messages import Commit, CoordinatorMessage, Evicted, Held, NewView, Rebuilt, Welcome
from isthmus.elastic.core.place import Phase, Place


class CoordinatorFence:
    """What a peer believes of the run. Coordinators with an old journal, and belated words, do not change it.

    Args:
        place: where the peer stands.
        chain: the commits that it believes in.
        counters: what was void, by reason.
    """

    def __init__(self, place: Place, chain: Chain, counters: Counter[str]) -> None:
        self._place, self.chain, self._counters = place, chain, counters
        self.epoch = Epoch(0) if chain.newest is None else chain.newest.key.epoch
        """The newest one heard of."""
        self._rebuilt: Rebuilt | None = None  # what was given up is void

    def admit(self, said: CoordinatorMessage) -> CoordinatorMessage | None:
        """The word, if it counts; None if it is void. A view without this peer means that it is evicted."""
        mine = self._place.view
        match said:
            case Welcome() | Evicted():
                epoch = said.epoch
                is_void = epoch < self.epoch or (mine is not None and epoch == mine.epoch)
                if (
                    not is_void
                    and epoch == self.epoch
                    and self._place.phase is Phase.JOINING
                    and isinstance(said, Evicted)
                ):
                    return None  # it is being answered already; the timer repeats the Join
            case NewView(view=view):
                epoch = view.epoch
                is_void = epoch < self.epoch or (
                    mine is not None and (epoch, view.outer_step) <= (mine.epoch, mine.outer_step)
                )
                if not is_void and not view.holds(self._place.me) and self._place.me not in said.excused:
                    return self.admit(Evicted(epoch=epoch, reason="not in the new view"))
            case Rebuilt(epoch=epoch, certificate=certificate):
                is_again = epoch == self.epoch and self._holds_what_nobody_proved(said.committed)
                is_void = epoch <= self.epoch and not is_again
                if epoch > self.epoch and certificate is not None and not self.chain.is_genuine(certificate):
                    return None
            case Commit(certificate=certificate):
                # A coordinator with an old journal may know commits of its own.
                epoch, is_void = (
                    self.epoch,
                    certificate.key.epoch < self.epoch and certificate.made not in self._known(),
                )
                is_void |= self._is_given_up(certificate)
                if not is_void and not self.chain.take(certificate):
                    return None
            case _:
                return said
        if is_void:
            self._counters["old_epoch"] += 1
            return None
        self.epoch = epoch
        if isinstance(said, Rebuilt):
            self._rebuilt = said
        return said

    def _is_given_up(self, certificate: Certificate) -> bool:
        """Whether the run has gone back behind this commit: another coordinator may still tell of it (seed 55061)."""
        rebuilt = self._rebuilt
        if rebuilt is None or certificate.key.epoch >= rebuilt.epoch:
            return False
        return rebuilt.certificate is None or certificate.order > rebuilt.certificate.order

    def _known(self) -> list[Held | None]:
        """The states that this peer was told of, or has made."""
        place, aside = self._place, self._place.round.laid_aside
        return [place.held, place.pursuit.target, place.view_state, None if aside is None else aside[1]]

    def _holds_what_nobody_proved(self, committed: Held | None) -> bool:
        """Whether the state that we hold is newer than the rebuilt run's and we have no certificate of it either."""
        held, newest = self._place.held, self.chain.newest
        if held is None or committed is None or held.outer_step <= committed.outer_step:
            return False
        return newest is None or newest.made != held
