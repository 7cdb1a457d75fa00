# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model are trained, by patterns of their names."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from tessera.errors import SettingValueError, did_you_mean
from tessera.foundations.tree import named_leaves
from tessera.train.models.model import Model


def freeze(
    model: Model, trainable: Sequence[str] | None, frozen: Sequence[str]
) -> Model:
    """The model with some of its parameters frozen.

    Args:
      model: Whose parameters.
      trainable: Patterns of the names that are trained, as ``fnmatch`` matches them;
        None trains the model's adapters, or all parameters of a model without any.
      frozen: Patterns of those that are not, although ``trainable`` has them.

    Raises:
      SettingValueError: [T502] a pattern matches no parameter, one of ``frozen`` none
        that would be trained, nothing is left to train, no adapter of a model that has
        some, or weights would be that are quantized.
    """
    if trainable is None and not frozen and not model.adapters:
        return model
    names = set(named_leaves(model.abstract()))
    kept = set(model.adapters) or names
    if trainable is not None:
        kept = _matches("trainable", trainable, names, "")
    kept = kept - _matches("frozen", frozen, kept, " that would be trained")
    if chosen := sorted(kept & model.quantized):
        raise SettingValueError(
            "quantized weights are not trained",
            got=f"training.trainable={trainable}: {chosen[0]}",
            fix="use patterns of others, as training.trainable=['*lora*','*norm*'], or "
            "model.lora.quantize_base=none",
        )
    if not kept & (model.adapters or names):
        example = "lora" if model.adapters else "norm"
        raise SettingValueError(
            f"no {'adapter' if model.adapters else 'parameter'} is left to train",
            got=f"training.trainable={trainable}, training.frozen={[*frozen]}",
            fix=f"use patterns that leave some, as training.trainable=['*{example}*']",
        )
    return replace(model, frozen=frozenset(names - kept))


def _matches(
    setting: str, patterns: Sequence[str], names: set[str], which: str
) -> set[str]:
    """The names that a setting's patterns match; each has to match one."""
    found = {p: {name for name in names if fnmatchcase(name, p)} for p in patterns}
    if unused := [p for p in patterns if not found[p]]:
        raise SettingValueError(
            f"a pattern of training.{setting} matches no parameter{which}",
            got=", ".join(map(repr, unused)),
            fix="\n".join(did_you_mean(p, sorted(names)) for p in unused),
        )
    return {name for matched in found.values() for name in matched}
