# SPDX-License-Identifier: Apache-2.0
"""What is left of an all-reduce when everything but its bytes is taken away: the floor of scripts/bench collective.

The same butterfly, checksums and kept input as ours: one cubic socket a pair, one epoll loop that does nothing else,
chunks sent and received with as few system calls as can be. No peer may fail, nothing is encoded, there is one
operation at a time, and nobody looks whether numbers are finite. Not for use.
"""

import select
import socket
import struct
from collections import deque

import torch
import xxhash
from torch import Tensor

_HEADER = struct.Struct("=?xxxIQ")  # is a result, chunk, checksum
_CHUNK_NBYTES = 1 << 20
_IN = select.EPOLLIN
_BOTH = select.EPOLLIN | select.EPOLLOUT


def near_socket() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class _Link:
    """What is under way on one socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.results: deque[tuple[bool, int, memoryview]] = deque()
        self.parts: deque[tuple[bool, int, memoryview]] = deque()
        self.unsent: list[memoryview] = []
        self.is_writing = False
        self.header = memoryview(bytearray(_HEADER.size))
        self.missing = _HEADER.size  # bytes of the header
        self.rest = memoryview(b"")  # of the payload
        self.payload = self.rest
        self.arriving = (False, 0, 0)
        self.free: list[Tensor] = []
        self.stage = torch.empty(0)


class BareLoop:
    """All-reduces (mean) of fp32 tensors.

    Args:
        rank: ours.
        sockets: connected, by rank, made by `near_socket`.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._world = len(sockets) + 1
        self._links = {other: _Link(sock) for other, sock in sockets.items()}
        self._by_fd = {link.sock.fileno(): (other, link) for other, link in self._links.items()}

    def all_reduce(self, tensor: Tensor, out: Tensor) -> None:
        """`out` becomes the mean of all tensors, whose number of elements is a multiple of 256 KiB times the world."""
        self._tensor, self._out = tensor, out
        self._in_bytes, self._out_bytes = (part.numpy().data.cast("B") for part in (tensor, out))
        self._slice = tensor.numel() // self._world
        self._chunk = min(_CHUNK_NBYTES // 4, self._slice)
        count = self._slice // self._chunk
        self._parts: list[list[tuple[_Link, Tensor]]] = [[] for _ in range(count)]
        self._to_come = self._to_send = 2 * count * len(self._links)
        self._epoll = select.epoll()
        for other, link in self._links.items():
            link.parts.extend((False, chunk, self._in_bytes[self._span(other, chunk)]) for chunk in range(count))
            link.is_writing = True
            self._epoll.register(link.sock, _BOTH)
        with self._epoll:
            while self._to_come or self._to_send:
                for fd, events in self._epoll.poll():
                    other, link = self._by_fd[fd]
                    if events & select.EPOLLIN:
                        self._read(other, link)
                    if events & select.EPOLLOUT:
                        self._write(link)

    def _span(self, rank: int, chunk: int) -> slice:
        first = (rank * self._slice + chunk * self._chunk) * 4
        return slice(first, first + self._chunk * 4)

    def _write(self, link: _Link) -> None:
        try:
            while link.unsent or self._take_next(link):
                nbytes = link.sock.sendmsg(link.unsent)
                while link.unsent and nbytes >= len(link.unsent[0]):
                    nbytes -= len(link.unsent.pop(0))
                if link.unsent:
                    link.unsent[0] = link.unsent[0][nbytes:]
                else:
                    self._to_send -= 1
        except BlockingIOError:
            return
        link.is_writing = False
        self._epoll.modify(link.sock, _IN)

    def _take_next(self, link: _Link) -> bool:
        queue = link.results or link.parts
        if not queue:
            return False
        is_result, chunk, payload = queue.popleft()
        link.unsent = [memoryview(_HEADER.pack(is_result, chunk, xxhash.xxh3_64_intdigest(payload))), payload]
        return True

    def _read(self, other: int, link: _Link) -> None:
        try:
            while self._to_come:
                if link.missing:
                    link.missing -= link.sock.recv_into(link.header[-link.missing :])
                else:
                    nbytes = link.sock.recvmsg_into([link.rest, link.header])[0]
                    ahead = max(0, nbytes - len(link.rest))
                    link.rest = link.rest[nbytes:]
                    if link.rest:
                        continue
                    link.missing = _HEADER.size - ahead
                    self._take(link)
                if not link.missing:
                    self._place(other, link)
        except BlockingIOError:
            return

    def _place(self, other: int, link: _Link) -> None:
        is_result, chunk, _ = link.arriving = _HEADER.unpack(link.header)
        if is_result:
            link.payload = self._out_bytes[self._span(other, chunk)]
        else:
            link.stage = link.free.pop() if link.free else torch.empty(_CHUNK_NBYTES // 4)
            link.payload = link.stage.numpy().data.cast("B")[: self._chunk * 4]
        link.rest = link.payload

    def _take(self, link: _Link) -> None:
        is_result, chunk, check = link.arriving
        assert xxhash.xxh3_64_intdigest(link.payload) == check
        self._to_come -= 1
        if not is_result:
            self._parts[chunk].append((link, link.stage))
            if len(self._parts[chunk]) == len(self._links):
                self._reduce(chunk)

    def _reduce(self, chunk: int) -> None:
        span = self._span(self._rank, chunk)
        place = slice(span.start // 4, span.stop // 4)
        total, base = self._out[place], self._tensor[place]
        for link, stage in self._parts[chunk]:
            torch.add(base, stage[: self._chunk], out=total)
            link.free.append(stage)
            base = total
        total.mul_(1 / self._world)
        for link in self._links.values():
            link.results.append((True, chunk, self._out_bytes[span]))
            if not link.is_writing:
                link.is_writing = True
                self._epoll.modify(link.sock, _BOTH)
            self._write(link)
