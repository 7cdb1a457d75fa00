# SPDX-License-Identifier: Apache-2.0
"""``training.remat=auto``: the policy that keeps as much as fits, chosen at the start.

As with ``model.mesh_shape=auto``, what is chosen becomes part of the command line.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tessera.analysis.memory import format_bytes
from tessera.foundations.config_files import configs_dir
from tessera.foundations.device_grid import inferred
from tessera.targets.target import Target
from tessera.train.config.batch_sizes import with_batch_sizes
from tessera.train.config.command_line import compose
from tessera.train.config.run_config import Config
from tessera.train.planner.layout import Layout
from tessera.train.planner.memory_model import is_safe
from tessera.train.planner.search_space import REMAT
from tessera.train.planner.step_time import StepModel

AUTO: Final = "training.remat=auto"


def choose_remat(words: Sequence[str], target: Target) -> tuple[str, str]:
    """The first of the policies that surely fits, from the one that keeps most.

    Args:
      words: Of ``tessera train``, without a policy.
      target: The machine. Nothing is compiled for it.

    Returns:
      The policy, and a line that says what was predicted of each.

    Raises:
      TesseraError: Any code of ``command_line.compose`` and of a run's own checks.
    """
    dry = [*words, f"runtime.target={target.name}", "training.dry_run=true"]
    config = _on_mesh(compose(dry, configs_dir()).config, target)
    model, layout = StepModel.of(config, target), Layout.of(config)
    found = {
        policy: model.memory(replace(layout, remat=policy)).total for policy in REMAT
    }
    safe = [each for each in REMAT if is_safe(found[each], target.machine)]
    chosen = safe[0] if safe else min(REMAT, key=found.__getitem__)
    reason = "keeps most of those that surely fit"
    if not safe:
        reason = "keeps least, and does not surely fit"
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.items())
    capacity = format_bytes(target.machine.memory_bytes)
    return chosen, f"{AUTO} chose {chosen}, which {reason} {capacity}: {sizes}"


def _on_mesh(config: Config, target: Target) -> Config:
    """The configuration with a mesh of known sizes, and the microbatches on it."""
    sizes, names = config.model.mesh_shape
    if -1 in sizes:
        sizes = inferred(names, sizes, target.num_devices)
    model = replace(config.model, mesh_shape=(sizes, names))
    known = replace(config, model=model)
    return with_batch_sizes(known, dict(zip(names, sizes, strict=True)))
