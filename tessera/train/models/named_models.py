# SPDX-License-Identifier: Apache-2.0
"""The configurations of named models, which are the files of ``configs/model``."""

from functools import cache
from typing import Any, cast

from tessera.errors import UnknownModelError, did_you_mean
from tessera.foundations.config_files import configs_dir
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.definition import DECODER, MODEL_SETTINGS, definition_of


def model_names() -> list[str]:
    """The names of all models that have a file."""
    return sorted(file.stem for file in (configs_dir() / "model").glob("*.yaml"))


@cache
def config_of(name: str) -> DecoderConfig:
    """The configuration of a named model.

    Args:
      name: Of a file in ``configs/model``, without its ending.

    Raises:
      UnknownModelError: [T403] there is no such model.
      ModelShapeError: [T405] the file has unknown keys, or sizes that do not make a
        model.

    Example:
      >>> config_of("tiny").num_heads
      4
    """
    if name not in (names := model_names()):
        raise UnknownModelError(
            f"there is no model {name!r}", fix=did_you_mean(name, names)
        )
    from omegaconf import OmegaConf  # as Hydra does, so that 1e6 is a number

    file = OmegaConf.load(configs_dir() / "model" / f"{name}.yaml")
    values = cast(dict[str, Any], OmegaConf.to_container(file))
    sizes = {key: values[key] for key in values.keys() - MODEL_SETTINGS}
    return definition_of(DECODER).configure(sizes)
