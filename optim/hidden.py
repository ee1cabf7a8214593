# SPDX-License-Identifier: Apache-2.0
"""Which matrices of a model are hidden: maps between vectors, of neither its first layer nor its last.

Muon is for these. A table of vectors (an embedding) and the output layer, which has a row for each of a table's
entries, are not. Modules tell by their type and by the weights that they share; names tell nothing.

It must not know optimizers.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Parameter


class _Map(NamedTuple):
    """A weight by what its layer makes of what."""

    weight: Parameter
    outputs: int
    inputs: int


class _Table(NamedTuple):
    weight: Parameter
    rows: int
    width: int


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Names of the hidden matrices among `model.named_parameters()`; sharded by FSDP2 or not.

    They are the two-dimensional weights of linear layers, without those of the output: a layer that shares its weight
    with an embedding. Where there is none, the output layers are the last of the model, if they have one output for
    each row of an embedding, or else the only layer that has.
    """
    tables = [table for module in model.modules() if (table := _as_table(module)) is not None]
    maps = [found for module in model.modules() if (found := _as_map(module)) is not None]
    others = {id(table.weight) for table in tables}
    if not any(id(found.weight) in others for found in maps):
        others |= {id(output.weight) for output in _outputs(maps, tables)}
    hidden = {id(found.weight) for found in maps} - others
    return frozenset(name for name, param in model.named_parameters() if id(param) in hidden)


def _outputs(maps: Sequence[_Map], tables: Sequence[_Table]) -> list[_Map]:
    """The layers that make scores of a table's entries; several if there are several heads."""
    like_outputs = [each for each in maps if _is_like_an_output(each, maps, tables)]
    if not like_outputs:
        return []
    last = maps[-1]
    if last is like_outputs[-1]:
        shape = last.outputs, last.inputs
        return list(itertools.takewhile(lambda each: (each.outputs, each.inputs) == shape, reversed(maps)))
    return like_outputs if len(like_outputs) == 1 else []


def _is_like_an_output(each: _Map, maps: Sequence[_Map], tables: Sequence[_Table]) -> bool:
    rows = [table for table in tables if table.rows == each.outputs]
    if any(table.width == each.inputs for table in rows):
        return True
    # As many outputs as a table has rows, by chance: positions or a small vocabulary may be as many as a layer is wide.
    is_inner_width = any(each.outputs == other.inputs for other in maps)
    return bool(rows) and not is_inner_width


def _as_table(module: nn.Module) -> _Table | None:
    rows, width = getattr(module, "num_embeddings", None), getattr(module, "embedding_dim", None)
    weight = _matrix(module)
    if weight is None or not isinstance(rows, int) or not isinstance(width, int):
        return None
    return _Table(weight, rows, width)


def _as_map(module: nn.Module) -> _Map | None:
    weight = _matrix(module)
    if weight is None:
        return None
    # nn.Linear and its like; then the Conv1D of GPT-2 in Hugging Face's transformers, whose weight is transposed.
    for outputs, inputs in (("out_features", "in_features"), ("nf", "nx")):
        num_outputs, num_inputs = getattr(module, outputs, None), getattr(module, inputs, None)
        if isinstance(num_outputs, int) and isinstance(num_inputs, int):
            return _Map(weight, num_outputs, num_inputs)
    return None


def _matrix(module: nn.Module) -> Parameter | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, nn.Parameter) and weight.ndim == 2 else None
