# SPDX-License-Identifier: Apache-2.0
"""Real peers on loopback, each in a thread, that train a small model whose gradients are plain functions."""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from isthmus.collective import BlockingCommunicator, OperationAborted, view_of
from isthmus.collective.api.standalone import peer_id_of
from isthmus.collective.codec import codec_named
from isthmus.optim.fragments import FragmentTable
from isthmus.optim.outer import GRAD, PARAM
from isthmus.optim.workload import ExactWire

LR = 0.03
PATIENCE_S = 40.0


class Model(nn.Module):
    """Four small layers; never run, its gradients are given."""

    def __init__(self, seed=0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 4 + place) for place in range(4))
        generator = torch.Generator().manual_seed(seed)  # models are made in several threads
        for param in self.parameters():
            nn.init.normal_(param, std=0.3, generator=generator)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def trained(self):
        return [param for param in self.parameters() if param.requires_grad]

    def flat(self):
        return torch.cat([param.detach().reshape(-1) for param in self.trained()])

    def set_gradient(self, flat):
        params = self.trained()
        parts = torch.split(flat, [param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view(param.shape).clone()


TABLE = FragmentTable.from_named_shapes((n, tuple(p.shape)) for n, p in Model().named_parameters() if p.requires_grad)


def gradient(worker, inner_step, value):
    """Of another quadratic for each worker, whose minimum moves. `worker` is a peer id."""
    number = 1.0 + int(worker, 16)
    index = torch.arange(value.numel(), dtype=torch.float32)
    return (0.5 + 0.2 * number) * (value - torch.sin(index * number + 0.1 * inner_step))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


sgd(Model())  # with its first optimizer torch loads half of itself: a second, and many on a busy machine


def inner_steps(model, optimizer, rank, steps):
    """The user's own loop."""
    for step in steps:
        model.set_gradient(gradient(peer_id_of(rank), step, model.flat()))
        optimizer.step()


class Rows:
    """The same training for `optim.simulate`.

    Args:
        build: makes an optimizer for a list of parameters.
        rows: workers.
        states: of the optimizer, that are averaged.
    """

    def __init__(self, build, rows, states=()):
        self.tensors = {kind: torch.zeros(rows, TABLE.numel) for kind in (PARAM, GRAD, *states)}
        self._build, self._states = build, states
        self._optimizers, self._names = {}, {}

    def begin(self, row, worker):
        param = nn.Parameter(self.tensors[PARAM][row])
        optimizer = self._build([param])
        if self._states:
            named = {state: self.tensors[state][row] for state in self._states}
            optimizer.state[param] = {"step": torch.tensor(0.0)} | named
        self._optimizers[row], self._names[row] = optimizer, worker

    def backward(self, rows, inner_steps):
        for row, inner_step in zip(rows, inner_steps, strict=True):
            self.tensors[GRAD][row] = gradient(self._names[row], inner_step, self.tensors[PARAM][row])

    def update(self, rows, inner_steps):
        for row in rows:
            optimizer = self._optimizers[row]
            optimizer.param_groups[0]["params"][0].grad = self.tensors[GRAD][row].clone()
            optimizer.step()


@contextlib.contextmanager
def communicators(number, epoch=0):
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(BlockingCommunicator(rank)) for rank in range(number)]
        install(opened, epoch)
        yield opened


def install(opened, epoch):
    """One view of all these; ranks are peer numbers."""
    view = view_of(epoch, [communicator.address for communicator in opened])
    for communicator in opened:
        communicator.install(view)


def together(opened, work):
    """`work(rank, communicator)` on all peers at once; their results."""
    with ThreadPoolExecutor(len(opened)) as threads:
        running = [threads.submit(work, rank, communicator) for rank, communicator in enumerate(opened)]
        return [one.result(PATIENCE_S) for one in running]


class CodecWire:
    """What GATHER and PAIR rounds lose in the codec they name, for `optim.simulate`."""

    def exchange(self, round_, fragment, payloads, weights):
        codec = codec_named(round_.codec or "raw")
        delivered = {name: through(codec, payload) for name, payload in payloads.items()}
        return ExactWire().exchange(round_, fragment, delivered, weights)


def through(codec, payload):
    """What others decode."""
    wire = codec.encode(payload, torch.zeros(codec.wire_nbytes(payload.numel()), dtype=torch.uint8))
    out = torch.empty_like(payload)
    codec.decode(wire, out)
    return out


class Saboteur:
    """A communicator some of whose operations break.

    Args:
        communicator: the real one.
        raises: instead of that there is an error at once: also alone.
        breaks: says of a key whether its all_reduce is another than the others', which ends it for all members.
        mishears: says of a key whether the result of its all_gather is lost on the way to us, and only to us.
    """

    def __init__(self, communicator, *, breaks=lambda _key: False, mishears=lambda _key: False, raises=False):
        self._real, self._breaks, self._mishears, self._raises = communicator, breaks, mishears, raises

    def __getattr__(self, name):
        return getattr(self._real, name)

    def all_reduce(self, key, tensor, **more):
        if self._breaks(key) and self._raises:
            broken = Future()
            broken.set_exception(OperationAborted(key, "a test wants it so"))
            return broken
        return self._real.all_reduce(key, tensor, **more, op="sum" if self._breaks(key) else "mean")

    def all_gather(self, key, tensor):
        work = self._real.all_gather(key, tensor)
        if not self._mishears(key):
            return work
        broken = Future()
        work.add_done_callback(lambda _: broken.set_exception(OperationAborted(key, "a test wants it so")))
        return broken
