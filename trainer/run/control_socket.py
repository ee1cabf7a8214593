# SPDX-License-Identifier: Apache-2.0
"""How the command line talks to the daemon of this machine: ZeroMQ over a Unix socket, msgpack, one answer a question.

A daemon binds a socket in a private folder (0700) under the system's temporary one, because a Unix socket's path may
have 107 bytes and a peer's folder may be deep; it writes the path to `peer.json` in the peer's folder, where clients
look. Rules: every question has a deadline; a daemon that is gone is told from one that does not answer, also when its
process id is another program's by now (after a restart of the machine or of a container); whoever may
open the socket is this user (permissions), so nothing is signed. Must not know what leaving means.

Errors: `NothingRuns` and `NobodyReachable` (exit code 4).
"""

import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar, assert_never

import msgspec
import zmq
import zmq.asyncio

from isthmus.trainer.contact.ticket import Ticket, decode_ticket, encode_ticket
from isthmus.trainer.errors import EnvironmentFault, NobodyReachable, NothingRuns, NotOurs, Refused
from isthmus.trainer.files import write_atomically
from isthmus.trainer.record.status import PeerStatus, Status
from isthmus.trainer.run.control_messages import (
    Accepted,
    LeaveRequest,
    NotDone,
    NotUnderstood,
    PeersReply,
    PeersRequest,
    PutOutRequest,
    Reply,
    Request,
    RevokeRequest,
    StatusReply,
    StatusRequest,
    StopRequest,
    TicketReply,
    TicketRequest,
)

if TYPE_CHECKING:
    from isthmus.trainer.contact.office import Office

log = logging.getLogger(__name__)

PEER_FILE_NAME = "peer.json"
DEFAULT_TIMEOUT_S = 5.0

ReplyT = TypeVar("ReplyT", bound=Reply)

_MAX_MESSAGE_NBYTES = 1 << 20
_MAX_QUEUED = 64
_ELSEWHERE = NotDone("the coordinator of the run does not live in this folder; name its folder with --dir")


class PeerFile(msgspec.Struct, frozen=True, kw_only=True):
    """`peer.json`: where the daemon of a folder is. Schema `isthmus.peer/1`."""

    schema: str = "isthmus.peer/1"
    socket: str
    pid: int
    peer_id: str
    run_id: str
    metrics_address: str | None = None


class Controlled(Protocol):
    """What a daemon lets itself be asked. All return at once."""

    def status(self) -> Status:
        """How it is now."""

    def peers(self) -> tuple[PeerStatus, ...]:
        """Who is in the run, as far as it knows."""

    def leave(self) -> None:
        """Begin to leave; repeated calls change nothing."""

    def stop(self) -> None:
        """Begin to stop without handing in anything."""

    @property
    def office(self) -> "Office | None":
        """Where an operator asks about the run; None where its coordinator does not live."""


class ControlServer:
    """The daemon's end. Use as a context manager around a task that runs `serve`.

    Args:
        run_dir: the peer's folder; gets `peer.json` while the server is open.
        controlled: who answers.
        peer_id: for `peer.json`.
        run_id: for `peer.json`.
        metrics_address: for `peer.json`.

    Raises (on entry):
        EnvironmentFault: no socket can be made.
    """

    def __init__(
        self, run_dir: Path, controlled: Controlled, *, peer_id: str, run_id: str, metrics_address: str | None = None
    ) -> None:
        self._run_dir = run_dir
        self._controlled = controlled
        self._peer_id = peer_id
        self._run_id = run_id
        self._metrics_address = metrics_address

    def __enter__(self) -> "ControlServer":
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="isthmus-"))  # mode 0700
        except OSError as error:
            raise EnvironmentFault(
                f"the control socket has no folder: {error.strerror}", cure="name one that can be written in TMPDIR"
            ) from error
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_NBYTES)
            self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
            self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
            path = self._folder / "control"
            self._socket.bind(f"ipc://{path}")
            peer = PeerFile(
                socket=str(path),
                pid=os.getpid(),
                peer_id=self._peer_id,
                run_id=self._run_id,
                metrics_address=self._metrics_address,
            )
            write_atomically(self._run_dir / PEER_FILE_NAME, msgspec.json.encode(peer), mode=0o600)
        except (OSError, zmq.ZMQError) as error:
            self._close()
            raise EnvironmentFault(
                f"the control socket cannot be made: {error.strerror}", cure="check TMPDIR and the folder of --dir"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (self._run_dir / PEER_FILE_NAME).unlink(missing_ok=True)
        self._close()

    async def serve(self) -> None:
        """Answer questions until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or frames[1]:
                continue  # no request of a REQ socket; there is nobody to answer
            reply = msgspec.msgpack.encode(await self._answer(frames[2]))
            try:
                await self._socket.send_multipart([frames[0], b"", reply], flags=zmq.NOBLOCK)
            except zmq.Again:
                log.debug("control_reply_dropped cause=%r", "the asker does not read")

    async def _answer(self, content: bytes) -> Reply:
        try:
            request = msgspec.msgpack.decode(content, type=Request)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return NotUnderstood(f"another version of isthmus? {error}")
        match request:
            case StatusRequest():
                return StatusReply(self._controlled.status())
            case LeaveRequest():
                self._controlled.leave()
                return Accepted()
            case StopRequest():
                self._controlled.stop()
                return Accepted()
            case PeersRequest():
                return PeersReply(self._controlled.peers())
            case TicketRequest() | PutOutRequest() | RevokeRequest():
                return await self._consult(request)
            case _:
                assert_never(request)

    async def _consult(self, request: TicketRequest | PutOutRequest | RevokeRequest) -> Reply:
        office = self._controlled.office
        if office is None:
            return _ELSEWHERE
        match request:
            case TicketRequest(is_new=False):
                return TicketReply(encode_ticket(office.ticket()), office.program)
            case TicketRequest(is_once=is_once, lifetime_s=lifetime_s):
                made = office.new_ticket(is_once=is_once, lifetime_s=lifetime_s)
                return TicketReply(encode_ticket(made), office.program)
            case PutOutRequest(peer_id=peer_id, for_ever=for_ever):
                return _done(await office.put_out(peer_id, for_ever=for_ever))
            case RevokeRequest(ticket_id=ticket_id, expires_at_s=expires_at_s):
                return _done(await office.revoke(ticket_id, expires_at_s))
            case _:
                assert_never(request)

    def _close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


class ControlClient:
    """The command line's end: blocking questions to the daemon of a folder.

    Args:
        run_dir: the peer's folder.
        timeout_s: for each answer.

    Raises:
        NothingRuns: no daemon is there, or it is gone.
    """

    def __init__(self, run_dir: Path, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.run_dir = run_dir
        self._timeout_s = timeout_s
        self.peer = find_peer(run_dir)

    def status(self) -> Status:
        """How the daemon is.

        Raises:
            NobodyReachable: it does not answer in time, or not in our language.
        """
        return self._ask(StatusRequest(), StatusReply).status

    def peers(self) -> tuple[PeerStatus, ...]:
        """Who is in the run, as far as the daemon knows. Raises as `status`."""
        return self._ask(PeersRequest(), PeersReply).peers

    def ticket(self, request: TicketRequest) -> tuple[Ticket, tuple[str, ...] | None]:
        """The run's, or a new one; and for whom, see `invitation`.

        Raises:
            Refused: the coordinator does not live there.
            NobodyReachable: as in `status`.
        """
        reply = self._ask(request, TicketReply)
        return decode_ticket(reply.ticket), reply.program

    def order(self, request: LeaveRequest | StopRequest | PutOutRequest | RevokeRequest) -> None:
        """Returns when it is done for good, or of a way out when it has begun: see `has_ended`.

        Raises:
            Refused: it cannot be done.
            NobodyReachable: as in `status`.
        """
        self._ask(request, Accepted)

    def has_ended(self) -> bool:
        """Whether the daemon is gone: it removes its file last, unless it was killed."""
        return not (self.run_dir / PEER_FILE_NAME).exists() or not _is_there(self.peer)

    def was_killed(self) -> bool:
        """Whether a daemon that has ended has left its file behind; another one may have put its own there."""
        try:
            return _read_peer_file(self.run_dir / PEER_FILE_NAME) == self.peer
        except (OSError, msgspec.MsgspecError, UnicodeError):
            return False

    def _ask(self, request: Request, kind: type[ReplyT]) -> ReplyT:
        timeout_ms = int(self._timeout_s * 1000)
        with zmq.Context() as context, context.socket(zmq.REQ) as asker:
            asker.setsockopt(zmq.LINGER, 0)
            asker.setsockopt(zmq.SNDTIMEO, timeout_ms)
            asker.setsockopt(zmq.RCVTIMEO, timeout_ms)
            asker.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_NBYTES)
            try:
                asker.connect(f"ipc://{self.peer.socket}")
                asker.send(msgspec.msgpack.encode(request))
                reply: Reply = msgspec.msgpack.decode(asker.recv(), type=Reply)
            except zmq.Again as error:
                raise NobodyReachable(
                    f"the daemon in {self.run_dir} (process {self.peer.pid}) did not answer in {self._timeout_s:g} s",
                    cure="try again, or look at its log",
                ) from error
            except zmq.ZMQError as error:
                raise NobodyReachable(f"the daemon in {self.run_dir} cannot be asked: {error.strerror}") from error
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise NobodyReachable(
                    f"the daemon in {self.run_dir} answers in another language", cure="use its version of isthmus"
                ) from error
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, NotDone):
            raise Refused(reply.reason)
        reason = reply.reason if isinstance(reply, NotUnderstood) else type(reply).__name__
        raise NobodyReachable(f"the daemon in {self.run_dir} did not understand: {reason}")


def _done(refusal: str | None) -> Reply:
    return Accepted() if refusal is None else NotDone(refusal)


def find_peer(run_dir: Path) -> PeerFile:
    """Where the daemon of a folder is.

    Raises:
        NothingRuns: there is none, or its process is gone.
        NotOurs: this user may not read the folder.
    """
    path = run_dir / PEER_FILE_NAME
    cure = "name the folder of a running peer with --dir"
    try:
        peer = _read_peer_file(path)
    except PermissionError as error:
        raise NotOurs(run_dir) from error
    except OSError as error:
        raise NothingRuns(f"no isthmus runs in {run_dir}", cure=cure) from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise NothingRuns(f"{path} is damaged", cure=cure) from error
    if not _is_there(peer):
        raise NothingRuns(f"the isthmus in {run_dir} has ended without a word (process {peer.pid})", cure=cure)
    return peer


def _read_peer_file(path: Path) -> PeerFile:
    return msgspec.json.decode(path.read_bytes(), type=PeerFile)


def is_running(run_dir: Path) -> bool:
    """Whether a daemon runs in a folder."""
    try:
        find_peer(run_dir)
    except NothingRuns:
        return False
    return True


def _is_there(peer: PeerFile) -> bool:
    """Whether its process lives and is the one that listens."""
    return _is_alive(peer.pid) and _is_listened_at(peer.socket)


def _is_listened_at(path: str) -> bool:
    """Whether somebody listens at a Unix socket, even if it is too busy to answer, or not for us."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
