# SPDX-License-Identifier: Apache-2.0
"""A training loop of one's own for test_attach.py, tiny and exact. Not a test.

    python tests/multiprocess/attached.py [--optimizer sgd] [--dim 12] [--tokens-per-sample 1]
        [--stand-still-at STEP] [--nan-at STEP] [--end-at STEP]

Its lines: "at STEP DIGEST" with the parameters that a step begins with, "own STEP" of those after the session, and at
last "ends DIGEST". It learns a matrix by heart. Under torchrun the model is cut by FSDP2 over the processes.
"""

import argparse
import hashlib
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import isthmus

BATCH_SIZE = 8
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=3e-2, momentum=0.9),
}


class Mixer(nn.Module):
    """Layers under names that methods with several fragments cut between."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))
        self.head = nn.Linear(dim, dim, bias=False)
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, values: Tensor) -> Tensor:
        """[batch, dim] to the same."""
        for layer in self.layers:
            values = values + torch.tanh(layer(values))
        return self.head(values)


def batch_of(indices: list[int], dim: int) -> tuple[Tensor, Tensor]:
    """Samples and what they should become."""
    values = torch.stack([torch.randn(dim, generator=torch.Generator().manual_seed(index)) for index in indices])
    return values, values.roll(1, dims=1)


def digest_of(model: nn.Module) -> str:
    """Of what is trained; all processes ask together."""
    trained = (parameter.detach() for parameter in model.parameters() if parameter.requires_grad)
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in trained)
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in whole)).hexdigest()[:12]


def tell(*words: object) -> None:
    """One line in one write: torchrun's processes are unbuffered, and share a file."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train until the session is over or `--end-at`, and two steps more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--dim", type=int, default=12)
    parser.add_argument("--tokens-per-sample", type=int, default=1)
    parser.add_argument("--stand-still-at", type=int)
    parser.add_argument("--nan-at", type=int, help="from this inner step on its values are no numbers")
    parser.add_argument("--end-at", type=int, help="an inner step after which it ends, though its run goes on")
    given = parser.parse_args()
    model = Mixer(given.dim)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS[given.optimizer](model.parameters())

    def train(indices: list[int]) -> Tensor:
        values, wanted = batch_of(indices, given.dim)
        optimizer.zero_grad()
        loss = (model(values) - wanted).square().mean()
        loss.backward()
        return loss

    with isthmus.attach(model, optimizer, tokens_per_sample=given.tokens_per_sample) as session:
        for indices in session:
            tell("at", session.inner_step, digest_of(model))
            while given.stand_still_at is not None and session.inner_step >= given.stand_still_at:
                time.sleep(3600)
            session.report(train(indices))
            if given.nan_at is not None and session.inner_step >= given.nan_at:
                model.head.weight.data.fill_(float("nan"))
            step = session.inner_step
            optimizer.step()
            if given.end_at is not None and step >= given.end_at:
                break
        tell("ends", digest_of(model))
    for step in range(2):
        train(list(range(BATCH_SIZE)))
        optimizer.step()
        tell("own", step)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
