# SPDX-License-Identifier: Apache-2.0
"""Machines of a test: network namespaces with addresses of their own, plugged into networks of a hub. Not a test.

    with World() as world:
        home = world.network("home")
        left = world.machine(home="10.9.0.1/24")
        right = world.machine(home="10.9.0.2/24")
        subprocess.run([*left.inside, "ping", "-c1", "10.9.0.2"])

The namespaces have no names: they end with the processes that hold them, and those with this one.
"""

import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from scripts.wanlink.wan import Wan, WanError

_HOLD = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo; exec sleep 100000")


def why_impossible() -> str | None:
    """Why this machine gives no namespaces; None if it does."""
    try:
        with World() as world:
            world.machine()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces need root, iproute2 and util-linux: {error}"
    return None


def why_no_wan() -> str | None:
    """Why this machine emulates no lines; None if it does."""
    try:
        with Wan(peers=2):
            return None
    except WanError as error:
        return str(error)


@dataclass(frozen=True)
class Machine:
    """`inside` before a command runs it there."""

    pid: int

    @property
    def inside(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net")

    def run(self, command: str) -> str:
        """A command of few words, to its end; returns what it printed."""
        done = subprocess.run([*self.inside, *command.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")
        return done.stdout


class World:
    """See the module. A context manager."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._numbers = itertools.count()
        self._networks: set[str] = set()

    def __enter__(self) -> "World":
        self._hub = self._namespace()
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    def machine(self, **networks: str) -> Machine:
        """A machine with an interface in each of these networks, named after it; its address there with its width."""
        machine = self._namespace()
        for network, address in networks.items():
            self.plug(machine, network, address)
        return machine

    def behind_nat(self, lan: str, *, outside: str, network: str) -> Machine:
        """A machine at 192.168.1.2 of a network `lan` of its own, whose router hides it from `network`.

        Args:
            lan: a name.
            outside: address of the router in `network`, with its width: all that others see.
            network: where the others are. Whoever calls from there does not get in.
        """
        router = self.machine(**{lan: "192.168.1.1/24", network: outside})
        router.run("sysctl -qw net.ipv4.ip_forward=1")
        router.run(f"iptables -t nat -A POSTROUTING -o {network} -j MASQUERADE")
        router.run(f"iptables -A FORWARD -i {network} -m conntrack --ctstate NEW -j DROP")
        machine = self.machine(**{lan: "192.168.1.2/24"})
        machine.run("ip route add default via 192.168.1.1")
        return machine

    def plug(self, machine: Machine, network: str, *addresses: str) -> None:
        """Give a machine an interface, named after its network, with these addresses."""
        if network not in self._networks:
            self._networks.add(network)
            self._hub.run(f"ip link add {network} type bridge")
            self._hub.run(f"ip link set {network} up")
        cable = f"cable{next(self._numbers)}"
        self._hub.run(f"ip link add {cable} type veth peer name {network} netns {machine.pid}")
        self._hub.run(f"ip link set {cable} master {network} up")
        for address in addresses:
            machine.run(f"ip address add {address} dev {network} {'nodad' if ':' in address else ''}")
        machine.run(f"ip link set {network} up")

    def _namespace(self) -> Machine:
        holder = subprocess.Popen(_HOLD, stdout=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise OSError("unshare --net is refused")
        machine = Machine(holder.pid)
        machine.run("ip link set lo up")
        return machine


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """10.9.0.1 and 10.9.0.2 in one network."""
    with World() as world:
        yield world.machine(lan="10.9.0.1/24"), world.machine(lan="10.9.0.2/24")


@contextlib.contextmanager
def two_behind_nats() -> Iterator[tuple[Machine, Machine, Machine]]:
    """One at 203.0.113.1, and two that have the same address, each behind a router of its own."""
    with World() as world:
        outside = world.machine(public="203.0.113.1/24")
        one = world.behind_nat("lan1", outside="203.0.113.11/24", network="public")
        other = world.behind_nat("lan2", outside="203.0.113.12/24", network="public")
        yield outside, one, other


IMPOSSIBLE = why_impossible()
MARKS = (
    pytest.mark.netns,
    pytest.mark.multiprocess,
    pytest.mark.skipif(IMPOSSIBLE is not None, reason=str(IMPOSSIBLE)),
)
"""Of tests with real peers on several machines."""
