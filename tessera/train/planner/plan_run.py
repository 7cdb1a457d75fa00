# SPDX-License-Identifier: Apache-2.0
"""Plans a run that a command line describes: search and answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from tessera.analysis.memory import format_bytes
from tessera.errors import PlanError, TargetError
from tessera.foundations.config_files import configs_dir
from tessera.targets.machine import machine_names
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.layout_checks import target_of
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.overrides import is_choice, parse
from tessera.train.config.run_config import Config
from tessera.train.models.definition import import_module
from tessera.train.planner.answer import Answer, describe
from tessera.train.planner.layout import without
from tessera.train.planner.search import SearchResult, search
from tessera.train.planner.search_space import AXES, Space
from tessera.train.planner.step_time import StepModel

_DRY: Final = ("training.dry_run=true",)


def plan_run(
    words: Sequence[str],
    *,
    modules: Sequence[str] = (),
    rows: int = 10,
    note: Callable[[str], object] = str,
) -> Answer:
    """The best layouts for the run of a command line, on its ``runtime.target``.

    Args:
      words: As of ``tessera train``. What they set is not searched.
      modules: Those that register models; imported first.
      rows: How many layouts to rank at least, where as many fit.
      note: Called with a line of what is going on.

    Raises:
      TargetError: [T711] there is no target, or none that is known.
      PlanError: [T714] no layout is legal, or none fits.
      TesseraError: Any code of ``command_line.compose``.
    """
    for module in modules:
        import_module(module)
    config, target, space = _asked(words, note)
    note(f"tracing {config.model.name}")
    model = StepModel.of(config, target)
    has_experts = any("experts" in each.names for each in model.work.parameters)
    axes = tuple(axis for axis in AXES if axis != "ep" or has_experts)
    space = replace(space, axes=axes, can_offload=target.machine.platform != "cpu")
    note("ranking layouts")
    found = search(space, model, rows)
    if not found.best:
        raise _nothing_fits(found, target)
    flags = [f"--module={module}" for module in modules]
    line = (*flags, *_line(words, space))
    return Answer(target, space, line, found, model.work.state_bytes)


def _asked(
    words: Sequence[str], note: Callable[[str], object]
) -> tuple[Config, Target, Space]:
    """The settings, the target and what may be chosen."""
    keys = [word.partition("=")[0] for word in words]
    composed = compose([*words, *_DRY, *_axes_for(keys)], configs_dir())
    for line in composed.notes:
        note(line)
    config = composed.config
    target = target_of(config)
    if target is None:
        names = ", ".join(machine_names())
        raise TargetError(
            "a plan needs the machine that it is for",
            got="no runtime.target",
            fix="name one and its size, such as runtime.target=h100:2x8\n"
            f"known: {names}",
        )
    parsed = [parse(word) for word in words]
    pinned = frozenset(str(o.key_or_group) for o in parsed if not is_choice(o))
    options = replace(config.model_options, remat="none")
    mesh = mesh_of_shape([[1], ["fsdp"]])
    has_blocks = not any(config.model.kind.problems(config.model.config, options, mesh))
    if not has_blocks:
        pinned |= {"training.remat"}
    return (
        config,
        target,
        Space(config, pinned, (), _global_batch(config, target), has_blocks),
    )


def _axes_for(keys: Sequence[str]) -> list[str]:
    """A mesh on which all settings are read that need an axis, where none is set."""
    if "model.mesh_shape" in keys:
        return []
    # Not every model has a use for cp and pp.
    axes = ["dp", "fsdp", "tp"]
    if "model.context_parallel" in keys:
        axes.insert(2, "cp")
    if any(key.startswith("training.pipeline_") for key in keys):
        axes.insert(0, "pp")
    sizes = ",".join("1" for _ in axes)
    return [f"model.mesh_shape=[[{sizes}],[{','.join(axes)}]]"]


def _global_batch(config: Config, target: Target) -> int:
    """Sequences of a step: as set, or what all devices would have together."""
    training = config.training
    if training.global_batch_size is not None:
        return training.global_batch_size
    each = training.micro_batch_size * training.gradient_accumulation_steps
    return each * target.num_devices


def _line(words: Sequence[str], space: Space) -> list[str]:
    """The command line with its global batch, without what follows from it."""
    kept = without(words, "training.gradient_accumulation_steps")
    batch = f"training.global_batch_size={space.global_batch_size}"
    has_batch = "training.global_batch_size" in space.pinned
    return kept if has_batch else [*kept, batch]


def _nothing_fits(found: SearchResult, target: Target) -> PlanError:
    if found.smallest is None:
        reasons = [str(error) for error in found.example.values()]
        return PlanError(
            f"no layout on {target.name} is legal for this run",
            got="\n".join(reasons[:3]),
            fix="use another number of devices, or another training.global_batch_size",
        )
    nbytes, layout = found.smallest
    capacity = target.machine.memory_bytes
    return PlanError(
        f"no layout of this run fits the memory of {target.name}",
        got=f"{format_bytes(round(nbytes))} of {format_bytes(capacity)} with least "
        f"memory: {describe(layout)}",
        fix="use more devices, a machine with more memory, or a smaller model, batch "
        "or sequence",
    )
