# SPDX-License-Identifier: Apache-2.0
"""Sockets and everything that is only known about sockets: options, handshakes, links, channels, the listener.

The layer above speaks of frames. Operating system errors end here: they become the errors of collective/errors.py.
"""

from collective.transport.certificates import Authority, Credentials
from collective.transport.channel import Channel, connect
from collective.transport.hello import Hello, HelloReply, Purpose
from collective.transport.listener import Listener
from collective.transport.security import Mode, Security, TicketSecurity
from collective.transport.sockets import SocketOptions
from collective.wire import FrameType

__all__ = [
    "Authority",
    "Channel",
    "Credentials",
    "FrameType",
    "Hello",
    "HelloReply",
    "Listener",
    "Mode",
    "Purpose",
    "Security",
    "SocketOptions",
    "TicketSecurity",
    "connect",
]
