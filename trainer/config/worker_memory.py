# SPDX-License-Identifier: Apache-2.0
"""What a peer's workers need of memory, counted from the settings; the daemon's part is memory.py's.

    parameters, moments   fp32, over all workers; what is not trained likewise, in the dtype of the computation
    gradients             fp32, over all workers; but whole on each where a sharded model adds up several micro-batches
    activations           of one micro-batch, and what the loss holds beside its slices

As gradients come, activations go, so of both the larger one counts. What is not known counts as nothing: a run that
would fit is not to be refused. Must not know what there is on this machine.
"""

from typing import Final

from isthmus.trainer.config.base_model import num_frozen
from isthmus.trainer.config.job import ActivationCheckpointing, choose_precision
from isthmus.trainer.config.outer_method import tokens_per_sample
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import DecoderSection, HuggingFaceSection, LoopInner
from isthmus.trainer.model.decoder import ModelConfig
from isthmus.trainer.model.loss import slice_size

_FLOAT_NBYTES: Final = 4
_FORKED_NBYTES: Final = 100 << 20
"""Of a worker on the CPU, which shares most of its program with the daemon."""
_ON_GPU_NBYTES: Final = 1 << 30
"""Of a worker with a CUDA context, in the machine's memory. Not measured."""


def workers_nbytes(config: Config, copy_nbytes: int, *, num_kinds: int, on_gpu: bool) -> tuple[int, int]:
    """Memory of all workers, and of each GPU. What they share with the daemon is not in it.

    Args:
        config: the run's, with this peer's own part.
        copy_nbytes: the parameters in fp32.
        num_kinds: tensors of that size that the inner optimizer keeps.
        on_gpu: whether the workers compute on GPUs.

    Raises:
        ConfigError: the model cannot be built.
    """
    if isinstance(config.inner, LoopInner):
        return 0, 0
    node = config.node
    num_workers, share = node.local_workers, -(-config.inner.batch_size // node.local_workers)
    precision = choose_precision(node.precision, "cuda" if on_gpu else "cpu")
    item_nbytes = _FLOAT_NBYTES if precision == "fp32" else 2
    micro_batch = share if node.micro_batch == "auto" else min(node.micro_batch, share)
    is_sharded = num_workers > 1 or precision != "fp32"
    kept = (1 + num_kinds) * copy_nbytes + item_nbytes * num_frozen(config)
    activations = _activation_nbytes(config, micro_batch * tokens_per_sample(config.model), item_nbytes)
    if micro_batch == share:
        passing = max(copy_nbytes // num_workers, activations)
    else:
        passing = (copy_nbytes if is_sharded else copy_nbytes // num_workers) + activations
    if on_gpu:
        return num_workers * _ON_GPU_NBYTES, kept // num_workers + passing
    return kept + num_workers * (passing + _FORKED_NBYTES), 0


def _activation_nbytes(config: Config, num_tokens: int, item_nbytes: int) -> int:
    """What one worker keeps of so many tokens between both passes."""
    checkpointing = config.node.activation_checkpointing
    if isinstance(config.model, DecoderSection):
        return _decoder_nbytes(config.model.description(), num_tokens, item_nbytes, checkpointing)
    if isinstance(config.model, HuggingFaceSection):
        return _hugging_face_nbytes(config.model, num_tokens, item_nbytes, checkpointing)
    return 0


def _decoder_nbytes(model: ModelConfig, num_tokens: int, item_nbytes: int, keep: ActivationCheckpointing) -> int:
    whole = block_nbytes(model, item_nbytes, "none")
    blocks = model.num_layers * block_nbytes(model, item_nbytes, keep)
    if keep != "none":
        blocks += whole  # one at a time is computed again
    last_norm = (8 + item_nbytes) * model.dim
    head = _FLOAT_NBYTES * model.vocab_size * model.dim  # its gradient; once more while that is scaled
    scores = _scores_nbytes(model.vocab_size, num_tokens)
    return num_tokens * (blocks + last_norm) + head + max(head, scores)


def block_nbytes(model: ModelConfig, item_nbytes: int, keep: ActivationCheckpointing) -> int:
    """What a block of the own decoder keeps of one token for the backward pass.

    none: the inputs of both norms and their quotients, in fp32; of all matrices; queries, keys and values; attention's
    logarithms; the inner width four times. selective: its input, and what products and attention gave.
    """
    kv_dim = model.num_kv_heads * model.head_dim
    match keep:
        case "none":
            items = 4 * model.dim + 2 * kv_dim + 4 * model.hidden_dim
            return 16 * model.dim + item_nbytes * items + _FLOAT_NBYTES * model.num_heads
        case "selective":
            return item_nbytes * (5 * model.dim + 2 * kv_dim + 2 * model.hidden_dim)
        case "full":
            return item_nbytes * model.dim


def _hugging_face_nbytes(
    model: HuggingFaceSection, num_tokens: int, item_nbytes: int, keep: ActivationCheckpointing
) -> int:
    """What any decoder has at least: the stream before and after attention, its queries and outcome, an inner width.

    Where `freeze` says what is not trained it is not known which blocks keep something, and of a mixture of experts not
    which tokens come to which.
    """
    if model.freeze:
        return 0
    text = model.description().config.get_text_config()
    width, num_layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    if not (isinstance(width, int) and isinstance(num_layers, int)):
        return 0
    has_experts = any(getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    inner = 0 if has_experts else getattr(text, "intermediate_size", None) or 0
    block = width if keep == "full" else 4 * width + inner
    return num_tokens * num_layers * item_nbytes * block + _scores_nbytes(int(text.vocab_size), num_tokens)


def _scores_nbytes(vocab_size: int, num_tokens: int) -> int:
    """Scores of one slice of the loss and their logarithms, fp32."""
    return 2 * _FLOAT_NBYTES * vocab_size * min(slice_size(vocab_size), num_tokens)
