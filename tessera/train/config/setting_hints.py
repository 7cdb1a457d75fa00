# SPDX-License-Identifier: Apache-2.0
"""What to type in the place of a setting or a flag that does not exist."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import yaml

from tessera.errors import UnknownSettingError

NO_DASHES: Final = (
    "use --help, --print-config, --module or --multirun; settings have no dashes: "
    "optimizer.learning_rate=1e-4, training.dry_run=true"
)
_MOST_LISTED: Final = 12
_FILE: Final = Path(__file__).with_name("other_names.yaml")


@cache
def other_names(section: str) -> dict[str, str]:
    """What to write for names that others have for things, by a section of the file."""
    hints = yaml.safe_load(_FILE.read_text())[section]
    return {name: to for names, to in hints.items() for name in names.split()}


def no_setting(
    key: str, depth: int, known: Sequence[str], paths: Sequence[str], where: str
) -> UnknownSettingError:
    """T501 with what was probably meant.

    Args:
      key: The whole key.
      depth: How many of its parts exist.
      known: What could stand in the place of the next part.
      paths: Every setting by its dotted path.
      where: What has the key.
    """
    fix = _hint(key, depth, known, paths) or "--help lists every setting"
    return UnknownSettingError(f"there is no setting {key!r}", got=where, fix=fix)


def unknown_flags(
    flags: Sequence[str], words: Sequence[str], paths: Sequence[str]
) -> UnknownSettingError:
    """T501 for flags, each with the setting that was probably meant.

    Args:
      flags: Those that do not exist, and what may stand between them.
      words: The command line, where the value of a flag may follow it.
      paths: The groups, and every setting by its dotted path.
    """
    # After an unknown flag, argparse counts settings among what it does not know.
    flags = [each for each in flags if each.startswith("-")]
    fixes, following = list[str](), dict(pairwise(words))
    for flag in flags:
        key, equals, value = flag.lstrip("-").partition("=")
        key, next_word = key.replace("-", "_"), following.get(flag, "")
        if not equals:
            is_value = next_word and "=" not in next_word and next_word[0] != "-"
            value = next_word if is_value else "true"
        group = key.rpartition(".")[0]
        known = [p.rpartition(".")[2] for p in paths if p.rpartition(".")[0] == group]
        fix = _hint(key, key.count("."), known, paths)
        if key in paths:
            fix = f"write {key}={value}"
        if not fix.startswith("Known"):
            fixes.append(f"settings have no dashes; for {flag}: {fix}")
    fix = "\n".join(fixes) or NO_DASHES
    return UnknownSettingError("unknown flag", got=" ".join(flags), fix=fix)


def instead_of_word(text: str) -> str:
    """What to write for a word without an equals sign; "" for what is none."""
    if text.endswith((".yaml", ".yml", ".toml")):
        return other_names("settings")["config"]
    is_word = re.fullmatch(r"[\w./:-]{1,100}", text)
    return f"write model={text}, data={text} or group.setting={text}" if is_word else ""


def _hint(key: str, depth: int, known: Sequence[str], paths: Sequence[str]) -> str:
    """What to write for a key; the arguments are those of ``no_setting``."""
    *before, part = key.split(".")[: depth + 1]
    group, _, last = key.rpartition(".")
    hints = other_names("settings")
    if (to := hints.get(key) or hints.get(last)) is not None:
        return to
    # Of two that are equally near, the one of the same group.
    paths = sorted(paths, key=lambda path: path.rpartition(".")[0] != group)
    names = {path: path.rpartition(".")[2] for path in paths}
    here = [".".join([*before, name]) for name in get_close_matches(part, known, n=1)]
    # wd for weight_decay, layers for num_layers
    short = [p for p in paths if "".join(w[:1] for w in names[p].split("_")) == last]
    within = [p for p in paths if len(last) > 2 and f"_{last}_" in f"_{names[p]}_"]
    near = get_close_matches(last, names.values(), n=1)
    elsewhere = [path for path in paths if names[path] in near]
    same = [path for path in paths if names[path] == last]
    candidates = [*same, *here, *short, *within, *elsewhere]
    fixes = [f"did you mean {candidate!r}?" for candidate in candidates[:1]]
    if len(known) <= _MOST_LISTED and candidates[:1] in ([], here):
        fixes.append(f"Known: {', '.join(map(repr, known)) or 'none'}")
    return " ".join(fixes)
