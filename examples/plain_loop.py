# SPDX-License-Identifier: Apache-2.0
"""DiLoCo around a plain PyTorch loop: every peer trains on its own text, and all meet every 20 steps.

    python examples/plain_loop.py --peers 2                    both on this machine
    python examples/plain_loop.py --hosts 10.0.0.1 10.0.0.2    prints the line to type on each of these machines

What turns somebody's own loop into this one are the three lines marked with >>>.
"""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isthmus import OuterLoop
from isthmus.collective import BlockingCommunicator, BulkOptions, OperationAborted, view_of
from isthmus.collective.api.standalone import peer_id_of
from isthmus.collective.rounds.supervision import Patience
from isthmus.optim import DiLoCo, default_outer_lr

CONTEXT = 16
BATCH_SIZE = 64
MEET_EVERY = 20
PATIENCE = Patience(first_contact_s=120.0)
"""The peers are started by hand, one after another."""


class NextByte(nn.Module):
    """Predicts a byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.layers = nn.Sequential(nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, context: Tensor) -> Tensor:
        """[batch, CONTEXT] bytes to [batch, 256] logits."""
        return self.layers(self.embed(context).flatten(1))


def text_of(rank: int, num_peers: int) -> Tensor:
    """One of `num_peers` + 1 shares of some of Python's own sources, as bytes. Share 0 is nobody's: for evaluation."""
    modules = sorted(Path(argparse.__file__).parent.glob("*.py"))[:60]
    share = modules[rank :: num_peers + 1]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in share)), dtype=torch.uint8).long()


def batch_of(text: Tensor, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """Contexts [size, CONTEXT] and the byte that follows each, [size]."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


def train(rank: int, addresses: list[str], num_steps: int, secret: bytes) -> None:
    """One peer's whole life."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    torch.manual_seed(rank)  # the first peer's parameters are sent to all
    model = NextByte()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, unseen = text_of(rank + 1, len(addresses)), text_of(0, len(addresses))
    generator = torch.Generator().manual_seed(rank)
    method = DiLoCo(inner_steps=MEET_EVERY, lr=default_outer_lr(len(addresses)))

    options = BulkOptions(patience=PATIENCE)
    with BlockingCommunicator(rank, addresses[rank], secret=secret, options=options) as communicator:  # >>>
        communicator.install(view_of(0, addresses))  # >>>

        def go_on_without(error: OperationAborted) -> None:
            living = {n: a for n, a in enumerate(addresses) if peer_id_of(n) not in error.suspects}
            print(f"peer {rank}: {error}; going on with {len(living)}", flush=True)
            communicator.install(view_of(communicator.key(0).epoch + 1, living))

        with OuterLoop(model, optimizer, communicator, method, on_abort=go_on_without) as loop:  # >>>
            for step in range(1, num_steps + 1):
                context, following = batch_of(text, generator, BATCH_SIZE)
                optimizer.zero_grad()
                loss = cross_entropy(model(context), following)
                loss.backward()
                optimizer.step()
                if step % 50 == 0:
                    digest = loop.shared_digest()[:12]
                    print(f"peer {rank}: step {step}, loss {loss.item():.3f}, shared state {digest}", flush=True)
            agree = loop.shared_agrees()
            model.load_state_dict(loop.shared_parameters(), strict=False)
            equal = loop.parameters_agree()
    with torch.no_grad():
        context, following = batch_of(unseen, torch.Generator().manual_seed(0), 4096)
        loss = cross_entropy(model(context), following)
    print(
        f"peer {rank}: done after {loop.outer_step} outer steps, {loop.num_dropped} dropped; "
        f"loss on unseen text {loss.item():.3f}; shared state {loop.shared_digest()[:12]}, "
        f"equal on all: {agree}, parameters too: {equal}",
        flush=True,
    )


def free_address() -> str:
    """Of this machine, free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def start_all(num_peers: int, more: list[str], script: str = __file__) -> int:
    """All peers as processes of this machine; the worst of their exit codes."""
    addresses = [free_address() for _ in range(num_peers)]
    command = [sys.executable, script, "--at", *addresses, *more, "--rank"]
    peers = [subprocess.Popen([*command, str(rank)]) for rank in range(num_peers)]
    try:
        return max(peer.wait() for peer in peers)
    finally:
        for peer in peers:
            peer.kill()


def main() -> int:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--peers", type=int, help="start so many on this machine")
    role.add_argument("--hosts", nargs="+", help="print the line for each of these machines")
    role.add_argument("--rank", type=int, help="be this peer of those in --at")
    parser.add_argument("--at", nargs="+", default=[], help="host:port of all peers, by rank")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--secret", default="give all peers the same")
    given = parser.parse_args()
    more = ["--steps", str(given.steps), "--secret", given.secret]
    if given.peers is not None:
        return start_all(given.peers, more)
    if given.hosts is not None:
        at = " ".join(f"{host}:4000" for host in given.hosts)
        for rank, host in enumerate(given.hosts):
            print(f"on {host}: python examples/plain_loop.py --rank {rank} --at {at} --secret '{given.secret}'")
        return 0
    train(given.rank, given.at, given.steps, given.secret.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
