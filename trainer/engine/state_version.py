# SPDX-License-Identifier: Apache-2.0
"""One version of the shared state: its fragments' tensors, their names, and which bits they have.

Rules: nothing in a version is ever written to. A version shares the states of those fragments that its outer step left
alone with the version before, so that a step costs memory and hashing for what it moves only. The tensors of a model in
one fragment are called "anchor", "momentum"; those of several "0/anchor", "0/momentum", "1/anchor" and so on, and what
belongs to a state of the inner optimizer "exp_avg/0/chain".

A fragment of which a method shares nothing (moments that are averaged, pairs) has one tensor here, `CHAIN`: the digest
of all that its rounds have returned, so that members vote on that too.

It must not know how a version is made, or who needs it.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor

from isthmus.elastic.core.messages import Held
from isthmus.elastic.state.digest import StateManifest, TensorManifest, chunk_of
from isthmus.elastic.state.replica import RoundRecord
from isthmus.optim.fragments import Fragment
from isthmus.optim.outer import ANCHOR, PARAM, Outer, Tensors

CHAIN: Final = "chain"
"""Name of the tensor of a fragment of which a method shares nothing: [32], the bytes of a digest."""


@dataclass(slots=True, kw_only=True, eq=False)
class Version:
    """One shared state, whole and hashed. `pins` counts who needs it: learners, and work that began from it."""

    fragments: tuple[Fragment, ...]
    states: tuple[Tensors, ...]
    """Of the fragments, in their order."""
    manifest: StateManifest
    when_idle: Callable[["Version"], None]
    pins: int = 0
    tensors: Mapping[str, Tensor] = field(init=False)
    """All shared tensors by name, in the manifest's order."""

    def __post_init__(self) -> None:
        self.tensors = name_tensors(self.fragments, self.states)

    @property
    def held(self) -> Held:
        """Its outer step and digest."""
        return Held(self.manifest.outer_step, self.manifest.digest)

    def shared(self, place: int) -> Tensors:
        """What the method shares of the fragment at this place."""
        return shared_part(self.states[place])

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
        """The places of the fragments whose parameters have other bits than in `other`."""
        parts, others = self.parts(), other.parts()
        names = [(place, tensor_name(self.fragments, place, ANCHOR)) for place in range(len(self.fragments))]
        return tuple(place for place, name in names if name in parts and parts[name] != others[name])


def shared_part(state: Tensors) -> Tensors:
    """The state as its method knows it."""
    return {} if CHAIN in state else state


def with_chain(shared: Tensors) -> Tensors:
    """The first state of a fragment, as it is kept."""
    return shared or {CHAIN: torch.zeros(blake3.digest_size)}


def next_chain(state: Tensors, inner_step: int, record: RoundRecord) -> Tensors:
    """The chain with one more round. New memory.

    Args:
        state: the chain before.
        inner_step: of the round.
        record: what it returned, the same on all members.
    """
    digest = blake3(bytes(state[CHAIN].to(torch.uint8).tolist()))
    digest.update(struct.pack(">q", inner_step))
    digest.update(repr((record.codec, record.weights, record.notes)).encode())
    for chunk in record.chunks:
        digest.update(struct.pack(">qq", chunk.start_numel, len(chunk.data)))
        digest.update(chunk.data)
    return {CHAIN: torch.tensor(list(digest.digest()), dtype=torch.float32)}


def tensor_name(fragments: Sequence[Fragment], place: int, name: str) -> str:
    """What a tensor of the state of the fragment at this place is called among all of them."""
    if len(fragments) == 1:
        return name
    fragment = fragments[place]
    return f"{fragment.index}/{name}" if fragment.kind == PARAM else f"{fragment.kind}/{fragment.index}/{name}"


def name_tensors(fragments: Sequence[Fragment], states: Sequence[Tensors]) -> dict[str, Tensor]:
    """The shared tensors of all fragments, in the order of fragments and then of names."""
    return {
        tensor_name(fragments, place, name): tensor
        for place, state in enumerate(states)
        for name, tensor in sorted(state.items())
    }


def has_anchor(outer: Outer, fragments: Sequence[Fragment]) -> bool:
    """Whether the parameters are part of the shared state."""
    sizes = (outer.init(part, torch.empty(part.numel, device="meta")) for part in fragments if part.kind == PARAM)
    shared = [ANCHOR in state for state in sizes]
    return bool(shared) and all(shared)


def gather_anchor(tensors: Mapping[str, Tensor], fragments: Sequence[Fragment], *, out: Tensor) -> None:
    """Put the parameters of a state together.

    Args:
        tensors: of the state, by name.
        fragments: in the method's order; those of the parameters together are the whole model.
        out: the flat vector, [table.numel]; overwritten.

    Raises:
        KeyError: if a fragment's parameters are missing.
        ValueError: if they have another size.
    """
    for place, fragment in enumerate(fragments):
        if fragment.kind == PARAM:
            fragment.scatter(tensors[tensor_name(fragments, place, ANCHOR)].view(-1), out=out)


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, sharing memory."""
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view
