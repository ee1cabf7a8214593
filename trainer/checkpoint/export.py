# SPDX-License-Identifier: Apache-2.0
"""A model out of a run: the newest checkpoint's parameters, in a folder that `isthmus sample` and transformers read.

Of a run of loops of their own it is a safetensors file of the parameters by name, which their `load_state_dict` takes.
The tokenizer is that of the run's text, which lies beside the checkpoint if tokens are not bytes.

Rules: the anchor is the model (every peer's is the same), or where a method shares none the peer's own parameters; a
checkpoint is verified before it is used. Must not know
how checkpoints or model folders are laid out.

Errors: `ConfigError` (2, no checkpoint there), `CheckpointCorrupted` (9), `Refused` (5, another version's checkpoint),
`EnvironmentFault` (3).
"""

import json
from collections.abc import Mapping
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
from isthmus.trainer.config.base_model import require_base_model
from isthmus.trainer.config.manifest import config_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import HuggingFaceSection, LoopModelSection
from isthmus.trainer.config.wiring import fragment_table, fragments_of, model_of, outer_of
from isthmus.trainer.engine.state_version import gather_anchor, has_anchor
from isthmus.trainer.engine.worker_values import OWN_PARAMETERS
from isthmus.trainer.errors import CheckpointCorrupted, ConfigError, EnvironmentFault
from isthmus.trainer.model.decoder import ModelConfig
from isthmus.trainer.model.exported import save_decoder, save_tokenizer
from isthmus.trainer.model.hugging_face import HuggingFaceModelConfig
from isthmus.trainer.model.hugging_face_export import ADAPTER_CONFIG_NAME, save_adapters, save_hugging_face
from isthmus.trainer.model.model_files import save_weights
from isthmus.trainer.model.model_folder import CONFIG_NAME, TOKENIZER_NAME, tokenizer_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written where."""

    run_id: str
    outer_step: int
    num_parameters: int
    directory: Path


def export_model(source: Path, directory: Path, *, base: Path | None = None, adapters_only: bool = False) -> Exported:
    """Write the model of a run's newest checkpoint.

    Args:
        source: a peer's folder, its checkpoints' folder, or one checkpoint.
        directory: the model's folder; created if missing, files of an older export are replaced.
        base: where the Hugging Face model is that the run began with; None: where its founder had it.
        adapters_only: write the adapters instead of the model that they are merged into.

    Raises:
        ConfigError: there is no checkpoint, the base model is needed and not there, there are no adapters, or the
            folder has the other of adapters and a whole model.
        Refused: another base model is there.
        CheckpointCorrupted: none is whole, or it holds another model than its manifest says.
        EnvironmentFault: the disk refuses.
    """
    restored = restore(source)
    checkpoint, config, views = restored.checkpoint, restored.config, restored.parameters
    if base is not None:
        config = config.model_copy(update={"node": config.node.model_copy(update={"model": base})})
    require_base_model(config, flag="--base")
    adapters = isinstance(config.model, HuggingFaceSection) and config.model.lora.rank > 0
    if adapters_only and not adapters:
        raise ConfigError("the run trained no adapters", cure="leave --adapters out")
    _require_one_kind(directory, adapters_only=adapters_only)
    try:
        if isinstance(config.model, LoopModelSection):
            save_weights(directory, views)
        else:
            _save(directory, model_of(config), checkpoint, views, adapters_only=adapters_only)
    except (OSError, SafetensorError) as error:  # the library wraps what the system says
        raise EnvironmentFault(
            f"the model cannot be written to {directory}: {getattr(error, 'strerror', None) or error}",
            cure="free some space there or give another folder with --out",
        ) from error
    return Exported(
        run_id=checkpoint.meta.run_id,
        outer_step=checkpoint.meta.outer_step,
        num_parameters=sum(map(Tensor.numel, views.values())),
        directory=directory,
    )


def _require_one_kind(directory: Path, *, adapters_only: bool) -> None:
    # Found before: transformers puts adapters that lie beside a whole model on top of it, so they counted twice.
    other, what = (CONFIG_NAME, "a whole model") if adapters_only else (ADAPTER_CONFIG_NAME, "adapters")
    if (directory / other).exists():
        raise ConfigError(
            f"{directory} holds {what}, and transformers would put adapters on top of a model that is beside them",
            cure="give another folder with --out",
        )


def _save(
    directory: Path,
    described: ModelConfig | HuggingFaceModelConfig,
    checkpoint: Checkpoint,
    parameters: Mapping[str, Tensor],
    *,
    adapters_only: bool,
) -> None:
    own = checkpoint.tokenizer
    tokenizer: tuple[Path, ...] = () if own is None else (own,)
    if isinstance(described, ModelConfig):
        save_decoder(directory, described, parameters, has_bytes=not tokenizer)
    elif adapters_only:
        save_adapters(directory, described, parameters)
        return
    else:
        save_hugging_face(directory, described, parameters, has_bytes=not tokenizer)
        base = described.weights_folder
        if own is not None and (base / TOKENIZER_NAME).is_file() and _same_json(own, base / TOKENIZER_NAME):
            tokenizer = tokenizer_files(base)  # with all that its makers say of it, such as how a chat is written
    save_tokenizer(directory, tokenizer, max_seq_len=described.max_seq_len)


def _same_json(one: Path, other: Path) -> bool:
    return bool(json.loads(one.read_bytes()) == json.loads(other.read_bytes()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restored:
    """A checkpoint, the configuration of its run, and its model's parameters by name."""

    checkpoint: Checkpoint
    config: Config
    parameters: Mapping[str, Tensor]


def restore(source: Path) -> Restored:
    """The model's parameters in a run's newest checkpoint. `source` and errors as for `export_model`."""
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
    return Restored(checkpoint=checkpoint, config=config, parameters=table.whole().views(parameters))


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
