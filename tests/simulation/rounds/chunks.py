# SPDX-License-Identifier: Apache-2.0
"""What an operation puts into the queues."""

from typing import TYPE_CHECKING

from tests.simulation.rounds.values import Frame

if TYPE_CHECKING:
    from tests.simulation.rounds.operation import Operation


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
