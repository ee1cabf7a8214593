# SPDX-License-Identifier: Apache-2.0
"""The run's text as a running peer has it: what it gives to others, and how it gets the shards that it needs.

Must not know leases, nor how a text is kept (trainer/data).
"""

from collections.abc import Sequence

from isthmus.collective.core.types import Member, PeerId
from isthmus.collective.transport import Channel, Purpose
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


def shard_supply(start: Start, connections: Connections, chronicle: Chronicle) -> ShardSupply | None:
    """Sees that the shards of this peer's leases are here; None where its text is in one piece."""
    config, text = start.config, None if start.text is None else start.text.corpus
    if not isinstance(text, PreparedText):
        return None
    peers = WaysToMembers(start, connections)

    def advanced(_giver: PeerId, _there_nbytes: int, _whole_nbytes: int) -> None:
        supply.moved()

    # The supply has the patience, so that each attempt begins with the URL, and with the shard that is needed by then.
    give = giver_of(text, config, from_peers(peers.find, peers.dial, patience_s=0.0, advanced=advanced))
    supply = ShardSupply(
        text,
        ShardPlaces(text, start.folder.path),
        sample_order(text, config),
        pool=config.data.shuffle_shards,
        give=give,
        arrived=lambda fetched: chronicle.emit(shard_fetched(fetched)),
        patience_s=config.members.outage_s,
        limit_nbytes=config.node.data_cache_nbytes,
    )
    return supply


_MAX_FORMER = 8
"""Peers that are no members now and are asked all the same."""


class WaysToMembers:
    """Where the members are, and a connection to one of them, also to one that can only call.

    They are those of the newest view; then those of earlier ones, who may be back and not be members yet. Found before:
    those of the view in which this peer became active were asked, and nobody who had come later.
    """

    def __init__(self, start: Start, connections: Connections) -> None:
        self._start = start
        self._connections = connections
        self._known: dict[PeerId, Member] = {}
        """Members of the views in which somebody was asked, as they were last; the latest are last."""

    async def find(self) -> Sequence[str]:
        """Addresses of the other members, and of the coordinators."""
        members = {one.peer_id: one for one in self._members() if one.ref != self._start.me}
        former = [one for peer_id, one in self._known.items() if peer_id not in members][-_MAX_FORMER:]
        self._known = {one.peer_id: one for one in former} | members
        others = [one.address for one in (*members.values(), *reversed(former))]
        return (*others, *(address for address in self._start.coordinators if address not in others))

    async def dial(self, address: str) -> Channel:
        """A STATE connection to whoever is there."""
        member = next((one for one in self._members() if one.address == address), None)
        if member is not None:
            return await self._connections.dial_donor(member)
        return await self._connections.dial(address, Purpose.STATE)

    def _members(self) -> Sequence[Member]:
        view = self._connections.communicator.view
        return () if view is None else view.members
