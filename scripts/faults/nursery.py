# SPDX-License-Identifier: Apache-2.0
"""The process that starts peers: it has loaded everything before, so a peer is there after a few milliseconds.

With `--namespaces` it lives in a network namespace of its own with a bridge in it, and gives every peer a namespace
with one cable to that bridge, which it can cut. The namespaces have no names and vanish with their processes.

Rules: one thread, no event loop; children never return from here. Peers die with it, also stopped ones, and it ends
with its standard input, so that a killed benchmark leaves nothing behind. Linux only.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys

import msgspec
import torch

from scripts.faults.peer import run_peer
from scripts.faults.words import Cut, Heal, Launch, ToNursery

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_BRIDGE = "hub"
_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> None:
    """Do what standard input says until it ends."""
    torch.set_num_threads(1)
    has_namespaces = "--namespaces" in arguments
    if has_namespaces:
        _leave_network()
        _ip(f"link add {_BRIDGE} type bridge")
        _ip(f"link set {_BRIDGE} up")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for peers: the kernel buries them
    decoder: msgspec.json.Decoder[ToNursery] = msgspec.json.Decoder(ToNursery)
    for received in sys.stdin.buffer:
        word = decoder.decode(received)
        match word:
            case Launch() as launch:
                _start(launch, has_namespaces)
            case Cut(number=number):
                _ip(f"link set cable{number} down")
            case Heal(number=number):
                _ip(f"link set cable{number} up")


def _start(launch: Launch, has_namespaces: bool) -> None:
    told, tell = os.pipe()
    unshared, unshare = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                return
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if has_namespaces:
                _leave_network()
            os.write(unshare, b".")
            os.read(told, 1)
            for descriptor in (0, told, tell, unshared, unshare):
                os.close(descriptor)
            asyncio.run(run_peer(launch, _host(launch.number) if has_namespaces else "127.0.0.1"))
            code = 0
        except Exception:  # noqa: BLE001 - a process's root
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    os.read(unshared, 1)
    if has_namespaces:
        _connect(launch.number, child)
    os.write(tell, b".")
    for descriptor in (told, tell, unshared, unshare):
        os.close(descriptor)


def _connect(number: int, child: int) -> None:
    """A cable between the bridge and the child's namespace."""
    _ip(f"link del cable{number}", may_fail=True)  # of an earlier start that is not quite gone
    _ip(f"link add cable{number} type veth peer name wan{number}")
    _ip(f"link set cable{number} master {_BRIDGE}")
    _ip(f"link set cable{number} up")
    _ip(f"link set wan{number} netns {child}")
    enter = ["nsenter", "--target", str(child), "--net"]
    _ip(f"address add {_host(number)}/24 dev wan{number}", enter)
    _ip(f"link set wan{number} up", enter)


def _host(number: int) -> str:
    return f"10.99.0.{number + 1}"


def _leave_network() -> None:
    if _libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace of our own")


def _ip(command: str, prefix: list[str] | None = None, *, may_fail: bool = False) -> None:
    # Not run(): with SIGCHLD ignored the kernel buries `ip` itself, and there is no exit code but its words.
    done = subprocess.Popen([*(prefix or []), "ip", *command.split()], stderr=subprocess.PIPE, text=True)
    _, complaint = done.communicate()
    if complaint and not may_fail:
        raise OSError(f"ip {command}: {complaint.strip()}")


if __name__ == "__main__":
    main(sys.argv[1:])
