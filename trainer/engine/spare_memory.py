# SPDX-License-Identifier: Apache-2.0
"""Memory of fragments' states that nobody needs: where the next outer step writes, and what is in it meanwhile.

Memory is handed on between fragments whose states have the same names and sizes. No more is kept than one outer step
has needed at once. Anchors go to memory that is lent, if there is some: others read them there (trainer/workers/).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from isthmus.elastic.state.digest import StateManifest
from isthmus.optim.fragments import Fragment
from isthmus.optim.outer import ANCHOR, Tensors

_Shape: TypeAlias = tuple[tuple[str, int], ...]


class SpareMemory:
    """See the module.

    Args:
        fragments: in the method's order; a place is an index into them.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._num_places = len(fragments)
        self._reserved: dict[int, Tensors] = {}  # by place: the next state goes there
        self._free: dict[_Shape, list[Tensors]] = {}
        self._most: dict[_Shape, int] = {}  # that were reserved at once
        self._shapes: dict[int, _Shape] = {}
        self._lent: tuple[Tensor, ...] = ()
        self._idle: list[Tensor] = []  # of what is lent
        self.content: StateManifest | None = None
        """What the reserved memory contains, if that is known."""

    def lend(self, memory: Sequence[Tensor]) -> None:
        """Tensors, [numel], for anchors of that size. Nobody else writes to them."""
        self._lent = tuple(memory)
        self._idle = list(memory)

    @property
    def is_empty(self) -> bool:
        """Whether there is none."""
        return not self._reserved and not any(self._free.values())

    def has(self, place: int) -> bool:
        """Whether there is memory for this fragment without asking the system."""
        return place in self._reserved or bool(self._free.get(self._shapes.get(place, ())))

    def fresh(self, outline: Tensors) -> dict[str, Tensor]:
        """New memory of these names and sizes, with any content: for an anchor what is lent, if it is idle.

        Pages are made where they are written. To touch gigabytes here would take seconds, in which no heartbeat goes
        out and no byte comes in.
        """
        state = {name: torch.empty_like(part, device="cpu") for name, part in outline.items()}
        if self._idle and ANCHOR in state and state[ANCHOR].shape == self._idle[-1].shape:
            state[ANCHOR] = self._idle.pop()
        return state

    def reserve(self, place: int, *, like: Tensors) -> Tensors:
        """Memory for this fragment's next state, the same until it is `used`. It is about to be written."""
        self.content = None
        if place not in self._reserved:
            shape = self._shapes[place] = _shape_of(like)
            free = self._free.get(shape)
            self._reserved[place] = free.pop() if free else self.fresh(like)
            num_reserved = sum(self._shapes[other] == shape for other in self._reserved)
            self._most[shape] = max(self._most.get(shape, 1), num_reserved)
        return self._reserved[place]

    def used(self, places: Iterable[int]) -> None:
        """What was reserved for these is part of a state now."""
        for place in places:
            self._reserved.pop(place, None)

    def give(self, states: Mapping[int, Tensors]) -> None:
        """Nobody needs the memory of these states any more."""
        for place, state in states.items():
            shape = self._shapes[place] = _shape_of(state)
            free = self._free.setdefault(shape, [])
            lent = [tensor for tensor in self._lent if tensor is state.get(ANCHOR)]
            # While lent memory is idle, the next state goes there: what is the system's goes back to it.
            if len(free) < self._most.get(shape, 1) and (lent or not self._idle):
                free.append(state)
            else:
                self._idle += lent

    def staged_in_vain(self, manifest: StateManifest) -> None:
        """The reserved memory holds its part of the state that this describes."""
        self.content = manifest

    def forget_content(self) -> None:
        """What is in it is of no use any more."""
        self.content = None

    def whole(self) -> dict[int, Tensors]:
        """What there is for each fragment of a state; it stays here until `clear`."""
        found = dict(self._reserved)
        free = {shape: list(states) for shape, states in self._free.items()}
        for place in range(self._num_places):
            states = free.get(self._shapes.get(place, ()))
            if place not in found and states:
                found[place] = states.pop()
        return found

    def clear(self) -> None:
        """All of it is somebody else's."""
        self._reserved.clear()
        self._free.clear()
        self.content = None


def _shape_of(state: Tensors) -> _Shape:
    return tuple(sorted((name, tensor.numel()) for name, tensor in state.items()))
