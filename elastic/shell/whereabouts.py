# SPDX-License-Identifier: Apache-2.0
"""Where others reach a peer, as it tells the coordinator: its machine knows only where that was when it was made.

Rules: looked at whenever the control connection comes up, and on a slow timer beside it, because a machine's addresses
change while a run lasts for weeks. Goes into words on their way out, so the machine need not know. Must not know how
addresses are found.
"""

import asyncio
from collections.abc import Callable

import msgspec

from isthmus.elastic.core.messages import Join, Leave, PeerMessage

Locate = Callable[[str | None], str]
"""Where others reach this peer now. Given: the host that the coordinator sees it come from; None: as it was last."""

LOOK_S = 5.0
"""Between two looks; as long as a silent peer is believed to be there. A look takes a millisecond."""


class Whereabouts:
    """See the module.

    Args:
        locate: None for a peer that stays where its machine was told that it is.
        moved: called when others reach it elsewhere than was told last.
    """

    def __init__(self, locate: Locate | None, *, moved: Callable[[], None]) -> None:
        self._locate = locate
        self._moved = moved
        self._address: str | None = None

    def look(self, seen_from: str | None = None) -> bool:
        """Find out where others reach this peer; whether that is another address than before."""
        before = self._address
        if self._locate is not None:
            self._address = self._locate(seen_from)
        return self._address != before

    def told_in(self, message: PeerMessage) -> PeerMessage:
        """The same message with the newest address, if there is one in it."""
        if self._address is None or not isinstance(message, Join | Leave) or not message.address:
            return message
        return msgspec.structs.replace(message, address=self._address)

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.look():
                self._moved()
