# SPDX-License-Identifier: Apache-2.0
"""The network as tests and benchmarks use it: start, change, look, and be sure that it is gone afterwards.

Rules: synchronous; every request to the emulator has a deadline. Closing kills whatever still runs in the namespaces,
daemons of daemons too; so does the emulator by itself if this process is killed.
"""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.wanlink import namespaces
from scripts.wanlink.scenario import JSON_MAX_NBYTES, Scenario, ScenarioError, Step

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
ANSWER_S = 10.0


class WanError(Exception):
    """The network cannot be had, or does not answer; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats:
    """Counters of one path: see links.Link."""

    segments: int
    lost: int
    refused: int
    carried_nbytes: int
    reordered: int
    duplicated: int
    corrupted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters since the start.

    Attributes:
        cpu_s: processor time of the emulator, with the kernel's work for the receiving side's TCP.
        delivered, late, late_max_s, overflowed: see switch.Switch.
        unwritten, device_drops: frames that a device did not take, or dropped before the emulator saw them. Anything
            but 0 means that more was lost than was asked for.
        up_dropped, down_dropped: [peer], segments that found a port's queue full.
        links: [from][to], None from a peer to itself.
    """

    cpu_s: float
    delivered: int
    late: int
    late_max_s: float
    overflowed: int
    unwritten: int
    device_drops: int
    up_dropped: list[int]
    down_dropped: list[int]
    links: list[list[LinkStats | None]]

    def link(self, source: int, target: int) -> LinkStats:
        """The path from one peer to another one."""
        found = self.links[source][target]
        if found is None:
            raise ValueError("no path leads from a peer to itself")
        return found


class Wan:
    """A network of `peers` namespaces; a context manager. One thread at a time."""

    def __init__(
        self,
        peers: int | None = None,
        *,
        scenario: Scenario | None = None,
        seed: int = 1,
        sysctls: Mapping[str, str] | None = None,
        mtu: int = 1500,
        offload: bool = True,
    ) -> None:
        """Describe the network; `__enter__` makes it.

        Args:
            peers: how many; without a scenario.
            scenario: what is in force from the start, and what `play` brings; instead of the first two and sysctls.
            seed, sysctls: see scenario.Scenario.
            mtu: of every device, bytes of an IP packet.
            offload: let the kernel hand over super-packets. Without, each segment is a frame with its checksum: about
                an order of magnitude more work, and corrupted segments are dropped by the receiver's TCP.

        Raises:
            ScenarioError: no such network.
        """
        if scenario is None:
            scenario = Scenario(peers=2 if peers is None else peers, seed=seed, sysctls=sysctls or {})
        elif peers not in (None, scenario.peers):
            raise ScenarioError(f"peers = {peers}, but the scenario has {scenario.peers}: give one of them")
        self.scenario = scenario
        self._mtu, self._offload = mtu, offload
        self._emulator: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._namespaces: list[tuple[int, int]] = []
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "Wan":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- the network

    def set_link(self, source: int | str, target: int | str, **change: float) -> None:
        """Change a path, one way; fields of `LinkSettings`, those not named stay. "*" stands for every peer."""
        self.apply(Step(links={_path(source, target): change}))

    def set_port(self, peer: int | str, **change: float) -> None:
        """Change a peer's access; fields of `PortSettings`, those not named stay. "*" stands for every peer."""
        self.apply(Step(ports={str(peer): change}))

    def cut(self, source: int | str, target: int | str, *, both: bool = False) -> None:
        """Break a path, one way unless `both`. What is under way arrives; nothing else does, and nobody is told."""
        self.apply(Step(cut=(_path(source, target, both),)))

    def heal(self, source: int | str, target: int | str, *, both: bool = False) -> None:
        """Join a path that was cut."""
        self.apply(Step(heal=(_path(source, target, both),)))

    def apply(self, step: Step) -> None:
        """Bring all of a step into force at once, or nothing of it.

        Raises:
            ScenarioError: it does not fit this network.
        """
        self._request({"do": "apply", "step": dataclasses.asdict(step)})

    def play(self) -> None:
        """Begin the scenario's timeline; at_s counts from now."""
        self._request({"do": "play"})

    def stats(self) -> Stats:
        """Counters since the start."""
        answer = self._request({"do": "stats"})
        links = [[LinkStats(**link) if link else None for link in row] for row in answer.pop("links")]
        return Stats(links=links, **answer)

    # ------------------------------------------------------------------------------------- the peers

    @property
    def peers(self) -> int:
        """How many there are."""
        return self.scenario.peers

    def address(self, peer: int) -> str:
        """The peer's IPv4 address."""
        return f"10.77.0.{peer + 1}"

    @property
    def emulator_pid(self) -> int:
        """The process that is the network."""
        if self._emulator is None:
            raise WanError("the network is not there: use it within `with`")
        return self._emulator.pid

    def command(self, peer: int, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs `argv` in the peer's namespace."""
        descriptor, _ = self._namespaces[peer]
        return ["nsenter", f"--net=/proc/{self.emulator_pid}/fd/{descriptor}", "--", *map(str, argv)]

    def popen(self, peer: int, argv: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:  # noqa: ANN401
        """Start a program in the peer's namespace; `options` are subprocess.Popen's. It is killed on close."""
        process = subprocess.Popen(self.command(peer, argv), **options)
        self._processes.append(process)
        return process

    def run(self, peer: int, argv: Sequence[str | Path], *, timeout: float) -> str:
        """Run a program in the peer's namespace to its end; returns its standard output.

        Raises:
            WanError: it failed, or took longer than `timeout` seconds.
        """
        process = self.popen(peer, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise WanError(f"{argv[0]} on peer {peer} took longer than {timeout:g} s") from error
        if process.returncode:
            raise WanError(f"{argv[0]} on peer {peer} ended with {process.returncode}: {errors.strip()}")
        return str(output)

    # ------------------------------------------------------------------------------------- begin and end

    def close(self) -> None:
        """Kill everything in the namespaces and end the network. May be called twice."""
        for process in self._processes:
            process.kill()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._emulator is not None:
            try:
                self._emulator.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                self._emulator.kill()
                self._emulator.wait()
            self._emulator = None
            # Again from here: the emulator itself may have been killed.
            namespaces.kill_inhabitants([identity for _, identity in self._namespaces])
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    def _start(self) -> None:
        if sys.platform != "linux":
            raise WanError("the emulated network needs Linux: run this in a Linux machine or container")
        if shutil.which("nsenter") is None:
            raise WanError("`nsenter` is missing: install util-linux")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.pidfd_open(os.getpid())
        self._control = ours
        try:
            arguments = ["-m", "scripts.wanlink.emulator", str(theirs.fileno()), str(parent)]
            self._emulator = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, pass_fds=(theirs.fileno(), parent), start_new_session=True
            )
        finally:
            theirs.close()
            os.close(parent)
        made = {"scenario": dataclasses.asdict(self.scenario), "mtu": self._mtu, "offload": self._offload}
        answer = self._request({"do": "make", **made}, START_S)
        self._namespaces = [(descriptor, identity) for descriptor, identity in answer["namespaces"]]

    def _request(self, message: dict[str, Any], timeout: float = ANSWER_S) -> dict[str, Any]:
        if self._control is None:
            raise WanError("the network is not there: use it within `with`")
        encoded = json.dumps(message).encode()
        if len(encoded) > JSON_MAX_NBYTES:
            raise ScenarioError(f"{len(encoded)} bytes of JSON: at most {JSON_MAX_NBYTES}, so take fewer steps")
        self._control.settimeout(timeout)
        try:
            self._control.send(encoded)
            answer = self._control.recv(JSON_MAX_NBYTES)
        except OSError as error:
            raise WanError(f"the emulator does not answer ({error}): its own message stands above, if any") from error
        if not answer:
            raise WanError("the emulator has ended: its own message stands above, if any")
        decoded: dict[str, Any] = json.loads(answer)
        if "error" in decoded:
            raise (WanError if message["do"] == "make" else ScenarioError)(decoded["error"])
        return decoded


def _path(source: int | str, target: int | str, both: bool = False) -> str:
    return f"{source}-{target}" if both else f"{source}>{target}"
