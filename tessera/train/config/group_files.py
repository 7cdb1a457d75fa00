# SPDX-License-Identifier: Apache-2.0
"""Composes the files of ``configs/`` that a command line chooses, with Hydra."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from tessera.errors import (
    SettingValueError,
    TesseraError,
    UnknownModelError,
    UnknownOptimizerError,
    did_you_mean,
)
from tessera.train.config.config_schema import schema, typed
from tessera.train.config.named_model import NamedModel
from tessera.train.config.optimizer_config import OPTIMIZERS
from tessera.train.config.overrides import GROUPS, RECIPE, unknown_key
from tessera.train.config.setting_hints import other_names
from tessera.train.data.records import conversation_setting
from tessera.train.models.definition import ModelDefinition

# What Hydra sees as the file of a model that has none.
OWN_MODEL: Final = "own"
# The error for a file that a group does not have; T502 for the others.
_UNKNOWN: Final = {"model": UnknownModelError, "optimizer": UnknownOptimizerError}
# What a group takes beside its files, for messages.
_BESIDE: Final = {
    "model": "\nthese begin with random weights; for given ones write "
    "model=./<folder>, or model=<organization>/{} of the Hub",
    "data": "\nfor your own write data=./<file or folder>, or "
    "data=<organization>/{} of the Hub",
}


def compose_files(
    choices: Mapping[str, str], config_dir: Path, model: NamedModel
) -> DictConfig:
    """``config.yaml`` and the chosen files, merged onto the types of all settings."""
    store_schemas(model.definition)
    if model.values is not None:
        ConfigStore.instance().store(group="model", name=OWN_MODEL, node=model.values)
    folder = str(config_dir.resolve())
    try:
        with hydra.initialize_config_dir(folder, version_base="1.3"):
            config = hydra.compose(
                "config",
                [f"{group}='{name}'" for group, name in choices.items()],
                return_hydra_config=True,
            )
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, ConfigKeyError):
            place = str(error).splitlines()[0].partition(":")[0]
            raise unknown_key(cause, place) from error
        raise SettingValueError(
            f"the files of {config_dir} do not make a configuration",
            got="\n".join(str(error).splitlines()[:4]),
            fix="correct the file that is named above",
        ) from error
    OmegaConf.set_struct(config.data.sources, False)  # the names are the user's
    return config


def store_schemas(definition: ModelDefinition) -> None:
    """Give Hydra the types of all settings."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_schema(definition))
    for name, cls in OPTIMIZERS.items():
        store.store(group="optimizer", name=f"{name}_schema", node=_typed(cls))


# Hydra copies what it loads from its store.
_schema, _typed = cache(schema), cache(typed)


def group_files(config_dir: Path) -> dict[str, list[str]]:
    """The names that each group can choose from."""
    return {
        group: sorted(file.stem for file in (config_dir / group).glob("*.yaml"))
        for group in GROUPS
    }


def unknown_files(
    choices: Mapping[str, str], files: Mapping[str, Sequence[str]]
) -> Iterator[TesseraError]:
    """An error for each choice that its group does not have."""
    for group, name in choices.items():
        if name not in files[group]:
            here = ""
            if os.path.exists(name):
                chats = conversation_setting(name) if group == "data" else ""
                here = f"write {group}=./{name}{chats} for what is here"
            other = did_you_mean(name, files[group])
            if group == RECIPE:
                other = other_names("recipes").get(name, other)
            beside = _BESIDE.get(group, "").format(name)
            yield _UNKNOWN.get(group, SettingValueError)(
                f"there is no {group} {name!r}",
                got=f"{group}={name}",
                fix=here or other + beside,
            )
