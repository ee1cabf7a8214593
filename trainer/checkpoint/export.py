# SPDX-License-Identifier: Apache-2.0
"""A model out of a run: the parameters of the newest checkpoint, in a folder that `isthmus sample` reads.

Of a run of loops of their own it is a safetensors file of the parameters by name, which their `load_state_dict` takes.

Rules: the anchor is the model (every peer's is the same), or where a method shares none the peer's own parameters; a
checkpoint is verified before it is used. Must not know
how checkpoints or model folders are laid out.

Errors: `ConfigError` (2, no checkpoint there), `CheckpointCorrupted` (9), `Refused` (5, another version's checkpoint),
`EnvironmentFault` (3).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.messages import Held
from isthmus.optim.outer import PARAM
from isthmus.trainer.checkpoint.checkpoint import Checkpoint, load_resumed
from isthmus.trainer.checkpoint.private_files import FOLDER_NAME as PRIVATE_FOLDER_NAME
from isthmus.trainer.checkpoint.private_files import PrivateFiles
from isthmus.trainer.config.manifest import config_of
from isthmus.trainer.config.training import LoopModelSection
from isthmus.trainer.config.wiring import fragment_table, fragments_of, outer_of
from isthmus.trainer.engine.state_version import gather_anchor, has_anchor
from isthmus.trainer.engine.worker_values import OWN_PARAMETERS
from isthmus.trainer.errors import CheckpointCorrupted, ConfigError, EnvironmentFault
from isthmus.trainer.model.generate import save_model, save_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written where."""

    run_id: str
    outer_step: int
    num_parameters: int
    directory: Path


def export_model(source: Path, directory: Path) -> Exported:
    """Write the model of a run's newest checkpoint.

    Args:
        source: a peer's folder, its checkpoints' folder, or one checkpoint.
        directory: the model's folder; created if missing, files of an older export are replaced.

    Raises:
        ConfigError: there is no checkpoint.
        CheckpointCorrupted: none is whole, or it holds another model than its manifest says.
        EnvironmentFault: the disk refuses.
    """
    checkpoint = load_resumed(source)
    config = config_of(checkpoint.meta.run_manifest)
    table = fragment_table(config.model)
    parameters = torch.empty(table.numel)
    try:
        if has_anchor(outer_of(config), fragments_of(config)):
            gather_anchor(checkpoint.tensors, fragments_of(config), out=parameters)
        else:
            parameters.copy_(_own_parameters(checkpoint))
    except (KeyError, ValueError) as error:
        held = {name: tensor.numel() for name, tensor in checkpoint.tensors.items()}
        raise CheckpointCorrupted(
            checkpoint.path, f"holds {held or 'nothing'}, its run's model has {table.numel} parameters"
        ) from error
    try:
        views = table.whole().views(parameters)
        if isinstance(config.model, LoopModelSection):
            save_weights(directory, views)
        else:
            save_model(directory, config.model.decoder_config(), views)
    except (OSError, SafetensorError) as error:  # the library wraps what the system says
        raise EnvironmentFault(
            f"the model cannot be written to {directory}: {getattr(error, 'strerror', None) or error}",
            cure="free some space there or give another folder with --out",
        ) from error
    return Exported(
        run_id=checkpoint.meta.run_id,
        outer_step=checkpoint.meta.outer_step,
        num_parameters=table.numel,
        directory=directory,
    )


def _own_parameters(checkpoint: Checkpoint) -> Tensor:
    """Those of the peer itself, where its method shares none.

    Raises:
        ConfigError: they are not beside its checkpoint.
    """
    folder = checkpoint.path.parent.parent / PRIVATE_FOLDER_NAME
    held = Held(OuterStep(checkpoint.meta.outer_step), checkpoint.meta.digest)
    own = PrivateFiles(folder, checkpoint.meta.run_id, keep=1).recall(held)
    if own is None or OWN_PARAMETERS not in own.private:
        raise ConfigError(
            f"{checkpoint.path} has no parameters of its peer beside it: this run's method shares none",
            cure="export from the folder of a peer that has left in order",
        )
    return own.private[OWN_PARAMETERS][PARAM]
