# SPDX-License-Identifier: Apache-2.0
"""What a machine must have before it can be a peer: looked at, never changed.

A temporary file without a name measures the disk, and a listener is opened that nobody is told of. Each function makes
one check; those that wait for a disk or a GPU are for a thread.

Must not know runs, tickets or the network beyond this machine.
"""

import ipaddress
import os
import resource
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path

import psutil

from isthmus.collective.core.address import candidates_of, is_wildcard, join_address, split_address
from isthmus.collective.errors import AddressInUse
from isthmus.collective.transport import SocketOptions
from isthmus.collective.transport.sockets import bind
from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.contact.reach import reachable_at
from isthmus.trainer.control_groups import memory_limits, num_processors
from isthmus.trainer.doctor.report import Check, Fact, fail, format_path, ok, warn
from isthmus.trainer.record.status import count

_WRITTEN_NBYTES = 64 << 20
_BLOCK_NBYTES = 4 << 20
_WRITE_S = 2.0
_LITTLE_DISK_NBYTES = 2 * 10**9
_SLOW_DISK_BYTES_PER_S = 20e6
_FEW_FILES, _TOO_FEW_FILES = 1024, 128
_TCP = Path("/proc/sys/net/ipv4")
_SHARED_ADDRESSES = ipaddress.ip_network("100.64.0.0/10")
"""Of a provider's NAT (RFC 6598)."""


def device(wanted: str, num_workers: int) -> Check:
    """Where the workers would compute.

    Args:
        wanted: `node.device`.
        num_workers: `node.local_workers`.
    """
    import torch

    num_devices = torch.cuda.device_count()
    num_cores = num_processors()
    if wanted == "cpu" or (wanted == "auto" and num_devices == 0):
        text = f"{'the CPU' if wanted == 'cpu' else 'no GPU: the CPU'} computes, with {count(num_cores, 'core')}"
        if wanted == "auto" and Path("/dev/nvidiactl").exists():
            cure = "install the driver that nvidia-smi asks for, and a torch that is built for CUDA"
            return warn("device", f"{text}; a GPU is here, and this torch cannot use it", cure, num_cores=num_cores)
        return ok("device", text, num_cores=num_cores)
    if num_devices < num_workers:
        return fail(
            "device",
            f"{num_workers} GPUs are wanted, and torch finds {num_devices}",
            "say --device cpu or fewer --local-workers, or install a driver and a torch that is built for CUDA",
            num_gpus=num_devices,
        )
    names: list[str] = []
    free_nbytes: list[int] = []
    for index in range(num_workers):
        try:
            (torch.ones(8, 8, device=f"cuda:{index}") @ torch.ones(8, 8, device=f"cuda:{index}")).sum().item()
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            cause = str(error).split("\n", 1)[0]
            return fail("device", f"GPU {index} does not compute: {cause}", "see what nvidia-smi says, or --device cpu")
        free_nbytes.append(free)
        names.append(f"{torch.cuda.get_device_name(index)} ({rounded_nbytes(free)} of {rounded_nbytes(total)} free)")
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    text = f"{', '.join(names)}, {'with' if has_bf16 else 'without'} bf16"
    return ok("device", text, num_gpus=num_workers, free_bytes=min(free_nbytes), bf16=has_bf16)


def memory() -> Check:
    """How much there is, within the limits of this process's groups."""
    total_nbytes, available_nbytes = memory_nbytes()
    text = f"{rounded_nbytes(total_nbytes)}, {rounded_nbytes(available_nbytes)} of it free"
    return ok("memory", text, total_bytes=total_nbytes, available_bytes=available_nbytes)


def memory_nbytes() -> tuple[int, int]:
    """Bytes in all, and those that can be had now."""
    machine = psutil.virtual_memory()
    limits = [(machine.total, machine.available), *memory_limits()]
    return min(total for total, _ in limits), min(available for _, available in limits)


def disk(folder: Path) -> Check:
    """Whether a run could use that folder, and how fast.

    Args:
        folder: absolute; it need not be there, and is not made.
    """
    place = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free_nbytes = shutil.disk_usage(place).free
    try:
        rate = _write_speed(place, min(_WRITTEN_NBYTES, free_nbytes // 4))
    except OSError as error:
        return fail(
            "disk", f"{format_path(place)} cannot be written: {error.strerror}", "give another folder with --dir"
        )
    text = f"{rounded_nbytes(free_nbytes)} free in {format_path(place)}, writes {rounded_nbytes(round(rate))}/s"
    facts: dict[str, Fact] = {"folder": str(place), "free_bytes": free_nbytes, "write_bytes_per_s": round(rate)}
    if free_nbytes < _LITTLE_DISK_NBYTES:
        return warn(
            "disk", text, "checkpoints may not fit: free some space, or give another folder with --dir", **facts
        )
    if rate < _SLOW_DISK_BYTES_PER_S:
        return warn("disk", text, "checkpoints and results will be late: give a faster folder with --dir", **facts)
    return ok("disk", text, **facts)


def _write_speed(place: Path, nbytes: int) -> float:
    """Bytes a second, flushed to the disk. Raises OSError."""
    block = secrets.token_bytes(_BLOCK_NBYTES)
    written_nbytes, began_s = 0, time.monotonic()
    with tempfile.TemporaryFile(dir=place, prefix="isthmus-doctor-", buffering=0) as file:
        while written_nbytes < nbytes and time.monotonic() - began_s < _WRITE_S:
            written_nbytes += file.write(block[: nbytes - written_nbytes])
        os.fsync(file.fileno())
    return written_nbytes / (time.monotonic() - began_s)


def files() -> Check:
    """How many files may be open, and where the memory lies that daemon and workers share.

    The limit is this process's own: every command has raised it as far as it may (cli/app.py), as a peer will.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:
        return fail("files", "no folder for temporary files can be written", "name one in TMPDIR")
    if hasattr(os, "memfd_create"):
        os.close(os.memfd_create("isthmus-doctor", os.MFD_CLOEXEC))
        shared = "shared memory without a file"
    else:
        free_nbytes = shutil.disk_usage(temporary).free
        shared = f"shared memory in {temporary}, {rounded_nbytes(free_nbytes)} free"
    text = f"{shown} open files, {shared}"
    if 0 <= limit < _FEW_FILES:
        level = fail if limit < _TOO_FEW_FILES else warn
        return level("files", text, "a connection is an open file; as root: ulimit -Hn 4096", max_open_files=limit)
    return ok("files", text, max_open_files=limit)


def bbr() -> Check:
    """Whether a long path can be filled with few connections."""
    cure = "as root: modprobe tcp_bbr"
    try:
        known = (_TCP / "tcp_available_congestion_control").read_text().split()
    except OSError:
        known = []
    is_there = "bbr" in known
    if is_there:
        # Only now: of a name that it does not know the kernel would load the module.
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            return ok("bbr", "available for long paths", available=True)
        except PermissionError:
            allowed = (_TCP / "tcp_allowed_congestion_control").read_text().strip()
            cure = f"as root: sysctl -w net.ipv4.tcp_allowed_congestion_control='{allowed} bbr'"
    text = f"{'not allowed' if is_there else 'not available'}: a long path takes 48 connections instead of 8"
    return warn("bbr", text, cure, available=False)


def listening(listen: str) -> tuple[Check, socket.socket | None]:
    """Whether `node.listen` is free. The socket is bound and listens; the caller closes it."""
    try:
        sock = bind(listen, SocketOptions())
        try:
            sock.listen()
        except OSError as error:
            sock.close()
            raise AddressInUse(listen) from error
    except AddressInUse as error:
        cure = "stop the process that listens there, or choose another port with --listen"
        return fail("listen", f"{error.address} is in use", cure), None
    except ValueError as error:
        return fail("listen", str(error), "name an address of this machine with --listen"), None
    host, port = split_address(listen)
    where = "every interface" if is_wildcard(host) else host
    shown = f"a free port, now {sock.getsockname()[1]}," if port == 0 else f"port {port}"
    return ok("listen", f"{shown} on {where}", listen=listen, port=sock.getsockname()[1]), sock


def addresses(own: str, advertise: str | None, *, is_open: bool) -> Check:
    """Where others may reach this machine, as far as it knows.

    Args:
        own: see `reachable_at`.
        is_open: whether it listens on every interface.
        advertise: `node.advertise`.
    """
    candidates = candidates_of(own)
    kinds = {address: "advertised" if address == advertise else kind_of(address) for address in candidates}
    shown = [f"{split_address(address)[0]} ({kind})" for address, kind in kinds.items() if kind != "loopback"]
    if not shown and not is_open:
        return ok("addresses", "loopback alone, as --listen says", addresses=list(candidates))
    if not shown:
        text = "loopback alone: only peers of this machine reach it"
        return warn("addresses", text, "connect it to a network, and leave --listen out", addresses=list(candidates))
    return ok("addresses", ", ".join(shown), addresses=list(candidates), kinds=list(kinds.values()))


def kind_of(address: str) -> str:
    """Of what kind a single address is, for people."""
    host, _ = split_address(address)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return "name"
    version_of = " IPv6" if ip.version == 6 else ""
    if ip.is_loopback:
        return "loopback"
    if ip.version == 4 and ip in _SHARED_ADDRESSES:
        return "provider's NAT"
    return f"{'private' if ip.is_private else 'public'}{version_of}"


def own_address(listen: str, port: int, *, advertise: str | None, seen_from: str | None = None) -> str:
    """Where others may try to reach a listener of ours, with all candidates."""
    host, _ = split_address(listen)
    return reachable_at(join_address(host, port), advertise=advertise, seen_from=seen_from)
