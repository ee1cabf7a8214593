# SPDX-License-Identifier: Apache-2.0
"""This package without the rest: a communicator with its own listener, for scripts that decide membership themselves.

    async with open_communicator(rank, "0.0.0.0:4000") as communicator:
        await communicator.install(view_of(0, ["10.0.0.1:4000", "10.0.0.2:4000"]))
        await communicator.all_reduce(communicator.key(0), tensor)

Rules: whoever uses it says who takes part: it makes the views, the same on all members, each with a larger epoch.
"""

import contextlib
import hmac
from collections.abc import AsyncIterator, Mapping, Sequence

from isthmus.collective.api.communicator import Communicator
from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, PeerRef, View
from isthmus.collective.rounds.options import BulkOptions
from isthmus.collective.transport.hello import REFUSED_EXIT_CODE, Hello, HelloReply, Purpose
from isthmus.collective.transport.listener import Listener
from isthmus.collective.transport.security import Security
from isthmus.collective.transport.wire import PROTOCOL_VERSION


def peer_id_of(number: int) -> PeerId:
    """A peer id from a small number."""
    return PeerId(f"{number:016x}")


def view_of(epoch: int, addresses: Sequence[str] | Mapping[int, str]) -> View:
    """A view of the peers with these numbers, all in their first incarnation.

    Args:
        epoch: larger than that of the view before.
        addresses: `host:port` by peer number; a sequence counts from 0.
    """
    numbered = addresses if isinstance(addresses, Mapping) else dict(enumerate(addresses))
    members = tuple(Member(peer_id_of(number), Incarnation(1), numbered[number]) for number in sorted(numbered))
    return View(Epoch(epoch), OuterStep(0), b"", members)


@contextlib.asynccontextmanager
async def open_communicator(
    number: int,
    address: str = "127.0.0.1:0",
    *,
    secret: bytes = b"",
    num_streams: int | None = None,
    chunk_nbytes: int = 2 << 20,
    options: BulkOptions | None = None,
    security: Security | None = None,
) -> AsyncIterator[Communicator]:
    """A communicator that listens at `address` until the context ends. `communicator.address` is where others reach it.

    Args:
        number: of this peer among all, from 0 up.
        address: host:port; port 0 takes any free one.
        secret: at most 128 bytes that all peers must show each other; of no matter with `security`, which has its own.
        num_streams: see Communicator.
        chunk_nbytes: see Communicator.
        options: see Communicator.
        security: encrypts what leaves this machine, see `Security.shared`; None encrypts nothing.

    Raises:
        AddressInUse: somebody listens there.
        ValueError: not an address of this machine.
    """
    me = PeerRef(peer_id_of(number), Incarnation(1))

    def hello(_to: PeerRef, stream: int, streams: int) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            run_id="",
            purpose=Purpose.BULK,
            peer_id=me.peer_id,
            incarnation=me.incarnation,
            credential=secret,
            stream=stream,
            num_streams=streams,
        )

    def accept(hello: Hello) -> HelloReply:
        # With a security the listener has let everybody prove who it is.
        is_one_of_us = security is not None or hmac.compare_digest(hello.credential, secret)
        return HelloReply(
            accepted=is_one_of_us,
            code=0 if is_one_of_us else REFUSED_EXIT_CODE,
            reason="" if is_one_of_us else "another secret; give all peers the same",
            peer_id=me.peer_id,
            incarnation=me.incarnation,
        )

    communicator = Communicator(
        me=me, hello=hello, num_streams=num_streams, chunk_nbytes=chunk_nbytes, options=options, security=security
    )
    sockets = (options or BulkOptions()).sockets
    listener = Listener(
        address, accept=accept, routes={}, bulk=communicator.adopt, options=sockets, security=security, max_unknown=256
    )
    async with listener:
        communicator.address = listener.address
        try:
            yield communicator
        finally:
            await communicator.close()
