# SPDX-License-Identifier: Apache-2.0
"""The families that are known, by the ``model_type`` of ``config.json``."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from tessera.errors import ModelFolderError, TesseraError, did_you_mean
from tessera.train.files.regular_files import read_regular
from tessera.train.files.untrusted_json import parse_json
from tessera.train.models.decoder.config import FIELDS_OF_KIND, DecoderConfig
from tessera.train.models.families.family import Family
from tessera.train.models.families.gemma import GEMMA2, GEMMA3
from tessera.train.models.families.gpt_oss import GPT_OSS
from tessera.train.models.families.llama3 import LLAMA3
from tessera.train.models.families.mistral import MISTRAL
from tessera.train.models.families.olmo import OLMO2, OLMO3
from tessera.train.models.families.phi import PHI3
from tessera.train.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE

CONFIG_FILE: Final = "config.json"
_LONGEST: Final = 2**24

FAMILIES: Final[tuple[Family, ...]] = (
    GEMMA3,
    GEMMA2,
    LLAMA3,
    MISTRAL,
    QWEN3,
    QWEN3_MOE,
    QWEN2,
    PHI3,
    OLMO2,
    OLMO3,
    GPT_OSS,
)

# Fields that a folder does not have: they change training or speed, not the model; and
# adapters, which an export merges into the weights.
_OF_TRAINING: Final = frozenset(
    ("scan_unroll", "router_balance_weight", "router_z_weight", "lora")
)


def read_config_file(folder: str | Path) -> dict[str, Any]:
    """The values of a folder's ``config.json``.

    Raises:
      ModelFolderError: [T806] there is none, or it is no JSON object.
    """
    return read_object(Path(folder) / CONFIG_FILE)[1]


def read_object(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a folder's JSON file, and its values.

    Raises:
      ModelFolderError: [T806] there is no such file, or it is no JSON object.
    """
    try:
        text = read_regular(path, _LONGEST).decode()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return text, parse_object(text, path)


def parse_object(text: str, path: str | Path) -> dict[str, Any]:
    """The values of a JSON object.

    Raises:
      ModelFolderError: [T806] it is none.
    """
    try:
        values = parse_json(text, longest=_LONGEST)
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise _unreadable(path, error) from error
    return values


def _unreadable(path: str | Path, error: Exception) -> ModelFolderError:
    return ModelFolderError(
        f"{path} cannot be read",
        got=getattr(error, "strerror", None) or str(error),
        fix="name the folder of a published model, which has a config.json",
    )


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a ``config.json``.

    Raises:
      ModelFolderError: [T806] there is none of its ``model_type``.
    """
    by_type = {name: family for family in FAMILIES for name in family.model_types}
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in by_type:
        raise ModelFolderError(
            "this config.json is of no family that Tessera knows",
            got=f"model_type = {model_type!r}",
            fix=did_you_mean(str(model_type), by_type),
        )
    return by_type[model_type]


def family_for(config: Any, model_type: str | None = None) -> Family:
    """The first family whose ``config.json`` can describe a configuration.

    Args:
      config: The configuration; there is no family for one of another kind of model.
      model_type: Of the family that is looked at before all others.

    Raises:
      ModelFolderError: [T806] there is none; lists the fields that each would change.
    """
    is_decoder = isinstance(config, DecoderConfig)
    lines = [] if is_decoder else [f"its configuration is a {type(config).__name__}"]
    families = sorted(FAMILIES, key=lambda one: model_type not in one.model_types)
    for family in families if is_decoder else ():
        try:
            again = family.config(family.values(config))
        except TesseraError as error:
            lines.append(f"{family.name}: {error.got}")
            continue
        changed = differences(config, again)
        if not changed:
            return family
        lines += [f"{family.name}: {line}" for line in changed]
    raise ModelFolderError(
        "no family of Hugging Face Transformers computes this model",
        got="\n".join(lines),
        fix="export it without --format=hf",
    )


def differences(config: DecoderConfig, other: DecoderConfig) -> list[str]:
    """The fields of two configurations by which their models compute other numbers."""
    first, second = map(_computation, (config, other))
    return [
        f"{name} = {value!r}, not {second[name]!r}"
        for name, value in first.items()
        if value != second[name]
    ]


def _computation(config: DecoderConfig) -> dict[str, Any]:
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    # Fields that say the same in several ways.
    values["layer_types"] = config.layer_kinds
    values["query_pre_attn_scalar"] = config.query_pre_attn_scalar or config.head_dim
    values["rope_dims"] = config.rotated_dims
    if config.rope_kind == "longrope":
        values["rope_attention_factor"] = config.rope_attention_factor or 1.0
    del values["global_every"]
    # Fields of a kind that no layer has.
    for kind, names in FIELDS_OF_KIND.items():
        if kind not in config.layer_kinds:
            values |= dict.fromkeys(names)
    return {name: value for name, value in values.items() if name not in _OF_TRAINING}
