# SPDX-License-Identifier: Apache-2.0
"""What a run needs of a machine, said before anything is started: bytes of memory, of each GPU, and on the disk.

Counted from the settings alone, in copies of what the parts keep (`engine/outer_state.py`, `engine/worker_values.py`,
`engine/own_state.py` say of what); the workers' part is worker_memory.py's. For DiLoCo with int8 the daemon has 5.5
copies of the parameters in fp32: state and next state 4, mailbox 1, results in wire form a half; and AdamW's moments,
2, while a checkpoint is written. Mailbox and anchors are in memory that the workers share, which counts once, here.
Checked against daemons that were measured: `scripts/bench memory`, tests/multiprocess.

Must not know what there is on this machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import torch

from isthmus.collective.codec import codec_named
from isthmus.optim.fragments import Fragment, FragmentKey
from isthmus.optim.outer import PARAM, Op, Outer, Round, Tensors
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.config.outer_method import FittedMethod, fragment_table, method_of, pace_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.wiring import kept_kinds
from isthmus.trainer.config.worker_memory import workers_nbytes

_NUMEL_NBYTES: Final = 4
_PROGRAM_NBYTES: Final = 400 << 20
"""Of a process that has loaded torch."""
_LOOKED_AT: Final = 256
"""Outer steps of a plan, which repeats itself sooner, and whose first rounds may be others."""


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
    num_kinds = len(kept_kinds(config) or ())
    moments = num_kinds * copy
    step = _step_nbytes(config, method, {key: state for key, (state, _) in states.items()})
    daemon = _PROGRAM_NBYTES + shared + step.spare + copy + step.payload + step.wire + 3 * own + moments
    workers, device = workers_nbytes(config, copy, num_kinds=num_kinds, on_gpu=on_gpu)
    saved = shared + own + moments
    disk = (config.checkpoint.keep + 1) * saved + shared  # results since the newest one are never more than a state
    return Needs(daemon=daemon, workers=workers, device=device, disk=disk)


def least_needs_of(config: Config, *, on_gpu: bool) -> Needs:
    """What it needs if workers halve their micro-batches as often as they may; else as `needs_of`."""
    usual = needs_of(config, on_gpu=on_gpu)
    if config.node.micro_batch != "auto":
        return usual
    node = config.node.model_copy(update={"micro_batch": 1})
    small = needs_of(config.model_copy(update={"node": node}), on_gpu=on_gpu)
    return replace(usual, workers=min(usual.workers, small.workers), device=min(usual.device, small.device))


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
    """The newest result, and what an exchange hands on; of a gather the payloads of all, also as they are read."""
    codec, numel = codec_named(round_.codec or config.outer.codec), round_.numel or fragment.numel
    if round_.op is not Op.GATHER:
        return 2 * codec.wire_nbytes(numel)
    return config.members.start_peers * (2 * codec.wire_nbytes(numel) + _NUMEL_NBYTES * numel)


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
