# SPDX-License-Identifier: Apache-2.0
"""What the emulator does to be a network although it is a process: when frames came, and where it runs."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from scripts.wanlink import emulator as emulator_module
from scripts.wanlink import processor
from scripts.wanlink.emulator import Emulator
from scripts.wanlink.switch import Switch


class Entered(Switch):
    """Only notes what enters it."""

    def __init__(self) -> None:
        super().__init__(2, seed=1)
        self.frames: list[tuple[int, bytes, float]] = []

    def enter(self, source: int, frame: bytes, now: float) -> None:
        self.frames.append((source, frame, now))


@pytest.fixture
def device() -> Iterator[tuple[socket.socket, int]]:
    """A sender, and a descriptor that gives a frame a read and never blocks."""
    with ExitStack() as stack:
        sender, receiver = (stack.enter_context(one) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        receiver.setblocking(False)
        yield sender, receiver.fileno()


def emulator_with(switch: Entered) -> Emulator:
    """One without namespaces and devices, which need root."""
    emulator = Emulator.__new__(Emulator)
    emulator.switch = switch
    return emulator


def test_frames_that_waited_to_be_read_came_evenly_since_the_last_look(device: tuple[socket.socket, int]) -> None:
    sender, descriptor = device
    switch = Entered()
    for number in range(4):
        sender.send(b"%d" % number)
    assert not emulator_with(switch)._read(7, descriptor, 10.0, 10.8)
    assert [(source, frame) for source, frame, _ in switch.frames] == [(7, b"%d" % number) for number in range(4)]
    assert [at for _, _, at in switch.frames] == pytest.approx([10.2, 10.4, 10.6, 10.8])


def test_a_device_that_has_more_than_a_turn_takes_is_come_back_to(
    device: tuple[socket.socket, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator_module, "READS_PER_TURN", 2)
    sender, descriptor = device
    for _ in range(3):
        sender.send(b"frame")
    emulator = emulator_with(switch := Entered())
    assert emulator._read(0, descriptor, 1.0, 2.0)
    assert not emulator._read(0, descriptor, 2.0, 3.0)
    assert [at for _, _, at in switch.frames] == pytest.approx([1.5, 2.0, 3.0])
    assert not emulator._read(0, descriptor, 3.0, 4.0), "and an empty one is left alone"


@pytest.mark.parametrize(("cores", "own", "others"), [({0, 1, 4}, [4], 0b11), ({2, 3}, [3], 0b100), ({5}, None, 0)])
def test_the_network_takes_one_core_and_leaves_the_others_to_its_peers(
    cores: set[int], own: list[int] | None, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, mask: taken.append(list(mask)))
    assert processor.settle() == others
    assert taken == ([] if own is None else [own])
