# SPDX-License-Identifier: Apache-2.0
"""Converts between OmegaConf and the dataclasses of ``run_config.py``."""

from dataclasses import MISSING, Field, field, fields, make_dataclass
from typing import Any, Final, cast, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf

from tessera.train.config.optimizer_config import OPTIMIZERS
from tessera.train.config.run_config import Config, ModelConfig
from tessera.train.files.bounded_yaml import parse_yaml
from tessera.train.models.definition import ModelDefinition, definition_of

# Of two types, which OmegaConf has no list for.
_MESH_SHAPE: Final = {"mesh_shape": list[Any]}
_OF_VALUES: Final = ("training", "data", "optimizer", "runtime", "preference", "grpo")
_OF_EVERY_MODEL: Final = [one for one in fields(ModelConfig) if one.name != "config"]


def model_schema(definition: ModelDefinition) -> type:
    """``ModelConfig`` on the command line: its sizes stand beside the others."""
    cls = definition.config_class
    hints = get_type_hints(ModelConfig) | _MESH_SHAPE | get_type_hints(cls)
    settings = [
        (one.name, hints[one.name], _copied(one))
        for one in (*_OF_EVERY_MODEL, *fields(cls))
    ]
    return make_dataclass("ModelSchema", settings, kw_only=True)


def _copied(one: Field[Any]) -> Any:
    """The default of a dataclass's field, as a field of another one."""
    if one.default_factory is not MISSING:
        return field(default_factory=one.default_factory)
    return field(default=one.default)


def schema(definition: ModelDefinition) -> DictConfig:
    """The type of every setting, for a kind of model."""
    groups = get_type_hints(Config) | {"model": model_schema(definition)}
    # Hydra reads the file of a recipe into its node.
    groups["recipe"] = Any
    node = typed(make_dataclass("Schema", groups.items()))
    node.recipe = "none"
    return node


def typed(cls: type) -> DictConfig:
    """A dataclass as a configuration that takes only its fields, of their types.

    OmegaConf makes the fields of a frozen dataclass read-only, which would keep Hydra
    from setting them.
    """
    node = cast(DictConfig, OmegaConf.structured(cls))
    for key, hint in get_type_hints(cls).items():
        if hasattr(hint, "__dataclass_fields__"):
            node[key] = typed(hint)
    OmegaConf.set_readonly(node, None)
    return node


def settings_of(config: DictConfig) -> Config:
    """A composed configuration as frozen values, with every interpolation resolved.

    Raises:
      ModelShapeError: [T405] the sizes of the model contradict each other.
    """
    values: dict[str, Any] = {
        group: OmegaConf.to_object(config[group]) for group in _OF_VALUES
    }
    sizes = cast(
        dict[str, Any],
        OmegaConf.to_container(config.model, resolve=True, throw_on_missing=True),
    )
    sizes = _frozen(sizes)
    own = {one.name: sizes.pop(one.name) for one in _OF_EVERY_MODEL}
    definition = definition_of(own["definition"])
    model = ModelConfig(**own, config=definition.configure(sizes))
    rewards = None if config.rewards is None else list(config.rewards)
    own = {"name": config.name, "recipe": config.recipe, "rewards": rewards}
    return Config(model=model, **own, **values)


def settings_of_text(text: str) -> Config:
    """The settings that ``as_text`` wrote, from a checkpoint for instance.

    Raises:
      ModelShapeError: [T405] the sizes of the model contradict each other.
      ValueError: It is not such a text, or not of this version.
    """
    try:
        values = parse_yaml(text)
        # Everything is resolved in what was written: a reference is somebody else's.
        if not isinstance(values, dict) or "${" in text:
            raise ValueError("it is no resolved configuration")
        config = schema(definition_of(values["model"]["definition"]))
        cls = OPTIMIZERS[values["optimizer"]["name"]]
        config.optimizer = typed(cls)
        return settings_of(cast(DictConfig, OmegaConf.merge(config, values)))
    except ValueError:
        raise
    except Exception as error:
        name = type(error).__name__
        raise ValueError(next(iter(str(error).splitlines()), name)) from error


def as_text(config: DictConfig) -> str:
    """A configuration as YAML with every interpolation resolved, lists on one line."""
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """YAML that OmegaConf reads back as it was, which takes 1e3 for a number."""

    def inline(self, data: list[Any]) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)

    def quoted(self, data: str) -> yaml.Node:
        style = "'" if data[:1] in set("0123456789.+-") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(list, _Dumper.inline)
_Dumper.add_representer(str, _Dumper.quoted)


def _frozen(value: Any) -> Any:
    """Nested lists as nested tuples, also in dicts."""
    if isinstance(value, dict):
        return {name: _frozen(inner) for name, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
