# SPDX-License-Identifier: Apache-2.0
"""Text out of a trained model, token by token. Must not know files, nor what a token stands for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.trainer.model.language_model import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    end: int | None = None,
    vocab_size: int | None = None,
) -> list[int]:
    """Continue a sequence, one token at a time.

    The model sees the last `max_seq_len` tokens, so an output may be of any length. Draws happen on the CPU in fp32:
    the same logits and seed give the same tokens wherever the model runs.

    Args:
        model: its training mode is restored.
        prompt: the tokens before; at least one.
        max_new_tokens: how many to add.
        temperature: divides the logits; 0 takes the likeliest token every time.
        top_k: draw only among the k likeliest tokens; None draws among all.
        seed: of the draws.
        end: a token after which nothing comes.
        vocab_size: draw among the first so many tokens, which mean something; None: among all.

    Returns:
        The new tokens without the prompt, and without `end`.

    Raises:
        ValueError: an argument out of range.
    """
    if not prompt:
        raise ValueError("there is nothing to continue: the prompt has no token")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, it is {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, it is {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")

    device = next(model.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tokens = list(prompt)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context_1L = torch.tensor([tokens[-model.max_seq_len :]], device=device)
            logits_V = model(context_1L)[0, -1, :vocab_size].float().cpu()
            token = _draw_token(logits_V, temperature, top_k, generator)
            if token == end:
                break
            tokens.append(token)
    finally:
        model.train(was_training)
    return tokens[len(prompt) :]


def _draw_token(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        threshold = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, float("-inf"))
    # Subtracting the maximum first keeps a very low temperature from dividing its way to inf - inf.
    probabilities_V = torch.softmax((logits_V - logits_V.max()) / temperature, dim=-1)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
