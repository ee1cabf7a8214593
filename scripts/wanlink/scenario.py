# SPDX-License-Identifier: Apache-2.0
"""What paths and ports are to be, and when they change: read from JSON, checked, and written back.

    {"peers": 4, "seed": 1, "sysctls": {"net.ipv4.tcp_no_metrics_save": "1"},
     "links": {"*": {"delay_ms": 75, "loss_percent": 0.1}, "0-3": {"delay_ms": 150}},
     "ports": {"*": {"up_mbit": 200, "down_mbit": 200, "queue_ms": 64}, "3": {"up_mbit": 30}},
     "timeline": [{"at_s": 5, "cut": ["0>1"]}, {"at_s": 8, "heal": ["0>1"], "links": {"*": {"delay_ms": 20}}}]}

Paths: "0>1" one way, "0-1" both ways, "0>*" and "*>0" all that leave or reach a peer, "*" all. Later entries of a
table go over earlier ones, and a key that is not named stays as it was.

Rules: pure. One shape, `Step`, for the beginning, the timeline and every change at run time. Names carry the units of
docker/scenario.toml.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

PEERS_MIN, PEERS_MAX = 2, 8
JSON_MAX_NBYTES = 1 << 17  # of a scenario or a step; one message to the emulator holds it
DELAY_MAX_MS = 60_000.0
RATE_MAX_MBIT = 100_000.0
AT_MAX_S = 1e6
QUEUE_MAX_MS = 10_000.0


class ScenarioError(ValueError):
    """The scenario is wrong; the message says where and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """One path, one way. All percentages are per segment of at most one MTU, and independent.

    Attributes:
        delay_ms: time under way, beside the queues of the ports.
        jitter_ms: the delay is uniform in delay_ms ± jitter_ms; jitter lets nothing overtake.
        loss_percent: lost independently.
        burst_enter_percent, burst_leave_percent, burst_loss_percent: losses that come together: after a segment, the
            chance that the next begins a bad stretch, the chance that a bad stretch ends, and the loss within.
        reorder_percent: held back by a quarter of the delay, at least 1 ms, while later ones pass.
        duplicate_percent: arrives twice.
        corrupt_percent: one bit of the payload is turned. With offload TCP's checksum is not looked at, so the
            application receives it; without offload the receiving kernel drops it.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    burst_enter_percent: float = 0.0
    burst_leave_percent: float = 100.0
    burst_loss_percent: float = 100.0
    reorder_percent: float = 0.0
    duplicate_percent: float = 0.0
    corrupt_percent: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay_ms", "jitter_ms"):
            _within(name, getattr(self, name), 0.0, DELAY_MAX_MS)
        for field in dataclasses.fields(self):
            if field.name.endswith("_percent"):
                _within(field.name, getattr(self, field.name), 0.0, 100.0)
        if self.jitter_ms > self.delay_ms:
            raise ScenarioError("jitter_ms exceeds delay_ms: a packet cannot arrive before it was sent")
        if self.burst_enter_percent and not self.burst_leave_percent:
            raise ScenarioError("burst_leave_percent is 0, so the first bad stretch never ends: give more, or use cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSettings:
    """One peer's access. Rates are in 10⁶ bit/s, Ethernet, IP and TCP headers included; 0 = no limit.

    Attributes:
        up_mbit, down_mbit: what the peer may send, and receive.
        queue_ms: room before each of the two, as the time it takes to send it; what does not fit is dropped. There is
            always room for a few segments.
    """

    up_mbit: float = 0.0
    down_mbit: float = 0.0
    queue_ms: float = 64.0

    def __post_init__(self) -> None:
        for name in ("up_mbit", "down_mbit"):
            _within(name, getattr(self, name), 0.0, RATE_MAX_MBIT)
        _within("queue_ms", self.queue_ms, 0.0, QUEUE_MAX_MS)


LINK_FIELDS = frozenset(field.name for field in dataclasses.fields(LinkSettings))
PORT_FIELDS = frozenset(field.name for field in dataclasses.fields(PortSettings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Changes that come into force together, in this order: links, ports, cut, heal.

    Attributes:
        at_s: seconds after the timeline began; no meaning elsewhere.
        links: paths, as in the module's text, to the settings that change.
        ports: a peer's index or "*", to the settings that change.
        cut, heal: paths that are broken off, and joined again.
    """

    at_s: float = 0.0
    links: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    ports: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    cut: tuple[str, ...] = ()
    heal: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A network, and what will happen to it.

    Attributes:
        peers: how many, 2 to 8.
        seed: of everything that is drawn. The same traffic then meets the same losses; two real runs never have quite
            the same traffic.
        sysctls: written in each peer's namespace, only names that begin with "net."; otherwise a namespace has what
            Linux gives it, which for TCP's buffers and congestion control are the host's values.
        start: in force from the beginning; never None, may be empty.
        timeline: later changes, ascending in at_s.
    """

    peers: int
    seed: int = 1
    sysctls: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: Step = dataclasses.field(default_factory=Step)
    timeline: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if not PEERS_MIN <= self.peers <= PEERS_MAX:
            raise ScenarioError(f"peers = {self.peers}: give {PEERS_MIN} to {PEERS_MAX}")
        for name in self.sysctls:
            if not name.startswith("net.") or "/" in name or ".." in name:
                raise ScenarioError(f"sysctl {name!r}: only those below net. belong to a network namespace")
        links: Links = dict.fromkeys(paths("*", self.peers), LinkSettings())
        all_ports: Ports = dict.fromkeys(range(self.peers), PortSettings())
        for step in (self.start, *self.timeline):
            new_links, new_ports = after(step, links, all_ports)
            links, all_ports = {**links, **new_links}, {**all_ports, **new_ports}
        if any(b.at_s < a.at_s for a, b in zip(self.timeline, self.timeline[1:], strict=False)):
            raise ScenarioError("the timeline goes back in time: sort it by at_s")


def paths(text: str, peers: int) -> list[tuple[int, int]]:
    """The (from, to) pairs a path's name stands for; see the module's text.

    Raises:
        ScenarioError: not such a name, or no such peer.
    """
    both_ways = "-" in text
    ends = ["*", "*"] if text == "*" else text.split("-" if both_ways else ">")
    if len(ends) != 2:
        raise ScenarioError(f"path {text!r}: write 0>1 (one way), 0-1 (both ways), 0>*, *>0 or *")
    sources, targets = ports(ends[0], peers), ports(ends[1], peers)
    found = [(i, j) for i in sources for j in targets if i != j]
    if not found:
        raise ScenarioError(f"path {text!r} leads from a peer to itself")
    return found + [(j, i) for i, j in found] if both_ways else found


def ports(text: str, peers: int) -> list[int]:
    """The peers that an index or "*" stands for.

    Raises:
        ScenarioError: neither of them, or no such peer.
    """
    if text == "*":
        return list(range(peers))
    if not (text.isascii() and text.isdigit()) or int(text) >= peers:
        raise ScenarioError(f"peer {text!r}: write 0 to {peers - 1}, or *")
    return [int(text)]


Links: TypeAlias = Mapping[tuple[int, int], LinkSettings]
Ports: TypeAlias = Mapping[int, PortSettings]


def after(step: Step, links: Links, ports_now: Ports) -> tuple[Links, Ports]:
    """What the step makes of the paths and ports it names; the others are not in the result.

    Raises:
        ScenarioError: it names what is not there, or the result makes no sense.
    """
    peers = len(ports_now)
    _within("at_s", step.at_s, 0.0, AT_MAX_S)
    for name in (*step.cut, *step.heal):
        paths(name, peers)
    new_links: dict[tuple[int, int], LinkSettings] = {}
    for name, change in step.links.items():
        _known(change, LINK_FIELDS, f"links {name!r}")
        for pair in paths(name, peers):
            new_links[pair] = dataclasses.replace(new_links.get(pair, links[pair]), **change)
    new_ports: dict[int, PortSettings] = {}
    for name, change in step.ports.items():
        _known(change, PORT_FIELDS, f"ports {name!r}")
        for peer in ports(name, peers):
            new_ports[peer] = dataclasses.replace(new_ports.get(peer, ports_now[peer]), **change)
    return new_links, new_ports


def read(text: str) -> Scenario:
    """Parse a scenario.

    Raises:
        ScenarioError: not JSON, an unknown key, or a value that makes no sense.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ScenarioError(f"the scenario is not JSON ({error}): correct that place") from error
    _known(document, {"peers", "seed", "sysctls", "links", "ports", "timeline"}, "the scenario")
    peers, seed = document.get("peers"), document.get("seed", 1)
    if type(peers) is not int or type(seed) is not int:
        raise ScenarioError('"peers" must be there, and it and "seed" be whole numbers')
    start = {key: document[key] for key in ("links", "ports") if key in document}
    sysctls = _table(document.get("sysctls", {}), "sysctls")
    return Scenario(
        peers=peers,
        seed=seed,
        sysctls={name: str(value) for name, value in sysctls.items()},
        start=step_from(start),
        timeline=tuple(step_from(entry) for entry in _list(document.get("timeline", []), "timeline")),
    )


def step_from(entry: object) -> Step:
    """A step out of decoded JSON; the opposite of `dataclasses.asdict`.

    Raises:
        ScenarioError: the shape is wrong. Whether names and values make sense is seen in `after`.
    """
    _known(entry, {"at_s", "links", "ports", "cut", "heal"}, "a step")
    table = _table(entry, "a step")
    return Step(
        at_s=table.get("at_s", 0.0),
        links={name: _table(change, name) for name, change in _table(table.get("links", {}), "links").items()},
        ports={name: _table(change, name) for name, change in _table(table.get("ports", {}), "ports").items()},
        cut=tuple(str(name) for name in _list(table.get("cut", []), "cut")),
        heal=tuple(str(name) for name in _list(table.get("heal", []), "heal")),
    )


def _within(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScenarioError(f"{name} = {value!r} is not a number: write it without quotes or unit")
    if not low <= value <= high:
        raise ScenarioError(f"{name} = {value:g} is out of range: give {low:g} to {high:g}")


def _known(entry: object, known: Iterable[str], where: str) -> None:
    unknown = sorted(set(_table(entry, where)) - set(known))
    if unknown:
        raise ScenarioError(f"unknown key {unknown[0]!r} in {where}: known are {', '.join(sorted(known))}")


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ScenarioError(f"{where} must be a table of names and values, in braces")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ScenarioError(f"{where} must be a list, in brackets")
    return value
