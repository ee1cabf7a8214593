# SPDX-License-Identifier: Apache-2.0
"""A snapshot is worth all records before it: whoever begins with it goes on exactly as who has read everything."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from isthmus.elastic.core.coordinator import CoordinatorMachine
from isthmus.elastic.core.doors import Doors
from isthmus.elastic.core.leases import LeaseLedger
from isthmus.elastic.core.records import Record
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.core.sizes import Sizes
from isthmus.elastic.core.work import Strikes, WorkBook
from isthmus.elastic.journal.store import pack
from tests.simulation.simulator import Simulator

SEEDS = tuple(range(20))
DECODER = msgspec.msgpack.Decoder(Record)


def contents(value: Any) -> Any:
    """Everything that a state holds, in its order, whatever fields it gets one day."""
    if isinstance(value, RunState | LeaseLedger | WorkBook | Strikes | Sizes | Doors):
        return {name: contents(item) for name, item in vars(value).items()}
    if isinstance(value, Mapping):
        return [(key, contents(item)) for key, item in value.items()]
    if isinstance(value, deque):
        return [contents(item) for item in value]
    return value


def sessions(machine: CoordinatorMachine) -> list[dict[str, Any]]:
    return [{name: getattr(item, name) for name in item.__slots__} for item in machine._roster.sessions.values()]


@pytest.mark.parametrize("seed", SEEDS)
def test_recovery_from_a_snapshot_and_the_records_after_it_is_that_from_all_records(seed: int) -> None:
    simulator = Simulator(seed)
    simulator.run()
    records = simulator.coordinator.journal
    config = simulator.coordinator_config
    whole = CoordinatorMachine.recover(config, records, 7.0)
    for cut in range(0, len(records) + 1, max(1, len(records) // 20)):
        written = pack(RunState.replay(records[:cut]).snapshot())
        snapshot = DECODER.decode(written)
        assert pack(snapshot) == written
        machine = CoordinatorMachine.recover(config, [snapshot, *records[cut:]], 7.0)
        assert contents(machine.state) == contents(whole.state), f"cut at record {cut}"
        assert sessions(machine) == sessions(whole)
        assert machine.next_deadline() == whole.next_deadline()
    again = [*records[:cut], snapshot, *records[cut:]]
    assert contents(RunState.replay(again)) == contents(whole.state), "in the midst of records it says nothing new"
