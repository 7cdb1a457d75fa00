# SPDX-License-Identifier: Apache-2.0
"""Checks a model on its mesh before anything is compiled or written.

It is asked of the modules that lay out arrays, which import JAX. So it comes after
``settings_checks.py``, once nothing is wrong with the settings themselves.
"""

from collections.abc import Iterator
from math import lcm
from typing import Final

from tessera.errors import BatchSizeError, PipelineSizeError, TesseraError, nearest
from tessera.graph.pipelining import schedule
from tessera.mesh import Mesh
from tessera.targets.target import Target
from tessera.train.config.batch_sizes import with_batch_sizes
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import Config
from tessera.train.config.setting_fields import collected
from tessera.train.loop.device_checks import check_fp8
from tessera.train.models.frozen_parameters import freeze
from tessera.train.models.model import Model
from tessera.train.models.partition_rules import Placement

LARGEST_TABLE: Final = 2**18
"""Entries of a schedule's table, stages times microbatches: some seconds to make."""


def layout_problems(settings: Config) -> list[TesseraError]:
    """Every mistake that is seen once a mesh is known; starts no backend.

    T711 and T507 for the target, T402 for heads, T502 for policies of ``remat``, T503
    for sequences, T311 and T507 for stages. A size of -1 counts as 1.

    Args:
      settings: Against which ``checks.check`` has nothing.
    """
    try:
        mesh = _mesh(settings, target_of(settings))
        if mesh.target is not None and settings.training.precision.fp8:
            check_fp8(mesh)
        if -1 not in settings.model.mesh_shape[0]:
            settings = with_batch_sizes(settings, mesh.shape)
    except TesseraError as error:
        return [error]
    return [*model_problems(settings), *schedule_problems(settings)]


def model_problems(settings: Config) -> list[TesseraError]:
    """Every reason why a model cannot be laid out on the mesh of a run.

    Args:
      settings: Against which ``checks.check`` has nothing.
    """
    model, mesh = settings.model, _mesh(settings)
    errors = list(model.kind.problems(model.config, settings.model_options, mesh))
    if not errors:
        with collected(errors):
            built = build_model(settings, mesh)
            errors += _check_sequences(settings, built.place(mesh))
    return errors


def parameter_problems(settings: Config) -> list[TesseraError]:
    """Why the parameters of a run cannot be stored on its mesh: T201, T202 or T402."""
    errors: list[TesseraError] = []
    with collected(errors):
        build_model(settings, _mesh(settings)).layouts(_mesh(settings))
    return errors


def schedule_problems(settings: Config) -> list[TesseraError]:
    """Why there is no schedule of a run's pipeline, or none in seconds: T311."""
    training, errors = settings.training, list[TesseraError]()
    count, chunks = training.gradient_accumulation_steps, training.pipeline_chunks
    with collected(errors):
        if (stages := _mesh(settings).shape.get("pp", 0)) * count > LARGEST_TABLE:
            raise PipelineSizeError(
                "a schedule of so many stages and microbatches is too large a table",
                got=f"{stages} stages x {count} microbatches",
                fix=f"use at most {LARGEST_TABLE // stages} for "
                "training.gradient_accumulation_steps",
            )
        if stages:
            depth = chunks if chunks > 1 else None
            schedule(training.pipeline_schedule, stages, count, depth)
    return errors


def _mesh(settings: Config, target: Target | None = None) -> Mesh:
    """The mesh of a run, on which a size of -1 counts as 1."""
    sizes, axes = settings.model.mesh_shape
    return mesh_of_shape([[max(size, 1) for size in sizes], axes], target=target)


def target_of(settings: Config) -> Target | None:
    """The machine that the run is compiled for, where it is not this one.

    Raises:
      TargetError: [T711] there is no such target.
    """
    runtime = settings.runtime
    if runtime.target is None:
        return None
    compiler = None if runtime.target_compiler == "native" else runtime.target_compiler
    return Target.parse(runtime.target, compiler)


def build_model(settings: Config, mesh: Mesh) -> Model:
    """The model of a run, without arrays.

    Raises:
      SettingValueError: [T502] a pattern of what is trained matches no parameter.
    """
    model, training = settings.model, settings.training
    built = model.kind.build(model.config, settings.model_options, mesh)
    return freeze(built, training.trainable, training.frozen or ())


def _check_sequences(settings: Config, place: Placement) -> Iterator[BatchSizeError]:
    length, spread = settings.training.sequence_length, place.arrangement
    model = settings.model
    parts = {
        f"model.context_parallel={model.context_parallel} over cp": (
            spread.size * spread.runs if spread else 1
        ),
        "model.sequence_parallel=true over " + " and ".join(place.axes("sequence")): (
            place.size("sequence") if model.sequence_parallel else 1
        ),
    }
    step = lcm(*parts.values())
    if length % step:
        wrong = (f"{n} parts for {what}" for what, n in parts.items() if length % n)
        near = nearest(range(step, length + step + 1, step), length)
        yield BatchSizeError(
            f"sequences cannot be split evenly: {', '.join(wrong)}",
            got=f"training.sequence_length={length}: {length} / {step} leaves "
            f"{length % step}",
            fix=f"use training.sequence_length={near}",
        )
