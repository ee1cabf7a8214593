# SPDX-License-Identifier: Apache-2.0
"""What an operation leaves to the next attempt, and what it puts into the queues."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.collective.core.slices import SlicePlan
from isthmus.collective.core.types import View
from tests.simulation.rounds.values import Frame, Value

if TYPE_CHECKING:
    from tests.simulation.rounds.operation import Operation


@dataclass(slots=True)
class Attempt:
    """What an operation leaves to the next attempt of it, among the same members by the same plan."""

    view: View
    plan: SlicePlan
    done: int
    memory: dict[int, Value]


class ChunkSend:
    """A chunk in a queue."""

    __slots__ = ("_operation", "chunk", "kind", "owner", "to")

    def __init__(self, operation: "Operation", kind: str, to: int, chunk: int) -> None:
        self.owner: object = operation
        self._operation, self.kind, self.to, self.chunk = operation, kind, to, chunk

    def pieces(self) -> Frame | None:
        return self._operation.frame_of(self.kind, self.chunk)

    def sent(self) -> None:
        self._operation.on_sent(self)
