"""A model out of a run: the parameters of the newest checkpoint, in a folder that `isthmus sample` reads.

Rules: the anchor is the model (every peer's is the same); a checkpoint is verified before it is used. Must not know
how checkpoints or model folders are laid out.

Errors: `ConfigError` (2, no checkpoint there), `CheckpointCorrupted` (9), `Refused` (5, another version's checkpoint),
`EnvironmentFault` (3).
"""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from optim.fragments import FragmentTable
from optim.outer import ANCHOR
from trainer.checkpoint import load_resumed
from trainer.config import Config
from trainer.errors import CheckpointCorrupted, EnvironmentFault
from trainer.generate import save_model
from trainer.model import named_shapes


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
    model_config = Config.from_manifest(checkpoint.meta.run_manifest).model.decoder_config()
    table = FragmentTable.from_named_shapes(named_shapes(model_config))
    anchor = checkpoint.tensors.get(ANCHOR)
    if anchor is None or anchor.numel() != table.numel:
        held = "no anchor" if anchor is None else f"{anchor.numel()} parameters"
        raise CheckpointCorrupted(checkpoint.path, f"holds {held}, its run's model has {table.numel}")
    try:
        save_model(directory, model_config, table.whole().views(anchor.view(-1)))
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
