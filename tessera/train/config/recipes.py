# SPDX-License-Identifier: Apache-2.0
"""Recipes: usual values of settings for a kind of run, in ``configs/recipe``.

A recipe acts like overrides that stand before those of the command line. A setting that
another file of ``configs/`` gives a value of its own keeps it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tessera.errors import TesseraError
from tessera.train.config.overrides import assign
from tessera.train.config.recorded_run import recorded_run
from tessera.train.config.run_config import Config
from tessera.train.config.setting_fields import as_yaml, default_of, walk
from tessera.train.loop.run_folder import CHECKPOINTS

RANDOM_WEIGHTS = (
    "the run begins with random weights, and its recipe is for given ones: write "
    "model=./<folder>, or model=<organization>/<name> of the Hub, or training.init_from"
)
"""A warning for fine-tuning that begins with nothing."""

_RATE = "optimizer.learning_rate"
_LOSS = "data.loss_on"


def tunes_nothing(config: Config) -> bool:
    """Whether a run fine-tunes, and begins with nothing that could be."""
    lora, training = getattr(config.model.config, "lora", None), config.training
    tuning = "finetune", "preference", "grpo"
    is_tuning = config.recipe in tuning or bool(lora and lora.rank)
    return is_tuning and training.init_from is None and training.resume == "none"


@dataclass(frozen=True)
class Recipe:
    """Which recipe a run has.

    Attributes:
      name: Of a file of ``configs/recipe``.
      reason: Why, as a clause; "" where the command line or ``config.yaml`` names it.
      values: What it sets, by dotted path.
    """

    name: str
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, config: DictConfig) -> Iterator[TesseraError]:
        """Set the values in a composed configuration."""
        for path, value in self.values.items():
            text = f"recipe={self.name}: {path}={as_yaml(value)}"
            yield from assign(path, value, config, text)

    def note(self, run: DictConfig) -> str:
        """A line for the log: which recipe, why, and the settings that have its values.

        Args:
          run: The configuration of the run.
        """
        reason = self.reason and f", {self.reason}"
        final = dict(walk(OmegaConf.to_container(run, resolve=True)))
        values = walk(dict(self.values))
        unread = "optimizer." if final["training.eval_only"] else "\0"
        used = [
            f"{path}={as_yaml(value)}"
            for path, value in values
            if final[path] == value and not path.startswith(unread)
        ]
        text = f"recipe={self.name}{reason}"
        return f"{text}; sets {' '.join(used)}" if used else text


def choose_recipe(run: DictConfig) -> Recipe:
    """The recipe of a run with ``recipe=auto``.

    That of the run that it resumes, so that nothing changes there; else by what it
    begins with.

    Args:
      run: Its configuration without a recipe, overrides included. No reference in it
        is resolved.
    """
    values: Any = OmegaConf.to_container(run, resolve=False)
    resume, training = values["training"]["resume"], values["training"]
    recorded = recorded_run(resume, values["hydra"]["run"]["dir"])
    if recorded is not None:
        folder, settings = recorded
        # Without a checkpoint, auto begins anew.
        if resume != "auto" or any((folder / CHECKPOINTS).glob("[0-9]*")):
            name = str(settings.get("recipe", "none"))
            return Recipe(name, f"as the run in {folder}")
    lora = values["model"].get("lora")
    for name in ("rank", "quantize_base") if isinstance(lora, Mapping) else ():
        if lora.get(name) not in (None, 0, "none"):
            return Recipe("lora", f"because model.lora.{name} is set")
    if training["init_from"] is not None:
        return Recipe(
            "finetune", f"because the run begins with {training['init_from']}"
        )
    reason = "because the run begins with random weights"
    return Recipe("none", f"{reason}; recipe=pretrain has values for larger models")


def with_values(recipe: Recipe, files: DictConfig, run: DictConfig) -> Recipe:
    """A recipe with its values for a run.

    A learning rate by the optimizer's name is that of the run's optimizer; one that is
    not named keeps its own. Which tokens are learned is said of every source that has
    conversations.

    Args:
      recipe: The recipe.
      files: What the files make, the recipe's values in the node ``recipe``.
      run: The same with the overrides.
    """
    values: Any = OmegaConf.to_container(run, resolve=False)
    given: Any = OmegaConf.to_container(files, resolve=False)
    found: dict[str, Any] = {}
    for path, value in walk(given["recipe"] or {}):
        group, _, last = path.rpartition(".")
        if group == _RATE:
            if last != values["optimizer"]["name"]:
                continue
            path = _RATE
        if path == _LOSS:
            found |= dict(_of_conversations(values["data"], value))
        elif not _is_changed(files, path):
            found[path] = value
    return replace(recipe, values=found)


def _of_conversations(data: Mapping[str, Any], value: str) -> Iterator[tuple[str, Any]]:
    """``loss_on`` of the data, or of each source, where there are conversations."""
    if data["name"] == "text" and data["messages_key"]:
        yield _LOSS, value
    sources = {
        name: {"loss_on": value}
        for name, source in data["sources"].items()
        if isinstance(source, Mapping) and source.get("messages_key")
    }
    if sources:
        yield "data.sources", sources


def _is_changed(files: DictConfig, path: str) -> bool:
    """Whether a file gives a setting another value than its class does."""
    group, _, name = path.rpartition(".")
    node = OmegaConf.select(files, group)
    cls = OmegaConf.get_type(node)
    declared = getattr(cls, "__dataclass_fields__", {}).get(name)
    if declared is None:
        return False  # there is no such setting, as assigning it says
    values: Any = OmegaConf.to_container(node, resolve=False)
    return bool(values[name] != default_of(declared))
