# SPDX-License-Identifier: Apache-2.0
"""Composes a command line with Hydra into a checked ``Config``, or one coded error.

``run_training.py model=tiny training.steps=100`` reads ``configs/config.yaml``, the
file that each group chooses, then the overrides. JAX, whose import takes seconds, is
imported only once nothing is wrong with the settings themselves.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tessera.errors import (
    OutputPathError,
    SettingValueError,
    TesseraError,
    UnknownSettingError,
)
from tessera.train.config.config_schema import as_text, settings_of
from tessera.train.config.group_files import (
    OWN_MODEL,
    compose_files,
    group_files,
    store_schemas,
    unknown_files,
)
from tessera.train.config.help_text import setting_paths, usage
from tessera.train.config.hub_settings import HubCommits
from tessera.train.config.model_tokenizer import tokenizer_notes, tokenizer_of
from tessera.train.config.named_model import NamedModel, own_data, own_model
from tessera.train.config.overrides import (
    RECIPE,
    RUN_DIR,
    apply,
    is_choice,
    parse,
    refused,
)
from tessera.train.config.recipes import Recipe, choose_recipe, with_values
from tessera.train.config.run_config import Config
from tessera.train.config.setting_fields import (
    as_yaml,
    collected,
    joined,
    raise_all,
    walk,
)
from tessera.train.config.setting_hints import NO_DASHES, unknown_flags
from tessera.train.config.settings_checks import check
from tessera.train.models.definition import (
    DECODER,
    definition_of,
    import_module,
)


@dataclass(frozen=True)
class Composed:
    """A command line, understood.

    Attributes:
      config: Checked values.
      text: The same as YAML, resolved: what ``config.yaml`` keeps of the run.
      output_dir: Where the run writes; nothing is created yet.
      notes: Lines for the log of the run.
      published: The text of the files of the folder ``model=<folder>``, by name, that
        an export of the run needs again.
      modules: Those of ``--module``, which were imported.
      changed: What the command line changed, as one would write it: the files of
        groups that it chose, and each setting that is not as its files have it.
    """

    config: Config
    text: str
    output_dir: Path
    notes: tuple[str, ...] = ()
    published: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def flat(self) -> dict[str, str]:
        """Every setting by its dotted path, as one would write it."""
        return {path: as_yaml(value) for path, value in walk(yaml.safe_load(self.text))}


def read_command_line(
    config_dir: Path, arguments: Sequence[str] | None = None
) -> Composed | int:
    """What the command line asks for, or the exit code where there is nothing to run.

    Imports no more of JAX's world than its mistakes take, so a program does it before
    it imports what it runs with.

    Args:
      config_dir: The folder of ``config.yaml`` and of the groups.
      arguments: None takes the process's own.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if asks_for_help(words):
            sys.stdout.write(_help(words, config_dir))
            return 0
        flags = read_flags(words)
        if flags.multirun and not flags.cfg:
            return _sweep(flags.overrides, config_dir)
        composed = compose(flags.overrides, config_dir)
        composed = replace(composed, modules=tuple(flags.module))
    except TesseraError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if not flags.cfg:
        return composed
    sys.stdout.write(composed.text)
    return 0


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether the words of a command line have ``--help`` or ``-h`` among them."""
    return not {"--help", "-h"}.isdisjoint(words)


def _help(words: Sequence[str], config_dir: Path) -> str:
    """The text of ``--help``, for as much of the command line as can be used."""
    files = group_files(config_dir)
    choices = {f"{group}={name}" for group, names in files.items() for name in names}
    try:
        return usage(compose(read_flags(words).overrides, config_dir).config, files)
    except TesseraError as error:
        problem = error
    is_sweep = not {"--multirun", "-m"}.isdisjoint(words)
    note = "" if is_sweep else str(problem)
    for usable in (choices.intersection(words), ()):
        with suppress(TesseraError):
            return usage(compose([*usable], config_dir).config, files, note)
    raise problem


def compose(overrides: Sequence[str], config_dir: Path) -> Composed:
    """The settings that overrides such as ``model=tiny`` and ``training.steps=5`` give.

    All mistakes that can be seen together come in one error, which has the code of the
    first of them.

    Raises:
      UnknownSettingError: [T501] a key does not exist.
      SettingValueError: [T502] a setting does not take a value, or an override is of a
        kind that is refused.
      TesseraError: Any code of ``settings_checks.check``, T403 or T505 for a file
        that a group does not have, T405 for a model's sizes.
    """
    parsed: list[Override] = []
    errors: list[TesseraError] = []
    for text in overrides:
        with collected(errors):
            parsed.append(parse(text))
    choices = {o.key_or_group: str(o.value()) for o in parsed if is_choice(o)}
    chosen = dict(choices)
    files = group_files(config_dir)
    model, commits = NamedModel(definition_of(DECODER)), HubCommits(parsed)
    if (name := choices.get("model", "")) not in files["model"]:
        model = own_model(name, commits) or model
    if model.values is not None:
        choices["model"] = OWN_MODEL
        files["model"].append(OWN_MODEL)
    data_path = own_data(choices, parsed)
    raise_all([*errors, *unknown_files(choices, files)])
    settings_overrides = [each for each in parsed if not is_choice(each)]
    config, recipe = _with_recipe(choices, config_dir, model, settings_overrides)
    errors += recipe.apply(config)
    if data_path is not None:
        config.data.path = data_path
    before = _unresolved(config)
    errors += _override(config, settings_overrides)
    errors += commits.pin_settings(config)
    try:
        settings, output_dir = _values(config, model)
        settings.data.tokenizer = tokenizer_of(settings, model.weights)
    except TesseraError as error:
        raise joined([*errors, error]) from error
    errors += [*check(settings), *_check_output(output_dir)]
    if not errors:
        from tessera.train.config.layout_checks import layout_problems  # imports JAX

        errors = layout_problems(settings)
    raise_all(errors)
    after = _unresolved(config)
    config.data.tokenizer = settings.data.tokenizer
    with open_dict(config):
        del config["hydra"]
    tokenizer = tokenizer_notes(settings, model.weights)
    composed = Composed(
        settings,
        as_text(config),
        Path(output_dir),
        notes=(*model.notes, recipe.note(config), *tokenizer),
        published=model.published,
    )
    changed = [f"{group}={name}" for group, name in chosen.items()]
    for path, value in composed.flat.items():
        is_said = path == "data.path" and data_path is not None  # by data=<path>
        if not is_said and (path not in before or before[path] != after[path]):
            changed.append(f"{path}={value}")
    return replace(composed, changed=tuple(changed))


def _unresolved(config: DictConfig) -> dict[str, Any]:
    """Every setting by its dotted path, with references as they are written."""
    return dict(walk(OmegaConf.to_container(config, resolve=False)))


def _with_recipe(
    choices: Mapping[str, str],
    config_dir: Path,
    model: NamedModel,
    overrides: Sequence[Override],
) -> tuple[DictConfig, Recipe]:
    """What the files make, and the recipe, which is named or chosen."""
    config = compose_files(choices, config_dir, model)
    _set_weights(config, overrides, model)
    run = deepcopy(config)
    for _ in _override(run, overrides):
        pass  # the mistakes are found again
    recipe = Recipe(config.hydra.runtime.choices[RECIPE])
    if recipe.name == "auto":
        recipe = choose_recipe(run)
        chosen = {RECIPE: recipe.name}
        raise_all([*unknown_files(chosen, group_files(config_dir))])
        if recipe.name != "none":
            config = compose_files({**choices, **chosen}, config_dir, model)
            _set_weights(config, overrides, model)
    recipe = with_values(recipe, config, run)
    config.recipe = recipe.name
    return config, recipe


def _set_weights(
    config: DictConfig, overrides: Sequence[Override], model: NamedModel
) -> None:
    """Begin with the weights of ``model=<folder>``, unless the run resumes another."""
    resumes = [o.value() for o in overrides if o.key_or_group == "training.resume"]
    if model.weights is not None and all(r in ("none", "auto") for r in resumes):
        config.training.init_from = model.weights


def _override(
    config: DictConfig, overrides: Sequence[Override]
) -> Iterator[TesseraError]:
    """Change settings of a composed configuration."""
    for override in overrides:
        yield from apply(override, config)


def _values(config: DictConfig, model: NamedModel) -> tuple[Config, str]:
    """The settings and the output folder, with every reference resolved."""
    # Nothing is resolved before this, and with it nothing at all.
    raise_all([*refused(config)])
    try:
        if (definition := config.model.definition) != model.definition.name:
            raise SettingValueError(
                "model.definition is what model= chooses",
                got=f"model.definition={definition}",
                fix=f"write model={definition}",
            )
        return settings_of(config), str(config.hydra.run.dir)
    except (OmegaConfBaseException, RecursionError) as error:
        raise SettingValueError(
            "a setting has no value",
            got=str(error).splitlines()[0],
            fix="give it one, or refer to a setting that has one: ${group.setting}",
        ) from error


def _check_output(folder: str) -> Iterator[TesseraError]:
    if not folder or "\0" in folder:
        yield OutputPathError(
            "the run has no folder to write to",
            got=f"{RUN_DIR}={folder!r}",
            fix=f"write {RUN_DIR}=<folder>, or leave it out",
        )


def _sweep(overrides: Sequence[str], config_dir: Path) -> int:
    """Start the runs of ``--multirun``; the exit code."""
    # It imports what starts processes, which one run does not need.
    from tessera.train.config.sweep import sweep

    store_schemas(definition_of(DECODER))
    for text in overrides:
        parse(text, is_sweep=True)
    return sweep(overrides, config_dir)


class _Flags(ArgumentParser):
    """The flags that are taken, and overrides among them."""

    def error(self, message: str) -> NoReturn:
        raise UnknownSettingError(
            "unknown flag",
            got=message,
            fix=NO_DASHES,
        )


def read_flags(arguments: Sequence[str]) -> Namespace:
    """The flags and overrides of a command line; imports its modules."""
    parser = _Flags(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])  # as Hydra calls it
    parser.add_argument("--print-config", dest="cfg", action="store_const", const="job")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--module", action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    flags, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise unknown_flags(unknown, arguments, setting_paths())
    for module in flags.module:
        import_module(module)
    return flags
