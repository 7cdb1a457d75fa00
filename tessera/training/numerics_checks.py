# SPDX-License-Identifier: Apache-2.0
"""Which runs can have deterministic numerics; the others are told why they cannot."""

from collections.abc import Mapping

from tessera.errors import (
    BatchSizeError,
    SettingConflictError,
    SettingValueError,
    TesseraError,
)
from tessera.training.config import Config, TrainingConfig, data_parallel_groups


def numerics_problems(settings: Config, sizes: Mapping[str, int]) -> list[TesseraError]:
    """What keeps a run from ``training.numerics``: T502, T503 and T507.

    Args:
      settings: Of the run.
      sizes: Of the mesh's axes, by name.
    """
    training, parts = settings.training, settings.training.microshards
    if training.numerics != "deterministic":
        return _unused(training)
    if parts < 1 or parts & (parts - 1):
        below = 1 << max(parts.bit_length() - 1, 0)
        return [
            SettingValueError(
                "microshards are added in pairs, so their number is a power of two",
                got=f"training.microshards={parts}",
                fix=f"use training.microshards={below} or {2 * below}",
            )
        ]
    conflicts = [*_of_mesh(settings, sizes), *_of_settings(settings)]
    errors: list[TesseraError] = [
        SettingConflictError(
            "numerics cannot be deterministic in this run",
            got=f"training.numerics=deterministic; {got}",
            fix=f"{fix}, or training.numerics=fast",
        )
        for found, got, fix in conflicts
        if found
    ]
    groups = data_parallel_groups(sizes)
    rows = settings.training.micro_batch_size * groups
    if not errors and rows % parts:
        each = -(-rows // parts) * parts // groups
        errors.append(
            BatchSizeError(
                "a microbatch cannot be cut into its microshards",
                got=f"{rows} rows, training.microshards={parts}: {rows} / {parts} "
                f"leaves {rows % parts}",
                fix=f"use training.micro_batch_size={each}, or fewer microshards",
            )
        )
    return errors


def _unused(training: TrainingConfig) -> list[TesseraError]:
    default = TrainingConfig.microshards
    if training.microshards == default:
        return []
    return [
        SettingValueError(
            "training.microshards has no meaning with fast numerics",
            got=f"training.microshards={training.microshards}, training.numerics=fast",
            fix="leave it out, or use training.numerics=deterministic",
        )
    ]


def _of_mesh(settings: Config, sizes: Mapping[str, int]) -> list[tuple[bool, str, str]]:
    parts, groups = settings.training.microshards, data_parallel_groups(sizes)
    others = [
        axis
        for axis, size in sizes.items()
        if axis == "pp" or (axis not in ("dp", "fsdp") and size > 1)
    ]
    return [
        (
            bool(others),
            f"mesh axis {', '.join(map(repr, others))}, which changes the order of "
            "sums inside the model",
            "use a mesh of dp and fsdp alone",
        ),
        (
            not others and parts % groups != 0,
            f"training.microshards={parts} for {groups} data-parallel groups: "
            f"{parts} / {groups} leaves {parts % groups}",
            "use as many groups as divide training.microshards",
        ),
    ]


def _of_settings(settings: Config) -> list[tuple[bool, str, str]]:
    training, optimizer = settings.training, settings.optimizer
    return [
        (
            settings.model.config.num_experts > 0,
            f"num_experts={settings.model.config.num_experts}, whose routers balance a "
            "whole microbatch",
            "use a model without experts",
        ),
        (
            training.gradient_compression != "none",
            f"training.gradient_compression={training.gradient_compression}",
            "use training.gradient_compression=none",
        ),
        (
            training.loss_chunk not in ("auto", "none"),
            f"training.loss_chunk={training.loss_chunk}, whose sums XLA orders "
            "otherwise on another mesh",
            "use training.loss_chunk=auto, which makes all logits at once then",
        ),
        (
            training.sync_gradients_every > 1,
            f"training.sync_gradients_every={training.sync_gradients_every}, while "
            "gradients in a fixed order are exchanged once in a step",
            "use training.sync_gradients_every=1",
        ),
        (
            optimizer.name == "adafactor",
            "optimizer.name=adafactor, which sums over rows and columns that a mesh "
            "may split",
            "use optimizer=adamw",
        ),
        (
            optimizer.scale_learning_rate != "none",
            f"optimizer.scale_learning_rate={optimizer.scale_learning_rate}, which "
            "follows the size of the mesh",
            "use optimizer.scale_learning_rate=none",
        ),
    ]
