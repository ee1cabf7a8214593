# SPDX-License-Identifier: Apache-2.0
"""A small GPT that learns Python's own sources byte by byte. README.md says how to run it."""

import argparse
import hashlib
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import isthmus

CONTEXT = 64
BATCH_SIZE = 16
NUM_STEPS = 400
PEAK_LR = 3e-3


class SmallGPT(nn.Module):
    """Predicts every byte from those before it."""

    def __init__(self, dim: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, dim)
        self.places = nn.Embedding(CONTEXT, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, 256, bias=False)
        self.head.weight = self.bytes.weight
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """[batch, CONTEXT] bytes to [batch, CONTEXT, 256] logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.layers(self.bytes(text) + self.places.weight, mask=mask, is_causal=True))


def text_of_python() -> Tensor:
    """Some of Python's own sources, as bytes."""
    modules = sorted(Path(argparse.__file__).parent.glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in modules)), dtype=torch.uint8).long()


def loss_of(model: nn.Module, text: Tensor, indices: list[int]) -> Tensor:
    """Mean over a batch: each index is a place in the text, and neighbours lie far apart."""
    starts = torch.tensor(indices) * 2_654_435_761 % (len(text) - CONTEXT)
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def learning_rate(step: float) -> float:
    """A warm-up, then a cosine down to a tenth."""
    progress = min(1.0, step / NUM_STEPS)
    return PEAK_LR * min(step / 20, 0.55 + 0.45 * math.cos(math.pi * progress))


def digest_of(model: nn.Module) -> str:
    """Two models with the same parameters have the same."""
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(parameters).hexdigest()[:12]


def main() -> None:
    """Train."""
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    text = text_of_python()
    model: nn.Module = SmallGPT()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR)
    session = isthmus.attach(model, optimizer, tokens_per_sample=CONTEXT)  # ISTHMUS_COMMAND: "up …", "join …"
    print(f"process {rank}: begins with parameters {digest_of(model)}", flush=True)
    for indices in session:
        step = session.inner_step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(session.position + 1)
        optimizer.zero_grad()
        loss = loss_of(model, text, indices)
        loss.backward()
        session.report(loss)
        optimizer.step()
        if step % 10 == 0:
            print(f"process {rank}: step {step}, loss {loss.item():.3f}", flush=True)
    session.close()
    print(f"process {rank}: ends with parameters {digest_of(model)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
