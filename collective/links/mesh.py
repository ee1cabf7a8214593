# SPDX-License-Identifier: Apache-2.0
"""The connections of one peer to the others of its view: dialled, adopted, kept across views, dropped.

Rules: of a pair, the peer with the smaller id dials. If its calls do not get through, the other one dials too: a peer
behind a NAT can call and cannot be called. The direction in which a pair is connected first stays, and is remembered.
Links to members that stay outlive a view. Nothing runs in the background but the sockets' callbacks; `connect` and the
rounds' supervision are the only places that dial. It must not know tensors or rounds.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from isthmus.collective.core.types import Member, PeerId, PeerRef, View
from isthmus.collective.transport.bundle import Bundle, BundleOwner
from isthmus.collective.transport.hello import Hello, Purpose
from isthmus.collective.transport.link import Caps
from isthmus.collective.transport.refusal_log import RefusalLog
from isthmus.collective.transport.security import Security
from isthmus.collective.transport.sockets import SocketOptions

_MAX_STRANGERS = 64
"""Starts of peers that may be connected before a view names them; the oldest goes first."""
_MAX_STARTS = 4
"""Of one peer among them: it makes room for itself, and not at the cost of others."""
_MAX_REMEMBERED = 4096
"""Peers of which is remembered which side dials."""


class Mesh:
    """See the module.

    Args:
        me: this start of this peer.
        hello: makes the hello for (peer, stream, num_streams) of a connection that we dial.
        num_streams: connections that we dial to each peer with a larger id; None chooses by the path.
        chunk_nbytes: longest payload.
        owner: hears what arrives.
        sockets: how they are set up.
        security: which of them are encrypted; None encrypts nothing.
        caps: bound what all of them together move.
        refusals: hears of connections that were refused.
    """

    def __init__(
        self,
        *,
        me: PeerRef,
        hello: Callable[[PeerRef, int, int], Hello],
        num_streams: int | None,
        chunk_nbytes: int,
        owner: BundleOwner,
        sockets: SocketOptions,
        security: Security | None,
        caps: Caps,
        refusals: RefusalLog,
    ) -> None:
        self.bundles: dict[PeerRef, Bundle] = {}
        self.view: View | None = None
        self.closed = False
        self._me = me
        self._hello = hello
        self._num_streams = num_streams
        self._chunk_nbytes = chunk_nbytes
        self._owner = owner
        self._sockets = sockets
        self._security = security
        self._caps = caps
        self._refusals = refusals
        self._dials: dict[PeerId, bool] = {}
        """Whether our side opens the connections, where that was found out."""
        self._moved_by_closed = [0, 0]

    def adopt(self, sock: socket.socket, hello: Hello) -> None:
        """Take an accepted BULK connection for good. One that cannot be meant for us is closed and counted."""
        known = self.view
        member = next((m for m in known.members if m.peer_id == hello.peer_id), None) if known else None
        if self.closed or hello.peer_id == self._me.peer_id or hello.stream >= hello.num_streams:
            self._refuse(sock, hello, "no stream of another peer")
            return
        if member is not None and hello.incarnation < member.incarnation:
            self._refuse(sock, hello, "connection of an older incarnation")
            return
        bundle = self.bundles.get(hello.ref)
        if bundle is None:
            self._make_room_for_stranger(hello.peer_id)
            bundle = self._new_bundle(hello.ref, hello.num_streams)
        elif bundle.is_dialler and bundle.is_connected and self._me.peer_id < hello.peer_id:  # see redial.py
            self._refuse(sock, hello, "connected in the other direction")
            return
        bundle.is_dialler = False
        bundle.keep_streams(hello.num_streams)  # the dialler decides
        bundle.attach(sock, hello.stream)

    def meet(self, member: Member) -> Bundle:
        """The links with a peer that may become a member.

        Those to an older start of it end: nobody is there any more, and what they dial anew would take the place of
        ours at the new start (tests/netns/test_behind_nats.py).
        """
        for ref, older in self.bundles.items():
            if ref.peer_id == member.peer_id and ref.incarnation < member.incarnation:
                older.close()
        bundle = self.bundles.get(member.ref)
        if bundle is None:
            self._make_room_for_stranger(member.peer_id)
            bundle = self._new_bundle(member.ref, self._num_streams)
        bundle.address = member.address
        return bundle

    def prepare(self, view: View) -> None:
        """Keep the links to members that stay, drop those to former ones, name the new ones.

        Whoever comes from an older view than the last one may have been left out meanwhile: the others have dropped
        its links then. Where the line was cut, it hears of that only when it sends again, seconds after it was healed,
        and the others wait for its call. So it calls anew, and waits for theirs as for those of peers never met.
        """
        if self.view is not None and view.epoch > self.view.epoch + 1:
            for ref, bundle in list(self.bundles.items()):
                bundle.is_met = False
                if bundle.is_dialler:
                    self.drop(ref)
        former = {member.ref for member in self.view.members} if self.view else set()
        members = {member.ref for member in view.members}
        newest = {member.peer_id: member.incarnation for member in view.members}
        for ref in list(self.bundles):
            outdated = ref.incarnation < newest.get(ref.peer_id, 0)
            if ref not in members and (ref in former or outdated):
                self.drop(ref)
        for member in linked_members(view, self._me):
            if member.ref not in self.bundles:
                self._new_bundle(member.ref, self._num_streams)
            self.bundles[member.ref].address = member.address
        self.view = view

    async def connect(self, timeout_s: float) -> None:
        """Dial the view's members for at most so long. Who cannot be reached is the first round's finding."""
        assert self.view is not None
        members = {member.ref for member in linked_members(self.view, self._me)}
        wanted = [bundle for ref, bundle in self.bundles.items() if ref in members and bundle.is_dialler]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as dials:
                for bundle in wanted:
                    dials.create_task(bundle.repair())

    def put_out(self, peer_id: PeerId) -> None:
        """End the connections of a peer that others do not want any more. To a round it is one whose line broke."""
        for ref, bundle in list(self.bundles.items()):
            if ref.peer_id == peer_id:
                bundle.cut("the peer was put out")

    def drop(self, ref: PeerRef) -> None:
        """End all links to this start of a peer."""
        bundle = self.bundles.pop(ref)
        if bundle.was_connected:
            self._dials.pop(ref.peer_id, None)
            self._dials[ref.peer_id] = bundle.is_dialler
            if len(self._dials) > _MAX_REMEMBERED:
                del self._dials[next(iter(self._dials))]
        bundle.close()
        self._moved_by_closed[0] += bundle.bytes_sent
        self._moved_by_closed[1] += bundle.bytes_received

    def close(self) -> None:
        """End all links."""
        self.closed = True
        for ref in list(self.bundles):
            self.drop(ref)

    @property
    def bytes_sent(self) -> int:
        """Bulk bytes given to the kernel since the start, headers included."""
        return self._moved_by_closed[0] + sum(bundle.bytes_sent for bundle in self.bundles.values())

    @property
    def bytes_received(self) -> int:
        """Bulk bytes read since the start, headers included."""
        return self._moved_by_closed[1] + sum(bundle.bytes_received for bundle in self.bundles.values())

    def _new_bundle(self, ref: PeerRef, num_streams: int | None) -> Bundle:
        self.bundles[ref] = Bundle(
            ref,
            is_dialler=self._dials.get(ref.peer_id, self._me.peer_id < ref.peer_id),
            num_streams=num_streams,
            chunk_nbytes=self._chunk_nbytes,
            hello=self._hello,
            owner=self._owner,
            options=self._sockets,
            security=self._security,
            caps=self._caps,
        )
        return self.bundles[ref]

    def _refuse(self, sock: socket.socket, hello: Hello, reason: str) -> None:
        self._say(hello.peer_id, reason)
        sock.close()

    def _say(self, peer_id: PeerId, reason: str) -> None:
        self._refusals.ended(reason, asyncio.get_running_loop().time(), peer_id=peer_id, purpose=Purpose.BULK)

    def _make_room_for_stranger(self, peer_id: PeerId) -> None:
        view = self.view
        strangers = [ref for ref in self.bundles if view is None or not view.holds(ref)]
        own = [ref for ref in strangers if ref.peer_id == peer_id]
        if len(own) >= _MAX_STARTS or len(strangers) >= _MAX_STRANGERS:
            self._say(peer_id, "too many connections before a view")
            self.drop(own[0] if len(own) >= _MAX_STARTS else strangers[0])


def linked_members(view: View, me: PeerRef) -> list[Member]:
    """The members that this one has a link with, or is to have one."""
    rank = view.rank_of(me.peer_id)
    unlinked = frozenset[int]() if rank is None else view.apart_from(rank)
    return [member for other, member in enumerate(view.members) if member.ref != me and other not in unlinked]
