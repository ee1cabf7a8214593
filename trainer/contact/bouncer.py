# SPDX-License-Identifier: Apache-2.0
"""Whom this process believes and whom it does not, applied to its connections.

Members hear of it from the coordinator, the coordinator's own process from its journal. Rules: what is withdrawn here
stays withdrawn as long as the process lives; the connections of whoever is put out end at once, and no other is opened.
Must not know why somebody is put out.
"""

import logging
from collections.abc import Callable

from isthmus.collective.core.types import PeerId
from isthmus.collective.transport import Security
from isthmus.collective.transport.certificates import certificate_from_bytes
from isthmus.elastic.core.messages import Bar, Trust

log = logging.getLogger(__name__)


class Bouncer:
    """See the module.

    Args:
        security: of all connections of this process.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._ends: list[Callable[[PeerId], None]] = []

    def ends(self, end: Callable[[PeerId], None]) -> None:
        """Call this, too, for whoever is put out: it ends the peer's connections."""
        self._ends.append(end)

    def heard(self, trust: Trust) -> None:
        """The coordinator has said whom to believe."""
        try:
            self._security.believe(map(certificate_from_bytes, trust.authorities))
        except ValueError as error:
            log.warning("authority_unreadable cause=%r", str(error))
        for bar in trust.barred:
            self.put_out(bar)

    def put_out(self, bar: Bar) -> None:
        """Let go of a peer, unless that is done already."""
        if self._security.withdraw(bar.peer_id, bar.certificate):
            log.info("put_out peer_id=%s", bar.peer_id)
            for end in self._ends:
                end(bar.peer_id)
