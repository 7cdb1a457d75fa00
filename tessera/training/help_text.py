# SPDX-License-Identifier: Apache-2.0
"""The text of ``--help``: groups, their files, every setting and its meaning.

Hydra's own help shows values alone; here are types and meanings as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from textwrap import fill
from typing import Any

from tessera.training.config import Config
from tessera.training.setting_fields import Description, as_yaml, describe

_HEAD = """\
Trains a model on a mesh of devices.

usage: python run_training.py [group=file ...] [group.setting=value ...]
       --help        this text, for the groups chosen beside it
       --cfg job     the configuration as YAML; nothing is run
       --multirun    a run for each value of settings that list several: a=1,2

name=<text>              names the folder of the output
hydra.run.dir=<folder>   puts the output there instead

"""


def usage(settings: Config, files: Mapping[str, Sequence[str]]) -> str:
    """The text of ``--help`` in 80 columns, for the classes that ``settings`` has."""
    return _HEAD + "\n".join(
        "".join(_group(group, names, settings)) for group, names in files.items()
    )


def group_settings(group: str, cls: type) -> Iterator[Description]:
    """Every setting of a group, under the name that it has on the command line."""
    for one in describe(cls):
        name = one.name.removeprefix("config.") if group == "model" else one.name
        yield Description(name, one.type, one.default, one.meaning)


def _value(config: Any, name: str) -> Any:
    """The value of a setting; a model's sizes are one level down."""
    if not hasattr(config, name.partition(".")[0]):
        config = config.config
    return attrgetter(name)(config)


def _group(group: str, names: Sequence[str], settings: Config) -> Iterator[str]:
    yield fill(f"{group}={' | '.join(names)}", 80, subsequent_indent="  ") + "\n"
    for one in group_settings(group, type(getattr(settings, group))):
        value = _value(getattr(settings, group), one.name)
        line = f"  {group}.{one.name}={as_yaml(value)}  ({one.type})"
        yield fill(line, 80, subsequent_indent=" " * 4, break_long_words=False) + "\n"
        meaning = one.meaning.replace("``", "")
        yield fill(meaning, 80, initial_indent=" " * 6, subsequent_indent=" " * 6)
        yield "\n"
