# SPDX-License-Identifier: Apache-2.0
"""The model that a run begins with: what of it is the run's, and what a peer must have itself.

    a founder    reads the folder of a Hugging Face model; the architecture goes into the run's manifest, and where
                 something is frozen the digest of the weights
    a joiner     needs the folder only where something is frozen, and then with the same weights

Must not know who asks.

Errors: `ConfigError` (2), `EnvironmentFault` (3), `Refused` (5).
"""

import math

import msgspec

from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import HuggingFaceSection
from isthmus.trainer.errors import ConfigError, EnvironmentFault, Refused
from isthmus.trainer.model.decoder import ModelConfig
from isthmus.trainer.model.hugging_face import HuggingFaceModelConfig
from isthmus.trainer.model.model_folder import read_architecture, weights_digest


def model_of(config: Config) -> ModelConfig | HuggingFaceModelConfig:
    """The model, as this peer builds it.

    Raises:
        ConfigError: there is no such model, or it is that of a loop of somebody's own.
        EnvironmentFault: what it is built with is missing.
    """
    described = config.model.description()
    if isinstance(described, HuggingFaceModelConfig):
        return msgspec.structs.replace(described, folder=str(config.model_path))
    return described


def with_base_model(config: Config) -> Config:
    """A founder's configuration, with all that its peers must agree on. Blocks while weights are read.

    Raises:
        ConfigError: the folder does not hold a model that can be trained.
        EnvironmentFault: what it is built with is missing, or the disk refuses.
    """
    section, folder = config.model, config.model_path
    if not isinstance(section, HuggingFaceSection) or folder is None:
        return config
    if section.architecture is None or folder.is_dir():  # a resumed run knows it, and may need no folder
        section = section.model_copy(update={"architecture": read_architecture(folder)})
    described = section.description()
    section = section.model_copy(
        update={
            "seq_len": described.max_seq_len,
            "weights_digest": weights_digest(folder) if described.needs_folder else None,
        }
    )
    return config.model_copy(update={"model": section})


def require_base_model(config: Config, *, flag: str = "--node.model") -> None:
    """Demand that what of the run's model nobody sends is on this machine. Blocks while weights are read.

    Args:
        config: the run's, with this peer's own part.
        flag: by which people name the folder.

    Raises:
        EnvironmentFault: it is not here, or what it is built with is missing.
        Refused: another one is here.
    """
    section, folder = config.model, config.model_path
    if not isinstance(section, HuggingFaceSection) or folder is None or not section.description().needs_folder:
        return
    cure = f"copy the run's base model to this machine, and name its folder with {flag}"
    try:
        digest = weights_digest(folder)
    except ConfigError as error:
        raise EnvironmentFault(
            f"the weights that this run does not train are not here: {error.problem}", cure=cure
        ) from error
    if digest != section.weights_digest:
        raise Refused(
            f"the model in {folder} is not the run's base model: its weights differ", cure=cure, fields=("node.model",)
        )


def num_frozen(config: Config) -> int:
    """How many parameters of the model are not trained.

    Raises:
        ConfigError: the model cannot be built.
        EnvironmentFault: what it is built with is missing.
    """
    if not isinstance(config.model, HuggingFaceSection):
        return 0
    return sum(math.prod(shape) for _, shape in config.model.description().frozen_shapes())
