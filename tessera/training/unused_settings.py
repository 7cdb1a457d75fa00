# SPDX-License-Identifier: Apache-2.0
"""Settings that nothing in a run reads, because another setting leaves out their use.

A value other than the default is refused there: whoever gave it expects it to act. What
is in a run and has nothing to do, as an axis of size 1, is a note in the log instead:
one configuration serves machines of all sizes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tessera.errors import SettingConflictError, TesseraError
from tessera.models.gemma3_config import Gemma3Config
from tessera.training.config import Config, ModelConfig, TrainingConfig
from tessera.training.optimizer_config import SgdConfig
from tessera.training.setting import as_yaml


@dataclass(frozen=True)
class _Unused:
    """Settings without a use, and why.

    Attributes:
      group: How the group is called on the command line.
      config: Has their values.
      defaults: The class that has their defaults.
      names: What they are called.
      because: The setting that leaves out their use, as one would write it.
      fix: What gives them one.
    """

    group: str
    config: Any
    defaults: type
    names: tuple[str, ...]
    because: str
    fix: str

    def problem(self) -> SettingConflictError | None:
        """T507 where one of them has a value of its own."""
        values = {name: getattr(self.config, name) for name in self.names}
        given = [
            f"{self.group}.{name}"
            for name, value in values.items()
            if value != self.defaults.__dataclass_fields__[name].default
        ]
        if not given:
            return None
        shown = [f"{key}={as_yaml(values[key.rpartition('.')[2]])}" for key in given]
        verb = "have no effect" if len(given) > 1 else "has no effect"
        return SettingConflictError(
            f"{' and '.join(given)} {verb} in this run",
            got=f"{', '.join(shown)}; {self.because}",
            fix=f"leave {'them' if len(given) > 1 else 'it'} out, or {self.fix}",
        )


def unused_problems(
    settings: Config, sizes: Mapping[str, int] | None
) -> list[TesseraError]:
    """Every setting that is given and that nothing in the run reads.

    Args:
      settings: Of the run.
      sizes: Of the mesh's axes, by name; None where they are not known.
    """
    found = (*_of_model(settings), *_of_mesh(settings, sizes), *_of_run(settings))
    return [problem for each in found if (problem := each.problem()) is not None]


def _of_model(settings: Config) -> Iterator[_Unused]:
    model, optimizer = settings.model.config, settings.optimizer
    if not model.num_experts:
        names = ("experts_per_token", "capacity_factor")
        weights = ("router_balance_weight", "router_z_weight")
        yield _Unused(
            *("model", model, Gemma3Config, (*names, *weights)),
            "model.num_experts=0",
            "use a model with experts: model.num_experts=8",
        )
    if isinstance(optimizer, SgdConfig) and optimizer.momentum == 0:
        yield _Unused(
            *("optimizer", optimizer, SgdConfig, ("nesterov",)),
            "optimizer.momentum=0",
            "use an optimizer.momentum above 0",
        )


def _of_mesh(settings: Config, sizes: Mapping[str, int] | None) -> Iterator[_Unused]:
    if sizes is None:
        return
    shape = f"model.mesh_shape={as_yaml(settings.model.mesh_shape)}"
    axes = {
        "cp": ("model", settings.model, ModelConfig, ("context_parallel",)),
        "tp": ("model", settings.model, ModelConfig, ("sequence_parallel",)),
        "pp": (
            *("training", settings.training, TrainingConfig),
            ("pipeline_schedule", "pipeline_chunks"),
        ),
    }
    for axis, given in axes.items():
        if axis not in sizes:
            yield _Unused(
                *given, f"{shape} has no axis {axis}", f"use a mesh with an axis {axis}"
            )


def _of_run(settings: Config) -> Iterator[_Unused]:
    training, data = settings.training, settings.data
    rows = [
        (
            not training.profile_communication,
            ("profile_wait", "profile_warmup", "profile_active"),
            "training.profile_communication=false",
            "use training.profile_communication=true",
        ),
        (
            training.checkpoint_every is None,
            ("keep",),
            "training.checkpoint_every=null",
            "use training.checkpoint_every=0, which keeps the last one",
        ),
        (
            data.validation_fraction == 0,
            ("validate_every", "validation_batches"),
            "data.validation_fraction=0",
            "keep data for validation: data.validation_fraction=0.05",
        ),
        (
            not training.sample_length,
            ("sample_prompt",),
            "training.sample_length=0",
            "use a training.sample_length above 0",
        ),
        (
            data.name == "synthetic",
            ("sample_prompt",),
            "data=synthetic, which is no text",
            "use data=text",
        ),
        (
            training.mixed_precision == "fp16",
            ("max_skipped_steps",),
            "training.mixed_precision=fp16, whose bound is the smallest loss scale",
            "use training.mixed_precision=bf16",
        ),
    ]
    for is_unused, names, because, fix in rows:
        if is_unused:
            yield _Unused("training", training, TrainingConfig, names, because, fix)
