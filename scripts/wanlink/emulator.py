# SPDX-License-Identifier: Apache-2.0
"""The process that is the network: a TUN device in each peer's namespace, and the switch between them.

It is started by `wan.Wan` with one end of a socket pair, over which JSON messages come and are answered one by one:

    {"do": "make", "scenario": {...}, "mtu": 1500, "offload": true}  -> {"namespaces": [[descriptor, identity], ...]}
    {"do": "apply", "step": {...}}                                   -> {}
    {"do": "play"}                                                   -> {}    the timeline begins now
    {"do": "stats"}                                                  -> {"cpu_s": ..., "links": [...], ...}
    a message it cannot carry out                                    -> {"error": "one sentence"}

Rules: standard library only, one thread. When the other end of the socket closes, or the parent dies however it dies,
everything in the namespaces is killed and the process ends. It is its own session, so that what kills its parent's
group leaves it the time for that.
"""

import contextlib
import ctypes
import gc
import itertools
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.wanlink import namespaces, packets, processor
from scripts.wanlink.scenario import JSON_MAX_NBYTES, Scenario, ScenarioError, Step, step_from
from scripts.wanlink.switch import Switch

FRAME_MAX_NBYTES = packets.VNET_NBYTES + (1 << 16)
READS_PER_TURN = 32  # of one device, so that none starves another, nor what is due
# Until BUSY_S after the last frame, the time between two looks at devices and heap: one wake-up then serves several
# frames. That halves the processor time at 1 Gbit/s.
PAUSE_S = 0.0004
BUSY_S = 0.001
# What it takes to wake up and to read, on the way in and out; delivering as much too early makes delays right.
EARLY_S = 0.00015
PRIORITY = -10
_PR_SET_TIMERSLACK = 29


class Emulator:
    """Devices, one a port of the switch, the namespaces they lie in, and the timeline."""

    def __init__(
        self, switch: Switch, devices: Sequence[int], homes: Sequence[int] = (), timeline: Sequence[Step] = ()
    ) -> None:
        self.switch = switch
        self.devices, self.namespaces = devices, homes
        self.unwritten = 0
        self._timeline = timeline
        self._steps: list[tuple[float, Step]] = []  # to come, the next one last

    @property
    def identities(self) -> list[int]:
        """The namespaces as /proc names them."""
        return [namespaces.identity(namespace) for namespace in self.namespaces]

    def run(self, wakers: dict[int, Callable[[], bool]]) -> None:
        """Pass packets until one of the wakers (by descriptor, called when it is readable) returns False."""
        monotonic = time.monotonic
        peer_of = {device: peer for peer, device in enumerate(self.devices)}
        descriptors = [*peer_of, *wakers]
        last_traffic = looked_at = 0.0
        is_behind = False
        while True:
            now = monotonic()
            while self._steps and self._steps[-1][0] <= now:
                self.switch.apply(self._steps.pop()[1], now)
            self.switch.deliver(now + EARLY_S, self._write)
            patience: float | None = 0.0
            if now - last_traffic >= BUSY_S:
                patience = self._patience(monotonic())
            elif not is_behind:
                time.sleep(PAUSE_S)
            readable, _, _ = select.select(descriptors, (), (), patience)
            is_behind = False
            since, looked_at = looked_at, monotonic()
            if patience != 0.0:
                since = looked_at  # nothing had come while it waited
            for descriptor in readable:
                if descriptor in peer_of:
                    last_traffic = looked_at
                    is_behind |= self._read(peer_of[descriptor], descriptor, since, looked_at)
                elif not wakers[descriptor]():
                    return

    def play(self) -> None:
        """Begin the timeline, or begin it again."""
        now = time.monotonic()
        self._steps = [(now + step.at_s, step) for step in reversed(self._timeline)]

    def stats(self) -> dict[str, Any]:
        """Counters since the start; the keys are those of wan.Stats."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        switch = self.switch
        link_names = ("segments", "lost", "refused", "carried_nbytes", "reordered", "duplicated", "corrupted")
        return {
            "cpu_s": used.ru_utime + used.ru_stime,
            "delivered": switch.delivered,
            "late": switch.late,
            "late_max_s": switch.late_max_s,
            "overflowed": switch.overflowed,
            "unwritten": self.unwritten,
            "device_drops": sum(namespaces.device_drops(namespace) for namespace in self.namespaces),
            "up_dropped": [port.up.dropped for port in switch.ports],
            "down_dropped": [port.down.dropped for port in switch.ports],
            "links": [
                [{name: getattr(link, name) for name in link_names} if link else None for link in row]
                for row in switch.links
            ],
        }

    def _patience(self, now: float) -> float | None:
        due = self.switch.next_due()
        if self._steps:
            due = min(due, self._steps[-1][0]) if due is not None else self._steps[-1][0]
        return None if due is None else max(0.0, due - EARLY_S - now)

    def _read(self, peer: int, device: int, since: float, until: float) -> bool:
        """Take what the device has, which came between these instants; returns whether it may have more.

        When each frame came nobody knows: evenly, then. If all came at once whenever this process has to wait for its
        turn, queues would drop what no real one drops.
        """
        frames = list(itertools.islice(_waiting(device), READS_PER_TURN))
        enter = self.switch.enter
        each_s = (until - since) / max(1, len(frames))
        for frame in frames:
            since += each_s
            enter(peer, frame, since)
        return len(frames) == READS_PER_TURN

    def _write(self, peer: int, pieces: packets.Pieces) -> None:
        try:
            os.writev(self.devices[peer], pieces)
        except OSError:
            self.unwritten += 1  # somebody has set the device down


def _waiting(device: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        while True:
            yield os.read(device, FRAME_MAX_NBYTES)


def _make(message: dict[str, Any], receiving_cores: int) -> Emulator:
    made = message["scenario"]
    scenario = Scenario(
        peers=made["peers"],
        seed=made["seed"],
        sysctls=made["sysctls"],
        start=step_from(made["start"]),
        timeline=tuple(step_from(step) for step in made["timeline"]),
    )
    switch = Switch(scenario.peers, scenario.seed)
    switch.apply(scenario.start, time.monotonic())
    homes = [namespaces.make_namespace() for _ in range(scenario.peers)]
    devices = [
        namespaces.furnish(
            home,
            peer,
            mtu=message["mtu"],
            offload=message["offload"],
            receiving_cores=receiving_cores,
            sysctls=scenario.sysctls,
        )
        for peer, home in enumerate(homes)
    ]
    return Emulator(switch, devices, homes, scenario.timeline)


def _answer(emulator: Emulator, message: dict[str, Any]) -> dict[str, Any]:
    match message["do"]:
        case "apply":
            emulator.switch.apply(step_from(message["step"]), time.monotonic())
        case "play":
            emulator.play()
        case "stats":
            return emulator.stats()
        case unknown:
            return {"error": f"unknown request {unknown!r}"}
    return {}


def serve(control: socket.socket, parent: int, receiving_cores: int) -> None:
    """Be the network until the other end of `control` closes or the process behind the pidfd `parent` ends.

    The peers' kernels receive on the cores of this mask; 0 leaves it to the kernel.
    """
    request = control.recv(JSON_MAX_NBYTES)
    if not request:
        return
    try:
        emulator = _make(json.loads(request), receiving_cores)
    except (namespaces.KernelRefuses, ScenarioError, OSError) as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return

    def on_request() -> bool:
        received = control.recv(JSON_MAX_NBYTES)
        if not received:
            return False
        try:
            reply = _answer(emulator, json.loads(received))
        except (ScenarioError, namespaces.KernelRefuses) as error:
            reply = {"error": str(error)}
        control.send(json.dumps(reply).encode())
        return True

    try:
        named = list(zip(emulator.namespaces, emulator.identities, strict=True))
        control.send(json.dumps({"namespaces": named}).encode())
        gc.disable()  # nothing here is cyclic, and thousands of packets under way would be visited again and again
        emulator.run({control.fileno(): on_request, parent: lambda: False})
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent died between its request and our answer
    finally:
        namespaces.kill_inhabitants(emulator.identities)


def go_first() -> None:
    """Let this process wake up on time, and before others as far as that is allowed."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns; else every wait takes 50 us more
    processor.claim(processor.NETWORK)
    # Where that is not allowed. Where the kernel groups processes by session, a priority counts within a group only,
    # and the group has one of its own.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        Path("/proc/self/autogroup").write_text(str(PRIORITY))


def main() -> None:
    """Arguments: the socket's descriptor and the parent's pidfd, both inherited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # through the `finally` above
    go_first()
    receiving_cores = processor.settle()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control, int(sys.argv[2]), receiving_cores)


if __name__ == "__main__":
    main()
