# SPDX-License-Identifier: Apache-2.0
"""What a peer believes of the run's commits: the newest certificate it has heard of, and what may come after it.

Rules: what is not sealed, and signed by a majority, is nobody's word. The next commit names this one as its parent;
what claims to be the next and does not is another history of the run, and is refused. A gap is no fault: a peer that
was away does not hear of every commit. Nobody goes back to an older certificate but by word that the run was rebuilt
from it.
"""

from collections import Counter

from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.notary import Verifier


class Chain:
    """The end of the chain as one peer knows it.

    Args:
        verifier: of seals and signatures.
        newest: what an earlier start of the peer has kept; dropped if it is not genuine.
        counters: what was refused, by reason.
    """

    def __init__(self, verifier: Verifier, newest: Certificate | None, counters: Counter[str]) -> None:
        self._verifier = verifier
        self._counters = counters
        self.newest = newest if newest is not None and self.is_genuine(newest) else None

    def is_genuine(self, certificate: Certificate) -> bool:
        """Whether it is one of this run, unchanged. Counts those that are not."""
        genuine = certificate.check(self._verifier)
        self._counters["forged_certificate"] += not genuine
        return genuine

    def take(self, certificate: Certificate) -> bool:
        """Believe in this commit, or not. Repeats of the newest one are believed."""
        newest = self.newest
        if newest is not None and certificate == newest:
            return True
        if not self.is_genuine(certificate):
            return False
        if newest is not None:
            if certificate.order < newest.order:
                self._counters["old_certificate"] += 1
                return False
            is_next_or_before = certificate.key.outer_step <= newest.key.outer_step + 1
            if is_next_or_before and not certificate.follows(newest):
                self._counters["broken_chain"] += 1
                return False
        self.newest = certificate
        return True

    def go_back_to(self, certificate: Certificate | None) -> None:
        """The run was rebuilt from this one, which is genuine: what came after it is no part of the run."""
        self.newest = certificate
