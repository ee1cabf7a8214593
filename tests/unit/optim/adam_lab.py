# SPDX-License-Identifier: Apache-2.0
"""The workers of lab.py with an inner optimizer that has states, so that a method can average these too."""

import torch

from isthmus.optim.outer import GRAD, PARAM
from tests.unit.optim.lab import INITIAL, TABLE, WORKERS, gradient, run

LR, BETAS, EPS = 0.02, (0.9, 0.99), 1e-8


def fixed_gradient(worker, inner_step, value):
    """One that does not depend on where the worker is: whatever a method does, the sequence stays the same."""
    return gradient(worker, inner_step, torch.zeros_like(value))


class Rows:
    """Workers and their gradients, a row each; `update` is the inner optimizer's.

    Args:
        states: names of its states.
        gradient: of (worker, its inner step, value).
        rows: how many workers there may be at once.
    """

    def __init__(self, states, *, gradient=gradient, rows=8):
        self.tensors = {kind: torch.zeros(rows, TABLE.numel) for kind in (PARAM, GRAD, *states)}
        self.states = states
        self.workers = {}
        self.gradient = gradient

    def begin(self, row, worker):
        self.workers[row] = worker
        for state in self.states:
            self.tensors[state][row].zero_()

    def backward(self, rows, inner_steps):
        for row, inner_step in zip(rows, inner_steps, strict=True):
            self.tensors[GRAD][row] = self.gradient(self.workers[row], inner_step, self.tensors[PARAM][row])

    def of_workers(self, kind):
        """[workers, numel], of those who are there from the start."""
        return self.tensors[kind][: len(WORKERS)]


class AdamRows(Rows):
    """Adam as DES-LOC's listing has it, without bias correction, for all rows at once."""

    def __init__(self, **settings):
        super().__init__(("exp_avg", "exp_avg_sq"), **settings)

    def update(self, rows, inner_steps):
        first_beta, second_beta = BETAS
        at = torch.tensor(rows)
        g = self.tensors[GRAD][at]
        u = first_beta * self.tensors["exp_avg"][at] + (1 - first_beta) * g
        v = second_beta * self.tensors["exp_avg_sq"][at] + (1 - second_beta) * g * g
        self.tensors["exp_avg"][at], self.tensors["exp_avg_sq"][at] = u, v
        self.tensors[PARAM][at] -= LR * u / (v.sqrt() + EPS)


class OptimizerRows(Rows):
    """Any optimizer of torch that updates its states in place.

    Args:
        build: makes one for a list of parameters.
        states: names of its states.
    """

    def __init__(self, build, states=(), **settings):
        super().__init__(states, **settings)
        self._build = build
        self._optimizers = {}

    def begin(self, row, worker):
        super().begin(row, worker)
        param = torch.nn.Parameter(self.tensors[PARAM][row])
        optimizer = self._build([param])
        if self.states:
            optimizer.state[param] = {"step": torch.tensor(0.0)} | {s: self.tensors[s][row] for s in self.states}
        self._optimizers[row] = optimizer

    def update(self, rows, inner_steps):
        for row in rows:
            optimizer = self._optimizers[row]
            optimizer.param_groups[0]["params"][0].grad = self.tensors[GRAD][row].clone()
            optimizer.step()


def run_rows(outer, num_inner_steps=24, *, rows, **settings):
    """Simulate on these rows."""
    return run(outer, num_inner_steps, workload=rows, **settings)


def adam_directly(periods, num_inner_steps, *, gradient=gradient, workers=WORKERS, aborted=()):
    """Adam on every worker in double precision, and means by period: the listing, sharing nothing with the package.

    Args:
        periods: by name "x", "u" and "v"; a name that is missing is never averaged.
        num_inner_steps: of each worker.
        gradient: of (worker, its inner step, value).
        workers: their names.
        aborted: (name, inner step) of means that do not take place.

    Returns:
        By name, [workers, numel].
    """
    first_beta, second_beta = BETAS
    x = INITIAL.double().repeat(len(workers), 1)
    u, v = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(1, num_inner_steps + 1):
        for row, worker in enumerate(workers):
            g = gradient(worker, step, x[row].clone())
            u[row] = first_beta * u[row] + (1 - first_beta) * g
            v[row] = second_beta * v[row] + (1 - second_beta) * g**2
            x[row] -= LR * u[row] / (v[row].sqrt() + EPS)
        for name, values in (("x", x), ("u", u), ("v", v)):
            if name in periods and step % periods[name] == 0 and (name, step) not in aborted:
                values[:] = values.mean(0)
    return {"x": x, "u": u, "v": v}
