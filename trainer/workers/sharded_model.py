# SPDX-License-Identifier: Apache-2.0
"""The model, sharded over the workers of one peer by FSDP2, block by block.

A worker that is alone and computes in fp32 has nothing to shard or to cast: its model is a plain module. Must not know
what is trained, or how.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from isthmus.trainer.config.job import ActivationCheckpointing, RealPrecision
from isthmus.trainer.model.language_model import LanguageModel, ModelDescription
from isthmus.trainer.workers.blocks import prepare_blocks
from isthmus.trainer.workers.shards import fill_shard


def sharded_model(
    description: ModelDescription,
    *,
    mesh: DeviceMesh,
    precision: RealPrecision,
    activation_checkpointing: ActivationCheckpointing = "none",
    is_compiled: bool = False,
) -> LanguageModel:
    """The model on this worker's device. What is trained has memory and no values; what is frozen has its values.

    Args:
        description: of the model.
        mesh: the workers of the peer, one dimension.
        precision: what forward and backward compute in; parameters and gradients are fp32.
        activation_checkpointing: see `prepare_blocks`; likewise `is_compiled`.
        is_compiled: likewise.
    """
    model = description.build()
    policy = _mixed_precision(precision)
    for parameter in model.parameters():
        if not parameter.requires_grad:  # nobody adds to it: it is kept as it is computed with
            parameter.data = parameter.data.to(policy.param_dtype or torch.float32)
    prepare_blocks(model.blocks, keep=activation_checkpointing, is_compiled=is_compiled)
    if mesh.size() > 1 or precision != "fp32":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    device = device_of(mesh)
    model.to_empty(device=device)
    model.init_buffers(device)
    model.load_frozen(fill_shard)
    return model


def reduce_gradients(model: nn.Module, *, is_last: bool) -> None:
    """Say whether the next backward pass is a step's last: gradients are reduced over the workers once a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters.

    A forward without a backward leaves those of the root gathered, and a later forward would use them whatever has been
    loaded meanwhile.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this worker computes."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _mixed_precision(precision: RealPrecision) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
