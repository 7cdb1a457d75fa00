# SPDX-License-Identifier: Apache-2.0
"""Composes a command line with Hydra into a checked ``Config``, or one coded error.

``run_training.py model=tiny training.steps=100`` reads ``configs/config.yaml``, the
file that each group chooses, then the overrides. JAX, whose import takes seconds, is
imported only once nothing is wrong with the settings themselves.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from tessera.errors import (
    OutputPathError,
    SettingConflictError,
    SettingValueError,
    TesseraError,
    UnknownModelError,
    UnknownOptimizerError,
    UnknownSettingError,
    did_you_mean,
)
from tessera.errors.untrusted_text import printable
from tessera.train.config.config_schema import as_text, schema, settings_of, typed
from tessera.train.config.help_text import usage
from tessera.train.config.hub_settings import HubCommits, check_model
from tessera.train.config.model_tokenizer import tokenizer_notes, tokenizer_of
from tessera.train.config.optimizer_config import OPTIMIZERS
from tessera.train.config.overrides import (
    GROUPS,
    RECIPE,
    RUN_DIR,
    apply,
    is_choice,
    parse,
    refused,
    unknown_key,
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
from tessera.train.config.settings_checks import check
from tessera.train.files.hub import MODEL_FILES, HubName, is_hidden_by_path
from tessera.train.models.definition import (
    DECODER,
    ModelDefinition,
    definition_of,
    import_module,
    registered_model,
)
from tessera.train.models.families.config_keys import ignored_keys
from tessera.train.models.families.published_files import published_texts
from tessera.train.models.families.registry import (
    CONFIG_FILE,
    family_of,
    read_config_file,
)

# What Hydra sees as the file of a model that has none.
_OWN: Final = "own"
# The error for a file that a group does not have; T502 for the others.
_UNKNOWN: Final = {"model": UnknownModelError, "optimizer": UnknownOptimizerError}


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


@dataclass(frozen=True)
class _Model:
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
        flags = _read_flags(words)
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
    files = _files(config_dir)
    choices = {f"{group}={name}" for group, names in files.items() for name in names}
    try:
        return usage(compose(_read_flags(words).overrides, config_dir).config, files)
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
    files = _files(config_dir)
    model, commits = _Model(definition_of(DECODER)), HubCommits(parsed)
    if (name := choices.get("model", "")) not in files["model"]:
        model = _own_model(name, commits) or model
    if model.values is not None:
        choices["model"] = _OWN
        files["model"].append(_OWN)
    data_path = _own_data(choices, parsed)
    raise_all([*errors, *_unknown_files(choices, files)])
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
    model: _Model,
    overrides: Sequence[Override],
) -> tuple[DictConfig, Recipe]:
    """What the files make, and the recipe, which is named or chosen."""
    config = _compose_files(choices, config_dir, model)
    _set_weights(config, overrides, model)
    run = deepcopy(config)
    for _ in _override(run, overrides):
        pass  # the mistakes are found again
    recipe = Recipe(config.hydra.runtime.choices[RECIPE])
    if recipe.name == "auto":
        recipe = choose_recipe(run)
        chosen = {RECIPE: recipe.name}
        raise_all([*_unknown_files(chosen, _files(config_dir))])
        if recipe.name != "none":
            config = _compose_files({**choices, **chosen}, config_dir, model)
            _set_weights(config, overrides, model)
    recipe = with_values(recipe, config, run)
    config.recipe = recipe.name
    return config, recipe


def _set_weights(
    config: DictConfig, overrides: Sequence[Override], model: _Model
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


def _values(config: DictConfig, model: _Model) -> tuple[Config, str]:
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


def _own_model(name: str, commits: HubCommits) -> _Model | None:
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
        return _Model(definition_of(DECODER), sizes, weights, tuple(notes), texts)
    if (definition := registered_model(name)) is None:
        return None
    values = {"name": definition.label, "definition": definition.name}
    return _Model(definition, values)


def _own_data(choices: dict[str, str], overrides: Sequence[Override]) -> str | None:
    """The ``data.path`` of ``data=<path or data set of the Hub>``, if it is one.

    Raises:
      SettingConflictError: [T507] ``data.path`` is given, too.
      SettingValueError: [T502] it begins with ``hf://``, and names no repository.
    """
    name = choices.get("data", "")
    if "/" not in name:
        return None
    if paths := [o.input_line for o in overrides if o.key_or_group == "data.path"]:
        raise SettingConflictError(
            "data= and data.path both name the data",
            got=f"data={name} {paths[0]}",
            fix=f"leave one out: data={name}, or data=text {paths[0]}",
        )
    choices["data"] = "text"
    return str(HubName.find(name, is_dataset=True) or name)


def _sweep(overrides: Sequence[str], config_dir: Path) -> int:
    """Start the runs of ``--multirun``; the exit code."""
    # It imports what starts processes, which one run does not need.
    from tessera.train.config.sweep import sweep

    _store_schemas(definition_of(DECODER))
    for text in overrides:
        parse(text, is_sweep=True)
    return sweep(overrides, config_dir)


def _compose_files(
    choices: Mapping[str, str], config_dir: Path, model: _Model
) -> DictConfig:
    """``config.yaml`` and the chosen files, merged onto the types of all settings."""
    _store_schemas(model.definition)
    if model.values is not None:
        ConfigStore.instance().store(group="model", name=_OWN, node=model.values)
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


def _store_schemas(definition: ModelDefinition) -> None:
    """Give Hydra the types of all settings."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_schema(definition))
    for name, cls in OPTIMIZERS.items():
        store.store(group="optimizer", name=f"{name}_schema", node=_typed(cls))


# Hydra copies what it loads from its store.
_schema, _typed = cache(schema), cache(typed)


def _files(config_dir: Path) -> dict[str, list[str]]:
    """The names that each group can choose from."""
    return {
        group: sorted(file.stem for file in (config_dir / group).glob("*.yaml"))
        for group in GROUPS
    }


def _unknown_files(
    choices: Mapping[str, str], files: Mapping[str, Sequence[str]]
) -> Iterator[TesseraError]:
    for group, name in choices.items():
        if name not in files[group]:
            here = f"write {group}=./{name} for what is here" * os.path.exists(name)
            yield _UNKNOWN.get(group, SettingValueError)(
                f"there is no {group} {name!r}",
                got=f"{group}={name}",
                fix=here or did_you_mean(name, files[group]),
            )


class _Flags(ArgumentParser):
    """The flags that are taken, and overrides among them."""

    def error(self, message: str) -> NoReturn:
        raise UnknownSettingError(
            "unknown flag",
            got=message,
            fix="use --help, --print-config, --module or --multirun, or write settings "
            "as group.setting=value",
        )


def _read_flags(arguments: Sequence[str]) -> Namespace:
    """The flags and overrides of a command line; imports its modules."""
    parser = _Flags(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])  # as Hydra calls it
    parser.add_argument("--print-config", dest="cfg", action="store_const", const="job")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--module", action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    flags = parser.parse_intermixed_args(arguments)
    for module in flags.module:
        import_module(module)
    return flags
