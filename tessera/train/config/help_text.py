# SPDX-License-Identifier: Apache-2.0
"""The text of ``--help``: groups, their files, every setting and its meaning.

Hydra's own help shows values alone; here are types and meanings as well.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import get_type_hints

from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.config.overrides import GROUPS, RECIPE
from tessera.train.config.run_config import Config
from tessera.train.config.setting_fields import Description, as_yaml, describe, find
from tessera.train.models.decoder.config import DecoderConfig

_HEAD = """\
Trains a model on a mesh of devices.

usage: {program} [group=file ...] [group.setting=value ...]
       --help           this text, for the groups chosen beside it
       --print-config   all settings as YAML; nothing is run
       --multirun       a run for each value of settings that list some: a=1,2

name=<text>              names the folder of the output
hydra.run.dir=<folder>   puts the output there instead

"""


def usage(
    settings: Config, files: Mapping[str, Sequence[str]], problem: str = ""
) -> str:
    """The text of ``--help`` in 80 columns, for the classes that ``settings`` has.

    Args:
      settings: Those whose values are shown.
      files: The names that each group can choose from.
      problem: Why these are not the values of the command line, if they are not.
    """
    script = Path(sys.argv[0]).name
    is_script = script == "run_training.py"
    head = _HEAD.format(program=f"python {script}" if is_script else "tessera train")
    text = head + "\n".join(
        "".join(_group(group, names, settings)) for group, names in files.items()
    )
    if problem:
        text += "\nThese are not the values of the command line, which is wrong:\n"
        text += "\n".join(fill(line, 80) for line in problem.splitlines()) + "\n"
    return text


def group_settings(
    group: str, cls: type, model_class: type = DecoderConfig
) -> Iterator[Description]:
    """Every setting of a group, under the name that it has on the command line.

    Args:
      group: The group.
      cls: Its class.
      model_class: The class of the model's own configuration, whose settings stand
        beside the others of the group ``model``.
    """
    for one in describe(cls):
        if (group, one.name) != ("model", "config"):
            yield one
    if group == "model":
        yield from describe(model_class)


def setting_paths() -> list[str]:
    """The groups, and every setting of the default classes by its dotted path."""
    classes = get_type_hints(Config) | {"optimizer": AdamWConfig}
    groups = {group: group_settings(group, classes[group]) for group in GROUPS[1:]}
    return [*GROUPS, *(f"{g}.{each.name}" for g in groups for each in groups[g])]


def _group(group: str, names: Sequence[str], settings: Config) -> Iterator[str]:
    yield fill(f"{group}={' | '.join(names)}", 80, subsequent_indent="  ") + "\n"
    if group == RECIPE:
        return
    cls, model_class = type(getattr(settings, group)), type(settings.model.config)
    for one in group_settings(group, cls, model_class):
        name = f"{group}.{one.name}"
        line = f"  {name}={as_yaml(find(settings, name)[0])}  ({one.type})"
        yield fill(line, 80, subsequent_indent=" " * 4, break_long_words=False) + "\n"
        meaning = one.meaning.replace("``", "")
        yield fill(meaning, 80, initial_indent=" " * 6, subsequent_indent=" " * 6)
        yield "\n"
