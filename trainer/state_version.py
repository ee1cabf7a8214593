# SPDX-License-Identifier: Apache-2.0
"""One version of the shared state: its fragments' tensors, their names, and which bits they have.

Rules: nothing in a version is ever written to. A version shares the states of those fragments that its outer step left
alone with the version before, so that a step costs memory and hashing for one fragment only. The tensors of a model in
one fragment are called "anchor", "momentum"; those of several "0/anchor", "0/momentum", "1/anchor" and so on.

It must not know how a version is made, or who needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isthmus.elastic.core.messages import Held
from isthmus.elastic.digest import StateManifest, TensorManifest, chunk_of
from isthmus.optim.fragments import Fragment
from isthmus.optim.outer import ANCHOR, State


@dataclass(slots=True, kw_only=True, eq=False)
class Version:
    """One shared state, whole and hashed. `pins` counts who needs it: learners, and work that began from it."""

    states: tuple[State, ...]
    """By index of the fragment."""
    manifest: StateManifest
    when_idle: Callable[["Version"], None]
    pins: int = 0
    tensors: Mapping[str, Tensor] = field(init=False)
    """All shared tensors by name, in the manifest's order."""

    def __post_init__(self) -> None:
        self.tensors = name_tensors(self.states)

    @property
    def held(self) -> Held:
        """Its outer step and digest."""
        return Held(self.manifest.outer_step, self.manifest.digest)

    @property
    def anchors(self) -> tuple[Tensor, ...]:
        """The parameters by fragment, each [fragment.numel]. Read-only."""
        return tuple(state.shared[ANCHOR] for state in self.states)

    def chunk(self, tensor: int, chunk: int) -> memoryview:
        """The bytes of one chunk of one tensor, in manifest order."""
        whole = byte_view(self.tensors[self.manifest.tensors[tensor].name])
        return chunk_of(whole, chunk, self.manifest.chunk_nbytes)

    def release(self) -> None:
        """Give up one pin. The last one gives the buffers back."""
        self.pins -= 1
        if self.pins == 0:
            self.when_idle(self)

    def parts(self) -> Mapping[str, TensorManifest]:
        """The manifest by name of the tensor."""
        return {part.name: part for part in self.manifest.tensors}

    def moved_from(self, other: "Version") -> tuple[int, ...]:
        """The fragments whose parameters have other bits than in `other`."""
        parts, others = self.parts(), other.parts()
        names = [tensor_name(index, ANCHOR, len(self.states)) for index in range(len(self.states))]
        return tuple(index for index, name in enumerate(names) if parts[name] != others[name])


def tensor_name(index: int, name: str, num_fragments: int) -> str:
    """What a tensor of a fragment's state is called among all of them."""
    return name if num_fragments == 1 else f"{index}/{name}"


def name_tensors(states: Sequence[State]) -> dict[str, Tensor]:
    """The shared tensors of all fragments, in the order of fragments and then of names."""
    return {
        tensor_name(index, name, len(states)): tensor
        for index, state in enumerate(states)
        for name, tensor in sorted(state.shared.items())
    }


def gather_anchor(tensors: Mapping[str, Tensor], fragments: Sequence[Fragment], *, out: Tensor) -> None:
    """Put the parameters of a state together.

    Args:
        tensors: of the state, by name.
        fragments: by index; together the whole model.
        out: the flat vector, [table.numel]; overwritten.

    Raises:
        KeyError: if a fragment's parameters are missing.
        ValueError: if they have another size.
    """
    for fragment in fragments:
        anchor = tensors[tensor_name(fragment.index, ANCHOR, len(fragments))]
        fragment.scatter(anchor.view(-1), out=out)


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, sharing memory."""
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view
