# SPDX-License-Identifier: Apache-2.0
"""Which tensors make up a layer, read from their names.

It must not know rounds, states or methods.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.optim.fragments import FragmentTable

_NUMBER = re.compile(r"[0-9]+")


def layer_groups(table: FragmentTable) -> tuple[tuple[str, ...], ...]:
    """The names of a model's tensors, one group a layer, in the order of the layers' numbers.

    A tensor's layer is the first number in its name: 3 for "layers.3.attn.wq" and for "layer3.w". A tensor without one
    goes with the first layer if the table lists it before any numbered tensor (the embedding), else with the last (the
    final norm, the head). Numbers may have gaps.

    Args:
        table: the model's tensors.

    Returns:
        At least one group, none of them empty; every name is in exactly one. Within a group the table's order holds. A
        model without any number is one group.
    """
    numbers = [_layer_of(spec.name) for spec in table.specs]
    known = sorted({number for number in numbers if number is not None})
    if not known:
        return (tuple(spec.name for spec in table.specs),)
    groups: dict[int, list[str]] = {number: [] for number in known}
    unnumbered = known[0]
    for spec, number in zip(table.specs, numbers, strict=True):
        if number is not None:
            unnumbered = known[-1]
        groups[unnumbered if number is None else number].append(spec.name)
    return tuple(map(tuple, groups.values()))


def _layer_of(name: str) -> int | None:
    found = _NUMBER.search(name)
    return None if found is None else int(found.group())
