# SPDX-License-Identifier: Apache-2.0
"""Checks the settings of a run before anything is compiled or written.

Nothing here imports JAX, which takes seconds; ``layout_checks.py`` has what needs it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from operator import itemgetter
from typing import Any, Final

from tessera.errors import (
    BatchSizeError,
    MeshShapeError,
    TesseraError,
    UnknownAxisError,
    did_you_mean,
    nearest,
)
from tessera.foundations.device_grid import checked_axes, checked_shape
from tessera.train.config import optimizer_config
from tessera.train.config.batch_sizes import with_batch_sizes
from tessera.train.config.post_training_config import POLICY
from tessera.train.config.run_config import (
    MESH_AXES,
    Config,
    ModelConfig,
    data_parallel_groups,
)
from tessera.train.config.setting_conflicts import conflicts, numerics_problems
from tessera.train.config.setting_fields import as_yaml, collected, problems_of
from tessera.train.data import data_config
from tessera.train.loop.precision import precision_of

# Numbers of one array: 256 PB in f32, below where the compiler's 64 bits overflow.
_MOST_ELEMENTS: Final = 2**56


def check(settings: Config) -> list[TesseraError]:
    """Every mistake that can be seen without JAX.

    T101, T102 and T103 for the mesh, T502 and T505 for values, T503 for batches, T504
    for the run's name, T507 for settings that exclude each other.
    """
    errors = value_problems(settings)
    if any(_range_problems(settings)):
        return errors + optimizer_config.check(settings.optimizer)
    return [*errors, *batch_problems(settings)]


def value_problems(settings: Config) -> list[TesseraError]:
    """Those mistakes of which ``batch_problems`` says nothing."""
    errors = problems_of(settings, "")
    sizes: Mapping[str, int] | None = None
    with collected(errors):
        sizes = _read_mesh(settings.model)
    errors += _range_problems(settings)
    with collected(errors):
        precision_of(settings.training.mixed_precision)
    with collected(errors):
        data_config.check(settings.data)
    return [*errors, *conflicts(settings, sizes)]


def _range_problems(settings: Config) -> Iterator[TesseraError]:
    for group in ("model", "training", "runtime", "preference", "grpo"):
        yield from problems_of(getattr(settings, group), group)


def _read_mesh(model: ModelConfig) -> dict[str, int]:
    """Sizes of the mesh's axes, with -1 as 1."""
    got = f"model.mesh_shape={as_yaml(model.mesh_shape)}"
    if [type(part) for part in model.mesh_shape] != [tuple, tuple]:
        raise MeshShapeError(
            "a mesh shape is a pair of sizes and axis names",
            got=got,
            fix="write model.mesh_shape=[[4,2],[fsdp,tp]]",
        )
    axes = checked_axes(model.mesh_shape[1])
    sizes = [max(size, 1) for size in checked_shape(model.mesh_shape[0], axes)]
    if unknown := [axis for axis in axes if axis not in MESH_AXES]:
        raise UnknownAxisError(
            f"the model has no use for mesh axes {', '.join(map(repr, unknown))}",
            got=got,
            fix="\n".join(did_you_mean(axis, MESH_AXES) for axis in unknown),
        )
    return dict(zip(axes, sizes, strict=True))


def batch_problems(settings: Config) -> Iterator[TesseraError]:
    """Whether microbatches, groups and parts of a step divide as they have to.

    Only with values within their limits and a proper mesh, or these are what is wrong.
    """
    if ranges := problems_of(settings.training, "training"):
        yield from ranges
        return
    training, sizes = settings.training, None
    with suppress(TesseraError):
        sizes = _read_mesh(settings.model)
    groups = data_parallel_groups(sizes or {})
    yield from optimizer_config.check(settings.optimizer, groups)
    total, every = training.gradient_accumulation_steps, training.sync_gradients_every
    if total % every:
        divisors = [number for number in range(1, total + 1) if total % number == 0]
        yield BatchSizeError(
            "training.sync_gradients_every does not divide "
            "training.gradient_accumulation_steps",
            got=f"{total} / {every} leaves {total % every}",
            fix=f"use training.sync_gradients_every={nearest(divisors, every)}",
        )
    if sizes is None:
        return
    yield from numerics_problems(settings, sizes)
    try:
        settings = with_batch_sizes(settings, sizes)
    except BatchSizeError as error:
        if -1 not in settings.model.mesh_shape[0]:
            yield error
    yield from _check_elements(settings, sizes)
    if settings.training.objective == POLICY and -1 not in settings.model.mesh_shape[0]:
        yield from rollout_problems(settings, sizes)


def rollout_problems(
    settings: Config, sizes: Mapping[str, int]
) -> Iterator[TesseraError]:
    """Whether the groups of a rollout fill its steps, and prompts have room."""
    grpo, rows = settings.grpo, settings.rows_per_step(sizes)
    total = rows * grpo.steps_per_rollout
    if total % grpo.group_size:
        size = grpo.group_size
        near = nearest(range(size, total + size + 1, size), total)
        yield BatchSizeError(
            "the groups of a rollout do not fill its steps",
            got=f"{rows} sequences x {grpo.steps_per_rollout} steps = {total} "
            f"completions in groups of {size}",
            fix=f"use {near} completions, or another grpo.group_size",
        )
    if grpo.mesh_shape is not None:
        yield from _check_sampling_mesh(grpo.mesh_shape, sizes)
    if settings.longest_prompt < 1:
        yield BatchSizeError(
            "completions leave no room for prompts",
            got=f"training.sequence_length={settings.training.sequence_length}, "
            f"{grpo.max_completion=}",
            fix="use longer sequences, or a smaller grpo.max_completion",
        )


def _check_sampling_mesh(
    shape: Sequence[Any], sizes: Mapping[str, int]
) -> Iterator[MeshShapeError]:
    """Whether the mesh of the sampler has the devices of the other, and no pipeline."""
    try:
        own, names = shape
        axes = checked_axes(tuple(names))
        own = checked_shape(tuple(own), axes)
        is_usable = prod(own) == prod(sizes.values()) and {*axes} <= {*MESH_AXES}
        if is_usable and "pp" not in {*axes, *sizes}:
            return
    except (TypeError, ValueError):  # T101 is a ValueError
        pass
    yield MeshShapeError(
        "the sampler's mesh has the devices of the run's, and neither has 'pp'",
        got=f"grpo.mesh_shape={as_yaml(shape)}, the run's mesh is {dict(sizes)}",
        fix="write grpo.mesh_shape=[[1,4],[fsdp,tp]] for a run of 4 devices",
    )


def _check_elements(
    settings: Config, sizes: Mapping[str, int]
) -> Iterator[TesseraError]:
    """Whether the arrays of a microbatch have sizes that a compiler can count."""
    training = settings.training
    rows = settings.rows_per_microbatch(sizes)
    length = training.sequence_length
    widths = settings.model.kind.widths(settings.model.config, length)
    what, widest = max(widths.items(), key=itemgetter(1), default=("tokens", 1))
    if rows * length * widest > _MOST_ELEMENTS:
        yield BatchSizeError(
            f"a microbatch is larger than any machine holds: {what}",
            got=f"{rows} sequences x {length} tokens x {widest} = "
            f"{rows * length * widest} numbers",
            fix="use a smaller training.micro_batch_size or training.sequence_length, "
            f"for at most {_MOST_ELEMENTS}",
        )
