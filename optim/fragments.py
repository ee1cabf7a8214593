# SPDX-License-Identifier: Apache-2.0
"""Where each tensor lies in the flat vector, and which tensors are exchanged together.

A `FragmentTable` lays the parameters of a model end to end, in the order given, in one flat fp32 vector. A
`Fragment` is a named group of those tensors, ``("param", 3)``; its own buffer is the concatenation of its
tensors in table order, so a fragment of strided layers is exchanged as one contiguous piece.

Rules:
    * The order is the caller's and is never changed: it is part of what the peers must agree on.
    * Offsets and sizes count elements, not bytes.
    * Everything here is a value: equal inputs give equal, hashable outputs on every peer.

It must not know models, devices, FSDP or the network: the trainer says which local shard is which slice.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FragmentKey:
    """Name of a fragment. Equal on all peers; part of a round's key."""

    kind: str
    """Which set of tensors: "param", "grad", or a state of the inner optimizer by its own name, as "exp_avg"."""

    index: int
    """Position among the fragments of this kind, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One tensor's place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """First element, counted from the start of the flat vector."""

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A group of tensors that is exchanged together.

    Build it with `FragmentTable.fragment` or `FragmentTable.whole`.
    """

    kind: str
    index: int
    specs: tuple[ParameterSpec, ...]
    """Its tensors, in table order."""

    def __post_init__(self) -> None:
        if not self.specs:
            raise ValueError(f"fragment ({self.kind}, {self.index}) holds no tensor")

    @property
    def key(self) -> FragmentKey:
        """Its name, without its contents."""
        return FragmentKey(kind=self.kind, index=self.index)

    @property
    def numel(self) -> int:
        """Elements in the fragment's own buffer."""
        return sum(spec.numel for spec in self.specs)

    @property
    def ranges(self) -> tuple[slice, ...]:
        """The fragment's slices of the flat vector; tensors that touch are merged into one slice."""
        merged: list[slice] = []
        for spec in self.specs:
            if merged and merged[-1].stop == spec.offset:
                merged[-1] = slice(merged[-1].start, spec.stop)
            else:
                merged.append(slice(spec.offset, spec.stop))
        return tuple(merged)

    def gather(self, flat: Tensor, *, out: Tensor) -> Tensor:
        """Copy the fragment out of the flat vector.

        Args:
            flat: the whole vector, [table.numel].
            out: the fragment's buffer, [self.numel]; overwritten. Must not overlap `flat`.

        Returns:
            `out`.
        """
        for piece, place in self.pairs(out):
            piece.copy_(flat[place])
        return out

    def scatter(self, buffer: Tensor, *, out: Tensor) -> Tensor:
        """Copy the fragment's buffer into its places in the flat vector; the rest of it is untouched.

        Args:
            buffer: the fragment's buffer, [self.numel].
            out: the whole vector, [table.numel]. Must not overlap `buffer`.

        Returns:
            `out`.
        """
        for piece, place in self.pairs(buffer):
            out[place].copy_(piece)
        return out

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """One tensor of the fragment's buffer, in its own shape, sharing memory.

        Raises:
            KeyError: if the fragment does not hold a tensor of that name.
            ValueError: if the buffer has another size.
        """
        return self.views(buffer)[name]

    def views(self, buffer: Tensor) -> Mapping[str, Tensor]:
        """All tensors of the fragment's buffer by name, in their own shapes, sharing memory.

        Raises:
            ValueError: if the buffer has another size.
        """
        self._check_buffer(buffer)
        starts = itertools.accumulate((spec.numel for spec in self.specs), initial=0)
        return {
            spec.name: buffer[start : start + spec.numel].view(spec.shape)
            for spec, start in zip(self.specs, starts, strict=False)
        }

    def names_in(self, start: int, stop: int) -> tuple[str, ...]:
        """The tensors that own elements `[start, stop)` of the fragment's buffer, in its order."""
        starts = itertools.accumulate((spec.numel for spec in self.specs), initial=0)
        placed = zip(self.specs, starts, strict=False)
        return tuple(spec.name for spec, first in placed if first < stop and start < first + spec.numel)

    def pairs(self, buffer: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """(a piece of the fragment's buffer, its slice of the flat vector), one for each of `ranges`.

        Raises:
            ValueError: if the buffer has another size.
        """
        self._check_buffer(buffer)
        start = 0
        for place in self.ranges:
            stop = start + place.stop - place.start
            yield buffer[start:stop], place
            start = stop

    def _check_buffer(self, buffer: Tensor) -> None:
        if buffer.ndim != 1 or buffer.numel() != self.numel:
            raise ValueError(
                f"fragment ({self.kind}, {self.index}) needs a flat buffer of {self.numel} elements, "
                f"got shape {tuple(buffer.shape)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentTable:
    """The layout of all tensors in one flat vector."""

    specs: tuple[ParameterSpec, ...]

    @classmethod
    def from_named_shapes(cls, named_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> FragmentTable:
        """Lay tensors end to end in the order given.

        Args:
            named_shapes: (name, shape) of every tensor; a tied weight appears once.

        Raises:
            ValueError: on no tensor at all, a repeated name or a negative dimension.
        """
        specs: dict[str, ParameterSpec] = {}
        offset = 0
        for name, shape in named_shapes:
            if name in specs:
                raise ValueError(f"tensor {name!r} is listed twice; list a tied weight once")
            if any(size < 0 for size in shape):
                raise ValueError(f"tensor {name!r} has a negative dimension: {tuple(shape)}")
            specs[name] = ParameterSpec(name=name, shape=tuple(shape), offset=offset)
            offset = specs[name].stop
        if not specs:
            raise ValueError("a fragment table needs at least one tensor")
        return cls(specs=tuple(specs.values()))

    @property
    def numel(self) -> int:
        """Elements in the flat vector."""
        return self.specs[-1].stop

    def whole(self, kind: str = "param") -> Fragment:
        """One fragment of all tensors; its buffer has the layout of the flat vector itself."""
        return Fragment(kind=kind, index=0, specs=self.specs)

    def fragment(self, index: int, names: Collection[str], kind: str = "param") -> Fragment:
        """A fragment of the named tensors, always in table order.

        Raises:
            ValueError: if a name is not in the table, or none is given.
        """
        wanted = frozenset(names)
        unknown = sorted(wanted - {spec.name for spec in self.specs})
        if unknown:
            raise ValueError(f"no such tensor: {', '.join(map(repr, unknown))}")
        return Fragment(kind=kind, index=index, specs=tuple(s for s in self.specs if s.name in wanted))

    def view(self, flat: Tensor, name: str) -> Tensor:
        """One tensor of the flat vector, in its own shape, sharing memory.

        Raises:
            KeyError: if there is no tensor of that name.
            ValueError: if the vector has another size.
        """
        return self.whole().view(flat, name)

    def check_partition(self, fragments: Iterable[Fragment]) -> None:
        """Demand that the fragments of each kind hold every tensor of the table exactly once.

        Several implementations have lost tensors between fragments, and such a tensor is simply never averaged:
        the run looks healthy. Hence every method's split passes through here.

        Raises:
            ValueError: names the first tensor that is missing, held twice or foreign to the table.
        """
        held: dict[str, set[ParameterSpec]] = {}
        for fragment in fragments:
            specs = held.setdefault(fragment.kind, set())
            for spec in fragment.specs:
                if spec in specs:
                    raise ValueError(f"tensor {spec.name!r} is in two fragments of kind {fragment.kind!r}")
                specs.add(spec)
        table = frozenset(self.specs)
        for kind, specs in held.items():
            for spec in sorted(table ^ specs, key=lambda spec: spec.offset):
                fault = "in no fragment" if spec in table else "not in this table but in a fragment"
                raise ValueError(f"tensor {spec.name!r} is {fault} of kind {kind!r}")
