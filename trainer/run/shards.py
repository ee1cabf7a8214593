# SPDX-License-Identifier: Apache-2.0
"""The run's text as a running peer has it: what it gives to others, and how it gets the shards that it needs.

Must not know leases, nor how a text is kept (trainer/data).
"""

from collections.abc import Sequence

from isthmus.collective.transport import Channel, Purpose
from isthmus.elastic.shell.member import Membership
from isthmus.elastic.state.replica import SharedText
from isthmus.trainer.data.corpus import Corpus
from isthmus.trainer.data.givers import from_peers
from isthmus.trainer.data.places import GivenPrepared, ShardPlaces
from isthmus.trainer.data.prepared import PreparedText
from isthmus.trainer.data.shard_supply import ShardSupply
from isthmus.trainer.data.text import GivenText, giver_of, sample_order
from isthmus.trainer.data.text_shelf import MAX_NBYTES
from isthmus.trainer.record.chronicle import Chronicle
from isthmus.trainer.record.translation import shard_fetched
from isthmus.trainer.run.connections import Connections
from isthmus.trainer.run.preparation import Start


def text_to_give(start: Start) -> SharedText | None:
    """What this peer gives to those that lack it; None: it has no text, or one that is too long to be sent."""
    text = None if start.text is None else start.text.corpus
    match text:
        case Corpus():
            return None if text.nbytes > MAX_NBYTES else GivenText(text)
        case PreparedText():
            return GivenPrepared(text, ShardPlaces(text, start.folder.path))
        case None:
            return None


def shard_supply(
    start: Start, membership: Membership, connections: Connections, chronicle: Chronicle
) -> ShardSupply | None:
    """Sees that the shards of this peer's leases are here; None where its text is in one piece."""
    config, text = start.config, None if start.text is None else start.text.corpus
    if not isinstance(text, PreparedText):
        return None
    peers = _WaysToMembers(start, membership, connections)
    return ShardSupply(
        text,
        ShardPlaces(text, start.folder.path),
        sample_order(text, config),
        pool=config.data.shuffle_shards,
        give=giver_of(text, config, from_peers(peers.find, peers.dial)),
        arrived=lambda fetched: chronicle.emit(shard_fetched(fetched)),
        limit_nbytes=config.node.data_cache_nbytes,
    )


class _WaysToMembers:
    """Where the members are, and a connection to one of them, also to one that can only call."""

    def __init__(self, start: Start, membership: Membership, connections: Connections) -> None:
        self._start = start
        self._membership = membership
        self._connections = connections

    async def find(self) -> Sequence[str]:
        view = self._membership.active_view
        others = [] if view is None else [one.address for one in view.members if one.ref != self._start.me]
        return (*others, *(address for address in self._start.coordinators if address not in others))

    async def dial(self, address: str) -> Channel:
        view = self._membership.active_view
        members = () if view is None else view.members
        member = next((one for one in members if one.address == address), None)
        if member is not None:
            return await self._connections.dial_donor(member)
        return await self._connections.dial(address, Purpose.STATE)
