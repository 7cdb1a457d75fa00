# SPDX-License-Identifier: Apache-2.0
"""Parses one override of the command line and applies it to a configuration.

Below ``command_line.py``. The grammar is Hydra's; what Hydra would do and Tessera does
not want is refused here: adding and deleting keys, sweeps, objects to instantiate,
resolvers that read the environment or other files into the saved configuration.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from tessera.errors import SettingValueError, TesseraError, UnknownSettingError
from tessera.train.config.setting_fields import walk
from tessera.train.config.setting_hints import instead_of_word, no_setting

RECIPE: Final = "recipe"
GROUPS: Final = (
    *(RECIPE, "model", "training", "data", "optimizer", "runtime"),
    *("preference", "grpo"),
)
RUN_DIR: Final = "hydra.run.dir"
# How values are written that have an unusual form.
_FORMS: Final = {
    "model.mesh_shape": "write sizes and axes: 'model.mesh_shape=[[4,2],[fsdp,tp]]'"
}
_CALLS: Final = (
    """quote what has parentheses: 'rewards=[exact,"length(maximum=200)"]'"""
)
_SWEEPING: Final = re.compile(r"hydra[./](sweep|launcher|sweeper)\b")


def parse(text: str, *, is_sweep: bool = False) -> Override:
    """One ``key=value`` of the command line.

    Args:
      text: It.
      is_sweep: Whether it may list several values, or be about Hydra's sweepers and
        launchers: ``--multirun``.

    Raises:
      SettingValueError: [T502] it is none, or of a kind that is refused.
      UnknownSettingError: [T501] it is about Hydra itself, ``hydra.run.dir`` excepted.
    """
    try:
        text.encode()
        override = OverridesParser.create().parse_override(text)
    # Beside its own errors: half a surrogate pair, a number of thousands of digits.
    except (HydraException, ValueError, RecursionError) as error:
        raise SettingValueError(
            "an argument is not an override",
            got=f"{_short(text)}: {_first_line(error)}",
            fix=instead_of_word(text)
            or (_CALLS if "Unknown function" in str(error) else "")
            or "write group.setting=value; put quotes around text with special "
            "characters, and others around those for the shell: "
            "\"group.setting='a b'\"",
        ) from error
    key = override.key_or_group
    if override.is_delete():
        what, fix = "a setting cannot be deleted", "give it a value instead"
    elif override.is_sweep_override() and not is_sweep:
        what = "one run has one value of each setting"
        fix = (
            "add --multirun for a run with each value, or quote text that has a "
            f"comma: \"{key}='…'\""
        )
    elif any(_is_reserved(part) for part in re.split(r"[./]", key)):
        what = "a configuration holds values, and nothing to instantiate"
        fix = "leave it out"
    elif is_of_hydra(override) and not (
        _SWEEPING.match(key) if is_sweep else key == RUN_DIR
    ):
        taken = "hydra.sweep, hydra.launcher and hydra.sweeper are"
        raise UnknownSettingError(
            f"of Hydra's own settings only {taken if is_sweep else f'{RUN_DIR} is'} "
            "taken",
            got=_short(text),
            fix="leave it out",
        )
    else:
        return override
    raise SettingValueError(what, got=_short(text), fix=fix)


def is_of_hydra(override: Override) -> bool:
    """Whether an override is about Hydra itself."""
    return re.split(r"[./]", override.key_or_group)[0] == "hydra"


def is_choice(override: Override) -> bool:
    """Whether an override chooses a file of a group, as ``model=tiny`` does."""
    return (
        override.key_or_group in GROUPS
        and override.package is None
        and isinstance(override.value(), str)
    )


def apply(override: Override, config: DictConfig) -> Iterator[TesseraError]:
    """Change one setting of a composed configuration, or say why that cannot be."""
    key, text = override.get_key_element().lstrip("+"), _short(override.input_line)
    errors = [*assign(key, override.value(), config, text)]
    if not errors and (override.is_add() or override.is_force_add()):
        yield SettingValueError(
            "settings cannot be added, and this one is there already",
            got=text,
            fix=f"leave out the +: {text.lstrip('+')}",
        )
    yield from errors


def assign(
    key: str, value: Any, config: DictConfig, text: str
) -> Iterator[TesseraError]:
    """Give a setting of a composed configuration a value.

    Args:
      key: Its dotted path.
      value: The value; a dict changes what it names.
      config: The configuration, which is changed.
      text: What asks for it, for messages.
    """
    # Nothing is resolved before it is known to be harmless.
    values: Any = OmegaConf.to_container(config, resolve=False)
    if (unknown := _unknown(key, values, text)) is not None:
        yield unknown
    else:
        try:
            OmegaConf.update(config, key, value, merge=True)
        except ConfigKeyError as error:
            yield unknown_key(error, text)
        # Lists in lists in lists are recursion to OmegaConf.
        except (OmegaConfBaseException, RecursionError) as error:
            is_whole = isinstance(value, float) and value.is_integer()
            is_one = isinstance(value, str) and "not a ListConfig" in str(error)
            yield SettingValueError(
                f"{key} does not take this value",
                got=f"{text}: {_first_line(error)}",
                fix=_FORMS.get(key)
                or (f"write {key}={value:.0f}" if is_whole else "")
                or (f"write '{key}=[{value}]'" if is_one else "")
                or "give a value of the type that --help shows, or set one setting at "
                "a time",
            )


def unknown_key(error: ConfigKeyError, where: str) -> TesseraError:
    """T501 from OmegaConf's error for a key that a typed node does not have."""
    key, known = str(error.full_key), [str(name) for name in error.parent_node or ()]
    prefix = key.rpartition(".")[0]
    paths = [f"{prefix}.{k}" for k in known]
    return no_setting(key, key.count("."), known, paths, where)


def _unknown(key: str, values: Any, where: str) -> TesseraError | None:
    """T501 where nested dicts have no such key."""
    node, depth = values, 0
    for part in key.split("."):
        known = list(node) if isinstance(node, dict) else []
        if part not in known:
            break
        node, depth = node[part], depth + 1
    else:
        return None
    paths = [path for path, _ in walk(values) if not path.startswith("hydra.")]
    known = [name for name in known if name != "hydra"]
    return no_setting(key, depth, known, paths, where)


def refused(config: DictConfig) -> Iterator[TesseraError]:
    """What no configuration may hold, wherever it came from."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    run_dir = values.pop("hydra")["run"]["dir"]
    for path, value in [*walk(values), (RUN_DIR, run_dir)]:
        if any(_is_reserved(part) for part in path.split(".")):
            yield SettingValueError(
                "a configuration holds values, and nothing to instantiate",
                got=f"{path}={value}",
                fix="leave it out",
            )
        elif "${" in _without_plain_references(str(value)):
            yield SettingValueError(
                f"{path} reads something outside the configuration",
                got=f"{path}={value}",
                fix="give the value itself (a shell puts in its variables: "
                f'"{path}=$HOME/x"); ${{group.setting}} and ${{now:…}} are taken',
            )


def _without_plain_references(value: str) -> str:
    """Text without the harmless interpolations: other settings, and the date."""
    return re.sub(r"\$\{(now:[^${}]*|[A-Za-z_][A-Za-z0-9_.]*)\}", "", value)


def _is_reserved(key: str) -> bool:
    """Whether a key would mean code to Hydra, as ``_target_`` does."""
    return re.fullmatch(r"_\w+_", key) is not None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _short(lines[0])


def _short(text: str | None) -> str:
    """Text for a message: without its middle where it is too long to read."""
    text = text or ""
    return text if len(text) <= 400 else f"{text[:200]}…{text[-100:]}"
