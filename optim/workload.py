# SPDX-License-Identifier: Apache-2.0
"""What simulated workers train, and what their rounds cost: the two things `simulate` leaves to its caller.

It must not know outer optimizers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, assert_never

import torch

from isthmus.optim.outer import PARAM, Op, Round

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from isthmus.optim.fragments import Fragment

    InnerStep: TypeAlias = Callable[[str, int, Tensor], None]
    """(worker, its inner step counted from 1, value [numel]): trains the value in place."""

FP32_NBYTES: Final = 4


class Workload(Protocol):
    """A model and an inner optimizer for many workers at once, a row each, so that one pass can train them all."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By kind of fragment, [rows, numel] fp32: "param", "grad" if gradients are exchanged, inner states by name.

        The simulation reads and writes rows; the memory stays the same.
        """
        ...

    def backward(self, rows: Sequence[int], inner_steps: Sequence[int]) -> None:
        """Write these rows of "grad", at their parameters, on the data of their n-th inner step, counted from 1."""
        ...

    def update(self, rows: Sequence[int], inner_steps: Sequence[int]) -> None:
        """Let the inner optimizer use the gradients."""
        ...

    def begin(self, row: int, worker: str) -> None:
        """A new worker takes this row: forget the inner states there. Its parameters are the caller's."""
        ...


class OneByOne:
    """Workers that are trained one after another by a plain function. For tests and small examples.

    Args:
        inner_step: trains one worker for one step.
        rows: how many workers there may be at once.
        numel: of the parameters.
    """

    def __init__(self, inner_step: InnerStep, *, rows: int, numel: int) -> None:
        self._inner_step = inner_step
        self._workers: dict[int, str] = {}
        self.tensors = {PARAM: torch.zeros(rows, numel)}

    def backward(self, rows: Sequence[int], inner_steps: Sequence[int]) -> None:
        """The function does all at once, in `update`."""

    def update(self, rows: Sequence[int], inner_steps: Sequence[int]) -> None:
        """Call the function."""
        for row, inner_step in zip(rows, inner_steps, strict=True):
            self._inner_step(self._workers[row], inner_step, self.tensors[PARAM][row])

    def begin(self, row: int, worker: str) -> None:
        """Remember the name."""
        self._workers[row] = worker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivery:
    """What an exchange gave to whom, and what it cost."""

    values: Mapping[str, Tensor]
    """By worker: the result's value. One tensor for all, but for PAIR; a worker without one was left out."""
    delivered: Mapping[str, Tensor]
    """By contributor, [numel]: what the others decoded from its payload."""
    partners: Mapping[str, str]
    """PAIR only."""
    payload_nbytes: float
    """Length of a payload in its wire form, headers apart; the mean over contributors."""
    sent_nbytes: float
    """What a contributor sent in all, likewise."""


class Wire(Protocol):
    """How payloads become results."""

    def exchange(
        self, round_: Round, fragment: Fragment, payloads: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Delivery:
        """Reduce, gather or swap.

        Args:
            round_: says how, and with which codec.
            fragment: whose payloads these are.
            payloads: by contributor, in the order of the view; not written.
            weights: of the same, all positive.
        """
        ...


class ExactWire:
    """fp32 as it is. Bytes are those of the collective layer here: means are reduced in slices, by their owners."""

    def exchange(
        self, round_: Round, fragment: Fragment, payloads: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Delivery:
        """See Wire."""
        del fragment
        rows = list(payloads.values())
        nbytes = float(rows[0].numel() * FP32_NBYTES)
        partners: dict[str, str] = {}
        others = len(rows) - 1
        match round_.op:
            case Op.MEAN:
                values = dict.fromkeys(payloads, weighted_mean(rows, list(weights.values())))
                sent = 2 * nbytes * others / len(rows)
            case Op.GATHER:
                values = dict.fromkeys(payloads, torch.stack(rows))
                sent = nbytes * others
            case Op.PAIR:
                partners = draw_pairs(round_, list(payloads))
                values = {worker: payloads[partner] for worker, partner in partners.items()}
                sent = nbytes * len(partners) / len(rows)
            case _:
                assert_never(round_.op)
        return Delivery(values=values, delivered=payloads, partners=partners, payload_nbytes=nbytes, sent_nbytes=sent)


def weighted_mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum(w * row) / sum(w), in order, each product rounded before it is added. New memory."""
    total = torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights, strict=True):
        total += row * weight
    return total.div_(sum(weights))


def draw_pairs(round_: Round, workers: Sequence[str], *, apart: Collection[frozenset[str]] = ()) -> dict[str, str]:
    """Disjoint pairs, both ways, drawn from the inner step; an odd one out has no partner.

    Args:
        round_: as planned.
        workers: who takes part, in the order of the view.
        apart: pairs that cannot meet.
    """
    drawn = random.Random(round_.inner_step).sample(list(workers), len(workers))
    pairs: dict[str, str] = {}
    for place, worker in enumerate(drawn):
        for partner in drawn[place + 1 :] if worker not in pairs else ():
            if partner not in pairs and frozenset((worker, partner)) not in apart:
                pairs[worker], pairs[partner] = partner, worker
                break
    return pairs
