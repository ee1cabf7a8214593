# SPDX-License-Identifier: Apache-2.0
"""A small GPT-2 that learns Python's own sources with a Hugging Face Trainer. README.md says how to run it."""

import os
import tempfile

import torch
from bare_loop import CONTEXT, digest_of, text_of_python
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import isthmus


class InRun(TrainerCallback):
    """The Trainer trains as a member of a run. ISTHMUS_COMMAND says of which: "up …" or "join …"."""

    def on_train_begin(self, args, state, control, model, optimizer, **more):
        self.session = isthmus.attach(model, optimizer, tokens_per_sample=CONTEXT)
        model.register_forward_hook(lambda _model, _inputs, output: self.session.report(output.loss))

    def on_step_begin(self, args, state, control, lr_scheduler, **more):
        lr_scheduler.last_epoch = int(self.session.position)

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop |= self.session.is_over

    def on_train_end(self, args, state, control, **more):
        self.session.close()


def main() -> None:
    """Train."""
    torch.manual_seed(os.getpid())
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    text = text_of_python()
    lines = [{"input_ids": line, "labels": line} for line in text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=400,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=os.getpid(),
        )
        trainer = Trainer(model=model, args=settings, train_dataset=lines, callbacks=[InRun()])
        trainer.train()
    print(f"ends with parameters {digest_of(model)}", flush=True)


if __name__ == "__main__":
    main()
