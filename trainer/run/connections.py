# SPDX-License-Identifier: Apache-2.0
"""Whom this process reaches (`Connections`), and who reaches it (`Reception`).

Must not know what a connection is about, nor what is exchanged.
"""

import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import version

from isthmus.collective import AddressInUse, Communicator
from isthmus.collective.api.callbacks import Callbacks
from isthmus.collective.core.address import join_address, split_address
from isthmus.collective.core.types import Member, PeerRef
from isthmus.collective.errors import PeerUnreachable
from isthmus.collective.transport import Channel, Hello, Listener, Purpose
from isthmus.collective.transport.link import Caps
from isthmus.collective.transport.security import wall_s
from isthmus.elastic.donor.donor import Donor, refuse
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.trainer.config.wiring import bulk_options
from isthmus.trainer.contact.admission import Gatekeeper, hello_maker
from isthmus.trainer.contact.bouncer import Bouncer
from isthmus.trainer.contact.reach import Reach
from isthmus.trainer.doctor.callback import CallBack
from isthmus.trainer.doctor.service import DoctorService, Surroundings
from isthmus.trainer.errors import ConfigError, EnvironmentFault
from isthmus.trainer.run.preparation import Start

log = logging.getLogger(__name__)

_DIAL_TIMEOUT_S = 5.0
_MEMBER_DIAL_S = 3.0
"""For a member that is asked to dial somebody back."""


class Connections:
    """A peer's own: the bulk links of exchanges, and what it dials or has others dial.

    Attributes:
        reach: where others reach this peer.
        communicator: the collective layer.
        callbacks: calls that one side asks the other for; `serve` says what they are for.
    """

    def __init__(self, start: Start, reach: Reach, serve: Callable[[Channel], Awaitable[None]]) -> None:
        self._start = start
        self.reach = reach
        net, hello = start.config.net, hello_maker(start.me, start.terms.run_id)
        self.communicator = Communicator(
            me=start.me,
            hello=lambda _peer, stream, num_streams: hello(Purpose.BULK, stream, num_streams),
            num_streams=net.num_streams,
            chunk_nbytes=net.chunk_nbytes,
            options=bulk_options(start.config),
            security=start.security,
        )
        self.callbacks = Callbacks(self.communicator, dial=self._call_back, serve=serve)

    async def dial(self, address: str, purpose: Purpose) -> Channel:
        """Open a connection to whoever is there. A coordinator in this process is where this process is now."""
        if address == self.reach.first:
            address = self.reach.now()
        return await self._start.dial(address, purpose, timeout_s=_DIAL_TIMEOUT_S)

    async def dial_donor(self, member: Member) -> Channel:
        """Dial it, or where that does not get through have it call us."""
        if not self.communicator.calls_us(member.ref):
            try:
                return await self.dial(member.address, Purpose.STATE)
            except PeerUnreachable as error:
                log.debug("donor_unreachable peer_id=%s cause=%s", member.peer_id, error)
        return await self.callbacks.open(member, timeout_s=_DIAL_TIMEOUT_S)

    async def _call_back(self, address: str, ref: PeerRef) -> Channel:
        return await self._start.dial(address, Purpose.CALLED, timeout_s=_DIAL_TIMEOUT_S, expect=ref.peer_id)


class Reception:
    """The port: taken before anybody is there to serve, and opened when all are. `bind`, `open`; `close` in any case.

    Args:
        start: of this process.
        bouncer: ends the connections of whoever is put out.
        coordinator: the one that lives here, once it does.
    """

    def __init__(self, start: Start, bouncer: Bouncer, coordinator: Callable[[], CoordinatorShell | None]) -> None:
        self._start = start
        self._coordinator = coordinator
        self._communicator: Communicator | None = None
        self._donor: Donor | None = None
        self._call_back = CallBack()
        gatekeeper = Gatekeeper(
            start.me,
            start.terms,
            security=start.security,
            run=None if start.founded is None else start.founded.run,
            now_s=wall_s,
            coordinator=coordinator,
        )
        self._routes: dict[Purpose, Callable[[Channel], Awaitable[None]]] = {
            Purpose.STATE: _give_nothing,
            Purpose.CALLED: _hang_up,
            Purpose.DIAL_BACK: self._call_back.serve,
        }
        if start.founded is not None:
            self._routes[Purpose.ADMISSION] = gatekeeper.admit
        self._listener = Listener(
            _address(start), accept=gatekeeper.accept, routes=self._routes, bulk=self._adopt, security=start.security
        )
        bouncer.ends(self._listener.put_out)

    def bind(self) -> str:
        """Take the port; returns the address that is listened at.

        Raises:
            EnvironmentFault: somebody else has it.
            ConfigError: it is no address of this machine.
        """
        with _address_errors():
            self._listener.bind()
        return self._listener.address

    def serve(self, connections: Connections, donor: Donor) -> None:
        """A peer lives here, and has this for those who are let in."""
        self._communicator, self._donor = connections.communicator, donor
        self._routes |= {Purpose.STATE: donor.serve, Purpose.CALLED: connections.callbacks.take}

    async def open(self) -> str:
        """Let people in; returns the address. Raises as `bind`."""
        coordinator = self._coordinator()
        if coordinator is not None:
            doctor = DoctorService(self._surroundings(coordinator), self._call_back)
            self._routes |= {Purpose.CONTROL: coordinator.serve, Purpose.DOCTOR: doctor.serve}
        with _address_errors():
            await self._listener.start()
        return self._listener.address

    async def close(self) -> None:
        """Let nobody in any more."""
        await self._listener.close()

    def refused(self) -> dict[str, int]:
        """How many connections were not let in, by reason."""
        bulk = {} if self._communicator is None else self._communicator.refused
        return dict(self._listener.counters) | {f"bulk: {reason}": count for reason, count in bulk.items()}

    def _surroundings(self, coordinator: CoordinatorShell) -> Surroundings:
        start, node = self._start, self._start.config.node
        communicator, donor = self._communicator, self._donor
        caps = Caps(upload=node.max_upload_bytes_per_s, download=node.max_download_bytes_per_s)

        async def dial(member: Member) -> Channel:
            return await start.dial(member.address, Purpose.DIAL_BACK, timeout_s=_MEMBER_DIAL_S, expect=member.peer_id)

        async def quiet() -> None:
            if donor is not None:
                await donor.room_for(0)

        return Surroundings(
            me=start.me.peer_id,
            terms=start.terms,
            version=version("isthmus"),
            now_s=wall_s,
            members=lambda: coordinator.status().view.members,
            dial=dial,
            quiet=quiet,
            upload=caps.upload if communicator is None else communicator.upload_cap,
            download=caps.download if communicator is None else communicator.download_cap,
        )

    def _adopt(self, sock: socket.socket, hello: Hello) -> None:
        if self._communicator is None:
            sock.close()
        else:
            self._communicator.adopt(sock, hello)


async def _give_nothing(channel: Channel) -> None:
    await refuse(channel, "a coordinator alone gives nothing")


async def _hang_up(_channel: Channel) -> None:
    """Nobody here has asked for a call."""


def _address(start: Start) -> str:
    """With the port of the last start, where the others look for the coordinator, unless told otherwise."""
    listen, founded = start.config.node.listen, start.founded
    if founded is not None and founded.address is not None and listen.endswith(":0"):
        return join_address(split_address(listen)[0], split_address(founded.address)[1])
    return listen


@contextlib.contextmanager
def _address_errors() -> Iterator[None]:
    try:
        yield
    except AddressInUse as error:
        raise EnvironmentFault(str(error)) from error
    except ValueError as error:
        raise ConfigError(
            str(error), cure="name an address of this machine with --listen", key="node.listen"
        ) from error
