# SPDX-License-Identifier: Apache-2.0
"""Plans a run that a command line describes: search, verification, answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera.analysis.memory import format_bytes
from tessera.config_files import configs_dir
from tessera.errors import PlanError, TargetError
from tessera.planner.answer import Answer, describe, safest_first
from tessera.planner.search import Found, search
from tessera.planner.space import AXES, Space
from tessera.planner.step_time import StepModel
from tessera.planner.verify import Verified, default_processes, verify
from tessera.targets.machine import machine_names
from tessera.targets.target import Target
from tessera.training.command_line import compose
from tessera.training.config import Config
from tessera.training.layout_checks import target_of
from tessera.training.overrides import is_choice, parse

_DRY: tuple[str, ...] = ("training.dry_run=true",)


def plan_run(
    words: Sequence[str],
    *,
    verified: int = 5,
    processes: int | None = None,
    note: Callable[[str], object] = str,
) -> Answer:
    """The best layouts for the run of a command line, on its ``runtime.target``.

    Args:
      words: As of ``tessera train``. What they set is not searched.
      verified: How many layouts to compile for the target; 0 for none.
      processes: How many compilers run side by side; None for one a core, up to four.
      note: Called with a line of what is going on.

    Raises:
      TargetError: [T711] there is no target, or none that is known.
      PlanError: [T714] no layout is legal, or none fits.
      TesseraError: Any code of ``command_line.compose``.
    """
    config, target, space = _asked(words)
    note(f"tracing {config.model.name}")
    model = StepModel.of(config, target)
    has_experts = any("experts" in each.names for each in model.work.parameters)
    axes = tuple(axis for axis in AXES if axis != "ep" or has_experts)
    space = replace(space, axes=axes)
    note("ranking layouts")
    found = search(space, model)
    if not found.best:
        raise _nothing_fits(found, target)
    words = _line(words, space)
    answer = Answer(target, space, tuple(words), found)
    if not verified or not target.is_installed:
        return answer
    done = verify(
        safest_first(found.best),
        [*words, *_DRY],
        target.machine.memory_bytes,
        wanted=verified,
        processes=processes or default_processes(),
        note=lambda each: note(_progress(each)),
    )
    return replace(answer, verified=tuple(done))


def _asked(words: Sequence[str]) -> tuple[Config, Target, Space]:
    """The settings, the target and what may be chosen."""
    config = compose([*words, *_DRY], configs_dir()).config
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
    return config, target, Space(config, pinned, (), _global_batch(config, target))


def _global_batch(config: Config, target: Target) -> int:
    """Sequences of a step: as set, or what all devices would have together."""
    training = config.training
    if training.global_batch_size is not None:
        return training.global_batch_size
    each = training.micro_batch_size * training.gradient_accumulation_steps
    return each * target.num_devices


def _line(words: Sequence[str], space: Space) -> list[str]:
    """The command line with its global batch, without what follows from it."""
    derived = ("training.micro_batch_size", "training.gradient_accumulation_steps")
    pinned = "training.micro_batch_size" in space.pinned
    kept = [
        word
        for word in words
        if word.partition("=")[0] not in derived[0 if not pinned else 1 :]
    ]
    batch = f"training.global_batch_size={space.global_batch_size}"
    has_batch = "training.global_batch_size" in space.pinned
    return kept if has_batch else [*kept, batch]


def _nothing_fits(found: Found, target: Target) -> PlanError:
    if found.smallest is None:
        reasons = [str(error) for error in found.example.values()]
        return PlanError(
            f"no layout on {target.name} is legal for this run",
            got="\n".join(reasons[:3]),
            fix="use another number of devices, or another training.global_batch_size",
        )
    nbytes, layout = found.smallest.prediction.memory_bytes, found.smallest.layout
    capacity = target.machine.memory_bytes
    times = -(-nbytes // capacity)
    return PlanError(
        f"no layout of this run fits the memory of {target.name}",
        got=f"{format_bytes(nbytes)} of {format_bytes(capacity)} with least memory: "
        f"{describe(layout)}",
        fix=f"use about {times} times as many devices, a machine with more memory, "
        "or a smaller model, batch or sequence",
    )


def _progress(each: Verified) -> str:
    found: Any = each.candidate.prediction
    state = "" if each.fits else f": left out{': ' * bool(each.problem)}{each.problem}"
    memory = format_bytes(found.memory_bytes)
    return f"compiled {describe(each.candidate.layout)}: {memory}{state}"
