# SPDX-License-Identifier: Apache-2.0
"""Ports that a process finds free again when it starts for the second time."""

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens, below those that Linux gives to connections: one of them took a port meanwhile."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", random.randrange(16384, 32768)))
                ports.append(sock.getsockname()[1])
    return ports
