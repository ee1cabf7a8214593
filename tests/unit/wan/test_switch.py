# SPDX-License-Identifier: Apache-2.0
"""The packet's way: who gets what, when, and what is counted."""

from random import Random

import pytest

from scripts.wanlink import switch as switch_module
from scripts.wanlink.packets import Pieces
from scripts.wanlink.scenario import ScenarioError, Step
from scripts.wanlink.switch import Switch
from tests.unit.wan import frames

SUPER = Random(9).randbytes(40 * frames.MSS)


class Network:
    """A switch whose deliveries are kept."""

    def __init__(self, peers: int = 3, **step: object) -> None:
        self.switch = Switch(peers, seed=1)
        self.switch.apply(Step(**step), 0.0)  # type: ignore[arg-type]
        self.got: list[tuple[float, int, Pieces]] = []

    def run_until(self, end: float) -> None:
        while (due := self.switch.next_due()) is not None and due <= end:
            self.switch.deliver(due, lambda peer, pieces, at=due: self.got.append((at, peer, pieces)))  # type: ignore[misc]

    def sequences(self) -> list[int]:
        return [frames.read(pieces).sequence for _, _, pieces in self.got]


def test_frame_arrives_unchanged_at_its_peer_after_the_delay() -> None:
    network = Network(links={"0>2": {"delay_ms": 30}})
    frame = frames.udp(b"hello", source=0, target=2)
    network.switch.enter(0, frame, 1.0)
    network.run_until(1.0299)
    assert network.got == []
    network.run_until(2.0)
    ((when, peer, pieces),) = network.got
    assert when == pytest.approx(1.03)
    assert (peer, pieces) == (2, (frame,))


def test_frames_for_nobody_for_oneself_and_for_absent_peers_are_counted_only() -> None:
    network = Network()
    for frame in (b"\0" * 60, frames.tcp(b"x", source=0, target=0), frames.tcp(b"x", source=0, target=3)):
        network.switch.enter(0, frame, 0.0)
    network.run_until(1.0)
    assert network.got == []
    assert network.switch.strangers == 3


def test_one_way_cut_stops_one_way_and_heals_at_once() -> None:
    network = Network(cut=("0>1",))
    there, back, aside = frames.tcp(b"x"), frames.tcp(b"x", source=1, target=0), frames.tcp(b"x", target=2)
    for source, frame in ((0, there), (1, back), (0, aside)):
        network.switch.enter(source, frame, 0.0)
    network.run_until(0.5)
    assert [peer for _, peer, _ in network.got] == [0, 2]
    assert network.switch.link(0, 1).refused == 1
    network.switch.apply(Step(heal=("0>1",)), 0.5)
    network.switch.enter(0, there, 0.5)
    network.run_until(1.0)
    assert network.got[-1] == (0.5, 1, (there,))


def test_lost_segments_are_cut_out_of_a_super_packet_and_the_rest_arrives() -> None:
    network = Network(links={"*": {"loss_percent": 10}})
    for i in range(50):
        network.switch.enter(0, frames.tcp(SUPER, sequence=i * len(SUPER)), float(i))
    network.run_until(100.0)
    link = network.switch.link(0, 1)
    arrived = sum(len(frames.read(pieces).payload) for _, _, pieces in network.got)
    assert link.segments == 2000
    assert 140 < link.lost < 260
    assert arrived == (2000 - link.lost) * frames.MSS
    for _, _, pieces in network.got:
        piece = frames.read(pieces)
        start = piece.sequence % len(SUPER)
        assert piece.payload == SUPER[start : start + len(piece.payload)]


def test_same_seed_loses_the_same_segments_whatever_else_is_drawn() -> None:
    def lost(change: dict[str, float]) -> list[int]:
        network = Network(links={"*": {"loss_percent": 5, **change}})
        for i in range(30):
            network.switch.enter(0, frames.tcp(SUPER, sequence=i * len(SUPER)), float(i))
        network.run_until(100.0)
        return sorted(set(network.sequences()))

    assert lost({}) == lost({"delay_ms": 10, "jitter_ms": 10, "duplicate_percent": 3, "corrupt_percent": 3})


def test_segments_that_are_held_back_are_overtaken_by_those_behind_them() -> None:
    network = Network(links={"*": {"delay_ms": 20, "reorder_percent": 20}})
    for i in range(200):
        network.switch.enter(0, frames.tcp(b"x", sequence=i), i * 1e-4)
    network.run_until(1.0)
    held_back = {i: at for (at, _, _), i in zip(network.got, network.sequences(), strict=True) if at > i * 1e-4 + 0.021}
    assert len(network.got) == 200
    assert len(held_back) == network.switch.link(0, 1).reordered > 20
    assert all(at == pytest.approx(i * 1e-4 + 0.025) for i, at in held_back.items())
    assert [at for at, _, _ in network.got] == sorted(at for at, _, _ in network.got)
    punctual = [i for i in network.sequences() if i not in held_back]
    assert punctual == sorted(punctual)


def test_uplink_is_shared_by_all_paths_of_a_peer_and_runs_are_short() -> None:
    network = Network(ports={"0": {"up_mbit": 100, "queue_ms": 1000}})
    network.switch.enter(0, frames.tcp(SUPER, target=1), 0.0)
    network.switch.enter(0, frames.tcp(SUPER, target=2), 0.0)
    network.run_until(10.0)
    assert network.got[-1][0] == pytest.approx(2 * 40 * 1514 * 8 / 100e6)
    gaps = [b[0] - a[0] for a, b in zip(network.got, network.got[1:], strict=False)]
    assert max(gaps) <= switch_module.RUN_S


def test_downlink_is_shared_by_all_senders() -> None:
    network = Network(ports={"2": {"down_mbit": 100, "queue_ms": 1000}})
    for source in (0, 1):
        network.switch.enter(source, frames.tcp(SUPER, source=source, target=2), 0.0)
    network.run_until(10.0)
    assert network.got[-1][0] == pytest.approx(2 * 40 * 1514 * 8 / 100e6)
    assert sum(len(frames.read(pieces).payload) for _, _, pieces in network.got) == 2 * len(SUPER)


def test_full_queues_drop_at_their_tail() -> None:
    network = Network(ports={"0": {"up_mbit": 10, "queue_ms": 20}})  # room for 25 000 bytes
    network.switch.enter(0, frames.tcp(SUPER), 0.0)
    network.run_until(10.0)
    assert len(network.got) == 25_000 // 1514
    assert network.switch.ports[0].up.dropped == 40 - 25_000 // 1514
    assert network.sequences() == [1000 + i * frames.MSS for i in range(len(network.got))]


def test_duplicates_arrive_twice_and_corrupted_ones_differ() -> None:
    network = Network(links={"*": {"duplicate_percent": 100}})
    network.switch.enter(0, frames.tcp(b"payload"), 0.0)
    network.switch.apply(Step(links={"*": {"duplicate_percent": 0, "corrupt_percent": 100}}), 0.0)
    network.switch.enter(0, frames.tcp(b"payload"), 0.0)
    network.run_until(1.0)
    payloads = [frames.read(pieces).payload for _, _, pieces in network.got]
    assert payloads[:2] == [b"payload"] * 2
    assert len(payloads) == 3
    assert payloads[2] != b"payload"


def test_frames_beyond_the_bound_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_module, "HELD_MAX_NBYTES", 3000)
    network = Network(links={"*": {"delay_ms": 100}})
    for _ in range(5):
        network.switch.enter(0, frames.tcp(bytes(frames.MSS)), 0.0)
    assert network.switch.overflowed == 3
    network.run_until(1.0)
    network.switch.enter(0, frames.tcp(bytes(frames.MSS)), 1.0)
    network.run_until(2.0)
    assert len(network.got) == 3


def test_step_that_makes_no_sense_changes_nothing() -> None:
    network = Network()
    with pytest.raises(ScenarioError, match="jitter_ms exceeds delay_ms"):
        network.switch.apply(Step(links={"0>1": {"delay_ms": 5}, "1>0": {"jitter_ms": 5}}, cut=("0>2",)), 0.0)
    assert network.switch.link(0, 1).settings.delay_ms == 0
    assert not network.switch.link(0, 2).is_cut


def test_late_deliveries_are_counted() -> None:
    network = Network()
    network.switch.enter(0, frames.tcp(b"x"), 1.0)
    network.switch.deliver(1.5, lambda _peer, _pieces: None)
    assert (network.switch.delivered, network.switch.late, network.switch.late_max_s) == (1, 1, 0.5)
