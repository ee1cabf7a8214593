# SPDX-License-Identifier: Apache-2.0
"""Sockets and everything that is only known about sockets: options, handshakes, links, channels, the listener.

The layer above speaks of frames. Operating system errors end here: they become the errors of collective/errors.py.
"""

from isthmus.collective.transport.certificates import Authority, Credentials
from isthmus.collective.transport.channel import Channel, connect
from isthmus.collective.transport.hello import Hello, HelloReply, Purpose
from isthmus.collective.transport.listener import Listener
from isthmus.collective.transport.security import Mode, Security, TicketSecurity
from isthmus.collective.transport.sockets import SocketOptions
from isthmus.collective.transport.wire import FrameType

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
