# SPDX-License-Identifier: Apache-2.0
"""The tables of the trainer's settings, from the classes that ``--help`` reads."""

import re
from collections.abc import Iterable, Iterator

import yaml

from tessera.foundations.config_files import configs_dir
from tessera.train.config.help_text import group_settings
from tessera.train.config.optimizer_config import OPTIMIZERS
from tessera.train.config.post_training_config import GrpoConfig, PreferenceConfig
from tessera.train.config.run_config import ModelConfig, RuntimeConfig, TrainingConfig
from tessera.train.config.setting_fields import as_yaml, walk
from tessera.train.data.data_config import DataConfig

GROUPS = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "data": DataConfig,
    "runtime": RuntimeConfig,
    "preference": PreferenceConfig,
    "grpo": GrpoConfig,
}


def rows_of(group: str, cls: type) -> Iterator[str]:
    """A row of Markdown for each setting of a group."""
    for one in group_settings(group, cls):
        default = f"`{one.default}`" if one.default else "of the file"
        # Names of pages become links; an asterisk is no emphasis.
        meaning = re.sub(r"docs/([\w/-]+)\.md", r"{doc}`/\1`", one.meaning)
        meaning = meaning.replace("*", r"\*")
        yield f"| `{one.name}` | {one.type} | {default} | {meaning} |"


def table(rows: Iterable[str]) -> str:
    """Rows below their heading."""
    heading = "| Setting | Type | Default | Meaning |"
    return "\n".join([heading, "| --- | --- | --- | --- |", *rows, ""])


def optimizers() -> str:
    """One table of what all optimizers share, and one for each with the others."""
    rows = {name: [*rows_of("optimizer", cls)] for name, cls in OPTIMIZERS.items()}
    first, *others = rows.values()
    shared = [row for row in first if all(row in other for other in others)]
    parts = [table(shared)]
    for name, own in rows.items():
        parts += [
            f"`optimizer={name}`\n",
            table(row for row in own if row not in shared),
        ]
    return "\n".join(parts)


def recipes() -> str:
    """What each file of ``configs/recipe`` sets, in a column of its own."""
    every = sorted((configs_dir() / "recipe").glob("*.yaml"))
    files = [file for file in every if yaml.safe_load(file.read_text())]
    columns: list[dict[str, str]] = []
    for file in files:
        column: dict[str, str] = {}
        for path, value in walk(yaml.safe_load(file.read_text())):
            setting, rate, optimizer = path.partition("learning_rate.")
            name = optimizer and f"{optimizer} "
            path = f"{setting}{rate.rstrip('.')}"
            before = f"{column[path]}, " if path in column else ""
            column[path] = f"{before}{name}{as_yaml(value)}"
        columns.append(column)
    names = " | ".join(f"`recipe={file.stem}`" for file in files)
    rows = [f"| Setting | {names} |", "| --- " * (len(files) + 1) + "|"]
    for path in dict.fromkeys(path for column in columns for path in column):
        cells = " | ".join(column.get(path, "–") for column in columns)
        rows.append(f"| `{path}` | {cells} |")
    return "\n".join([*rows, ""])


def tables() -> dict[str, str]:
    """The text of each generated file, by its name."""
    texts = {"recipe": recipes()}
    texts |= {group: table(rows_of(group, cls)) for group, cls in GROUPS.items()}
    texts["optimizer"] = optimizers()
    return {f"settings-{group}.md": text for group, text in texts.items()}
