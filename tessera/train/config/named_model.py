# SPDX-License-Identifier: Apache-2.0
"""What ``model=`` and ``data=`` name, where no file of ``configs/`` has that name."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.types import Override

from tessera.errors import SettingConflictError, printable
from tessera.train.config.hub_settings import HubCommits, check_model
from tessera.train.files.hub import MODEL_FILES, HubName, is_hidden_by_path
from tessera.train.models.definition import (
    DECODER,
    ModelDefinition,
    definition_of,
    registered_model,
)
from tessera.train.models.families.config_keys import ignored_keys
from tessera.train.models.families.published_files import published_texts
from tessera.train.models.families.registry import (
    CONFIG_FILE,
    family_of,
    read_config_file,
)

# The kind of data that a recipe reads, where it is not text.
_DATA_OF: Final = {"preference": "preferences", "grpo": "prompts"}


@dataclass(frozen=True)
class NamedModel:
    """What ``model=`` names.

    Attributes:
      definition: What kind it is.
      values: Settings of the group ``model`` that are not defaults, if no file in
        ``configs/model`` has them.
      weights: The folder of its weights, if it has them.
      notes: Lines for the log of the run.
      published: See ``Composed``.
    """

    definition: ModelDefinition
    values: Mapping[str, Any] | None = None
    weights: str | None = None
    notes: tuple[str, ...] = ()
    published: Mapping[str, str] = field(default_factory=dict)


def own_model(name: str, commits: HubCommits) -> NamedModel | None:
    """A folder, which has a slash in its path, one of the Hub, or a registered model.

    The weights of a model of the Hub are downloaded once they are needed.
    """
    if "/" in name:
        folder, notes = Path(os.path.expanduser(name)), list[str]()
        label, weights = folder.resolve().name, str(folder)
        if hub := HubName.find(name):
            check_model(hub, "model")
            hub = commits.pin(hub)
            folder, weights = hub.download(MODEL_FILES), str(hub)
            label = hub.repo.partition("/")[2]
            notes = [f"model={name} is {weights}"]
        elif is_hidden_by_path(name):
            notes = [f"model={name} is the folder here, not a model of the Hub"]
        values = read_config_file(folder)
        config = family_of(values).config(values)
        sizes = {"name": label, **asdict(config)}
        notes += [
            f"{folder / CONFIG_FILE}: {printable(key)} is about a tool, and ignored"
            for key in ignored_keys(values)
        ]
        texts = published_texts(folder)
        return NamedModel(definition_of(DECODER), sizes, weights, tuple(notes), texts)
    if (definition := registered_model(name)) is None:
        return None
    values = {"name": definition.label, "definition": definition.name}
    return NamedModel(definition, values)


def own_data(choices: dict[str, str], overrides: Sequence[Override]) -> str | None:
    """The ``data.path`` of ``data=<path or data set of the Hub>``, if it is one.

    The kind of data becomes text, or what the recipe reads.

    Raises:
      SettingConflictError: [T507] ``data.path`` is given, too.
      SettingValueError: [T502] it begins with ``hf://``, and names no repository.
    """
    name = choices.get("data", "")
    if "/" not in name:
        return None
    kind = _DATA_OF.get(choices.get("recipe", ""), "text")
    if paths := [o.input_line for o in overrides if o.key_or_group == "data.path"]:
        raise SettingConflictError(
            "data= and data.path both name the data",
            got=f"data={name} {paths[0]}",
            fix=f"leave one out: data={name}, or data={kind} {paths[0]}",
        )
    choices["data"] = kind
    return str(HubName.find(name, is_dataset=True) or name)
