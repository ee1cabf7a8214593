# SPDX-License-Identifier: Apache-2.0
"""An outer optimizer in a Hugging Face Trainer: one callback. Needs the extra `hf`: pip install 'isthmus[hf]'.

    python examples/hf_callback.py --peers 2     two Trainers on this machine, a small GPT-2 from scratch, no download

In your own script:

    callback = outer_loop_callback(communicator, DiLoCo(inner_steps=50))
    Trainer(model=model, args=args, train_dataset=my_share, callbacks=[callback]).train()

Every peer runs its own Trainer on its own share of the data, all with the same number of steps (`max_steps`).
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from plain_loop import PATIENCE, start_all, text_of
from torch import nn
from torch.optim import Optimizer

from isthmus import OuterLoop
from isthmus.collective import BlockingCommunicator, BulkOptions, view_of
from isthmus.optim import DiLoCo, Outer

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

FILE_NAME = "outer_loop.pt"
"""In a Trainer's checkpoint, beside the model and the optimizer."""
CONTEXT = 64


def outer_loop_callback(
    communicator: BlockingCommunicator,
    method: Outer,
    *,
    resume_from: str | Path | None = None,
    **settings: Any,  # noqa: ANN401
) -> "TrainerCallback":
    """A callback that enters an `OuterLoop` when training begins and leaves it at the end.

    It writes the loop's state into every checkpoint of the Trainer. At the end the model has the shared parameters: the
    same on all peers, where the method has them.

    Args:
        communicator: with a view installed.
        method: the outer optimizer.
        resume_from: the checkpoint folder that goes to `Trainer.train(resume_from_checkpoint=)` too.
        **settings: of `OuterLoop`. `batch_size` is known from the Trainer.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import TrainerCallback  # late: only who uses a Trainer needs it

    class OuterLoopCallback(TrainerCallback):
        loop: OuterLoop | None = None

        def on_train_begin(
            self,
            args: "TrainingArguments",
            state: "TrainerState",
            control: "TrainerControl",
            *,
            model: nn.Module,
            optimizer: Optimizer,
            **more: object,
        ) -> None:
            """The Trainer has made its optimizer, and has loaded a checkpoint if there is one."""
            own = {"batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps}
            self.loop = OuterLoop(model, bare(optimizer), communicator, method, **(own | settings))
            if resume_from is not None:
                self.loop.load_state_dict(torch.load(Path(resume_from, FILE_NAME), weights_only=True))
            self.loop.__enter__()

        def on_log(
            self,
            args: "TrainingArguments",
            state: "TrainerState",
            control: "TrainerControl",
            *,
            logs: dict[str, Any],
            **more: object,
        ) -> None:
            """Beside the loss: how many rounds were absorbed and dropped."""
            if self.loop is not None:
                logs.update(outer_step=self.loop.outer_step, dropped=self.loop.num_dropped)

        def on_save(
            self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **more: object
        ) -> None:
            """The Trainer has written its checkpoint."""
            assert self.loop is not None, "training has begun"
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            torch.save(self.loop.state_dict(), folder / FILE_NAME)

        def on_train_end(
            self,
            args: "TrainingArguments",
            state: "TrainerState",
            control: "TrainerControl",
            *,
            model: nn.Module,
            **more: object,
        ) -> None:
            """Leave the loop, with what all peers stand for."""
            assert self.loop is not None, "training has begun"
            self.loop.__exit__(None, None, None)
            model.load_state_dict(self.loop.shared_parameters(), strict=False)

    return OuterLoopCallback()


def bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer of torch inside what accelerate wraps around it: hooks are the inner one's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def train(rank: int, addresses: list[str], num_steps: int, secret: bytes) -> None:
    """One peer's whole life."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    torch.manual_seed(rank)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    text = text_of(rank + 1, len(addresses))
    lines = [{"input_ids": line, "labels": line} for line in text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)]
    with (
        tempfile.TemporaryDirectory() as folder,
        BlockingCommunicator(
            rank, addresses[rank], secret=secret, options=BulkOptions(patience=PATIENCE)
        ) as communicator,
    ):
        communicator.install(view_of(0, addresses))
        settings = TrainingArguments(
            folder,
            max_steps=num_steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=rank,
        )
        callback: Any = outer_loop_callback(communicator, DiLoCo(inner_steps=10))
        Trainer(model=model, args=settings, train_dataset=lines, callbacks=[callback]).train()
        print(f"peer {rank}: shared state {callback.loop.shared_digest()[:12]}", flush=True)


def main() -> int:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--peers", type=int, help="start so many on this machine")
    role.add_argument("--rank", type=int, help="be this peer of those in --at")
    parser.add_argument("--at", nargs="+", default=[], help="host:port of all peers, by rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--secret", default="give all peers the same")
    given = parser.parse_args()
    if given.peers is not None:
        return start_all(given.peers, ["--steps", str(given.steps), "--secret", given.secret], __file__)
    train(given.rank, given.at, given.steps, given.secret.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
