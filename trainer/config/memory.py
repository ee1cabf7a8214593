# SPDX-License-Identifier: Apache-2.0
"""What a run needs of a machine, said before anything is started: bytes of memory, of each GPU, and on the disk.

Counted from the settings alone, in copies of what the parts keep (`engine/outer_state.py`, `engine/worker_values.py`,
`engine/own_state.py`, `workers/inner_loop.py` say of what). For DiLoCo with int8 the daemon has 5.5 copies of the
parameters in fp32: state and next state 4, mailbox 1, results in wire form a half; and AdamW's moments, 2, while a
checkpoint is written. Checked against daemons that were measured: `scripts/bench memory`, tests/multiprocess.

Must not know what there is on this machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch

from isthmus.collective.codec import codec_named
from isthmus.optim.fragments import Fragment, FragmentKey
from isthmus.optim.outer import PARAM, Op, Outer, Round, Tensors
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.config.outer_method import FittedMethod, fragment_table, method_of, pace_of, tokens_per_sample
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import DecoderSection, LoopInner
from isthmus.trainer.config.wiring import kept_kinds

_NUMEL_NBYTES: Final = 4
_PROGRAM_NBYTES: Final = 400 << 20
"""Of a process that has loaded torch."""
_FORKED_NBYTES: Final = 100 << 20
"""Of a worker on the CPU, which shares most of that."""
_ON_GPU_NBYTES: Final = 1 << 30
"""Of a worker with a CUDA context, in the machine's memory. Not measured."""
_LOOKED_AT: Final = 64
"""Outer steps of a plan, which repeats itself sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """In bytes, the most at once.

    Attributes:
        daemon: memory of the daemon, the program included.
        workers: memory of all workers, on the CPU or beside GPUs. Of a loop of one's own nothing is known: 0.
        device: memory of each GPU; 0 on the CPU.
        disk: in the peer's folder, once `checkpoint.keep` checkpoints are there and one more is being written.
    """

    daemon: int
    workers: int
    device: int
    disk: int

    @property
    def host(self) -> int:
        """Memory of the machine."""
        return self.daemon + self.workers


def needs_of(config: Config, *, on_gpu: bool) -> Needs:
    """What a peer needs.

    Args:
        config: the run's, with this peer's own part.
        on_gpu: whether the workers compute on GPUs.

    Raises:
        ConfigError: model or method cannot be built.
    """
    method = method_of(config)
    copy = _NUMEL_NBYTES * fragment_table(config.model).numel
    states = {fragment.key: _state_nbytes(method.outer, fragment) for fragment in method.fragments}
    shared = sum(state for state, _ in states.values())
    own = sum(private for _, private in states.values())
    if not all(state for key, (state, _) in states.items() if key.kind == PARAM):  # its parameters are its own
        own += copy
    moments = len(kept_kinds(config) or ()) * copy
    step = _step_nbytes(config, method, {key: state for key, (state, _) in states.items()})
    daemon = _PROGRAM_NBYTES + shared + step.spare + copy + step.payload + step.wire + 3 * own + moments
    workers, device = _workers_nbytes(config, copy, on_gpu=on_gpu)
    saved = shared + own + moments
    disk = (config.checkpoint.keep + 1) * saved + shared  # results since the newest one are never more than a state
    return Needs(daemon=daemon, workers=workers, device=device, disk=disk)


# ----------------------------------------------------------------------------------------------------- the daemon


def _state_nbytes(outer: Outer, fragment: Fragment) -> tuple[int, int]:
    """What is shared of a fragment, and what the method keeps of it for one peer."""
    values = torch.empty(fragment.numel, device="meta")
    shared = outer.init(fragment, values)
    return _nbytes(shared), _nbytes(outer.init_private(fragment, shared, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The most that an outer step takes: the next state, payloads, what travels."""

    spare: int
    payload: int
    wire: int


def _step_nbytes(config: Config, method: FittedMethod, states: Mapping[FragmentKey, int]) -> _Step:
    """`states`: bytes that are shared of each fragment."""
    outer, fragments = method.outer, {fragment.key: fragment for fragment in method.fragments}
    plan = OuterPlan(outer)
    steps = islice(range(1, config.run.outer_steps + 1), _LOOKED_AT)
    spare = payload = wire = 0
    pace = pace_of(config)
    num_flights = 1 + pace.longest_delay // pace.longest_stretch
    for step in steps:
        rounds = plan.rounds(step)
        spare = max(spare, sum(states[round_.fragment] for round_ in rounds))
        payload = max(payload, sum(_payload_nbytes(round_, fragments[round_.fragment]) for round_ in rounds))
        wire = max(wire, sum(_wire_nbytes(config, round_, fragments[round_.fragment]) for round_ in rounds))
    (first, *_) = plan.rounds(1)
    is_mailbox = len(fragments) == 1 and first.numel is None and not first.delay and type(outer).settle is Outer.settle
    return _Step(spare=spare, payload=0 if is_mailbox else num_flights * payload, wire=wire)


def _payload_nbytes(round_: Round, fragment: Fragment) -> int:
    """The values that a payload is made of, and the payload, where that has another size."""
    return _NUMEL_NBYTES * (fragment.numel + (round_.numel or 0))


def _wire_nbytes(config: Config, round_: Round, fragment: Fragment) -> int:
    """The newest result, and what an exchange hands on; of a gather the payloads of all."""
    codec = codec_named(round_.codec or config.outer.codec)
    num_parts = config.members.start_peers if round_.op is Op.GATHER else 1
    return 2 * num_parts * codec.wire_nbytes(round_.numel or fragment.numel)


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


# ----------------------------------------------------------------------------------------------------- the workers


def _workers_nbytes(config: Config, copy: int, *, on_gpu: bool) -> tuple[int, int]:
    """Memory of all workers, and of each GPU: parameters, gradients, what the optimizer keeps, activations."""
    if isinstance(config.inner, LoopInner):
        return 0, 0
    num_workers = config.node.local_workers
    sharded = (2 + len(kept_kinds(config) or ())) * copy
    activations = _activation_nbytes(config)
    if on_gpu:
        return num_workers * _ON_GPU_NBYTES, sharded // num_workers + activations
    return sharded + num_workers * (activations + _FORKED_NBYTES), 0


def _activation_nbytes(config: Config) -> int:
    """What one worker keeps of a micro-batch between both passes, in fp32; a token's share of the blocks and the head.

    A block keeps the inputs of both norms and of all its matrices, rotated queries and keys, and three of the inner
    width.
    """
    if not isinstance(config.model, DecoderSection):
        return 0
    model, inner = config.model.description(), config.inner
    assert not isinstance(inner, LoopInner), "it goes with another model"
    share = -(-inner.batch_size // config.node.local_workers)
    num_tokens = (share if config.node.micro_batch == "auto" else min(config.node.micro_batch, share)) * tokens_per_sample(config.model)
    heads = 2 * model.dim + 3 * model.num_kv_heads * model.head_dim
    block = 5 * model.dim + heads + 4 * model.hidden_dim
    return _NUMEL_NBYTES * num_tokens * (model.num_layers * block + 3 * model.vocab_size)
