# SPDX-License-Identifier: Apache-2.0
"""What is asked of the kernel: network namespaces, a TUN device in each, and an end of all that runs in them.

The namespaces have no name: nothing but open descriptors and processes holds them, so none can be left behind. Another
program enters one by /proc/PID/fd/N of the emulator.

Rules: standard library only, Linux only, one thread (a namespace belongs to a thread). Every refusal by the kernel
becomes one sentence with its cure. It knows nothing of packets or links.
"""

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from scripts.wanlink.packets import SUBNET, VNET_NBYTES

DEVICE = "wan0"
TUN_PATH = "/dev/net/tun"
# Frames that may wait in the device for the emulator to read them: it must never be the device that drops.
TX_QUEUE_FRAMES = 20_000
SWEEP_S = 5.0

_RECEIVING_CORES = Path("/proc/sys/net/core/rps_default_mask")  # of devices that are made from now on
_CLONE_NEWNET = 0x40000000
# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
# linux/sockios.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_IFF_UP = 0x1

_libc = ctypes.CDLL(None, use_errno=True)


class KernelRefuses(Exception):
    """This machine does not give what the emulator needs; the message says what to do."""


def make_namespace() -> int:
    """Make a network namespace, come back, and return a descriptor that holds it.

    Raises:
        KernelRefuses: not permitted, or not built in.
    """
    with _back_home():
        _must(_libc.unshare, _CLONE_NEWNET)
        return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def furnish(
    namespace: int, peer: int, *, mtu: int, offload: bool, receiving_cores: int, sysctls: Mapping[str, str]
) -> int:
    """Give peer its device, address and settings in its namespace; returns the device's descriptor.

    Args:
        namespace: a descriptor of it.
        peer: its index.
        mtu: of the device, bytes.
        offload: whether the device gives and takes super-packets.
        receiving_cores: a mask of those on which its kernel receives; 0 leaves it to the kernel.
        sysctls: written last.

    Raises:
        KernelRefuses: no TUN device to be had, or no such sysctl.
    """
    with _inside(namespace):
        with suppress(OSError):  # before Linux 6.3: the core that writes into the device receives as well
            _RECEIVING_CORES.write_text(f"{receiving_cores:x}")
        for name, value in sysctls.items():
            path = Path("/proc/sys") / name.replace(".", "/")
            try:
                path.write_text(value)
            except OSError as error:
                raise KernelRefuses(f"sysctl {name} = {value}: {error.strerror}; leave it out") from error
        tun = open_tun(offload)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            _configure(any_socket.fileno(), peer, mtu)
        return tun


def device_drops(namespace: int) -> int:
    """Frames that the device dropped because the emulator did not read them in time."""
    with _inside(namespace):
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == DEVICE:
                return int(counters.split()[11])
    return 0


def identity(namespace: int) -> int:
    """The number by which /proc names the namespace."""
    return os.fstat(namespace).st_ino


def kill_inhabitants(identities: Collection[int]) -> None:
    """Kill every process in these namespaces but this one, and wait until none is left (at most SWEEP_S)."""
    deadline = time.monotonic() + SWEEP_S
    while found := list(_inhabitants(identities)):
        for pid in found:
            with suppress(ProcessLookupError):  # it was faster
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)


def _inhabitants(identities: Collection[int]) -> Iterator[int]:
    links = {f"net:[{identity}]" for identity in identities}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if os.readlink(f"/proc/{entry}/ns/net") in links and not _is_dead(entry):
                    yield int(entry)
            except OSError:
                continue  # it has ended, or is not ours to look at


def _is_dead(pid: str) -> bool:
    """Whether nothing of the process is left but its exit code, which its parent has to fetch."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


@contextmanager
def _back_home() -> Iterator[None]:
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            _must(_libc.setns, home, _CLONE_NEWNET)
        finally:
            os.close(home)


@contextmanager
def _inside(namespace: int) -> Iterator[None]:
    with _back_home():
        _must(_libc.setns, namespace, _CLONE_NEWNET)
        yield


def _must(call: Callable[..., int], *arguments: int) -> None:
    if call(*arguments) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EPERM:
        raise KernelRefuses(
            "network namespaces need root: use sudo, or `unshare -rn` where your kernel allows it, or in a container "
            "--cap-add SYS_ADMIN --cap-add NET_ADMIN --device /dev/net/tun"
        )
    raise KernelRefuses(f"this kernel gives no network namespace ({os.strerror(code)}): it needs CONFIG_NET_NS")


def open_tun(offload: bool, name: str = DEVICE) -> int:
    """Make the device, or take it if it is there, in the namespace of this thread; returns its descriptor.

    Raises:
        KernelRefuses: no TUN device to be had.
    """
    try:
        tun = os.open(TUN_PATH, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KernelRefuses(
            f"{TUN_PATH} cannot be opened ({error.strerror}): on a machine `modprobe tun` as root, in a container "
            f"--device {TUN_PATH}"
        ) from error
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(tun, _TUNSETVNETHDRSZ, struct.pack("i", VNET_NBYTES))
        if offload:
            fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    except OSError as error:
        os.close(tun)
        raise KernelRefuses(
            f"no TUN device in this namespace ({error.strerror}): it needs CAP_NET_ADMIN, in a container "
            "--cap-add NET_ADMIN"
        ) from error
    return tun


def _configure(any_socket: int, peer: int, mtu: int) -> None:
    """What `ip address` and `ip link set up` do, so that iproute2 is not needed."""

    def request(code: int, device: str, form: str, *values: int | bytes) -> bytes:
        return fcntl.ioctl(any_socket, code, struct.pack(f"16s{form}", device.encode(), *values).ljust(40, b"\0"))

    def ipv4(address: bytes) -> bytes:
        return struct.pack("=HH4s", socket.AF_INET, 0, address)

    request(_SIOCSIFMTU, DEVICE, "i", mtu)
    with suppress(PermissionError):  # under `unshare -rn`: 500 frames then, and Stats.device_drops counts
        request(_SIOCSIFTXQLEN, DEVICE, "i", TX_QUEUE_FRAMES)
    request(_SIOCSIFADDR, DEVICE, "8s", ipv4(SUBNET + bytes([peer + 1])))
    request(_SIOCSIFNETMASK, DEVICE, "8s", ipv4(bytes([255, 255, 255, 0])))
    for device in ("lo", DEVICE):
        (flags,) = struct.unpack_from("H", request(_SIOCGIFFLAGS, device, "H", 0), 16)
        request(_SIOCSIFFLAGS, device, "H", flags | _IFF_UP)
