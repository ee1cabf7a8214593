# SPDX-License-Identifier: Apache-2.0
"""Which machines a simulation runs: the real ones, or broken variants of them (mutants.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.events import CoordinatorEffect
from isthmus.elastic.core.member import MemberMachine
from isthmus.elastic.core.records import SnapshotRecord
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.shell.alarm import HeldClock
from tests.simulation.exchange import FrameGate
from tests.simulation.worker import Worker


def in_order(effects: Sequence[CoordinatorEffect]) -> Sequence[CoordinatorEffect]:
    """As the contract of the effects says."""
    return effects


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The machines, a peer's trainer, the fences for frames and in the store, the machine's time, snapshots, and the
    order of effects."""

    coordinator: type[CoordinatorMachine] = CoordinatorMachine
    member: type[MemberMachine] = MemberMachine
    gate: type[FrameGate] = FrameGate
    worker: type[Worker] = Worker
    fences: bool = True
    hold: Callable[[HeldClock], None] = HeldClock.hold
    release: Callable[[HeldClock], None] = HeldClock.release
    snapshot: Callable[[RunState], SnapshotRecord] = RunState.snapshot
    arrange: Callable[[Sequence[CoordinatorEffect]], Sequence[CoordinatorEffect]] = in_order
