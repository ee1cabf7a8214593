# SPDX-License-Identifier: Apache-2.0
"""What root makes of this machine: network namespaces whose paths can be cut, and disks that can be full.

The network is the emulator of scripts/wanlink: one-way and two-way cuts of single paths, and a rate for an access. The
disks are small file systems in memory, mounted in a mount namespace that ends with this process: however it ends, no
mount is left. Without root there is one loopback for all and one disk, and neither can fail.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.wanlink.wan import Wan, WanError

DISK_NBYTES = 48 << 20
_CLONE_NEWNS = 0x20000
_BALLAST = "ballast"
_LOOKS = 20


class HostError(Exception):
    """This machine does not give what is needed; the message says what to do."""


def is_root() -> bool:
    """Whether faults of network and disk can be had."""
    return os.geteuid() == 0


class Network:
    """Addresses of the sites, and the paths between them.

    Args:
        wan: the emulator, one namespace a site; None for one loopback.
    """

    def __init__(self, wan: Wan | None) -> None:
        self._wan = wan

    def command(self, site: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` at the site."""
        return list(argv) if self._wan is None else self._wan.command(site, argv)

    def listen(self, site: int) -> str:
        """Where a process of the site listens: a free port."""
        return "127.0.0.1:0" if self._wan is None else f"{self._wan.address(site)}:0"

    def cut(self, paths: Sequence[tuple[int | str, int | str]]) -> None:
        """Break these paths, each one way; "*" stands for every site."""
        for source, target in paths:
            self._emulator.cut(source, target)

    def heal(self, paths: Sequence[tuple[int | str, int | str]]) -> None:
        """Join them again."""
        for source, target in paths:
            self._emulator.heal(source, target)

    def limit_download(self, site: int, mbit: float) -> None:
        """What the site may receive; 0 is no limit. Without namespaces nothing happens."""
        if self._wan is not None:
            self._wan.set_port(site, down_mbit=mbit)

    def carried_to(self, site: int, num_sites: int) -> list[int] | None:
        """Bytes that each site has sent to this one; None if nobody counts."""
        if self._wan is None:
            return None
        stats = self._wan.stats()
        return [0 if source == site else stats.link(source, site).carried_nbytes for source in range(num_sites)]

    @property
    def _emulator(self) -> Wan:
        assert self._wan is not None, "cuts need root"
        return self._wan


@contextlib.contextmanager
def open_network(num_sites: int, *, seed: int, with_namespaces: bool) -> Iterator[Network]:
    """The network; what runs in it is killed on the way out.

    Raises:
        HostError: no namespaces to be had.
    """
    if not with_namespaces:
        yield Network(None)
        return
    try:
        with Wan(peers=num_sites, seed=seed) as wan:
            yield Network(wan)
    except WanError as error:
        raise HostError(f"{error}; or leave the fault `cut` out") from error


def enter_own_mounts() -> None:
    """From now on mounts of this process and its children are their own, and end with them.

    Raises:
        HostError: not permitted.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise HostError(f"no mount namespace ({os.strerror(ctypes.get_errno())}); leave the fault `disk` out")
    _run("mount", "--make-rprivate", "/")


def mount_disk(folder: Path) -> None:
    """A file system of DISK_NBYTES at this folder, which is made."""
    folder.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs", str(folder))


def unmount_disk(folder: Path) -> None:
    """End it, and with it what is on it."""
    _run("umount", str(folder))


def fill_disk(folder: Path, *, room_nbytes: int) -> None:
    """Take all space but this."""
    with (folder / _BALLAST).open("wb") as file:
        for _ in range(_LOOKS):
            space = os.statvfs(folder)
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, space.f_bavail * space.f_frsize - room_nbytes))
            except OSError as error:
                if error.errno != errno.ENOSPC:  # else somebody has written meanwhile
                    raise
            else:
                return
    raise HostError(f"{folder} is written to faster than it can be filled")


def free_disk(folder: Path) -> None:
    """Give it back."""
    (folder / _BALLAST).unlink(missing_ok=True)


def copy_folder(source: Path, target: Path) -> None:
    """As a disk image would have it, while somebody writes there: without sockets, and with what is there now."""
    shutil.copytree(source, target, ignore=_not_of_the_disk, copy_function=_copy_if_there)


def _not_of_the_disk(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not Path(folder, name).is_file() and not Path(folder, name).is_dir()]


def _copy_if_there(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"{' '.join(command)}: {done.stderr.strip()}")
