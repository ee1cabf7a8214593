# SPDX-License-Identifier: Apache-2.0
"""One round of a method by itself: what an engine asks from the result on, for one worker."""

import dataclasses
from typing import NamedTuple

import torch

from isthmus.optim.outer import Outcome, digest_of, empty_like
from isthmus.optim.simulate import State


class After(NamedTuple):
    """What came of it."""

    state: State
    target: torch.Tensor | None
    keep: float


def begin(outer, fragment, value):
    """The state of a worker at the start."""
    shared = outer.init(fragment, value)
    return State(shared=shared, private=outer.init_private(fragment, shared, value))


def after(outer, round_, result, state, mine=None, *, out=None):
    """Step and settle. A round without a result is None; `mine` is the worker's contribution."""
    shared = state.shared
    if result is not None:
        shared = outer.step(round_, result, state.shared, out=None if out is None else out.shared)
        if not round_.keeps_value:
            result = dataclasses.replace(result, value=torch.empty(0))
    outcome = Outcome(
        round_=round_, result=result, contribution=mine, before=state.shared, after=shared, private=state.private
    )
    settled = outer.settle(outcome, out=None if out is None else out.private)
    return After(State(shared, settled.private), settled.target, settled.keep)


def tensors_of(state):
    return [*state.shared.values(), *state.private.values()]


def spare(state, fill=torch.nan):
    """To be recycled, of other memory, with nothing in it that anybody may read."""
    recycled = State(*map(empty_like, state))
    for tensor in tensors_of(recycled):
        tensor.fill_(fill)
    return recycled


def digest(state):
    return digest_of(state.shared)


def same(left, right):
    """Whether two states are equal, names and bits."""
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )
