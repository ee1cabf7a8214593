# SPDX-License-Identifier: Apache-2.0
"""Asynchronous DiLoCo: delayed Nesterov on a server that every member keeps a copy of, and local steps by speed.

A worker sends its difference when it has done its steps, and goes on from the anchor of that moment; nobody waits for
the slowest. The server takes one difference g after the other; each N-th of them moves the momentum:

    acc <- acc + g
    N-th:       m <- mu * m + acc / N;   anchor <- anchor - lr * (g / N + (1 - c * N + c) * mu * m);   acc <- 0
    otherwise:                           anchor <- anchor - lr * (g / N + c * mu * m)

for a momentum that moves with every stale difference runs away. N = 1 is Nesterov. N workers that arrive together with
c = 0 are DiLoCo.

There is no server here. Every `poll_steps` global inner steps all members meet in a GATHER, to which those contribute
who have done their steps. Every row is one arrival, in the members' order, and all take them into the shared state
alike. A worker whose row arrived pulls: it goes to the new anchor and keeps a copy, from which its next difference
counts. The others train on, untouched. A poll to which nobody came has no result and costs no bytes.

Shared state: anchor, momentum, acc, and how many have arrived since the momentum moved. Private state: the anchor that
was pulled, and when.

Departures from the paper: arrivals wait for the next poll, and those of one poll pull the same anchor, after all of
them. A difference of any age and any number of steps is one arrival; weights of the members are not read.

Source: Asynchronous Local-SGD (arXiv:2401.09135), its delayed Nesterov and dynamic local updates (DyLU).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from isthmus.optim.diloco import MOMENTUM, DiLoCo, anchor_and_momentum
from isthmus.optim.flat import overlap, require_flat
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import ANCHOR, PARAM, Emitted, Op, Outer, Round, Settled, successor
from isthmus.optim.registry import register

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from isthmus.optim.fragments import Fragment, FragmentTable
    from isthmus.optim.outer import Outcome, Result, Tensors, Work
    from isthmus.optim.run_facts import RunFacts

ACCUMULATOR: Final = "accumulator"
"""Name, in shared state, of the sum of the differences since the momentum moved, [numel]."""
NUM_ARRIVALS: Final = "num_arrivals"
"""Name, in shared state, of how many they are, [1]: a whole number below N."""
PULLED: Final = "pulled"
"""Name, in private state, of the anchor this worker went on from, [numel]."""
PULLED_AT: Final = "pulled_at"
"""Name, in private state, of the global inner step after which it did, [1]: exact in fp32 up to 2^24."""

_WHOLE: Final = FragmentKey(kind=PARAM, index=0)
_NUM_PEERS: Final = 4
"""Where nobody says how many peers there are."""


@register("async")
@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncDiLoCo(Outer):
    """Settings of asynchronous DiLoCo.

    All but `inner_steps` and `dylu` must be equal on all members; these two are read by a worker for itself.

    Raises:
        ValueError: if a setting is out of its range.
    """

    lr: float = 1.0
    """Server's learning rate ε, > 0: 1 without momentum is plain averaging. The paper: 0.7 with 0.9; naive asynchronous
    Nesterov (buffer 1) needs a tenth of that."""
    momentum: float = 0.0
    """Server's momentum, in [0, 1). The paper: 0.9, for thousands of rounds; in short runs any may do harm."""
    buffer: int | None = None
    """N, arrivals between two moves of the momentum, >= 1. None: the number of peers that the run expects, which
    `fitted` works out; the paper has the number of workers. Where no run is known, it is 4."""
    momentum_share: float = 0.0
    """c, in [0, 1/N]: the part of the momentum that each arrival applies; the N-th applies what is left of it."""
    inner_steps: int = 50
    """H_w, steps that this worker does between its contributions, >= 1. Its own steps, or global ones with `dylu`."""
    dylu: bool = False
    """Dynamic local updates: H counts global inner steps since the worker's last pull. One of speed v does floor(H * v)
    of its own in that time, and at least 1; no speed is measured or told to anybody."""
    poll_steps: int = 10
    """Global inner steps between polls, >= 1. One that is ready trains on until the next. Ours: no paper has it."""

    def __post_init__(self) -> None:
        DiLoCo(lr=self.lr, momentum=self.momentum, inner_steps=self.inner_steps)  # the same ranges
        if self.buffer is not None and self.buffer < 1:
            raise ValueError(f"buffer must be at least 1, got {self.buffer}")
        arrivals = self.buffer or 1  # not known yet: the widest range there is
        if not 0.0 <= self.momentum_share <= 1.0 / arrivals:
            raise ValueError(f"momentum_share must be in [0, 1/{arrivals}], got {self.momentum_share}")
        if self.poll_steps < 1:
            raise ValueError(f"poll_steps must be at least 1, got {self.poll_steps}")

    def fitted(self, _table: FragmentTable, run: RunFacts | None = None, /) -> AsyncDiLoCo:
        """The same settings with `buffer` known.

        Raises:
            ValueError: if `momentum_share` is too large for it.
        """
        if self.buffer is not None:
            return self
        return dataclasses.replace(self, buffer=_NUM_PEERS if run is None else run.num_peers)

    @property
    def counts_from_anchor(self) -> bool:
        """No: from the anchor that the worker pulled."""
        return False

    @property
    def reads_payloads(self) -> bool:
        """All of them."""
        return True

    def fragments(self, table: FragmentTable, /) -> tuple[Fragment, ...]:
        """One fragment: the whole flat vector."""
        return (table.whole(),)

    def init(self, fragment: Fragment, value: Tensor, /) -> Tensors:
        """Anchor: a copy of the value. The rest: zeros."""
        require_flat(value, fragment.numel, "the initial value")
        accumulated = {ACCUMULATOR: torch.zeros_like(value), NUM_ARRIVALS: torch.zeros(1)}
        return {**anchor_and_momentum(value), **accumulated}

    def init_private(self, _fragment: Fragment, _shared: Tensors, value: Tensor, /) -> Tensors:
        """What was pulled: a copy of the value, at inner step 0."""
        return {PULLED: value.clone(), PULLED_AT: torch.zeros(1)}

    def plan(self, inner_step: int, /) -> tuple[Round, ...]:
        """A blocking poll after every `poll_steps` inner steps."""
        if inner_step == 0 or inner_step % self.poll_steps:
            return ()
        return (Round(fragment=_WHOLE, op=Op.GATHER, inner_step=inner_step),)

    def emit(
        self, round_: Round, value: Tensor, _shared: Tensors, private: Tensors, work: Work, /, *, out: Tensor
    ) -> Emitted:
        """How far the worker went since it pulled; of weight 0 if it is not ready."""
        pulled = private[PULLED]
        require_flat(value, pulled.numel(), "the local value")
        require_flat(out, pulled.numel(), "the payload buffer")
        steps = round_.inner_step - int(private[PULLED_AT].item()) if self.dylu else work.inner_steps
        is_ready = work.inner_steps > 0 and steps >= self.inner_steps
        return Emitted(payload=torch.sub(pulled, value, out=out), weight=float(is_ready))

    def step(self, _round: Round, result: Result, shared: Tensors, /, *, out: Tensors | None = None) -> Tensors:
        """Take every row as one arrival.

        Raises:
            ValueError: if `out` shares memory with `shared`, or `buffer` is not known.
        """
        out = successor(shared, out)
        # The one row of a lone arrival may lie in a tensor of `out`.
        is_recycled = any(overlap(result.value, tensor) for tensor in out.values())
        rows = result.value.clone() if is_recycled else result.value
        for name, tensor in shared.items():
            out[name].copy_(tensor)
        for row in rows:
            self._arrive(row, out)
        return out

    def settle(self, outcome: Outcome, /, *, out: Tensors | None = None) -> Settled:
        """A worker that arrived pulls: it goes to the new anchor and keeps a copy.

        All others train on untouched, for they count from what they pulled: who was not ready, and whose difference was
        not counted, which is ready again at the next poll, with more.
        """
        mine = outcome.contribution
        if outcome.result is None or mine is None or mine.weight == 0.0:
            return Settled.untouched(outcome.private)
        out = successor(outcome.private, out)
        out[PULLED].copy_(outcome.after[ANCHOR])
        out[PULLED_AT].fill_(outcome.round_.due_step)
        return Settled.replaced(out, outcome.after[ANCHOR])

    def _arrive(self, difference: Tensor, shared: Mapping[str, Tensor]) -> None:
        """One step of the server, in place. Every product and sum is rounded by itself: see optim/nesterov.py."""
        if self.buffer is None:
            raise ValueError("buffer is not known: call fitted(table) first, or set it")
        anchor, momentum, accumulator = (shared[name] for name in (ANCHOR, MOMENTUM, ACCUMULATOR))
        num_arrivals = int(shared[NUM_ARRIVALS].item()) + 1
        accumulator.add_(difference)
        share = self.momentum_share
        if num_arrivals == self.buffer:
            momentum.mul_(self.momentum).add_(accumulator.div_(self.buffer))
            accumulator.zero_()
            num_arrivals, share = 0, 1.0 - share * self.buffer + share
        shared[NUM_ARRIVALS].fill_(num_arrivals)
        step = difference / self.buffer
        if share > 0.0:
            step.add_(momentum * (share * self.momentum))
        anchor.sub_(step.mul_(self.lr))
