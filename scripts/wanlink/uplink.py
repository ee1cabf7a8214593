# SPDX-License-Identifier: Apache-2.0
"""The emulator before one interface of a container, for a kernel without netem: what one user sends meets a link.

    python -m scripts.wanlink.uplink start INTERFACE UID LINK   as root; LINK is JSON, see `Uplink`
    python -m scripts.wanlink.uplink show                       prints what is in force, and counters, as JSON
    python -m scripts.wanlink.uplink clear                      as root; takes it off

    socket -> rule for its uid -> uplink0 -> this process: queue, losses, delay -> uplink0 -> forwarded -> INTERFACE

The rule sends what the user's sockets send to a TUN device. What the link lets through is written back to the device,
with the same addresses and no NAT; the kernel forwards it, and a forwarded packet belongs to nobody, so that the rule
does not hold for it. What comes in is not touched.

Rules: standard library only. The process lives as long as the container, as nobody. Its device stays when it dies:
nothing is sent past the link. IPv4 only; what the kernel sends by itself (a reset, the last acknowledgement of a closed
connection) belongs to nobody either.
"""

import contextlib
import gc
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.wanlink import packets
from scripts.wanlink.emulator import Emulator, go_first
from scripts.wanlink.namespaces import TX_QUEUE_FRAMES, KernelRefuses, open_tun
from scripts.wanlink.scenario import ScenarioError, Step
from scripts.wanlink.switch import Switch

DEVICE = "uplink0"
NOBODY = 65534
TABLE = "77"  # of routes; the rule has the same number, before those that Linux has by itself
ADDRESS = "\0isthmus-uplink"  # an abstract name belongs to the network namespace
MESSAGE_MAX_NBYTES = 4096
ANSWER_S = 5.0
END_S = 5.0
# A packet of our own address may come back by the device, and is forwarded.
SYSCTLS = {"net.ipv4.ip_forward": "1", "net.ipv4.conf.all.accept_local": "1", "net.ipv4.conf.all.rp_filter": "0"}


class Uplink(Emulator):
    """One device, and one link from it to itself.

    Args:
        device: the TUN device.
        link: delay_ms, jitter_ms, loss_percent, rate_mbit and queue_kb (1024 bytes), as in docker/scenario.toml.

    Raises:
        ScenarioError: there is no such link.
    """

    def __init__(self, device: int, link: dict[str, float]) -> None:
        rate_mbit = link["rate_mbit"]
        port = {"up_mbit": rate_mbit, "queue_ms": link["queue_kb"] * 1024 * 8 / rate_mbit / 1e3} if rate_mbit else {}
        path = {name: link[name] for name in ("delay_ms", "jitter_ms", "loss_percent")}
        switch = Switch(2, secrets.randbits(32), _onward)
        switch.apply(Step(links={"0>1": path}, ports={"0": port}), time.monotonic())
        super().__init__(switch, [device])

    def in_force(self) -> dict[str, float]:
        """The link as the switch has it, with the names of docker/scenario.toml."""
        path, port = self.switch.link(0, 1).settings, self.switch.ports[0]
        queue_kb = port.up.limit_nbytes / 1024 if port.settings.up_mbit else 0.0
        return {
            "delay_ms": path.delay_ms,
            "jitter_ms": path.jitter_ms,
            "loss_percent": path.loss_percent,
            "rate_mbit": port.settings.up_mbit,
            "queue_kb": queue_kb,
        }

    def counters(self) -> dict[str, float]:
        """Since the start: segments, those lost by chance and by a full queue; runs, late ones, see `Switch`."""
        link, switch = self.switch.link(0, 1), self.switch
        return {
            "segments": link.segments,
            "lost": link.lost,
            "queue_dropped": switch.ports[0].up.dropped,
            "unwritten": self.unwritten,
            "delivered": switch.delivered,
            "late": switch.late,
            "late_max_ms": round(switch.late_max_s * 1e3, 3),
            "cpu_s": round(time.process_time(), 3),
        }

    def _write(self, peer: int, pieces: packets.Pieces) -> None:  # noqa: ARG002 - there is one device
        super()._write(0, pieces)


def _onward(frame: bytes) -> int:
    """All IPv4 goes to the other end."""
    return 1 if len(frame) >= packets.VNET_NBYTES + 20 and frame[packets.VNET_NBYTES] >> 4 == 4 else -1


# ------------------------------------------------------------------------------------------ the kernel's part


def _set_up(interface: str, uid: int) -> int:
    """Make the device and send the user's packets there; returns the device's descriptor."""
    found = json.loads(_ip("-j", "-4", "address", "show", "dev", interface))
    addresses = [info["local"] for link in found for info in link.get("addr_info", ())]
    if not addresses:
        raise KernelRefuses(f"{interface} has no IPv4 address: give the container a network with one")
    for name, value in SYSCTLS.items():
        _set_sysctl(name, value, name)
    _ip("tuntap", "add", "dev", DEVICE, "mode", "tun", "vnet_hdr")
    try:
        _set_sysctl(f"net.ipv4.conf.{DEVICE}.rp_filter", "0", "net.ipv4.conf.default.rp_filter")
        mtu, length = str(found[0]["mtu"]), str(TX_QUEUE_FRAMES)
        _ip("link", "set", "dev", DEVICE, "mtu", mtu, "txqueuelen", length, "up")
        _ip("route", "add", "default", "dev", DEVICE, "src", addresses[0], "table", TABLE)
        _ip("rule", "add", "priority", TABLE, "uidrange", f"{uid}-{uid}", "lookup", TABLE)
        return open_tun(offload=True, name=DEVICE)
    except KernelRefuses:
        _take_off()
        raise


def _take_off() -> None:
    for arguments in (("rule", "del", "priority", TABLE), ("tuntap", "del", "dev", DEVICE, "mode", "tun")):
        with contextlib.suppress(KernelRefuses):  # not there
            _ip(*arguments)


def _set_sysctl(name: str, value: str, given_as: str) -> None:
    """See that it has this value; `given_as` is the name by which a container is started with it."""
    path = Path("/proc/sys") / name.replace(".", "/")
    if path.read_text().strip() == value:
        return
    try:
        path.write_text(value)
    except OSError as error:
        raise KernelRefuses(f"{name} is not {value}: start the container with --sysctl {given_as}={value}") from error


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise KernelRefuses(f"`ip {' '.join(arguments)}` cannot be run ({error}): install iproute2") from error
    if done.returncode:
        cure = "give the container NET_ADMIN" if "not permitted" in done.stderr else "correct that and try again"
        raise KernelRefuses(f"`ip {' '.join(arguments)}` failed ({' '.join(done.stderr.split())}): {cure}")
    return done.stdout


# ------------------------------------------------------------------------------------------ the process


def start(interface: str, uid: int, link: dict[str, float]) -> None:
    """Put the link in force; a process of its own goes on with it when this one ends.

    Raises:
        KernelRefuses, ScenarioError: it is not in force.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        control.bind(ADDRESS)
        device = _set_up(interface, uid)
        try:
            uplink = Uplink(device, link)
        except ScenarioError:
            os.close(device)
            _take_off()
            raise
        if os.fork():
            return
        os.setsid()
        os.dup2(2, 1)  # whoever reads what the command says has heard all of it
        go_first()
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.disable()  # see emulator.serve

        def on_request() -> bool:
            request, asker = control.recvfrom(MESSAGE_MAX_NBYTES)
            if request != b"show":
                return False
            told = {"interface": interface, "uid": uid, "link": uplink.in_force(), "counters": uplink.counters()}
            with contextlib.suppress(OSError):  # it does not wait any more
                control.sendto(json.dumps(told).encode(), socket.MSG_DONTWAIT, asker)
            return True

        uplink.run({control.fileno(): on_request})
        os.close(device)  # before the address: who sees that nobody is there may remove it


def ask() -> dict[str, Any] | None:
    """What the process that holds the link says of it; None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
        asker.bind("")  # a name of the kernel's choice, to be answered at
        asker.settimeout(ANSWER_S)
        if not _is_sent(asker, b"show"):
            return None
        answer: dict[str, Any] = json.loads(asker.recv(MESSAGE_MAX_NBYTES))
        return answer


def clear() -> None:
    """Take the link off, whether or not its process lives."""
    deadline = time.monotonic() + END_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
        while _is_sent(asker, b"end") and time.monotonic() < deadline:
            time.sleep(0.01)
    _take_off()


def _is_sent(asker: socket.socket, request: bytes) -> bool:
    """Whether there is anybody to hear it."""
    try:
        asker.sendto(request, socket.MSG_DONTWAIT, ADDRESS)
    except ConnectionRefusedError:
        return False
    except BlockingIOError:
        pass  # it has not read the last ones yet
    return True


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 3 and a sentence on stdout where the link is not in force."""
    try:
        match arguments:
            case ["start", interface, uid, link]:
                start(interface, int(uid), json.loads(link))
            case ["show"]:
                print(json.dumps(ask()))
            case ["clear"]:
                clear()
            case _:
                print(__doc__)
                return 2
    except (KernelRefuses, ScenarioError, OSError) as error:
        print(error)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
